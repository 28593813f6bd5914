"""Every law bites: faults that others' code has, and some of our own, are caught.

Each is planted in the code that really runs, on a net with batch norms whose output
layer reads a flattened map. That the laws hold without it, the suite itself shows.
Faults of what stays, is kept, is judged and is reported: ``test_bites_kept.py``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspu import Payload, State, Update, choose_random, extract, merge
from fedspu.conformance import LAWS, check
from fedspu.conformance.nets import made_examples, mlp
from fedspu.data.examples import DividedData, divide
from fedspu.federation import client, messages, plan, rounds, server
from fedspu.federation.messages import TrainReply, TrainRequest
from fedspu.federation.plan import Plan
from fedspu.federation.server import (
    Federation,
    TrainRequests,
    choose_clients,
    update_of,
)
from fedspu.methods import method
from fedspu.methods.fedspu import fedspu
from fedspu.methods.method import ClientRound, Offer, Trained, Turn, local_epochs
from fedspu.neurons import average, blocks
from fedspu.neurons.average import Average
from fedspu.neurons.blocks import state_of
from fedspu.random_streams import generator, stream_key, torch_stream
from fedspu.settings import TrainSettings
from fedspu.training.epochs import LocalTraining
from tests.conformance.catching import (
    BYTES,
    FEDAVG,
    HELD_OUT,
    IDLE,
    LEAVES,
    MEAN,
    MERGED,
    SAME,
    SEED,
    WHO,
    assert_caught,
)

Patch = pytest.MonkeyPatch
Fault = Callable[[State, list[Update]], State]


def averaging(monkeypatch: Patch, fault: Fault) -> None:
    """The server's average is another one."""

    class Faulty:
        def __init__(self, state: State, by_examples: bool = True) -> None:
            self.state = state
            self.updates: list[Update] = []

        def add(self, update: Update) -> None:
            self.updates.append(update)

        def result(self) -> State:
            return fault(self.state, self.updates)

    monkeypatch.setattr(average, "Average", Faulty)


def right_average(state: State, updates: list[Update]) -> State:
    mean = Average(state)
    for update in updates:
        mean.add(update)
    return mean.result()


# What the released code does ----------------------------------------------------------


def test_values_of_all_neurons_overwritten_by_the_first_ones(
    monkeypatch: Patch,
) -> None:
    def fault(state: State, updates: list[Update]) -> State:
        return right_average(
            state,
            [
                replace(u, payload={n: first_alone(v) for n, v in u.payload.items()})
                for u in updates
            ],
        )

    def first_alone(values: Tensor) -> Tensor:
        return values[:1].expand_as(values) if values.dim() == 1 else values

    averaging(monkeypatch, fault)
    assert_caught(MEAN, says="the global conv1.bias")


def by_channel(where: blocks.Where, block: Tensor) -> tuple[blocks.Where, Tensor]:
    """Columns of the flattened map, taken for channels of 2x2 pixels."""
    rows, columns = where
    if columns is None:
        return where, block
    channels = (columns // 4).unique()
    return (rows, channels), block[:, : len(channels)]


def test_output_columns_indexed_by_channel_when_averaged(monkeypatch: Patch) -> None:
    def fault(state: State, updates: list[Update]) -> State:
        return right_average(state, [wrong(update) for update in updates])

    def wrong(update: Update) -> Update:
        name = "fc.weight"
        if name not in update.where:
            return update
        where, block = by_channel(update.where[name], update.payload[name])
        return replace(
            update,
            where={**update.where, name: where},
            payload={**update.payload, name: block},
        )

    averaging(monkeypatch, fault)
    assert_caught(MEAN, says="the global fc.weight")


def test_output_columns_indexed_by_channel_when_merged(monkeypatch: Patch) -> None:
    right = blocks.put

    def fault(tensor: Tensor, where: blocks.Where, block: Tensor) -> None:
        if tensor.shape == (3, 24):
            where, block = by_channel(where, block)
        right(tensor, where, block)

    monkeypatch.setattr(blocks, "put", fault)
    assert_caught(MERGED, says="fc.weight[")


def test_full_and_partial_clients_that_overwrite_each_other(
    monkeypatch: Patch,
) -> None:
    def fault(state: State, updates: list[Update]) -> State:
        for update in updates:
            state = merge(state, update.where, update.payload)
        return state

    averaging(monkeypatch, fault)
    assert_caught(MEAN, says="who trained it: client ")


@pytest.mark.parametrize("law", [MEAN, LEAVES])
def test_a_head_that_is_trained_and_never_sent(monkeypatch: Patch, law: str) -> None:
    def fault(self: Plan, where: Mapping[str, Any]) -> dict[str, Any]:
        return {name: w for name, w in where.items() if not name.startswith("fc")}

    monkeypatch.setattr(Plan, "leaving", fault)
    assert_caught(law)


def test_a_head_whose_frozen_columns_are_trained() -> None:
    def fault(turn: Turn, local: LocalTraining) -> Trained:
        trained = local_epochs(turn, local)
        trained.sent["fc.weight"].sub_(0.01)
        return trained

    assert_caught(LEAVES, replace(fedspu, name="mine", train=fault), says="fc.weight[")


def test_initial_personal_models_that_alias_the_global_one(
    monkeypatch: Patch,
) -> None:
    def fault(state: State, updates: list[Update]) -> State:
        for name, values in right_average(state, updates).items():
            state[name].copy_(values)
        return state

    averaging(monkeypatch, fault)
    assert_caught(WHO, says="w0 itself has changed")


def test_personal_models_that_begin_from_another_random_network(
    monkeypatch: Patch,
) -> None:
    def fault(plan: Plan, own: Any, initial: State | None) -> State:
        return state_of(plan.build()) if own is None else own.state

    monkeypatch.setattr(client, "_full", fault)
    assert_caught(MERGED, says="begins to train from a model in which")


@pytest.mark.parametrize("law", [MEAN, LEAVES])
def test_batch_counts_as_weights(monkeypatch: Patch, law: str) -> None:
    def fault(*, num_examples: int, **given: Any) -> TrainReply:
        return TrainReply(num_examples=-(-num_examples // 8), **given)

    monkeypatch.setattr(client, "TrainReply", fault)
    assert_caught(law)


def test_norm_statistics_that_learn_the_test_part(monkeypatch: Patch) -> None:
    test_parts: list[Tensor] = []
    right = DividedData.part

    def noted(self: DividedData, client: int, name: str) -> tuple[Tensor, Tensor]:
        test_parts.append(right(self, client, "test")[0])
        return right(self, client, name)

    def fault(model: torch.nn.Module) -> State:
        with torch.no_grad():
            model.train()(test_parts[-1])
        return state_of(model)

    monkeypatch.setattr(DividedData, "part", noted)
    monkeypatch.setattr(method, "state_of", fault)
    assert_caught(HELD_OUT, says="with nonsense in every test example")


def test_stopping_by_the_test_part(monkeypatch: Patch) -> None:
    right = DividedData.part

    def fault(self: DividedData, client: int, name: str) -> tuple[Tensor, Tensor]:
        return right(self, client, "test" if name == "val" else name)

    monkeypatch.setattr(DividedData, "part", fault)
    assert_caught(HELD_OUT, says="with nonsense in every test example")


def test_training_on_the_validation_part(monkeypatch: Patch) -> None:
    right = DividedData.part

    def fault(self: DividedData, client: int, name: str) -> tuple[Tensor, Tensor]:
        pairs = zip(right(self, client, name), right(self, client, "val"), strict=True)
        both = [torch.cat(pair) for pair in pairs]
        return (both[0], both[1]) if name == "train" else right(self, client, name)

    monkeypatch.setattr(DividedData, "part", fault)
    assert_caught(HELD_OUT, says="with nonsense in every val example")


def test_unequal_splits(monkeypatch: Patch) -> None:
    def fault(settings: Any, *rest: Any) -> Any:
        seed = 1 if settings.method.name == "fedspu" else 0
        return divide(settings.model_copy(update={"seed": seed}), *rest)

    monkeypatch.setattr("fedspu.prepare.divide", fault)
    assert_caught(SEED, says="client 0 has ")


def test_unequal_initial_models(monkeypatch: Patch) -> None:
    def fault(seed: int, purpose: str) -> Any:
        return torch_stream(seed, f"{purpose} {torch.rand(())}")

    monkeypatch.setattr(plan, "torch_stream", fault)
    assert_caught(SEED, says="the initial conv1.weight[0, 0, 0, 0] is ")


def test_unequal_cohorts(monkeypatch: Patch) -> None:
    def fault(federation: Federation, plan: Plan, t: int) -> list[int]:
        return choose_clients(
            federation, plan, t + 10 if plan.method.name == "fedspu" else t
        )

    monkeypatch.setattr(server, "choose_clients", fault)
    assert_caught(SEED, says="took part, round by round, and in fedavg")


@pytest.mark.parametrize("law", [SEED, FEDAVG])
def test_unequal_learning_rates(monkeypatch: Patch, law: str) -> None:
    right = Plan.train_settings

    def fault(self: Plan, round: int) -> TrainSettings:
        lr = 0.2 if self.method.name == "fedspu" else 0.1
        return right(self, round).model_copy(update={"lr": lr})

    monkeypatch.setattr(Plan, "train_settings", fault)
    assert_caught(law)


def test_a_learning_rate_of_the_methods_own() -> None:
    def fault(turn: Turn, local: LocalTraining) -> Trained:
        settings = local.settings.model_copy(update={"lr": 0.2})
        return local_epochs(turn, replace(local, settings=settings))

    mine = replace(fedspu, name="mine", train=fault)
    assert_caught(FEDAVG, mine, says=f'leave_out=["{FEDAVG}"]')


def test_batches_in_an_order_of_the_methods_own() -> None:
    def fault(turn: Turn, local: LocalTraining) -> Trained:
        return local_epochs(turn, replace(local, rng=np.random.default_rng(3)))

    assert_caught(
        SEED, replace(fedspu, name="mine", train=fault), says="batches 0 times"
    )


def test_stopped_clients_that_return(monkeypatch: Patch) -> None:
    def fault(federation: Federation, plan: Plan, t: int) -> list[int]:
        return choose_clients(replace(federation, stopped=frozenset()), plan, t)

    monkeypatch.setattr(server, "choose_clients", fault)
    assert_caught(WHO, says="has stopped, but takes part in round 3")


def test_personal_models_sent_to_the_server(monkeypatch: Patch) -> None:
    def fault(state: State, where: Mapping[str, Any]) -> Payload:
        return {name: state[name] for name in where}

    monkeypatch.setattr(client, "extract", fault)
    assert_caught(LEAVES, says="bytes of values; the entries it trained are ")


@dataclass(frozen=True)
class Hoarding(Federation):
    """A server that keeps the clients' own models."""

    personal: dict[int, State] = field(default_factory=dict)


def test_personal_models_kept_by_the_server(monkeypatch: Patch) -> None:
    right = server.next_federation

    def fault(*given: Any) -> Federation:
        return Hoarding(**vars(right(*given)))

    monkeypatch.setattr(rounds, "next_federation", fault)
    assert_caught(LEAVES, says="the server also keeps personal")


def test_personal_models_sent_through_the_server(monkeypatch: Patch) -> None:
    right = TrainRequests.__getitem__

    def fault(self: TrainRequests, client: int) -> TrainRequest:
        request = right(self, client)
        noise = {name: v + 1 for name, v in request.payload.items()}
        return replace(request, payload=noise) if self.t > 1 else request

    monkeypatch.setattr(TrainRequests, "__getitem__", fault)
    assert_caught(LEAVES, says="that are not the")


# What others do, and what we might ----------------------------------------------------


@pytest.mark.parametrize("law", [MEAN, IDLE])
def test_entries_that_nobody_trained_set_to_zero(monkeypatch: Patch, law: str) -> None:
    def fault(state: State, updates: list[Update]) -> State:
        zeros = {name: torch.zeros_like(v) for name, v in state.items()}
        return right_average(zeros, updates)

    averaging(monkeypatch, fault)
    assert_caught(law, "fjord")


def test_all_clients_weighed_alike_in_the_average(monkeypatch: Patch) -> None:
    def fault(state: State, updates: list[Update]) -> State:
        return right_average(state, [replace(u, num_examples=1) for u in updates])

    averaging(monkeypatch, fault)
    assert_caught(MEAN)


def test_weights_lost_on_the_way_to_the_average(monkeypatch: Patch) -> None:
    def fault(plan: Plan, reply: TrainReply) -> Update | None:
        return update_of(plan, replace(reply, num_examples=1))

    monkeypatch.setattr(rounds, "update_of", fault)
    assert_caught(MEAN)


def test_a_plain_mean_over_clients_that_did_not_train_it(monkeypatch: Patch) -> None:
    def fault(state: State, updates: list[Update]) -> State:
        return right_average(
            state,
            [
                Update(
                    {name: (None,) * values.dim() for name, values in state.items()},
                    merge(state, update.where, update.payload),
                    update.num_examples,
                )
                for update in updates
            ],
        )

    averaging(monkeypatch, fault)
    assert_caught(MEAN)


def test_a_sum_in_the_order_of_arrival(monkeypatch: Patch) -> None:
    def fault(state: State, updates: list[Update]) -> State:
        total = {name: torch.zeros_like(v) for name, v in state.items()}
        weight = {name: torch.zeros_like(v) for name, v in state.items()}
        for update in updates:
            for name, where in update.where.items():
                index = blocks.mesh(total[name], where)
                total[name][index] += update.num_examples * update.payload[name]
                weight[name][index] += update.num_examples
        return {
            name: torch.where(weight[name] > 0, total[name] / weight[name], v).to(v)
            for name, v in state.items()
        }

    averaging(monkeypatch, fault)
    monkeypatch.setattr(rounds, "in_client_order", lambda clients, answers: answers)
    assert_caught(SAME, says="with the last reply first")


def test_neurons_drawn_from_a_generator_that_is_shared() -> None:
    shared = np.random.default_rng(0)

    def fault(now: ClientRound) -> Offer:
        return Offer(choose_random(now.neurons, now.capacity, shared))

    assert_caught(
        SAME,
        replace(fedspu, name="mine", offer=fault),
        says="with the last reply first",
    )


def test_what_came_and_was_ignored(monkeypatch: Patch) -> None:
    monkeypatch.setattr(blocks, "put", lambda tensor, where, block: None)
    assert_caught(MERGED)


def test_a_trained_entry_that_is_not_sent(monkeypatch: Patch) -> None:
    def fault(state: State, where: Any) -> Payload:
        payload = extract(state, where)
        return {**payload, "fc.bias": torch.zeros_like(payload["fc.bias"])}

    monkeypatch.setattr(client, "extract", fault)
    assert_caught(LEAVES, says="has values that are not those it trained")


def drawn_backwards(now: ClientRound) -> Offer:
    """Random neurons by a rule of its own, with the key they were drawn by."""
    key = stream_key(now.seed, "neurons", now.round, now.client)
    drawn = choose_random(now.neurons, now.capacity, generator(key))
    sizes = {group.name: group.size for group in now.neurons.groups}
    return Offer({n: sizes[n] - 1 - i.flip(0) for n, i in drawn.items()}, key)


def test_a_key_from_which_the_client_draws_other_neurons(monkeypatch: Patch) -> None:
    method = replace(fedspu, offer=drawn_backwards)
    check(method, mlp, made_examples(), leave_out=set(LAWS) - {MERGED, LEAVES, BYTES})

    monkeypatch.setattr(messages, "_is_drawn_from_key", lambda *_: True)

    assert_caught(MERGED, method, net=mlp)
