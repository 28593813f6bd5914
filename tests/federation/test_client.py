from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from time import process_time, sleep
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedspu.methods.method as method_module
from fedspu import State
from fedspu.errors import TrainingError
from fedspu.federation import client as client_module
from fedspu.federation.client import Client
from fedspu.federation.client_memory import Shelf
from fedspu.federation.engine import Cost
from fedspu.federation.messages import (
    JudgeReply,
    JudgeRequest,
    Seconds,
    TrainReply,
    TrainRequest,
    pack_request,
    unpack_reply,
)
from fedspu.federation.plan import Plan
from fedspu.federation.server import Federation
from fedspu.federation.values import Values
from fedspu.methods.method import Memory, ModelState, Trained, Turn
from fedspu.prepare import Prepared
from fedspu.runs import Run
from fedspu.training.epochs import LocalTraining
from fedspu.training.evaluation import Score, evaluate_each
from tests.oracles.federation import (
    ConvNet,
    Slow,
    client_of,
    distance,
    in_double,
    masks,
    mlp,
    play_all,
    prepared_for,
    request_for,
    run_for,
    same_bits,
    slow_turn,
    with_inputs,
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


def first_request(ready: Prepared, client: int, t: int = 1) -> TrainRequest:
    """What a client is asked that never took part."""
    plan = ready.plan
    return request_for(plan, Federation(t - 1, plan.initial), t, client)


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
    rule = {"early_stopping": True, "early_stopping__patience": 2}
    ready = in_double(prepared_for(**{**rule, **recipe}))
    plan = ready.plan
    global_state, own = turn_inputs(plan)
    t = 4

    mask, expected, train_loss, val_loss = slow_turn(
        ready, Slow(global_state, {client: own}), t, client
    )
    federation = Federation(t - 1, global_state, last={client: 2})
    request = request_for(plan, federation, t, client)
    before = Memory(ModelState(own), (9.0,))
    reply, memory = client_of(ready).take_turn(request, before)

    assert memory.own is not None
    assert distance(memory.own.state, expected) < 1e-12
    assert reply.train_loss == pytest.approx(train_loss, rel=1e-12)
    assert reply.val_loss == pytest.approx(val_loss, rel=1e-12)
    assert memory.losses[0] == 9.0
    assert memory.losses[1:] == pytest.approx((0.7 * train_loss + 0.3 * val_loss,))
    assert reply.num_examples == len(ready.examples.splits[client].train)
    assert (reply.round, reply.client) == (t, client)
    # What is sent back is the trained model where the mask is one, and nothing else.
    for name, inside in mask.items():
        sent = reply.payload[name].flatten()
        assert torch.allclose(sent, expected[name][inside.bool()], rtol=0, atol=1e-12)
    assert reply.payload.keys() == mask.keys()


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_frozen_entries_are_the_client_s_own_bit_for_bit(optimizer: str) -> None:
    ready = prepared_for(train__optimizer=optimizer, train__weight_decay=0.1)
    plan = ready.plan
    global_state, own = turn_inputs(plan)
    request = request_for(plan, Federation(0, global_state), 1, 0)
    assert request.offer is not None
    one, two = (set(request.offer.active[n].tolist()) for n in ("conv1", "conv2"))
    _, memory = client_of(ready).take_turn(request, Memory(ModelState(own)))
    assert memory.own is not None
    for name, inside in masks(one, two).items():
        if not name.endswith(("running_mean", "running_var")):
            frozen = ~inside.bool()
            assert torch.equal(memory.own.state[name][frozen], own[name][frozen]), name
            assert not torch.equal(memory.own.state[name], own[name]), name


def test_frozen_channels_statistics_go_on_following_local_data() -> None:
    ready = prepared_for()
    global_state, own = turn_inputs(ready.plan)
    request = request_for(ready.plan, Federation(0, global_state), 1, 0)
    _, memory = client_of(ready).take_turn(request, Memory(ModelState(own)))
    assert memory.own is not None
    for name in ("bn1.running_mean", "bn1.running_var", "bn2.running_mean"):
        assert (memory.own.state[name] != own[name]).all()
    # Two epochs of 3 to 5 batches each.
    count = int(
        memory.own.state["bn1.num_batches_tracked"] - own["bn1.num_batches_tracked"]
    )
    assert count == 2 * -(-(len(ready.examples.splits[0].train) - 1) // 4)


def test_under_the_local_norm_policy_norms_start_from_the_client_s_own() -> None:
    ready = prepared_for(norm__policy="local", train__lr=0.0, clients__capacities=[1.0])
    global_state, own = turn_inputs(ready.plan)
    request = request_for(ready.plan, Federation(0, global_state), 1, 0)
    reply, memory = client_of(ready).take_turn(request, Memory(ModelState(own)))
    assert memory.own is not None
    assert torch.equal(memory.own.state["bn1.weight"], own["bn1.weight"])
    assert torch.equal(memory.own.state["conv1.weight"], global_state["conv1.weight"])
    assert not any(name.startswith("bn") for name in reply.payload)


def test_the_workbench_s_earlier_content_does_not_matter() -> None:
    ready = prepared_for()
    request = first_request(ready, 1)
    clean, dirty = client_of(ready), client_of(ready)
    model = dirty.workbench.full.model.eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7)
    first = clean.take_turn(request, Memory())
    second = dirty.take_turn(request, Memory())
    assert first[1].own is not None
    assert second[1].own is not None
    assert same_bits(first[1].own.state, second[1].own.state)
    assert first[0].train_loss == second[0].train_loss


def test_memory_and_reply_share_no_tensor_with_the_workbench_or_the_request() -> None:
    ready = prepared_for(clients__capacities=[1.0])
    client, request = client_of(ready), first_request(ready, 1)
    reply, memory = client.take_turn(request, Memory())
    assert memory.own is not None
    before = {name: tensor.clone() for name, tensor in memory.own.state.items()}
    sent = {name: tensor.clone() for name, tensor in reply.payload.items()}
    with torch.no_grad():
        model = client.workbench.full.model
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    for tensor in request.payload.values():
        tensor.zero_()
    assert same_bits(memory.own.state, before)
    assert same_bits(reply.payload, sent)


def test_dropout_draws_from_the_turn_s_own_stream() -> None:
    def build() -> nn.Module:
        return nn.Sequential(mlp(), nn.Dropout(0.5))

    ready = prepared_for(build)
    request = first_request(ready, 1)
    losses = []
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            reply, _ = client_of(ready).take_turn(request, Memory())
            losses.append(reply.train_loss)
    assert losses[0] == losses[1]


# Broken training ---------------------------------------------------------------------


def test_a_loss_that_is_not_a_number_is_refused() -> None:
    ready = with_part(prepared_for(), "train")
    request = first_request(ready, 2, t=7)
    with pytest.raises(TrainingError, match=r"^the training loss is nan"):
        client_of(ready).reply(request)


def one_step(lr: float, scale: float = 1.0, **given: Any) -> Prepared:
    """A run of single steps: a loss is seen before the weights are ruined."""
    recipe = {"train__lr": lr, "train__epochs": 1, "train__batch_size": 200}
    ready = prepared_for(mlp, **recipe, **given)
    return with_inputs(ready, scale * ready.examples.data.x)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"lr": 1e38, "scale": 1e3}, id="weights overflow"),
        pytest.param({"lr": 1e38, "early_stopping": True}, id="no validation loss"),
        pytest.param({"lr": 1e39}, id="no float32 holds lr"),
    ],
)
def test_a_model_ruined_by_its_last_step_is_refused(given: dict[str, Any]) -> None:
    ready = one_step(**given)
    client = client_of(ready)
    with pytest.raises(TrainingError, match=r"lower train\.lr"):
        client.reply(first_request(ready, 5))
    assert client.shelf.names() == []  # a turn that failed leaves nothing


def test_a_test_loss_that_is_not_a_number_is_refused() -> None:
    ready = with_part(prepared_for(), "test")
    request = JudgeRequest(round=3, client=2, last=0, which="personal")
    with pytest.raises(TrainingError, match=r"^on its test examples"):
        client_of(ready).reply(request)


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
            client_module,
            "evaluate_each",
            lambda *args: [Score(next(val_losses), 0.5)],
        )

    return script


def turns(ready: Prepared, count: int) -> tuple[list[bool], list[Memory]]:
    """Whether one client says that it stops, turn by turn, and what it keeps."""
    client, request = client_of(ready), first_request(ready, 0)
    said, kept = [], [Memory()]
    for t in range(1, count + 1):
        reply, memory = client.take_turn(replace(request, round=t), kept[-1])
        said.append(reply.has_stopped)
        kept.append(memory)
    return said, kept[1:]


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
    ready = prepared_for(early_stopping=True)
    assert turns(ready, len(train))[0] == stops


def test_the_blend_is_the_share_of_the_training_loss(
    scripted: Callable[..., None],
) -> None:
    scripted([5.0, 4.0], [5.0, 7.0])
    ready = prepared_for(early_stopping=True, early_stopping__blend=0.5)  # 5.5 > 5
    assert turns(ready, 2)[0] == [False, True]


def test_with_patience_two_rises_in_a_row_are_needed(
    scripted: Callable[..., None],
) -> None:
    losses = [5.0, 6.0, 4.0, 5.0, 6.0]
    scripted(losses, losses)
    ready = prepared_for(early_stopping=True, early_stopping__patience=2)
    assert turns(ready, 5)[0] == [False, False, False, False, True]


def test_without_early_stopping_nobody_stops_and_nothing_is_validated(
    scripted: Callable[..., None],
) -> None:
    scripted([1.0, 2.0, 3.0], [])
    said, kept = turns(prepared_for(), 3)
    assert said == [False, False, False]
    assert [memory.losses for memory in kept] == [(), (), ()]


def losses_by_client(
    monkeypatch: pytest.MonkeyPatch, losses: dict[int, list[float]]
) -> None:
    """Let each client's training come to its own losses, turn by turn."""
    left: dict[int, Iterator[float]] = {k: iter(v) for k, v in losses.items()}
    original = Client.take_turn

    def turn(self: Client, request: TrainRequest, memory: Memory) -> Any:
        loss = next(left[request.client])
        monkeypatch.setattr(method_module, "train", lambda *_: loss)
        score = Score(loss, 0.5)
        monkeypatch.setattr(client_module, "evaluate_each", lambda *_: [score])
        return original(self, request, memory)

    monkeypatch.setattr(Client, "take_turn", turn)


def test_only_the_client_s_own_participations_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Losses rise from client to client, and fall from turn to turn of each."""
    ready = prepared_for(early_stopping=True, rounds=8, clients__per_round=2)
    falling = {k: [10.0 * k + 1 / turn for turn in range(1, 9)] for k in range(6)}
    losses_by_client(monkeypatch, falling)
    played = play_all(ready)
    turns_taken = Counter(client for r in played.rounds for client in r.answers)
    assert max(turns_taken.values()) > 1
    assert played.federation.stopped == frozenset()
    assert played.federation.round == 8


@pytest.mark.parametrize("method", ["fedspu", "local", "fedavg"])
def test_the_run_ends_once_every_client_has_stopped(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    ready = prepared_for(
        method=method,
        early_stopping=True,
        rounds=50,
        clients__number=3,
        clients__per_round=3,
    )
    losses = {0: [3.0, 4.0], 1: [3.0, 2.0, 1.0, 5.0], 2: [3.0, 3.0, 9.0]}
    losses_by_client(monkeypatch, losses)
    played = play_all(ready)
    cohorts = [sorted(r.answers) for r in played.rounds]
    assert cohorts == [[0, 1, 2], [0, 1, 2], [1, 2], [1]]
    assert played.federation.stopped == {0, 1, 2}
    assert [len(r.federation.stopped) for r in played.rounds] == [0, 1, 2, 3]


@settings(max_examples=20)
@given(
    losses=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=9
    ),
    patience=st.integers(1, 4),
)
def test_a_client_keeps_no_more_losses_than_its_patience_and_stops_as_with_all(
    losses: list[tuple[int, int]], patience: int
) -> None:
    ready = with_patience(patience)
    with pytest.MonkeyPatch.context() as patch:
        trained, judged = (iter(values) for values in zip(*losses, strict=True))
        patch.setattr(method_module, "train", lambda *_: float(next(trained)))
        patch.setattr(
            client_module, "evaluate_each", lambda *_: [Score(next(judged), 0.5)]
        )
        said, kept = turns(ready, len(losses))

    blended = [0.7 * train + (1 - 0.7) * val for train, val in losses]
    for turn, (stops, memory) in enumerate(zip(said, kept, strict=True), 1):
        assert memory.losses == tuple(blended[:turn][-patience:])
        # It stops if each of the last losses is above the one before.
        steps = range(turn - patience, turn)
        rises = [i > 0 and blended[i] > blended[i - 1] for i in steps]
        assert stops == all(rises)


def with_patience(patience: int) -> Prepared:
    ready = quick()
    rule = ready.plan.settings.early_stopping.model_copy(update={"patience": patience})
    chosen = ready.plan.settings.model_copy(update={"early_stopping": rule})
    return replace(ready, plan=replace(ready.plan, settings=chosen))


@cache
def quick() -> Prepared:
    return prepared_for(mlp, early_stopping=True)


# Memories of rounds -------------------------------------------------------------------


def device_of(ready: Prepared, shelf: Shelf) -> Client:
    return Client(ready.plan, ready.examples, shelf, torch.device("cpu"))


def asked(
    ready: Prepared, device: Client, t: int, last: int, state: State
) -> tuple[TrainReply, Memory]:
    """What client 1 replies in round t and keeps, sent values of this global model."""
    federation = Federation(t - 1, state, last={1: last} if last else {})
    request = request_for(ready.plan, federation, t, 1)
    reply = unpack_reply(
        ready.plan, request, device.answer(pack_request(ready.plan, request))
    )
    assert isinstance(reply, TrainReply)
    return reply, device.shelf.get(1, t)


def assert_same_turn(
    found: tuple[TrainReply, Memory], expected: tuple[TrainReply, Memory]
) -> None:
    (reply, memory), (other, expected_memory) = found, expected
    assert same_bits(reply.payload, other.payload)
    assert reply.train_loss == other.train_loss
    assert reply.has_stopped == other.has_stopped
    assert memory.losses == expected_memory.losses
    assert memory.own is not None
    assert expected_memory.own is not None
    assert same_bits(memory.own.state, expected_memory.own.state)


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_what_a_client_keeps_is_on_its_shelf_when_it_replies(
    is_on_disk: bool, tmp_path: Path
) -> None:
    ready = prepared_for(early_stopping=True)
    device = device_of(ready, Shelf(tmp_path if is_on_disk else None))
    request = first_request(ready, 1)
    _, kept = client_of(ready).take_turn(request, Memory())
    device.answer(pack_request(ready.plan, request))
    assert device.shelf.names() == [(1, 1)]
    found = device.shelf.get(1, 1)
    assert found.losses == kept.losses
    assert found.own is not None
    assert kept.own is not None
    assert same_bits(found.own.state, kept.own.state)


@pytest.mark.parametrize("method", ["fedspu", "local", "hermes"])
@pytest.mark.parametrize("is_on_disk", [False, True])
def test_after_a_round_that_the_server_lost_a_client_begins_from_the_one_before(
    method: str, is_on_disk: bool, tmp_path: Path
) -> None:
    """The server asks again for round 2, and has other values to send this time."""
    ready = prepared_for(method=method, early_stopping=True)
    first, lost, second = (noisy(ready.plan.initial, seed) for seed in (1, 2, 3))
    places = [tmp_path / "device", tmp_path / "other"]
    for place in places:
        place.mkdir()
    device, other = (device_of(ready, Shelf(p if is_on_disk else None)) for p in places)

    asked(ready, device, 1, 0, first)
    asked(ready, device, 2, 1, lost)
    asked(ready, device, 3, 2, lost)
    found = asked(ready, device, 2, 1, second)

    asked(ready, other, 1, 0, first)
    assert_same_turn(found, asked(ready, other, 2, 1, second))


def test_a_client_that_the_server_does_not_know_begins_from_w0() -> None:
    ready = prepared_for(early_stopping=True)
    first, lost, second = (noisy(ready.plan.initial, seed) for seed in (1, 2, 3))
    device, other = client_of(ready), client_of(ready)
    asked(ready, device, 1, 0, first)
    asked(ready, device, 2, 1, lost)
    found = asked(ready, device, 3, 0, second)
    assert_same_turn(found, asked(ready, other, 3, 0, second))


@pytest.mark.parametrize("split", ["three-way", "paper"])
@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_client_judges_the_model_it_had_after_the_round_that_is_asked_for(
    last: int, split: str
) -> None:
    ready = prepared_for(data__split=split)
    device, initial = client_of(ready), ready.plan.initial
    asked(ready, device, 1, 0, noisy(initial, 1))
    asked(ready, device, 2, 1, noisy(initial, 2))
    model = ready.plan.build()
    own = device.shelf.get(1, last).own
    model.load_state_dict(initial if own is None else own.state)
    x, y = ready.examples.part(1, "test")
    with torch.no_grad():
        scores = model.eval()(x)

    request = JudgeRequest(round=2, client=1, last=last, which="personal")
    reply = unpack_reply(
        ready.plan, request, device.answer(pack_request(ready.plan, request))
    )

    assert isinstance(reply, JudgeReply)
    assert (reply.round, reply.client, reply.num_examples) == (2, 1, len(x))
    assert reply.loss == pytest.approx(float(F.cross_entropy(scores, y)), rel=1e-5)
    assert reply.value == pytest.approx(share_of_right(model, x, y))
    val = ready.examples.part(1, "val")
    assert reply.val_value == pytest.approx(share_of_right(model, *val))
    assert torch.equal(val[1], y) == (split == "paper")
    if split == "paper":
        assert reply.val_value == reply.value
    assert set(device.shelf.names()) == {(1, 1), (1, 2)}  # judging leaves nothing


def share_of_right(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Accuracy as one would count it: one example at a time."""
    model.eval()
    with torch.no_grad():
        answers = [int(model(example[None]).argmax()) for example in x]
    right: list[bool] = [
        answer == label for answer, label in zip(answers, y.tolist(), strict=True)
    ]
    return sum(right) / len(right)


@pytest.mark.parametrize("method", ["fedspu", "local", "fedavg"])
def test_every_client_s_validation_score_is_of_its_own_validation_examples(
    method: str,
) -> None:
    ready = prepared_for(method=method, judge__every=1, train__lr=0.02, seed=3)
    played = play_all(ready)
    scores = played.rounds[-1].scores
    server_s = ready.plan.build()
    server_s.load_state_dict(played.federation.global_state)
    wanted: dict[int, Values] = {}
    for client in range(6):
        model = server_s
        if method != "fedavg":
            model = ready.plan.build()
            own = played.memory(client).own
            model.load_state_dict(ready.plan.initial if own is None else own.state)
        parts = (ready.examples.part(client, name) for name in ("test", "val"))
        wanted[client] = Values(*(share_of_right(model, x, y) for x, y in parts))
    assert {k: pytest.approx(v) for k, v in wanted.items()} == scores.personal
    for client, found in played.rounds[-1].judged.items():
        assert found == scores.personal[client]
    # Else this shows nothing.
    assert len({v.val for v in wanted.values()}) > 1
    assert any(v.val != v.test for v in wanted.values())


@pytest.mark.parametrize("method", ["fedspu", "local", "fedavg"])
def test_under_the_paper_s_split_both_scores_are_the_same(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    def counted(model: nn.Module, parts: Any, *rest: Any) -> list[Score]:
        looked.extend(len(x) for x, _ in parts)
        return evaluate_each(model, parts, *rest)

    monkeypatch.setattr(client_module, "evaluate_each", counted)
    ready = prepared_for(method=method, data__split="paper", judge__every=1)
    scores = play_all(ready).rounds[-1].scores
    assert len(scores.personal) == 6
    assert all(v.val == v.test for v in scores.personal.values())
    assert scores.global_ is None or scores.global_.val == scores.global_.test
    # The part is looked at once, not twice, for both.
    looked.clear()
    client_of(ready).reply(JudgeRequest(1, 1, 0, "personal"), ready.plan.initial)
    assert looked == [len(ready.examples.splits[1].test)]


@pytest.mark.parametrize(("part", "word"), [("test", "test"), ("val", "validation")])
def test_a_score_that_is_not_finite_says_of_which_examples(
    part: str, word: str
) -> None:
    device = client_of(with_part(prepared_for(), part))
    says = rf"^on its {word} examples the loss is nan and the accuracy "
    with pytest.raises(TrainingError, match=says):
        device.reply(JudgeRequest(1, 1, 0, "personal"), device.plan.initial)


def test_the_server_s_model_is_judged_as_it_is_broadcast() -> None:
    ready = prepared_for()
    device, state = client_of(ready), noisy(ready.plan.initial, 4)
    personal = JudgeRequest(1, 1, 0, "personal")
    global_ = JudgeRequest(1, 1, 0, "global")
    model = ready.plan.build()
    model.load_state_dict(state)
    x, y = ready.examples.part(1, "test")
    with torch.no_grad():
        loss = float(F.cross_entropy(model.eval()(x), y))
    judged, _ = device.reply(global_, state)
    own, _ = device.reply(personal, state)
    assert isinstance(judged, JudgeReply)
    assert isinstance(own, JudgeReply)
    assert judged.loss == pytest.approx(loss, rel=1e-5)
    assert own.loss != judged.loss  # that is of w0


# Time --------------------------------------------------------------------------------

JUDGED = JudgeRequest(1, 1, 0, "personal")


@pytest.mark.parametrize("kind", ["train", "judge"])
def test_a_reply_says_how_long_it_took_by_both_clocks(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = prepared_for()
    device = client_of(ready)
    request = first_request(ready, 1) if kind == "train" else JUDGED
    clocks = {"perf_counter": iter([10.0, 13.0]), "process_time": iter([1.0, 1.5])}
    for name, clock in clocks.items():
        monkeypatch.setattr(client_module, name, partial(next, clock))
    down = pack_request(ready.plan, request)
    up = device.answer(down, ready.plan.initial if kind == "judge" else None)
    assert up.took == Seconds(wall=3.0, cpu=0.5)
    cost = Cost.of(down, up)
    assert (cost.train_seconds, cost.train_cpu_seconds) == (3.0, 0.5)


def test_waiting_costs_no_processor_time_and_work_does() -> None:
    def train(waits: bool, turn: Turn, local: LocalTraining) -> Trained:
        if waits:
            sleep(0.3)
        until = process_time() + 0.1
        while process_time() < until:
            pass
        return ready.plan.method.train(turn, local)

    ready = prepared_for(train__epochs=1)
    took = []
    for waits in (False, True):
        method = replace(ready.plan.method, train=partial(train, waits))
        device = client_of(replace(ready, plan=replace(ready.plan, method=method)))
        took.append(device.reply(first_request(ready, 1))[1])
    assert all(each.cpu >= 0.1 for each in took)
    assert took[1].wall >= took[1].cpu + 0.2


# What must not be touched ------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedspu", "local", "fedavg"])
def test_without_early_stopping_the_validation_part_is_judged_and_no_more(
    method: str,
) -> None:
    ready = prepared_for(method=method)
    clean, blind = play_all(ready), play_all(with_part(ready, "val", 5.0))
    assert clean.rounds[-1].scores != blind.rounds[-1].scores  # it is looked at
    assert same_bits(clean.federation.global_state, blind.federation.global_state)
    for mine, other in zip(clean.rounds, blind.rounds, strict=True):
        assert on_test_part(mine.scores.personal) == on_test_part(other.scores.personal)
        assert on_test_part(mine.judged) == on_test_part(other.judged)
    for client in clean.federation.last:
        if clean.memory(client).own is not None:
            assert same_bits(clean.own(client), blind.own(client))


def on_test_part(scores: dict[int, Values]) -> dict[int, float]:
    return {client: values.test for client, values in scores.items()}


def test_with_early_stopping_the_validation_part_decides() -> None:
    ready = prepared_for(early_stopping=True, rounds=6)
    clean, blind = play_all(ready), play_all(with_part(ready, "val", 5.0))
    assert clean.federation.stopped != blind.federation.stopped


@pytest.mark.parametrize("method", ["fedspu", "local", "fedavg"])
def test_the_test_part_moves_no_weight_no_statistic_and_stops_nobody(
    method: str,
) -> None:
    ready = prepared_for(method=method, early_stopping=True, rounds=5, judge__every=1)
    clean, blind = play_all(ready), play_all(with_part(ready, "test", 5.0))
    assert clean.rounds[-1].scores != blind.rounds[-1].scores  # it is looked at
    assert clean.federation.round == blind.federation.round
    assert clean.federation.stopped == blind.federation.stopped
    assert same_bits(clean.federation.global_state, blind.federation.global_state)
    assert clean.federation.last == blind.federation.last
    for client in clean.federation.last:
        memory, other = clean.memory(client), blind.memory(client)
        assert memory.losses == other.losses
        assert (memory.own is None) == (other.own is None)
        if memory.own is not None:
            assert same_bits(memory.own.state, blind.own(client))


def test_under_the_paper_s_split_validation_and_test_are_one_part() -> None:
    for split in prepared_for(data__split="paper").examples.splits:
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
    ready = prepared_for()
    client = client_of(ready)
    model = client.workbench.full.model.train()
    state = noisy(ready.plan.initial, 3)
    copy = {name: tensor.clone() for name, tensor in state.items()}
    memory, request = Memory(ModelState(state)), JudgeRequest(1, 0, 1, "personal")
    first = client.judge(request, memory, ready.plan.initial)
    assert client.judge(request, memory, ready.plan.initial) == first
    assert same_bits(state, copy)
    assert same_bits(dict(model.state_dict()), copy)
    assert model.training


def test_a_personal_model_is_ready_for_use() -> None:
    run = run_for(rounds=1)
    model = run.personal_model(0)
    assert isinstance(model, ConvNet)
    assert not model.training
