from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedspu import Active, State
from fedspu.federation.messages import Reply
from fedspu.federation.plan import Plan
from fedspu.federation.server import (
    Federation,
    absorb,
    build_request,
    choose_clients,
)
from fedspu.methods import METHODS
from tests.oracles.federation import plan_for, play_all, same_bits

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
    later = Federation(4, moved, met=frozenset({1, 2}))
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


def test_every_method_plays_with_the_same_cohorts() -> None:
    cohorts = {
        method: [
            sorted(report.answers)
            for report in play_all(plan_for(method=method, rounds=4)).reports
        ]
        for method in METHODS
    }
    assert len({str(cohort) for cohort in cohorts.values()}) == 1


def leading(tensor: Tensor, like: Tensor) -> Tensor:
    """The first entries of a tensor, as many along each axis as ``like`` has."""
    return tensor[tuple(slice(size) for size in like.shape)]


def test_every_method_has_the_same_splits_and_the_same_first_model() -> None:
    plans = [plan_for(method=method) for method in METHODS]
    for plan in plans[1:]:
        # The anchor small has the first neurons of that model, and no others.
        first = plans[0].initial
        if plan.method.name == "small":
            first = {name: leading(first[name], t) for name, t in plan.initial.items()}
        assert same_bits(plan.initial, first)
        for mine, other in zip(plan.splits, plans[0].splits, strict=True):
            for part in ("train", "val", "test"):
                assert getattr(mine, part).tolist() == getattr(other, part).tolist()


# Requests ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedspu", "local"])
def test_w0_comes_at_first_contact_to_clients_that_keep_a_model(
    method: str,
) -> None:
    plan = plan_for(method=method)
    first = build_request(start(plan), plan, 1, 2)
    assert first.initial is not None
    assert same_bits(first.initial, plan.initial)
    met = replace(start(plan), round=1, met=frozenset({2}))
    assert build_request(met, plan, 2, 2).initial is None
    assert build_request(met, plan, 2, 3).initial is not None


def test_fedavg_sends_no_w0_beside_the_model_itself() -> None:
    plan = plan_for(method="fedavg")
    assert build_request(start(plan), plan, 1, 2).initial is None


@pytest.mark.parametrize("method", ["fedspu", "local", "fedavg"])
def test_w0_is_counted_once_for_each_client(method: str) -> None:
    played = play_all(plan_for(method=method, rounds=5))
    seen: set[int] = set()
    # 36+4 conv1, 16 bn1, 216+6 conv2, 24 bn2, 72+3 fc: all that travels.
    size = 4 * (36 + 4 + 16 + 216 + 6 + 24 + 72 + 3) if method != "fedavg" else 0
    for report in played.reports:
        for client, answer in report.answers.items():
            assert answer.cost.bytes_initial == (0 if client in seen else size)
        seen |= report.answers.keys()
    assert len(seen) > 3


def test_a_request_holds_the_global_model_s_active_entries() -> None:
    plan = plan_for()
    moved = {name: tensor + 1 for name, tensor in plan.initial.items()}
    request = build_request(Federation(0, moved), plan, 1, 0)  # p = .3
    assert request.offer is not None
    one, two = (request.offer.active[name].tolist() for name in ("conv1", "conv2"))
    assert (len(one), len(two)) == (1, 1)
    assert torch.equal(
        request.payload["conv2.weight"], moved["conv2.weight"][two][:, one]
    )
    assert torch.equal(request.payload["bn2.bias"], moved["bn2.bias"][two])
    assert torch.equal(request.payload["fc.bias"], moved["fc.bias"])


# Absorbing ---------------------------------------------------------------------------


def reply_of(
    plan: Plan, active: Active, add: float, n: int, has_stopped: bool = False
) -> Reply:
    """A client that added one number to every entry that it was sent."""
    payload = {
        name: _block(plan.initial, name, where) + add
        for name, where in plan.travelling(active).items()
    }
    return Reply(active, payload, n, 1.0, None, has_stopped)


def _block(state: State, name: str, where: tuple[Tensor | None, ...]) -> Tensor:
    tensor = state[name]
    for dim, positions in enumerate(where):
        if positions is not None:
            tensor = tensor.index_select(dim, positions)
    return tensor


def replies(plan: Plan) -> dict[int, Reply]:
    def active(one: list[int], two: list[int]) -> Active:
        return {"conv1": torch.tensor(one), "conv2": torch.tensor(two)}

    return {
        0: reply_of(plan, active([0], [1]), 0.1, 3),
        3: reply_of(plan, active([0, 2], [1, 4, 5]), 0.7, 5, has_stopped=True),
        5: reply_of(plan, active([2, 3], [1, 2]), -0.3, 11),
    }


def test_an_entry_is_the_mean_over_those_who_trained_it_by_their_examples() -> None:
    after = absorb(start(PLAN), PLAN, replies(PLAN).items()).global_state
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
    after = absorb(start(PLAN), PLAN, replies(PLAN).items()).global_state
    assert torch.equal(after["conv1.weight"][1], PLAN.initial["conv1.weight"][1])
    assert torch.equal(after["bn2.bias"][[0, 3]], PLAN.initial["bn2.bias"][[0, 3]])
    assert torch.equal(
        after["bn1.num_batches_tracked"], PLAN.initial["bn1.num_batches_tracked"]
    )


def test_absorbing_leaves_the_federation_before_as_it_was() -> None:
    before = start(PLAN, 7)
    copy = {name: tensor.clone() for name, tensor in before.global_state.items()}
    after = absorb(before, PLAN, replies(PLAN).items())
    assert same_bits(before.global_state, copy)
    assert (before.round, after.round) == (0, 1)
    assert (set(before.stopped), set(before.met)) == ({7}, set())
    assert (set(after.stopped), set(after.met)) == ({3, 7}, {0, 3, 5})


def test_what_the_server_carries_cannot_be_changed_in_place() -> None:
    after = absorb(start(PLAN), PLAN, replies(PLAN).items())
    assert isinstance(after.stopped, frozenset)
    assert isinstance(after.met, frozenset)


def test_one_who_stops_is_averaged_this_round_and_never_asked_again() -> None:
    given_replies = replies(PLAN)
    on = {**given_replies, 3: replace(given_replies[3], has_stopped=False)}
    after = absorb(start(PLAN), PLAN, given_replies.items())
    assert same_bits(
        after.global_state, absorb(start(PLAN), PLAN, on.items()).global_state
    )
    assert all(3 not in choose_clients(after, PLAN, t) for t in range(1, 50))


def test_replies_without_values_leave_the_global_model_alone() -> None:
    alone = {2: Reply(None, {}, 4, 1.0, None, False)}
    after = absorb(start(PLAN), PLAN, alone.items())
    assert same_bits(after.global_state, PLAN.initial)
    assert after.met == {2}
