from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fedspu.methods.method as method_module
from fedspu import State
from fedspu.errors import TrainingError
from fedspu.federation import client as client_module
from fedspu.federation.client import Memory, judge, take_turn
from fedspu.federation.messages import Request
from fedspu.federation.plan import Plan
from fedspu.federation.server import Federation, build_request
from fedspu.federation.workbench import Workspace
from fedspu.methods.method import Held
from fedspu.runs import Run
from fedspu.training import Score
from tests.oracles.federation import (
    ConvNet,
    Slow,
    distance,
    in_double,
    masks,
    mlp,
    plan_for,
    play_all,
    run_for,
    same_bits,
    slow_turn,
    with_part,
)


def noisy(state: State, seed: int) -> State:
    """Another model of the same shape, as after some rounds; variances positive."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.1 * torch.rand(tensor.shape, generator=draw).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor + 3
        for name, tensor in state.items()
    }


def turn_inputs(plan: Plan) -> tuple[State, State]:
    """A global and a personal model that differ in every entry."""
    return noisy(plan.initial, 1), noisy(plan.initial, 2)


# One turn ----------------------------------------------------------------------------


@pytest.mark.parametrize("client", [0, 3, 5])  # p = .3, .5, 1
@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"train__momentum": 0.9, "train__weight_decay": 0.05},
        {"train__batch_size": 3, "train__epochs": 3},
    ],
)
def test_a_turn_is_the_slow_one(client: int, recipe: dict[str, Any]) -> None:
    plan = in_double(plan_for(early_stopping=True, **recipe))
    global_state, own = turn_inputs(plan)
    t = 4

    mask, expected, train_loss, val_loss = slow_turn(
        plan, Slow(global_state, {client: own}), t, client
    )
    federation = Federation(t - 1, global_state, met=frozenset({client}))
    request = build_request(federation, plan, t, client)
    reply, memory = take_turn(plan, Workspace(plan), request, Memory(Held(own), (9.0,)))

    assert memory.own is not None
    assert distance(memory.own.state, expected) < 1e-12
    assert reply.train_loss == pytest.approx(train_loss, rel=1e-12)
    assert reply.val_loss == pytest.approx(val_loss, rel=1e-12)
    assert memory.losses[0] == 9.0
    assert memory.losses[1:] == pytest.approx((0.7 * train_loss + 0.3 * val_loss,))
    assert reply.num_examples == len(plan.splits[client].train)
    # What is sent back is the trained model where the mask is one, and nothing else.
    for name, inside in mask.items():
        sent = reply.payload[name].flatten()
        assert torch.allclose(sent, expected[name][inside.bool()], rtol=0, atol=1e-12)
    assert reply.payload.keys() == mask.keys()


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_frozen_entries_are_the_client_s_own_bit_for_bit(optimizer: str) -> None:
    plan = plan_for(train__optimizer=optimizer, train__weight_decay=0.1)
    global_state, own = turn_inputs(plan)
    request = build_request(Federation(0, global_state), plan, 1, 0)
    assert request.offer is not None
    one, two = (set(request.offer.active[n].tolist()) for n in ("conv1", "conv2"))
    _, memory = take_turn(plan, Workspace(plan), request, Memory(Held(own)))
    assert memory.own is not None
    for name, inside in masks(one, two).items():
        if not name.endswith(("running_mean", "running_var")):
            frozen = ~inside.bool()
            assert torch.equal(memory.own.state[name][frozen], own[name][frozen]), name
            assert not torch.equal(memory.own.state[name], own[name]), name


def test_frozen_channels_statistics_go_on_following_local_data() -> None:
    plan = plan_for()
    global_state, own = turn_inputs(plan)
    request = build_request(Federation(0, global_state), plan, 1, 0)
    _, memory = take_turn(plan, Workspace(plan), request, Memory(Held(own)))
    assert memory.own is not None
    for name in ("bn1.running_mean", "bn1.running_var", "bn2.running_mean"):
        assert (memory.own.state[name] != own[name]).all()
    # Two epochs of 3 to 5 batches each.
    count = int(
        memory.own.state["bn1.num_batches_tracked"] - own["bn1.num_batches_tracked"]
    )
    assert count == 2 * -(-(len(plan.splits[0].train) - 1) // 4)


def test_under_the_local_norm_policy_norms_start_from_the_client_s_own() -> None:
    plan = plan_for(norm__policy="local", train__lr=0.0, clients__capacities=[1.0])
    global_state, own = turn_inputs(plan)
    request = build_request(Federation(0, global_state), plan, 1, 0)
    reply, memory = take_turn(plan, Workspace(plan), request, Memory(Held(own)))
    assert memory.own is not None
    assert torch.equal(memory.own.state["bn1.weight"], own["bn1.weight"])
    assert torch.equal(memory.own.state["conv1.weight"], global_state["conv1.weight"])
    assert not any(name.startswith("bn") for name in reply.payload)


def test_the_workspace_s_earlier_content_does_not_matter() -> None:
    plan = plan_for()
    request = build_request(Federation(0, plan.initial), plan, 1, 1)
    clean, dirty = Workspace(plan), Workspace(plan)
    model = dirty.full.model.eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7)
    first = take_turn(plan, clean, request, None)
    second = take_turn(plan, dirty, request, None)
    assert first[1].own is not None
    assert second[1].own is not None
    assert same_bits(first[1].own.state, second[1].own.state)
    assert first[0].train_loss == second[0].train_loss


def test_memory_and_reply_share_no_tensor_with_the_workspace_or_the_request() -> None:
    plan = plan_for(clients__capacities=[1.0])
    workspace = Workspace(plan)
    request = build_request(Federation(0, plan.initial), plan, 1, 1)
    reply, memory = take_turn(plan, workspace, request, None)
    assert memory.own is not None
    before = {name: tensor.clone() for name, tensor in memory.own.state.items()}
    sent = {name: tensor.clone() for name, tensor in reply.payload.items()}
    with torch.no_grad():
        model = workspace.full.model
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    for tensor in request.payload.values():
        tensor.zero_()
    assert same_bits(memory.own.state, before)
    assert same_bits(reply.payload, sent)


def test_dropout_draws_from_the_turn_s_own_stream() -> None:
    def build() -> nn.Module:
        return nn.Sequential(mlp(), nn.Dropout(0.5))

    plan = plan_for(build)
    request = build_request(Federation(0, plan.initial), plan, 1, 1)
    losses = []
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            losses.append(take_turn(plan, Workspace(plan), request, None)[0].train_loss)
    assert losses[0] == losses[1]


# Broken training ---------------------------------------------------------------------


def test_a_loss_that_is_not_a_number_names_round_and_client() -> None:
    plan = with_part(plan_for(), "train")
    request = build_request(Federation(6, plan.initial), plan, 7, 2)
    with pytest.raises(TrainingError, match=r"^round 7, client 2: the training loss"):
        take_turn(plan, Workspace(plan), request, None)


def one_step(lr: float, scale: float = 1.0, **given: Any) -> Plan:
    """A plan of a single step: its loss is seen before the weights are ruined."""
    plan = plan_for(mlp, train__lr=lr, train__epochs=1, train__batch_size=200, **given)
    return replace(plan, data=replace(plan.data, x=scale * plan.data.x))


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"lr": 1e38, "scale": 1e3}, id="weights overflow"),
        pytest.param({"lr": 1e38, "early_stopping": True}, id="no validation loss"),
        pytest.param({"lr": 1e39}, id="no float32 holds lr"),
    ],
)
def test_a_model_ruined_by_its_last_step_is_refused(given: dict[str, Any]) -> None:
    plan = one_step(**given)
    request = build_request(Federation(0, plan.initial), plan, 1, 5)
    with pytest.raises(TrainingError, match="round 1, client 5"):
        take_turn(plan, Workspace(plan), request, None)


# Early stopping: Algorithm 2, lines 11 to 16 -----------------------------------------


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let training and validation return losses from a list."""

    def script(train: list[float], val: list[float]) -> None:
        train_losses, val_losses = iter(train), iter(val)
        monkeypatch.setattr(
            method_module, "train", lambda *args, **kwargs: next(train_losses)
        )
        monkeypatch.setattr(
            client_module, "evaluate", lambda *args: Score(next(val_losses), 0.5)
        )

    return script


def turns(plan: Plan, count: int, memory: Memory | None = None) -> list[bool]:
    """Whether one client says that it stops, turn by turn."""
    request = build_request(Federation(0, plan.initial), plan, 1, 0)
    said = []
    for t in range(1, count + 1):
        reply, memory = take_turn(
            plan, Workspace(plan), replace(request, round=t), memory
        )
        said.append(reply.has_stopped)
    return said


@pytest.mark.parametrize(
    ("train", "val", "stops"),
    [
        ([5.0, 4.0, 3.0], [5.0, 4.0, 3.0], [False, False, False]),
        ([5.0, 6.0], [5.0, 5.0], [False, True]),
        ([5.0, 5.0], [5.0, 5.0], [False, False]),  # equal is not greater
        ([5.0, 4.0], [5.0, 8.0], [False, True]),  # .7 * 4 + .3 * 8 = 5.2
        ([5.0, 4.0], [5.0, 7.0], [False, False]),  # .7 * 4 + .3 * 7 = 4.9
        # The last participation counts, not the best one.
        ([5.0, 1.0, 0.9], [5.0, 1.0, 0.9], [False, False, False]),
        ([5.0, 1.0, 1.1], [5.0, 1.0, 1.0], [False, False, True]),
    ],
)
def test_a_client_stops_once_its_blended_loss_rises(
    scripted: Callable[..., None],
    train: list[float],
    val: list[float],
    stops: list[bool],
) -> None:
    scripted(train, val)
    assert turns(plan_for(early_stopping=True), len(train)) == stops


def test_the_blend_is_the_share_of_the_training_loss(
    scripted: Callable[..., None],
) -> None:
    scripted([5.0, 4.0], [5.0, 7.0])
    plan = plan_for(early_stopping=True, early_stopping__blend=0.5)  # 5.5 > 5
    assert turns(plan, 2) == [False, True]


def test_with_patience_two_rises_in_a_row_are_needed(
    scripted: Callable[..., None],
) -> None:
    losses = [5.0, 6.0, 4.0, 5.0, 6.0]
    scripted(losses, losses)
    plan = plan_for(early_stopping=True, early_stopping__patience=2)
    assert turns(plan, 5) == [False, False, False, False, True]


def test_without_early_stopping_nobody_stops_and_nothing_is_validated(
    scripted: Callable[..., None],
) -> None:
    scripted([1.0, 2.0, 3.0], [])
    assert turns(plan_for(), 3) == [False, False, False]


def losses_by_client(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, losses: dict[int, list[float]]
) -> None:
    """Let each client's training come to its own losses, turn by turn."""
    left: dict[int, Iterator[float]] = {k: iter(v) for k, v in losses.items()}
    original = client_module.take_turn

    def turn(plan: Plan, place: Workspace, request: Request, memory: Any) -> Any:
        loss = next(left[request.client])
        monkeypatch.setattr(method_module, "train", lambda *_: loss)
        monkeypatch.setattr(client_module, "evaluate", lambda *_: Score(loss, 0.5))
        return original(plan, place, request, memory)

    monkeypatch.setattr("fedspu.engines.turns.take_turn", turn)


def test_only_the_client_s_own_participations_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Losses rise from client to client, and fall from turn to turn of each."""
    plan = plan_for(early_stopping=True, rounds=8, clients__per_round=2)
    falling = {k: [10.0 * k + 1 / turn for turn in range(1, 9)] for k in range(6)}
    losses_by_client(monkeypatch, plan, falling)
    played = play_all(plan)
    turns_taken = [len(memory.losses) for memory in played.engine.memories.values()]
    assert max(turns_taken) > 1
    assert played.federation.stopped == frozenset()
    assert played.federation.round == 8


@pytest.mark.parametrize("method", ["fedspu", "local", "fedavg"])
def test_the_run_ends_once_every_client_has_stopped(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    plan = plan_for(
        method=method,
        early_stopping=True,
        rounds=50,
        clients__number=3,
        clients__per_round=3,
    )
    losses = {0: [3.0, 4.0], 1: [3.0, 2.0, 1.0, 5.0], 2: [3.0, 3.0, 9.0]}
    losses_by_client(monkeypatch, plan, losses)
    played = play_all(plan)
    cohorts = [sorted(report.answers) for report in played.reports]
    assert cohorts == [[0, 1, 2], [0, 1, 2], [1, 2], [1]]
    assert played.federation.stopped == {0, 1, 2}
    assert [len(r.federation.stopped) for r in played.reports] == [0, 1, 2, 3]


# What must not be touched ------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedspu", "local", "fedavg"])
def test_without_early_stopping_the_validation_part_is_not_touched(
    method: str,
) -> None:
    plan = plan_for(method=method)
    clean, blind = play_all(plan), play_all(with_part(plan, "val"))
    assert same_bits(clean.federation.global_state, blind.federation.global_state)
    for mine, other in zip(clean.reports, blind.reports, strict=True):
        assert mine.accuracies == other.accuracies
        assert mine.judged == other.judged
    for client, memory in clean.engine.memories.items():
        if memory.own is not None:
            assert same_bits(memory.own.state, blind.own(client))


def test_with_early_stopping_the_validation_part_decides() -> None:
    plan = plan_for(early_stopping=True, rounds=6)
    clean, blind = play_all(plan), play_all(with_part(plan, "val", 5.0))
    assert clean.federation.stopped != blind.federation.stopped


@pytest.mark.parametrize("method", ["fedspu", "local", "fedavg"])
def test_the_test_part_moves_no_weight_no_statistic_and_stops_nobody(
    method: str,
) -> None:
    plan = plan_for(method=method, early_stopping=True, rounds=5, judge__every=1)
    clean, blind = play_all(plan), play_all(with_part(plan, "test"))
    assert clean.federation.round == blind.federation.round
    assert clean.federation.stopped == blind.federation.stopped
    assert same_bits(clean.federation.global_state, blind.federation.global_state)
    for client, memory in clean.engine.memories.items():
        assert memory.losses == blind.engine.memories[client].losses
        if memory.own is not None:
            assert same_bits(memory.own.state, blind.own(client))


def test_under_the_paper_s_split_validation_and_test_are_one_part() -> None:
    plan = plan_for(data__split="paper")
    for split in plan.splits:
        assert split.val.tolist() == split.test.tolist()
        assert not set(split.train.tolist()) & set(split.test.tolist())


# Personal models ---------------------------------------------------------------------


def own_of(run: Run, client: int) -> State:
    return {n: t.clone() for n, t in run.personal_model(client).state_dict().items()}


@pytest.mark.parametrize("method", ["fedspu", "local"])
def test_clients_that_were_never_asked_hold_w0(method: str) -> None:
    run = run_for(method=method, rounds=2, clients__per_round=2)
    asked = {client for line in run.rounds for client in line["clients"]}
    assert 2 <= len(asked) < 6
    for client in range(6):
        is_first = same_bits(own_of(run, client), run.plan.initial)
        assert is_first == (client not in asked)


def test_personal_models_alias_neither_each_other_nor_the_global_one() -> None:
    run = run_for(rounds=1)
    states = [own_of(run, client) for client in range(6)]
    with torch.no_grad():
        for tensor in run.personal_model(0).parameters():
            tensor.fill_(7)
        for tensor in run.global_model().parameters():
            tensor.fill_(7)
    assert all(same_bits(own_of(run, k), states[k]) for k in range(6))


def test_judging_changes_neither_model_nor_mode() -> None:
    plan = plan_for()
    workspace = Workspace(plan)
    model = workspace.full.model.train()
    state = noisy(plan.initial, 3)
    copy = {name: tensor.clone() for name, tensor in state.items()}
    memory = Memory(Held(state))
    first = judge(plan, workspace, 1, 0, memory, plan.initial)
    assert judge(plan, workspace, 1, 0, memory, plan.initial) == first
    assert same_bits(state, copy)
    assert same_bits(dict(model.state_dict()), copy)


def test_a_personal_model_is_ready_for_use() -> None:
    run = run_for(rounds=1)
    model = run.personal_model(0)
    assert isinstance(model, ConvNet)
    assert not model.training
