"""The laws that every method obeys.

Each is one function of a subject, a method on some model and data, and raises a
Violation that says what was found instead.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedspu.conformance.entries import (
    as_bytes,
    at_full_size,
    describe,
    differs,
    first_difference,
    held_by_slim,
    is_active,
)
from fedspu.conformance.subject import RESUMED, Subject
from fedspu.conformance.witness import Seen, Trial, Turn, cost_of
from fedspu.federation.client import Memory, Which, ready_model
from fedspu.federation.memory import Memories
from fedspu.federation.messages import Packet, Reply, Request, pack_reply
from fedspu.federation.plan import Plan
from fedspu.federation.record import COSTS
from fedspu.federation.rounds import Answer, play_round
from fedspu.federation.server import Federation
from fedspu.federation.workbench import Workspace
from fedspu.neurons.blocks import merge
from fedspu.neurons.table import Active, State
from fedspu.training import Score

Law = Callable[[Subject], None]


class Violation(AssertionError):  # noqa: N818  # no error: a finding
    """One or several laws that a method does not obey; ``laws`` are their names."""

    def __init__(self, text: str, laws: tuple[str, ...]) -> None:
        super().__init__(text)
        self.laws = laws


class _Broken(Exception):  # noqa: N818  # as above
    """What was found, for the law to report."""


LAWS: dict[str, Law] = {}
"""Every law by its name, in order."""


def law(function: Law) -> Law:
    """Make a function a law: what it finds is reported with all names."""
    says = " ".join((function.__doc__ or "").split("\n\n")[0].split())

    @wraps(function)
    def tried(subject: Subject) -> None:
        broken = f"{function.__name__}: {subject} violates the law {says!r}"
        try:
            function(subject)
        except _Broken as found:
            raise Violation(f"{broken}: {found}", (function.__name__,)) from None
        except Exception as error:  # whatever a faulty method comes to
            raise Violation(
                f"{broken}: it could not be tried: {_in_words(error)}",
                (function.__name__,),
            ) from error

    LAWS[function.__name__] = tried
    return tried


def _played(trial: Trial) -> Trial:
    """The trial, if it came to its end."""
    if trial.error is not None:
        raise trial.error
    return trial


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# What the server does -----------------------------------------------------------------


@law
def nothing_is_learnt_from_nothing(subject: Subject) -> None:
    """A round in which nobody learns leaves the global model bit for bit as it was.

    At learning rate 0 that is every learnable entry, and every entry of a model whose
    norm statistics stay as they are (norm momentum 0).
    """
    trials = [(_played(subject.still), "and norm momentum 0 ")]
    if subject.still.plan.neurons.statistics:
        trials.append((_played(subject.idle), ""))
    for trial, when in trials:
        learnable = {name for turn in trial.turns for name in _seen(turn).learnable}
        names = list(trial.initial) if when else sorted(learnable)
        for t, federation in enumerate(trial.federations):
            found = {name: federation.global_state[name] for name in names}
            wanted = {name: trial.initial[name] for name in names}
            if wrong := first_difference(found, wanted):
                raise _Broken(
                    f"after round {t} at learning rate 0 {when}the global {wrong}"
                )


@law
def an_entry_is_the_mean_of_those_who_trained_it(subject: Subject) -> None:
    """An entry is the weighted mean of the clients that trained it, or as it was.

    Weights are numbers of training examples, or equal if the method says so. The mean
    is worked out in float64 here, entry by entry, and may differ in the last place: the
    server sums differences from its own value, in float64 too, and rounds once.
    """
    for trial in (subject.usual, subject.stopping):
        _check_means(subject, _played(trial))


def _check_means(subject: Subject, trial: Trial) -> None:
    travelling = _travelling(trial.plan)
    for before, after in pairwise(trial.federations):
        turns = trial.in_round(after.round)
        models = {turn.client: _full(trial, turn) for turn in turns}
        weights = {
            turn.client: _seen(turn).num_examples
            if subject.method.weighs_examples
            else 1
            for turn in turns
        }
        for name, old in before.global_state.items():
            new = after.global_state[name]
            inside = {
                turn.client: _inside(trial, turn, name)
                for turn in turns
                if name in travelling
            }
            total, weight = torch.zeros(2, *old.shape, dtype=torch.float64)
            largest = old.double().abs()
            for client, is_its in inside.items():
                trained = torch.where(is_its, models[client][name].double(), 0)
                total += weights[client] * trained
                weight += weights[client] * is_its
                largest = torch.maximum(largest, trained.abs())
            wanted = torch.where(weight > 0, total / weight, old.double())
            slack = _last_place(wanted, largest, old.dtype)
            is_mean = (new.double() - wanted).abs() <= slack
            wrong = torch.where(weight > 0, ~is_mean, differs(new, old))
            if bool(wrong.any()):
                place = tuple(wrong.nonzero()[0].tolist())
                who = [
                    f"client {client} (weight {weights[client]}) has "
                    f"{models[client][name][place].item()!r}"
                    for client, is_its in inside.items()
                    if bool(is_its[place])
                ]
                raise _Broken(
                    f"after round {after.round} the global "
                    f"{describe(name, wrong, new, wanted)}; it was "
                    f"{old[place].item()!r}; of those who trained it "
                    f"{', '.join(who) or 'there was none'}"
                )


def _last_place(wanted: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """One unit in the last place, and what float64 itself loses on the way."""
    if not dtype.is_floating_point:
        return torch.zeros_like(wanted)
    form, double = torch.finfo(dtype), torch.finfo(torch.float64)
    place = form.eps * torch.clamp(wanted.abs(), min=form.tiny)
    return place + 8 * double.eps * largest


@law
def at_full_capacity_it_is_fedavg(subject: Subject) -> None:
    """At p = 1 for all, the global model is that of FedAvg, bit for bit.

    With FedAvg's weights and statistics as the method has them: HeteroFL averages over
    clients and sends no statistics, so it is compared with a FedAvg that does the same.
    """
    if not subject.method.exchanges:
        return
    trial = _played(subject.full)
    measure = _played(subject.ground.fedavg_like(subject.method).full)
    for found, wanted in zip(trial.federations, measure.federations, strict=True):
        if wrong := first_difference(found.global_state, wanted.global_state):
            raise _Broken(
                f"after round {found.round} the global {wrong}; if the method is not "
                "meant to become FedAvg, leave this law out: "
                f'leave_out=["{at_full_capacity_it_is_fedavg.__name__}"]'
            )


# What must make no difference ---------------------------------------------------------


@law
def arrival_engine_and_resume_make_no_difference(subject: Subject) -> None:
    """Order of arrival, engine, workers and a resume change no bit of a run."""
    trial = _played(subject.stopping)
    for before, after in pairwise(trial.federations):
        late = _Replay({turn.client: turn for turn in trial.in_round(after.round)})
        found = play_round(before, trial.plan, late)
        _same_federation("with the last reply first", found.federation, after)

    for when, reports in subject.elsewhere.items():
        for report in reports:
            t = report.federation.round
            if sorted(report.answers) != [turn.client for turn in trial.in_round(t)]:
                raise _Broken(
                    f"{when} clients {sorted(report.answers)} take part in round {t}, "
                    f"and without {[turn.client for turn in trial.in_round(t)]}"
                )
            for turn in trial.in_round(t):
                reply = report.answers[turn.client].reply
                _same_reply(f"{when} in round {t}", turn, reply)
            _same_federation(when, report.federation, trial.federations[t])
        _same_end(when, len(reports), trial)

    memories = subject.resumed.memories
    for client, memory in sorted(trial.memories.items()):
        who = f"{RESUMED} client {client}"
        if client not in memories:
            raise _Broken(f"{who} has lost its memory")
        _same_memory(who, memories[client], memory)


@dataclass
class _Replay:
    """An engine that hands in what clients said before, the last of them first."""

    turns: Mapping[int, Turn]
    memories: Memories = field(default_factory=Memories)

    def exchange(self, requests: Mapping[int, Request]) -> Iterator[tuple[int, Answer]]:
        """What they said."""
        for client, turn in sorted(self.turns.items(), reverse=True):
            yield client, Answer(_arrived(turn), cost_of(turn.down, _up(turn)))

    def judge(
        self, clients: object, federation: Federation, which: Which
    ) -> dict[int, Score]:
        """Nobody is judged."""
        return {}


def _same_end(when: str, rounds: int, trial: Trial) -> None:
    if rounds != trial.last.round:
        raise _Broken(f"{when} {rounds} rounds were played, not {trial.last.round}")


def _same_federation(when: str, found: Federation, wanted: Federation) -> None:
    after = f"{when}, after round {wanted.round},"
    if wrong := first_difference(found.global_state, wanted.global_state):
        raise _Broken(f"{after} the global {wrong}")
    for what in ("stopped", "met"):
        if getattr(found, what) != getattr(wanted, what):
            raise _Broken(
                f"{after} the clients {what} are {sorted(getattr(found, what))} "
                f"instead of {sorted(getattr(wanted, what))}"
            )
    if found.kept.keys() != wanted.kept.keys():
        raise _Broken(
            f"{after} the server knows what clients {sorted(found.kept)} kept instead "
            f"of {sorted(wanted.kept)}"
        )
    for client, kept in wanted.kept.items():
        if wrong := first_difference(found.kept[client], kept):
            raise _Broken(f"{after} of what client {client} kept {wrong}")


def _same_reply(when: str, turn: Turn, found: Reply) -> None:
    wanted = _arrived(turn)
    who = f"{when} client {turn.client}"
    for what in ("num_examples", "train_loss", "val_loss", "has_stopped"):
        if getattr(found, what) != getattr(wanted, what):
            raise _Broken(
                f"{who} returned {what} = {getattr(found, what)} instead of "
                f"{getattr(wanted, what)}"
            )


def _same_memory(who: str, found: Memory, wanted: Memory) -> None:
    if found.losses != wanted.losses:
        raise _Broken(
            f"{who} remembers the losses {found.losses} instead of {wanted.losses}"
        )
    if wrong := first_difference(found.kept or {}, wanted.kept or {}):
        raise _Broken(f"{who} remembers other neurons: {wrong}")
    own, other = found.own, wanted.own
    if own is None or other is None:
        if own is not other:
            raise _Broken(f"{who} has a model of its own in one of two cases only")
        return
    if wrong := first_difference(own.state, other.state):
        raise _Broken(f"{who} has a model in which {wrong}")
    if wrong := first_difference(own.active or {}, other.active or {}):
        raise _Broken(f"{who} has a model of other neurons: {wrong}")


@law
def the_seed_decides_what_methods_share(subject: Subject) -> None:
    """One seed gives all methods the same splits, w0, batches, recipe and cohorts.

    A method with a model of its own (``remodel``) has the first neurons of the same w0.
    Cohorts are the same as long as nobody stops early.
    """
    trial = _played(subject.usual)
    other = _played(subject.ground.fedavg_like(subject.method).usual)
    pairs = zip(trial.plan.splits, other.plan.splits, strict=True)
    for client, (found, wanted) in enumerate(pairs):
        for part in ("train", "val", "test"):
            mine, theirs = getattr(found, part), getattr(wanted, part)
            if not np.array_equal(mine, theirs):
                raise _Broken(
                    f"client {client} has {len(mine)} {part} examples, and they are "
                    f"not the {len(theirs)} it has in fedavg"
                )
    if wrong := first_difference(trial.initial, _cut_w0(trial.plan, other)):
        raise _Broken(f"the initial {wrong}, which is fedavg's")
    if trial.cohorts() != other.cohorts():
        raise _Broken(
            f"clients {trial.cohorts()} took part, round by round, and in fedavg "
            f"{other.cohorts()}"
        )
    for turn, like in zip(trial.turns, other.turns, strict=True):
        _same_lesson(turn, _seen(turn), _seen(like))


def _cut_w0(plan: Plan, other: Trial) -> State:
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
        cut[name] = values[inside]  # flat, so of another shape
        shape = plan.initial[name].shape if name in plan.initial else values.shape
        if values[inside].numel() == shape.numel():
            cut[name] = values[inside].view(shape)
        elif values.dim() < len(shape):  # a row for each of several widths
            cut[name] = values.expand(shape)
    return cut


def _same_lesson(turn: Turn, found: Seen, wanted: Seen) -> None:
    who = f"in round {turn.round} client {turn.client}"
    if found.num_examples != wanted.num_examples:
        raise _Broken(
            f"{who} trained on {found.num_examples} examples, and in fedavg on "
            f"{wanted.num_examples}"
        )
    for entry in fields(found.recipe):
        mine = getattr(found.recipe, entry.name)
        theirs = getattr(wanted.recipe, entry.name)
        if mine != theirs:
            raise _Broken(
                f"{who} trained with {entry.name} = {mine}, and in fedavg with {theirs}"
            )
    for epoch, theirs in enumerate(wanted.orders):
        if epoch >= len(found.orders):
            raise _Broken(
                f"{who} drew the order of its batches {len(found.orders)} times from "
                f"the stream it was given, and in fedavg {len(wanted.orders)} times"
            )
        mine = found.orders[epoch]
        if not np.array_equal(mine, theirs):
            raise _Broken(
                f"{who} trained on its examples in the order {mine.tolist()}, and in "
                f"fedavg in {theirs.tolist()}"
            )


@law
def held_out_examples_are_not_seen(subject: Subject) -> None:
    """No weight, statistic or stopping decision depends on test examples.

    They are NaN in a second run, in which all that is not judged must be the same. Nor
    does anything depend on validation examples without early stopping.
    """
    # Two rounds, as the first never stops anybody.
    runs = (("test", subject.stopping, 2), ("val", subject.usual, 1))
    for part, trial, rounds in runs:
        when = f"with every {part} example replaced by NaN"
        blind = subject.without(part, _played(trial), rounds)
        if blind.error is not None:
            raise _Broken(f"{when} the run fails: {_in_words(blind.error)}")
        for turn, like in zip(blind.turns, trial.turns, strict=False):
            who = f"{when}, in round {turn.round}, client {turn.client}"
            if turn.client != like.client:
                raise _Broken(f"{who} takes part in the place of client {like.client}")
            _same_reply(f"{when}, in round {turn.round},", like, _arrived(turn))
            if wrong := first_difference(_seen(turn).trained, _seen(like).trained):
                raise _Broken(f"{who} trained another model: {wrong}")
            if turn.after is not None and like.after is not None:
                _same_memory(who, turn.after, like.after)
        _same_federation(when, blind.last, trial.federations[blind.last.round])


# What crosses between server and client -----------------------------------------------


@law
def what_came_is_where_it_belongs(subject: Subject) -> None:
    """A client begins from its own model, with what it was sent in its place.

    In methods that merge. Its own model is w0 at first, and always in methods whose
    clients keep none.
    """
    if subject.method.start is not merge:
        return
    trial = _played(subject.usual)
    for turn in trial.turns:
        offer, own = turn.request.offer, turn.before.own if turn.before else None
        wanted = dict(trial.initial)
        if own is not None and own.active is not None:
            wanted, _ = at_full_size(
                trial.plan.neurons, own.active, own.state, trial.initial
            )
        elif own is not None:
            wanted = dict(own.state)
        server = trial.federations[turn.round - 1].global_state
        for name in _travelling(trial.plan) if offer else ():
            inside = _are_active(trial, _offered(turn), name)
            wanted[name] = torch.where(inside, server[name], wanted[name])
        begin, exists = _at_full_size(trial, turn, _seen(turn).begin)
        if wrong := first_difference(begin, wanted, exists):
            raise _Broken(
                f"in round {turn.round} client {turn.client} begins to train from a "
                f"model in which {wrong}"
            )


@law
def only_what_was_trained_leaves_a_client(subject: Subject) -> None:
    """Only entries trained this round, positions, counts and losses leave a client.

    Byte by byte: the packet holds nothing else. No learnable entry outside of them
    changes in training. What reaches a client is the global model's, or w0, and the
    server keeps nothing of a client but which neurons it trained.
    """
    trial = subject.usual
    for turn in trial.turns:
        _account_for_request(trial, turn)
        if turn.reply is not None:
            _account_for_training(turn, _seen(turn))
            _account_for_reply(trial, turn, turn.reply)
    _played(trial)
    for federation in trial.federations:
        if extra := {entry.name for entry in fields(federation)} - SERVER_KNOWS:
            raise _Broken(f"the server also keeps {', '.join(sorted(extra))}")
        for client, kept in federation.kept.items():
            sizes = {group.name: group.size for group in trial.plan.neurons.groups}
            for name, indices in kept.items():
                if indices.is_floating_point() or len(indices) > sizes.get(name, 0):
                    raise _Broken(
                        f"the server keeps {indices.numel()} numbers of client "
                        f"{client} as {name}: no neurons of such a group"
                    )


SERVER_KNOWS = {"round", "global_state", "stopped", "met", "kept"}
REPLY_HOLDS = {
    *("active", "payload", "num_examples", "train_loss", "val_loss", "has_stopped"),
}


def _account_for_request(trial: Trial, turn: Turn) -> None:
    who = f"in round {turn.round} the request to client {turn.client}"
    server = trial.federations[turn.round - 1].global_state
    wanted = b""
    if turn.request.offer is not None:
        wanted = _bytes_at(trial, server, _offered(turn))
    if turn.down.values != wanted:
        raise _Broken(
            f"{who} has {len(turn.down.values)} bytes of values that are not the "
            f"{len(wanted)} of the global model's entries it was offered"
        )
    w0 = b"".join(as_bytes(trial.initial[name]) for name in trial.plan.neurons.shapes)
    if turn.down.initial not in (b"", w0):
        raise _Broken(f"{who} has {len(turn.down.initial)} bytes that are not w0")


def _account_for_training(turn: Turn, seen: Seen) -> None:
    outside = {
        name: ~is_active(seen.neurons, seen.active, name, tuple(values.shape))
        for name, values in seen.begin.items()
        if name in seen.learnable
    }
    if wrong := first_difference(seen.trained, seen.begin, outside):
        raise _Broken(
            f"in round {turn.round} client {turn.client} changed what it did not "
            f"train: {wrong}"
        )


def _account_for_reply(trial: Trial, turn: Turn, reply: Reply) -> None:
    who = f"in round {turn.round} the reply of client {turn.client}"
    if extra := {entry.name for entry in fields(reply)} - REPLY_HOLDS:
        raise _Broken(f"{who} also holds {', '.join(sorted(extra))}")
    seen, up = _seen(turn), turn.up
    counts = {
        "num_examples": (reply.num_examples, seen.num_examples),
        "train_loss": (reply.train_loss, seen.loss),
    }
    for what, (said, true) in counts.items():
        if said != true:
            raise _Broken(f"{who} says {what} = {said}, and it is {true}")
    if up is None:
        return
    wanted = b""
    if reply.active is not None:
        wanted = _bytes_at(trial, _full(trial, turn), reply.active)
        _same_neurons(who, trial, turn, reply.active)
    if len(up.values) != len(wanted):
        raise _Broken(
            f"{who} has {len(up.values)} bytes of values; the entries it trained are "
            f"{len(wanted)} bytes"
        )
    if up.values != wanted:
        raise _Broken(f"{who} has values that are not those it trained")
    if turn.arrived is not None:
        again = pack_reply(trial.plan, turn.arrived, turn.request.offer)
        for part in ("header", "positions", "values", "initial"):
            sent, read = getattr(up, part), getattr(again, part)
            if sent != read:
                raise _Broken(
                    f"{who} has {len(sent)} bytes of {part}, of which the server's "
                    f"reading accounts for {len(read)}"
                )


def _same_neurons(who: str, trial: Trial, turn: Turn, active: Active) -> None:
    """The neurons a reply names are those that were trained, as many at least."""
    trained = {name: len(indices) for name, indices in _seen(turn).active.items()}
    named = {name: len(indices) for name, indices in active.items()}
    if trained != named:
        raise _Broken(f"{who} names {named} neurons by group, and {trained} trained")


@law
def bytes_reported_are_bytes_sent(subject: Subject) -> None:
    """The bytes that engines, records and summaries report are those of the packets."""
    trial = _played(subject.stopping)
    for turn in trial.turns:
        for packet, state, active in (
            (turn.down, trial.initial, turn.request.offer and _offered(turn)),
            (_up(turn), trial.initial, _arrived(turn).active),
        ):
            wanted = len(_bytes_at(trial, state, active)) if active else 0
            if len(packet.values) != wanted:
                raise _Broken(
                    f"in round {turn.round} a packet of client {turn.client} has "
                    f"{len(packet.values)} bytes of values, and its entries {wanted}"
                )
    costs = {(t.round, t.client): cost_of(t.down, _up(t)) for t in trial.turns}
    for when, reports in subject.elsewhere.items():
        for report in reports:
            for client, answer in report.answers.items():
                t = report.federation.round
                sent = costs.get((t, client))
                if sent is None:
                    raise _Broken(f"{when} client {client} takes part in round {t}")
                for name in COSTS:
                    found, wanted = getattr(answer.cost, name), getattr(sent, name)
                    if found != wanted:
                        raise _Broken(
                            f"{when} {name} = {found} is reported of client {client} "
                            f"in round {t}, whose packets have {wanted}"
                        )
    for name in COSTS:
        found = subject.resumed.run.summary[name]
        wanted = sum(getattr(cost, name) for cost in costs.values())
        if found != wanted:
            raise _Broken(f"the summary says {name} = {found}; {wanted} were sent")


# Who takes part -----------------------------------------------------------------------


@law
def newcomers_have_w0_and_leavers_stay_away(subject: Subject) -> None:
    """A client that never took part has w0; one that stopped never takes part again."""
    trial = _played(subject.usual)
    if wrong := first_difference(trial.plan.initial, trial.initial):
        raise _Broken(f"w0 itself has changed: {wrong}")
    plan = replace(trial.plan, method=replace(subject.method, adapt=None, settle=None))
    for client in sorted(set(range(plan.num_clients)) - trial.last.met):
        if client in trial.memories:
            raise _Broken(f"client {client} never took part and has a memory")
        if subject.method.judges_own:
            now = (trial.last.round, client, None, trial.last.global_state)
            model = ready_model(plan, Workspace(plan), *now).model
            if wrong := first_difference(dict(model.state_dict()), trial.initial):
                raise _Broken(f"client {client} never took part, and its {wrong}")

    trial = _played(subject.stopping)
    for before, after in pairwise(trial.federations):
        turns = trial.in_round(after.round)
        here = {turn.client for turn in turns}
        if back := sorted(here & before.stopped):
            raise _Broken(
                f"client {back[0]} has stopped, and takes part in round {after.round}"
            )
        gone = {turn.client for turn in turns if _arrived(turn).has_stopped}
        if forgotten := sorted((before.stopped | gone) - after.stopped):
            raise _Broken(
                f"client {forgotten[0]} has stopped, and after round {after.round} the "
                "server does not know"
            )


# What a trial has seen, at full size --------------------------------------------------


def _seen(turn: Turn) -> Seen:
    if turn.seen is None:
        raise RuntimeError(f"client {turn.client} did not train in round {turn.round}")
    return turn.seen


def _arrived(turn: Turn) -> Reply:
    if turn.arrived is None:
        raise RuntimeError(f"no reply of client {turn.client} in round {turn.round}")
    return turn.arrived


def _up(turn: Turn) -> Packet:
    if turn.up is None:
        raise RuntimeError(f"no reply of client {turn.client} in round {turn.round}")
    return turn.up


def _offered(turn: Turn) -> Active:
    offer = turn.request.offer
    return offer.active if offer else {}


def _travelling(plan: Plan) -> list[str]:
    """The tensors that are exchanged: all in the table, but for norms that stay."""
    stays: frozenset[str] = frozenset()
    if plan.settings.norm.policy == "local":
        stays = plan.neurons.norm_tensors
    elif not plan.method.sends_statistics:
        stays = plan.neurons.statistics
    return [name for name in plan.neurons.shapes if name not in stays]


def _are_active(trial: Trial, active: Active, name: str) -> Tensor:
    shape = tuple(trial.initial[name].shape)
    return is_active(trial.plan.neurons, active, name, shape)


def _inside(trial: Trial, turn: Turn, name: str) -> Tensor:
    """The entries of a tensor that a client trained for the server."""
    active = _arrived(turn).active
    if active is None:
        return torch.zeros(trial.initial[name].shape, dtype=torch.bool)
    return _are_active(trial, active, name)


def _at_full_size(
    trial: Trial, turn: Turn, state: State
) -> tuple[State, dict[str, Tensor]]:
    """A client's model where it lies in the full one, and which entries it has."""
    active = turn.reply.active if turn.reply else None
    if not trial.plan.method.is_slim or active is None:
        return state, {
            n: torch.ones_like(v, dtype=torch.bool) for n, v in state.items()
        }
    held = held_by_slim(trial.plan.neurons, active)
    return at_full_size(trial.plan.neurons, held, state, trial.initial)


def _full(trial: Trial, turn: Turn) -> State:
    return _at_full_size(trial, turn, _seen(turn).trained)[0]


def _bytes_at(trial: Trial, state: State, active: Active) -> bytes:
    """The travelling entries of the active neurons, one after the other."""
    return b"".join(
        as_bytes(state[name][_are_active(trial, active, name)])
        for name in _travelling(trial.plan)
    )
