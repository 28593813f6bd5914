"""Laws about how the server combines replies."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from fedspu.conformance.cases import Case
from fedspu.conformance.entries import describe, differs, first_difference
from fedspu.conformance.laws.law import Broken, law, played_to_its_end
from fedspu.conformance.recorded_turns import (
    as_received,
    sent_at_full_size,
    trained_entries,
    training_of,
    travelling,
)
from fedspu.conformance.recording import RecordedTurn, Recording
from fedspu.neurons.average import (
    Accumulator,
    Update,
    average_by_clients,
    average_by_examples,
)
from fedspu.neurons.table import State


@law
def nothing_is_learnt_from_nothing(case: Case) -> None:
    """A round in which no client learns does not change one bit of the global model.

    At learning rate 0, this holds for every learnable entry. With norm momentum 0 too,
    norm statistics do not change either, and it holds for every entry. If values are
    rounded when they are sent, w0 is rounded before: no value can be lost on the way.
    """
    runs = [(played_to_its_end(case.still), "and norm momentum 0 ")]
    if case.still.plan.neurons.statistics:
        runs.append((played_to_its_end(case.idle), ""))
    for run, when in runs:
        learnable = {name for turn in run.turns for name in training_of(turn).learnable}
        names = list(run.initial) if when else sorted(learnable)
        for t, federation in enumerate(run.federations):
            found = {name: federation.global_state[name] for name in names}
            wanted = {name: run.initial[name] for name in names}
            if wrong := first_difference(found, wanted):
                raise Broken(
                    f"after round {t} at learning rate 0 {when}the global {wrong}"
                )


@law
def an_entry_is_the_mean_of_those_who_trained_it(case: Case) -> None:
    """An entry is the weighted mean over the clients that trained it, or unchanged.

    Weights are numbers of training examples, or equal if the method combines replies
    that way. A method that combines them in its own way is not checked, and neither is
    a server with an optimizer. The mean is computed here in float64, entry by entry.
    The server's may differ in the last place: it sums differences from its own value,
    also in float64, and rounds once.
    """
    for run in (case.usual, case.stopping):
        _check_means(case, played_to_its_end(run))


def _check_means(case: Case, run: Recording) -> None:
    names = travelling(run.plan)
    by_examples = _weighs_by_examples(case.method.combine)
    if by_examples is None or run.plan.settings.server.optimizer != "none":
        return
    for before, after in pairwise(run.federations):
        turns = run.in_round(after.round)
        models = {turn.client: _arrived_at_full_size(run, turn) for turn in turns}
        weights = {
            turn.client: training_of(turn).num_examples if by_examples else 1
            for turn in turns
        }
        for name, old in before.global_state.items():
            new = after.global_state[name]
            inside = {
                turn.client: trained_entries(run, turn, name)
                for turn in turns
                if name in names
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
                raise Broken(
                    f"after round {after.round} the global "
                    f"{describe(name, wrong, new, wanted)}; before, it was "
                    f"{old[place].item()!r}; who trained it: "
                    f"{', '.join(who) or 'no client'}"
                )


def _arrived_at_full_size(run: Recording, turn: RecordedTurn) -> State:
    """The model whose trained entries went back, with values as the server reads them.

    The entries that did not go back mean nothing.
    """
    sent = sent_at_full_size(run, turn)
    return {name: as_received(run.plan, name, v, "up") for name, v in sent.items()}


def _weighs_by_examples(combine: Callable[[State], Accumulator]) -> bool | None:
    """True if replies are weighted by examples, False if equally, else None.

    For our own functions the answer is fixed, so that a fault in them shows; any other
    function is tried out.
    """
    ours = {average_by_examples: True, average_by_clients: False}
    if combine in ours:
        return ours[combine]
    combined = combine({"w": torch.zeros(1)})
    for value, num_examples in ((1.0, 1), (0.0, 3)):
        payload = {"w": torch.full((1,), value)}
        combined.add(Update({"w": (None,)}, payload, num_examples))
    return {0.25: True, 0.5: False}.get(float(combined.result()["w"]))


def _last_place(wanted: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """One unit in the last place, plus the rounding errors of float64 itself."""
    if not dtype.is_floating_point:
        return torch.zeros_like(wanted)
    form, double = torch.finfo(dtype), torch.finfo(torch.float64)
    place = form.eps * torch.clamp(wanted.abs(), min=form.tiny)
    return place + 8 * double.eps * largest


@law
def at_full_capacity_it_is_fedavg(case: Case) -> None:
    """With p = 1 for all clients, the global model is FedAvg's, bit for bit.

    In that FedAvg, the same tensors stay with clients, and replies are combined in the
    same way. HeteroFL, for example, averages over clients and sends no statistics.
    """
    if not case.method.exchanges:
        return
    run = played_to_its_end(case.full)
    measure = played_to_its_end(case.setup.fedavg_like(case.method).full)
    for found, wanted in zip(run.federations, measure.federations, strict=True):
        if wrong := first_difference(found.global_state, wanted.global_state):
            raise Broken(
                f"after round {found.round} the global {wrong}; if the method is not "
                "meant to become FedAvg, leave this law out: "
                f'leave_out=["{at_full_capacity_it_is_fedavg.__name__}"]'
            )
