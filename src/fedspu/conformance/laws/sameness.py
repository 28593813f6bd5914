"""Laws about what must make no difference."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from fedspu.conformance.cases import RESUMED, Case
from fedspu.conformance.entries import first_difference, is_active
from fedspu.conformance.laws.law import Broken, in_words, law, played_to_its_end
from fedspu.conformance.recorded_turns import arrived, training_of, up_of
from fedspu.conformance.recording import RecordedTraining, RecordedTurn, Recording
from fedspu.federation.engine import Answer, Cost, Facts
from fedspu.federation.messages import Reply, Request
from fedspu.federation.plan import Plan
from fedspu.federation.rounds import play_round
from fedspu.federation.server import Federation
from fedspu.methods.method import Memory
from fedspu.neurons.table import State


@law
def arrival_engine_and_resume_make_no_difference(case: Case) -> None:
    """Order of arrival, engine, workers and a resume change no bit of a run."""
    run = played_to_its_end(case.stopping)
    for before, after in pairwise(run.federations):
        late = _Replay({turn.client: turn for turn in run.in_round(after.round)})
        found = play_round(before, run.plan, late)
        same_federation("with the last reply first", found.federation, after)

    for when, reports in case.elsewhere.items():
        for report in reports:
            t = report.federation.round
            if sorted(report.answers) != [turn.client for turn in run.in_round(t)]:
                raise Broken(
                    f"{when} clients {sorted(report.answers)} take part in round {t}; "
                    f"expected {[turn.client for turn in run.in_round(t)]}"
                )
            for turn in run.in_round(t):
                reply = report.answers[turn.client].reply
                same_reply(f"{when} in round {t}", turn, reply)
            same_federation(when, report.federation, run.federations[t])
        _same_end(when, len(reports), run)

    memories = case.resumed.memories
    for client, memory in sorted(run.memories.items()):
        who = f"{RESUMED} client {client}"
        if client not in memories:
            raise Broken(f"{who} has lost its memory")
        same_memory(who, memories[client], memory)


@dataclass
class _Replay:
    """An engine that hands in the recorded replies, the last client's first."""

    turns: Mapping[int, RecordedTurn]
    facts = Facts()

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer]]:
        """The recorded replies."""
        for client, turn in sorted(self.turns.items(), reverse=True):
            yield client, Answer(up_of(turn), Cost.of(turn.down, up_of(turn)))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def _same_end(when: str, rounds: int, run: Recording) -> None:
    if rounds != run.last.round:
        raise Broken(f"{when} {rounds} rounds were played, not {run.last.round}")


def same_federation(when: str, found: Federation, wanted: Federation) -> None:
    """Raise Broken if the server's state is not as wanted."""
    after = f"{when}, after round {wanted.round},"
    if wrong := first_difference(found.global_state, wanted.global_state):
        raise Broken(f"{after} the global {wrong}")
    if found.stopped != wanted.stopped:
        raise Broken(
            f"{after} the stopped clients are {sorted(found.stopped)} instead of "
            f"{sorted(wanted.stopped)}"
        )
    if dict(found.last) != dict(wanted.last):
        raise Broken(
            f"{after} clients last took part in rounds {dict(found.last)} instead of "
            f"{dict(wanted.last)}"
        )
    if wrong := first_difference(found.extra, wanted.extra):
        raise Broken(f"{after} in the server's memory, {wrong}")
    if found.kept.keys() != wanted.kept.keys():
        raise Broken(
            f"{after} the server knows what clients {sorted(found.kept)} kept instead "
            f"of {sorted(wanted.kept)}"
        )
    for client, kept in wanted.kept.items():
        if wrong := first_difference(found.kept[client], kept):
            raise Broken(f"{after} of what client {client} kept, {wrong}")


def same_reply(when: str, turn: RecordedTurn, found: Reply) -> None:
    """Raise Broken if a reply is not as recorded; its values show in the average."""
    wanted = arrived(turn)
    who = f"{when} client {turn.client}"
    for what in ("num_examples", "train_loss", "val_loss", "has_stopped"):
        if getattr(found, what) != getattr(wanted, what):
            raise Broken(
                f"{who} returned {what} = {getattr(found, what)} instead of "
                f"{getattr(wanted, what)}"
            )


def same_memory(who: str, found: Memory, wanted: Memory) -> None:
    """Raise Broken if a client's memory is not as wanted."""
    if found.losses != wanted.losses:
        raise Broken(
            f"{who} remembers the losses {found.losses} instead of {wanted.losses}"
        )
    if wrong := first_difference(found.extra, wanted.extra):
        raise Broken(f"{who} remembers something else: {wrong}")
    own, other = found.own, wanted.own
    if own is None or other is None:
        if own is not other:
            raise Broken(f"{who} has a model of its own in only one of the two runs")
        return
    if wrong := first_difference(own.state, other.state):
        raise Broken(f"{who} has a model in which {wrong}")
    if wrong := first_difference(own.active or {}, other.active or {}):
        raise Broken(f"{who} has a model of other neurons: {wrong}")


@law
def the_seed_decides_what_methods_share(case: Case) -> None:
    """One seed gives all methods the same splits, w0, batches, settings and cohorts.

    A method with a model of its own (``remodel``) has the first neurons of the same w0.
    Cohorts are the same as long as no client stops early.
    """
    run = played_to_its_end(case.usual)
    other = played_to_its_end(case.setup.fedavg_like(case.method).usual)
    pairs = zip(run.examples.splits, other.examples.splits, strict=True)
    for client, (found, wanted) in enumerate(pairs):
        for part in ("train", "val", "test"):
            mine, theirs = getattr(found, part), getattr(wanted, part)
            if not np.array_equal(mine, theirs):
                raise Broken(
                    f"client {client} has {len(mine)} {part} examples, but they are "
                    f"not the {len(theirs)} it has in fedavg"
                )
    if wrong := first_difference(run.initial, _cut_w0(run.plan, other)):
        raise Broken(f"compared with fedavg, the initial {wrong}")
    if run.cohorts() != other.cohorts():
        raise Broken(
            f"clients {run.cohorts()} took part, round by round, and in fedavg "
            f"{other.cohorts()}"
        )
    for turn, like in zip(run.turns, other.turns, strict=True):
        _same_lesson(turn, training_of(turn), training_of(like))


def _cut_w0(plan: Plan, other: Recording) -> State:
    """FedAvg's w0, cut to the neurons that the plan's model has, where it has fewer."""
    sizes = {group.name: group.size for group in plan.neurons.groups}
    table = other.plan.neurons
    first = {
        group.name: torch.arange(sizes.get(group.name, group.size))
        for group in table.groups
    }
    cut = {}
    for name, values in other.initial.items():
        inside = is_active(table, first, name, tuple(values.shape))
        cut[name] = values[inside]  # flat: the wrong shape, unless it is set below
        shape = plan.initial[name].shape if name in plan.initial else values.shape
        if values[inside].numel() == shape.numel():
            cut[name] = values[inside].view(shape)
        elif values.dim() < len(shape):  # a row for each of several widths
            cut[name] = values.expand(shape)
    return cut


def _same_lesson(
    turn: RecordedTurn, found: RecordedTraining, wanted: RecordedTraining
) -> None:
    who = f"in round {turn.round} client {turn.client}"
    if found.num_examples != wanted.num_examples:
        raise Broken(
            f"{who} trained on {found.num_examples} examples, and in fedavg on "
            f"{wanted.num_examples}"
        )
    for (name, mine), (_, theirs) in zip(found.settings, wanted.settings, strict=True):
        if mine != theirs and name != "kernels":  # these depend on the model
            raise Broken(
                f"{who} trained with {name} = {mine}, and in fedavg with {theirs}"
            )
    for epoch, theirs in enumerate(wanted.orders):
        if epoch >= len(found.orders):
            raise Broken(
                f"{who} drew the order of its batches {len(found.orders)} times from "
                f"the stream it was given, and in fedavg {len(wanted.orders)} times"
            )
        mine = found.orders[epoch]
        if not np.array_equal(mine, theirs):
            raise Broken(
                f"{who} trained on its examples in the order {mine.tolist()}, and in "
                f"fedavg in {theirs.tolist()}"
            )


@law
def held_out_examples_are_not_seen(case: Case) -> None:
    """No weight, statistic or stopping decision depends on test examples.

    In a second run, test examples are nonsense, and everything but the judging must be
    the same. Without early stopping, validation examples must not matter either.
    """
    # Two rounds, because no client ever stops in the first.
    runs = (("test", case.stopping, 2), ("val", case.usual, 1))
    for part, run, rounds in runs:
        when = f"with nonsense in every {part} example"
        blind = case.without(part, played_to_its_end(run), rounds)
        if blind.error is not None:
            raise Broken(f"{when} the run fails: {in_words(blind.error)}")
        for turn, like in zip(blind.turns, run.turns, strict=False):
            who = f"{when}, in round {turn.round}, client {turn.client}"
            if turn.client != like.client:
                raise Broken(f"{who} takes part instead of client {like.client}")
            same_reply(f"{when}, in round {turn.round},", like, arrived(turn))
            if wrong := first_difference(
                training_of(turn).sent, training_of(like).sent
            ):
                raise Broken(f"{who} trained a different model: {wrong}")
            if turn.after is not None and like.after is not None:
                same_memory(who, turn.after, like.after)
        same_federation(when, blind.last, run.federations[blind.last.round])
