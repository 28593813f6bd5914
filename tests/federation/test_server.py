from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedspu import Active, State
from fedspu.federation.messages import JudgeRequest, TrainReply
from fedspu.federation.plan import Plan
from fedspu.federation.server import (
    Federation,
    TrainRequests,
    choose_clients,
    judge_requests,
    next_federation,
    take_server_step,
    update_of,
)
from fedspu.methods import CATALOGUE, Entry, make_method
from fedspu.neurons.average import Average
from fedspu.prepare import Prepared
from fedspu.settings import MethodSettings, ServerSettings
from tests.oracles.federation import (
    bits,
    distance,
    empty_reply,
    in_double,
    plan_for,
    play_all,
    prepared_for,
    request_for,
    same_bits,
)

PLAN = plan_for(clients__number=8, clients__per_round=3)


def start(plan: Plan, *stopped: int) -> Federation:
    return Federation(0, plan.initial, frozenset(stopped))


# Cohorts -----------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10**6),
    t=st.integers(1, 10**4),
    stopped=st.sets(st.integers(0, 7), max_size=8),
)
def test_a_cohort_is_sorted_distinct_of_the_right_size_and_on(
    seed: int, t: int, stopped: set[int]
) -> None:
    settings = PLAN.settings.model_copy(update={"seed": seed})
    plan = replace(PLAN, settings=settings)
    cohort = choose_clients(start(plan, *stopped), plan, t)
    assert cohort == sorted(set(cohort))
    assert len(cohort) == min(3, 8 - len(stopped))
    assert set(cohort) <= set(range(8)) - stopped


def test_all_are_chosen_when_no_more_than_a_cohort_is_left() -> None:
    assert choose_clients(start(PLAN, 0, 1, 2, 4, 6), PLAN, 1) == [3, 5, 7]
    assert choose_clients(start(PLAN, 0, 1, 2, 4, 5, 6), PLAN, 1) == [3, 7]
    assert choose_clients(start(PLAN, *range(8)), PLAN, 1) == []


def test_cohorts_depend_on_seed_and_round_alone() -> None:
    first = choose_clients(start(PLAN), PLAN, 5)
    moved = {name: tensor + 1 for name, tensor in PLAN.initial.items()}
    later = Federation(4, moved, last={1: 3, 2: 4})
    assert choose_clients(later, PLAN, 5) == first
    others = [choose_clients(start(PLAN), PLAN, t) for t in range(6, 12)]
    assert any(cohort != first for cohort in others)
    reseeded = replace(PLAN, settings=PLAN.settings.model_copy(update={"seed": 1}))
    assert any(
        choose_clients(start(PLAN), PLAN, t) != choose_clients(start(PLAN), reseeded, t)
        for t in range(1, 6)
    )


def test_every_client_is_chosen_about_equally_often() -> None:
    counts = Counter(
        client for t in range(1, 801) for client in choose_clients(start(PLAN), PLAN, t)
    )
    # 800 rounds, 3 of 8: 300 times each; four standard deviations are 55.
    assert all(abs(counts[client] - 300) < 55 for client in range(8))


def ready_for(entry: Entry, **given: Any) -> Prepared:
    return prepared_for(method__name=entry.name, method__reading=entry.reading, **given)


def test_every_method_plays_with_the_same_cohorts() -> None:
    cohorts = {
        entry: [
            sorted(done.answers)
            for done in play_all(
                ready_for(entry, rounds=4, train__epochs=1, method__finish_last=0)
            ).rounds
        ]
        for entry in CATALOGUE
    }
    assert len({str(cohort) for cohort in cohorts.values()}) == 1


def leading(tensor: Tensor, like: Tensor) -> Tensor:
    """The first entries of a tensor, as many along each axis as ``like`` has."""
    return tensor[tuple(slice(size) for size in like.shape)]


def test_every_method_has_the_same_splits_and_the_same_first_model() -> None:
    all_ready = [ready_for(entry) for entry in CATALOGUE]
    for ready in all_ready[1:]:
        # The anchor small has the first neurons of that model, and no others; fjord in
        # its original reading has norm statistics for every width.
        first, mine = all_ready[0].plan.initial, ready.plan.initial
        if ready.plan.method.name == "small":
            first = {name: leading(first[name], t) for name, t in mine.items()}
        elif ready.plan.method.remodel is not None:
            first = {name: first[name].expand_as(t) for name, t in mine.items()}
        assert same_bits(mine, first)
        splits = zip(ready.examples.splits, all_ready[0].examples.splits, strict=True)
        for own, other in splits:
            for part in ("train", "val", "test"):
                assert getattr(own, part).tolist() == getattr(other, part).tolist()


# Requests ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedspu", "local"])
def test_w0_comes_at_first_contact_to_clients_that_keep_a_model(
    method: str,
) -> None:
    plan = plan_for(method=method)
    first = request_for(plan, start(plan), 1, 2)
    assert first.initial is not None
    assert same_bits(first.initial, plan.initial)
    later = replace(start(plan), round=1, last={2: 1})
    assert request_for(plan, later, 2, 2).initial is None
    assert request_for(plan, later, 2, 3).initial is not None


def test_a_request_says_when_its_client_last_took_part() -> None:
    plan = plan_for()
    later = replace(start(plan), round=6, last={2: 4, 3: 6})
    requests = TrainRequests(later, plan, 7)
    assert [requests[client].last for client in (1, 2, 3)] == [0, 4, 6]
    assert {requests[client].round for client in (1, 2, 3)} == {7}
    judged = judge_requests(later, [3, 1], "global")
    assert judged == {
        3: JudgeRequest(6, 3, 6, "global"),
        1: JudgeRequest(6, 1, 0, "global"),
    }


def test_a_round_s_requests_are_those_of_its_cohort() -> None:
    plan = plan_for()
    requests = TrainRequests(start(plan, 4), plan, 1)
    assert list(requests) == choose_clients(start(plan, 4), plan, 1)
    assert len(requests) == 3
    assert [requests[client].client for client in requests] == list(requests)


def test_fedavg_sends_no_w0_beside_the_model_itself() -> None:
    plan = plan_for(method="fedavg")
    assert request_for(plan, start(plan), 1, 2).initial is None


@pytest.mark.parametrize("method", ["fedspu", "local", "fedavg"])
def test_w0_is_counted_once_for_each_client(method: str) -> None:
    played = play_all(prepared_for(method=method, rounds=5))
    seen: set[int] = set()
    # 36+4 conv1, 16 bn1, 216+6 conv2, 24 bn2, 72+3 fc: all that travels.
    size = 4 * (36 + 4 + 16 + 216 + 6 + 24 + 72 + 3) if method != "fedavg" else 0
    for done in played.rounds:
        for client, answer in done.answers.items():
            assert answer.cost.bytes_initial == (0 if client in seen else size)
        seen |= done.answers.keys()
    assert len(seen) > 3


def test_a_request_holds_the_global_model_s_active_entries() -> None:
    plan = plan_for()
    moved = {name: tensor + 1 for name, tensor in plan.initial.items()}
    request = request_for(plan, Federation(0, moved), 1, 0)  # p = .3
    assert request.offer is not None
    one, two = (request.offer.active[name].tolist() for name in ("conv1", "conv2"))
    assert (len(one), len(two)) == (1, 1)
    assert torch.equal(
        request.payload["conv2.weight"], moved["conv2.weight"][two][:, one]
    )
    assert torch.equal(request.payload["bn2.bias"], moved["bn2.bias"][two])
    assert torch.equal(request.payload["fc.bias"], moved["fc.bias"])


# What comes back ---------------------------------------------------------------------


def reply_of(
    plan: Plan, client: int, active: Active, add: float, n: int, **given: Any
) -> TrainReply:
    """A client that added one number to every entry that it was sent."""
    payload = {
        name: _block(plan.initial, name, where) + add
        for name, where in plan.travelling(active).items()
    }
    return empty_reply(
        1, client, active=active, payload=payload, num_examples=n, **given
    )


def _block(state: State, name: str, where: tuple[Tensor | None, ...]) -> Tensor:
    tensor = state[name]
    for dim, positions in enumerate(where):
        if positions is not None:
            tensor = tensor.index_select(dim, positions)
    return tensor


def replies(plan: Plan) -> dict[int, TrainReply]:
    def active(one: list[int], two: list[int]) -> Active:
        return {"conv1": torch.tensor(one), "conv2": torch.tensor(two)}

    return {
        0: reply_of(plan, 0, active([0], [1]), 0.1, 3),
        3: reply_of(plan, 3, active([0, 2], [1, 4, 5]), 0.7, 5, has_stopped=True),
        5: reply_of(plan, 5, active([2, 3], [1, 2]), -0.3, 11),
    }


def after_round(
    before: Federation, plan: Plan, replies: Mapping[int, TrainReply]
) -> Federation:
    """Where the server stands once these have come."""
    combined = plan.method.combine(before.global_state)
    for reply in replies.values():
        if update := update_of(plan, reply):
            combined.add(update)
    return next_federation(plan, before, combined.result(), replies)


def test_an_entry_is_the_mean_over_those_who_trained_it_by_their_examples() -> None:
    after = after_round(start(PLAN), PLAN, replies(PLAN)).global_state
    moved = {name: after[name] - tensor for name, tensor in PLAN.initial.items()}
    # conv1: 0 by clients 0 and 3, 2 by clients 3 and 5, 3 by client 5, 1 by nobody.
    expected = torch.tensor(
        [(3 * 0.1 + 5 * 0.7) / 8, 0.0, (5 * 0.7 - 11 * 0.3) / 16, -0.3]
    )
    assert torch.allclose(moved["bn1.weight"], expected, atol=1e-6)
    assert torch.allclose(
        moved["conv1.weight"], expected.view(4, 1, 1, 1).expand(4, 1, 3, 3), atol=1e-6
    )
    # conv2 1 <- conv1 2 by clients 3 and 5; 4 <- 3 by nobody, though 4 and 3 are sent.
    weight = moved["conv2.weight"]
    assert torch.allclose(weight[1, 2], torch.full((3, 3), (3.5 - 3.3) / 16), atol=1e-6)
    assert torch.equal(weight[4, 3], torch.zeros(3, 3))
    everyone = (3 * 0.1 + 5 * 0.7 - 11 * 0.3) / 19
    assert torch.allclose(moved["fc.bias"], torch.full((3,), everyone), atol=1e-6)


def test_an_entry_nobody_trained_keeps_its_value() -> None:
    after = after_round(start(PLAN), PLAN, replies(PLAN)).global_state
    assert torch.equal(after["conv1.weight"][1], PLAN.initial["conv1.weight"][1])
    assert torch.equal(after["bn2.bias"][[0, 3]], PLAN.initial["bn2.bias"][[0, 3]])
    assert torch.equal(
        after["bn1.num_batches_tracked"], PLAN.initial["bn1.num_batches_tracked"]
    )


def test_the_next_federation_leaves_the_one_before_as_it_was() -> None:
    before = start(PLAN, 7)
    copy = {name: tensor.clone() for name, tensor in before.global_state.items()}
    after = after_round(before, PLAN, replies(PLAN))
    assert same_bits(before.global_state, copy)
    assert (before.round, after.round) == (0, 1)
    assert (set(before.stopped), before.last) == ({7}, {})
    assert (set(after.stopped), after.last) == ({3, 7}, {0: 1, 3: 1, 5: 1})


def test_the_last_round_of_each_client_is_known() -> None:
    before = replace(start(PLAN), round=8, last={3: 2, 6: 7})
    after = after_round(before, PLAN, replies(PLAN))
    assert after.last == {0: 9, 3: 9, 5: 9, 6: 7}


def test_what_the_server_carries_is_not_what_it_carried_before() -> None:
    """Whoever has an earlier federation has what it was then."""
    before = replace(start(CHOICE), last={1: 1}, kept={1: {}}, extra={})
    after = after_round(before, CHOICE, replies(CHOICE))
    assert isinstance(after.stopped, frozenset)
    assert (before.last, before.kept, before.extra) == ({1: 1}, {1: {}}, {})
    assert after.last.keys() == after.kept.keys() == {0, 1, 3, 5}


CHOICE = plan_for(method="hermes", clients__number=8, clients__per_round=3)


def test_where_clients_choose_the_server_remembers_what_they_kept() -> None:
    given_replies = replies(CHOICE)
    after = after_round(start(CHOICE), CHOICE, given_replies)
    assert after.kept == {k: r.active for k, r in given_replies.items()}
    assert after_round(start(PLAN), PLAN, replies(PLAN)).kept == {}
    # It is what the client is sent from then on.
    offer = TrainRequests(after, CHOICE, 2).offer(3)
    assert offer is not None
    assert offer.active == given_replies[3].active


def test_one_who_stops_is_averaged_this_round_and_never_asked_again() -> None:
    given_replies = replies(PLAN)
    on = {**given_replies, 3: replace(given_replies[3], has_stopped=False)}
    after = after_round(start(PLAN), PLAN, given_replies)
    assert same_bits(
        after.global_state, after_round(start(PLAN), PLAN, on).global_state
    )
    assert all(3 not in choose_clients(after, PLAN, t) for t in range(1, 50))


def test_replies_without_values_leave_the_global_model_alone() -> None:
    after = after_round(start(PLAN), PLAN, {2: empty_reply(1, 2)})
    assert same_bits(after.global_state, PLAN.initial)
    assert after.last == {2: 1}


# The server's optimizer --------------------------------------------------------------

Optimizer = Literal["momentum", "adam"]
STATISTICS = frozenset({"bn.running_mean"})


def random_state(rng: np.random.Generator) -> State:
    def floats(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape)).float()

    return {
        "weight": floats(2, 3),
        "half": floats(4).to(torch.bfloat16),
        "double": floats(2).double(),
        "bn.running_mean": floats(3),
        "bn.num_batches_tracked": torch.tensor(int(rng.integers(9))),
    }


def moved_state(state: State, rng: np.random.Generator) -> State:
    """What replies combine to: some entries of some tensors are as they were."""
    combined = random_state(rng)
    for name, tensor in state.items():
        is_kept = torch.tensor(rng.random(tuple(tensor.shape)) < 0.3)
        combined[name] = torch.where(is_kept, tensor, combined[name])
    return combined


class SlowServer:
    """FedAvgM and FedAdam from their papers, one entry after the other."""

    def __init__(
        self, state: State, settings: ServerSettings, averaged: set[str]
    ) -> None:
        self.state = {name: t.clone() for name, t in state.items()}
        self.settings, self.averaged = settings, averaged
        self.means: dict[tuple[str, int], float] = {}
        self.squares: dict[tuple[str, int], float] = {}

    def step(self, combined: State) -> None:
        for name, tensor in self.state.items():
            if name in self.averaged:
                self.state[name] = combined[name].clone()
                continue
            flat, target = tensor.view(-1), combined[name].reshape(-1)
            for i in range(len(flat)):
                gradient = float(target[i]) - float(flat[i])
                if gradient != 0.0:  # else nobody moved it
                    flat[i] = float(flat[i]) + self._move((name, i), gradient)

    def _move(self, entry: tuple[str, int], gradient: float) -> float:
        s = self.settings
        mean = self.means.get(entry, 0.0)
        if s.optimizer == "momentum":
            self.means[entry] = s.momentum * mean + gradient
            return s.lr * self.means[entry]
        square = self.squares.get(entry, 0.0)
        self.means[entry] = s.momentum * mean + (1 - s.momentum) * gradient
        self.squares[entry] = s.beta2 * square + (1 - s.beta2) * gradient**2
        return s.lr * self.means[entry] / (sqrt(self.squares[entry]) + s.epsilon)


server_settings = st.one_of(
    st.builds(
        ServerSettings,
        optimizer=st.just("momentum"),
        lr=st.sampled_from([1.0, 0.3]),
        momentum=st.sampled_from([0.0, 0.5, 0.9]),
    ),
    st.builds(
        ServerSettings,
        optimizer=st.just("adam"),
        lr=st.sampled_from([0.1, 0.01]),
        momentum=st.sampled_from([0.0, 0.9]),
        beta2=st.sampled_from([0.5, 0.99]),
        epsilon=st.sampled_from([1e-3, 1e-8]),
    ),
)


def assert_near(found: State, expected: State) -> None:
    """Equal to what a number of this kind can tell apart."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        other = expected[name]
        assert tensor.dtype == other.dtype
        near = {torch.float32: 1e-6, torch.bfloat16: 1e-2}.get(tensor.dtype, 1e-12)
        assert torch.allclose(tensor, other, rtol=near, atol=near), name


@given(settings=server_settings, seed=st.integers(0, 999))
def test_the_server_s_optimizer_is_the_slow_one(
    settings: ServerSettings, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    state, extra = random_state(rng), dict[str, Tensor]()
    averaged = {"bn.running_mean", "bn.num_batches_tracked"}
    slow = SlowServer(state, settings, averaged)
    for _ in range(5):
        combined = moved_state(state, rng)
        state, extra = take_server_step(settings, state, combined, extra, STATISTICS)
        slow.step(combined)
        assert_near(state, slow.state)
        slow.state = {name: t.clone() for name, t in state.items()}  # errors add up


@given(settings=server_settings, seed=st.integers(0, 99))
def test_an_entry_that_nobody_moved_keeps_its_value_and_its_means(
    settings: ServerSettings, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    state = random_state(rng)
    state["weight"][0, 0] = -0.0
    first = {**moved_state(state, rng), "weight": state["weight"] + 1}
    first["weight"][0, 0] = -0.0
    state, extra = take_server_step(settings, state, first, {}, STATISTICS)
    combined = {name: t.clone() for name, t in state.items()}
    combined["weight"][1, 2] += 0.37
    after, later = take_server_step(settings, state, combined, extra, STATISTICS)

    assert extra.keys() == later.keys()
    still = torch.ones(2, 3, dtype=torch.bool)
    still[1, 2] = False
    for found, before in ((after, state), (later, extra)):
        for name in before:
            if name.endswith("weight"):
                assert bits(found[name][still]) == bits(before[name][still])
                assert not torch.equal(found[name], before[name])
            else:
                assert same_bits({name: found[name]}, {name: before[name]})


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_statistics_and_counts_are_plain_averages(optimizer: Optimizer) -> None:
    rng = np.random.default_rng(0)
    settings = ServerSettings(optimizer=optimizer, lr=0.3)
    state, extra = random_state(rng), dict[str, Tensor]()
    for _ in range(3):
        combined = moved_state(state, rng)
        state, extra = take_server_step(settings, state, combined, extra, STATISTICS)
        for name in ("bn.running_mean", "bn.num_batches_tracked"):
            assert same_bits({name: state[name]}, {name: combined[name]})
    assert not any("bn." in name for name in extra)


def test_without_an_optimizer_the_average_is_the_next_model() -> None:
    rng = np.random.default_rng(0)
    state = random_state(rng)
    combined, extra = moved_state(state, rng), {"of the method": torch.ones(2)}
    after = take_server_step(ServerSettings(), state, combined, extra, STATISTICS)
    assert same_bits(after[0], combined)
    assert same_bits(after[1], extra)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_server_s_step_changes_nothing_that_it_is_given(
    optimizer: Optimizer,
) -> None:
    rng = np.random.default_rng(0)
    settings = ServerSettings(optimizer=optimizer, lr=0.3)
    state = random_state(rng)
    combined = moved_state(state, rng)
    _, extra = take_server_step(settings, state, combined, {}, STATISTICS)
    given_all = [state, combined, extra]
    copies = [{name: t.clone() for name, t in found.items()} for found in given_all]
    take_server_step(settings, state, combined, extra, STATISTICS)
    for found, copy in zip(given_all, copies, strict=True):
        assert same_bits(found, copy)


@pytest.mark.parametrize("method", ["fedspu", "fedavg"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_in_a_federation_the_server_steps_from_model_to_model(
    optimizer: str, method: str
) -> None:
    """What replies combine to is noted, and the slow server follows it."""
    noted: list[State] = []

    class Noted(Average):
        def result(self) -> State:
            noted.append(super().result())
            return noted[-1]

    record = replace(make_method(MethodSettings(name=method)), combine=Noted)
    ready = in_double(
        prepared_for(
            method_record=record, server__optimizer=optimizer, server__lr=0.3, rounds=3
        )
    )
    played = play_all(ready)
    assert len(noted) == 3

    averaged = {
        f"bn{i}.{name}"
        for i in (1, 2)
        for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    slow = SlowServer(ready.plan.initial, ready.plan.settings.server, averaged)
    for combined, done in zip(noted, played.rounds, strict=True):
        slow.step(combined)
        assert distance(done.federation.global_state, slow.state) < 1e-12
    assert distance(played.federation.global_state, noted[-1]) > 1e-3


def test_the_optimizer_s_means_and_the_method_s_memory_are_kept_side_by_side() -> None:
    method = make_method(MethodSettings(name="fedavg"))

    def count(extra: State, replies: Mapping[int, TrainReply]) -> State:
        before = extra.get("turns", torch.tensor(0))
        return {"turns": before + len(replies)}

    record = replace(method, server=count)
    given: dict[str, Any] = {"server__optimizer": "momentum", "rounds": 3}
    played = play_all(prepared_for(method_record=record, **given))
    plain = play_all(prepared_for(method="fedavg", **given))
    extra = dict(played.federation.extra)
    assert extra.pop("turns") == 9
    assert same_bits(extra, plain.federation.extra)
    assert same_bits(played.federation.global_state, plain.federation.global_state)
