"""Last models (``method.finish``), against the same written out step by step."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedspu
from fedspu import State
from fedspu.errors import FedSPUError, ModelError, SettingsError, TrainingError
from fedspu.federation.checks import read_reply, read_request
from fedspu.federation.finishing import RATES, finish
from fedspu.federation.messages import TrainRequest, pack_reply, pack_request
from fedspu.federation.rounds import has_ended, is_over
from fedspu.federation.server import EMA, Federation, TrainRequests
from fedspu.methods.method import Memory, ModelState, random_neurons
from fedspu.prepare import Prepared
from fedspu.random_streams import stream
from fedspu.resolve import resolve
from fedspu.settings import MethodSettings
from fedspu.training.evaluation import Score
from tests.oracles.federation import (
    ConvNet,
    Played,
    client_of,
    empty_reply,
    examples,
    mlp,
    named,
    plan_for,
    play_all,
    prepared_for,
    request_for,
    run_for,
    same_bits,
)

FINISH: dict[str, Any] = {"method__finish": 3}
FINISH_LAST: dict[str, Any] = {"method__finish_last": 3}
LAST = ("fc.", "5.")
"""Last layers of the two models here."""


# What a client keeps ------------------------------------------------------------------


def slow_choice(ready: Prepared, before: Played, client: int) -> State:
    """The mean of the three best models on the client's validation examples."""
    plan, federation = ready.plan, before.federation
    t = federation.round + 1
    settings = plan.settings
    parts = {name: ready.examples.part(client, name) for name in ("train", "val")}
    earlier = before.memory(client).own
    own = earlier.state if earlier else plan.initial
    travelling = {name: federation.global_state[name] for name in plan.neurons.shapes}
    last = {**own, **travelling}
    if settings.train.adjust_logits:
        counts = [1 + parts["train"][1].tolist().count(label) for label in range(3)]
        bias = next(n for n in last if n.startswith(LAST) and n.endswith("bias"))
        last[bias] = last[bias] + (torch.tensor(counts) / sum(counts)).log()
    found = [last]
    trained = plan.neurons.everything()
    if plan.method.uses_capacity:
        trained = random_neurons(plan.client_round(t, client)).active
    masks = masks_of(ready, trained)
    head = {n: torch.full_like(m, n.startswith(LAST)) for n, m in masks.items()}
    for mode, trains in {"finish": masks, "finish_last": head}.items():
        for share in RATES if getattr(settings.method, mode) else ():
            rng = stream(settings.seed, "finish", t, client)
            model = built(plan.build(), last).train(mode == "finish")
            for epochs in (2, 1):
                for _ in range(epochs):
                    slow_epoch(model, *parts["train"], rng, share * 0.1, trains)
                found.append(values_of(model))

    def score(state: State) -> tuple[float, float]:
        return right(built(plan.build(), state), *parts["val"])

    scores = [score(state) for state in found]
    three = sorted(range(len(found)), key=lambda i: (*scores[i], -i))[:-4:-1]
    mean = {name: torch.zeros_like(values) for name, values in last.items()}
    for name, values in mean.items():
        states = [found[i][name].double() for i in three]
        values.copy_((states[0] + states[1] + states[2]) / 3)
        if not values.is_floating_point():
            values.copy_(states[0])
    kept = mean if score(mean) >= scores[three[2]] else found[three[0]]
    if plan.method.keeps_own and score(own) >= scores[three[0]]:
        kept = own
    return kept


def masks_of(ready: Prepared, active: fedspu.Active) -> dict[str, Tensor]:
    masks = {}
    for name, where in ready.plan.neurons.blocks(active).items():
        mask = torch.zeros(ready.plan.initial[name].shape, dtype=torch.bool)
        axes = [
            torch.arange(n) if axis is None else axis
            for n, axis in zip(mask.shape, where, strict=True)
        ]
        if axes:
            mask[torch.meshgrid(*axes, indexing="ij")] = True
        masks[name] = mask
    return masks


def built(model: nn.Module, state: State) -> nn.Module:
    model.load_state_dict(state)
    return model.eval()


def values_of(model: nn.Module) -> State:
    return {name: values.clone() for name, values in model.state_dict().items()}


def slow_epoch(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    rng: np.random.Generator,
    lr: float,
    masks: dict[str, Tensor],
) -> None:
    order = torch.from_numpy(rng.permutation(len(x)))
    starts = list(range(0, len(x), 4))
    if len(starts) > 1 and len(x) - starts[-1] == 1:
        starts.pop()
    for start, end in zip(starts, [*starts[1:], len(x)], strict=True):
        batch = order[start:end]
        model.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                parameter.sub_(lr * parameter.grad * masks[name])


def right(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    with torch.no_grad():
        output = model(x)
    share = float((output.argmax(1) == y).double().mean())
    return share, -float(F.cross_entropy(output, y))


ADJUSTED: dict[str, Any] = {"train__adjust_logits": True}


@pytest.mark.parametrize("build", [mlp, ConvNet])
@pytest.mark.parametrize("finish", [FINISH, FINISH_LAST, FINISH | FINISH_LAST])
@pytest.mark.parametrize(
    "given",
    [
        {"method": "fedspu"},
        {"method": "fedavg"},
        {"method": "ditto"},
        {"method": "fedspu", "method__context": "global", **ADJUSTED},
        {"method": "fedavg", **ADJUSTED},
    ],
)
def test_a_client_keeps_the_best_model_on_its_validation_examples(
    build: Any, given: dict[str, Any], finish: dict[str, Any]
) -> None:
    before = play_all(prepared_for(build, seed=3, **given))
    ready = prepared_for(build, seed=3, **given, **finish)
    finished = play_all(ready)
    assert finished.federation.is_finished
    assert finished.federation.round == before.federation.round + 1
    kinds = set()
    for client in range(6):
        wanted = slow_choice(ready, before, client)
        own = finished.own(client)
        assert own.keys() == wanted.keys()
        for name in own:
            torch.testing.assert_close(own[name], wanted[name], rtol=1e-4, atol=1e-5)
        kinds.add(same_bits(own, before.federation.global_state))
    assert False in kinds  # else this shows little


def test_the_models_of_the_server_and_of_earlier_rounds_are_as_without_it() -> None:
    plain, finished = play_all(prepared_for()), play_all(prepared_for(**FINISH))
    assert same_bits(plain.federation.global_state, finished.federation.global_state)
    assert [round.answers.keys() for round in plain.rounds] == [
        round.answers.keys() for round in finished.rounds[:-1]
    ]
    last = finished.rounds[-1]
    assert sorted(last.answers) == list(range(6))
    assert sorted(last.judged) == list(range(6))
    for client, score in last.scores.personal.items():
        x, y = prepared_for().examples.part(client, "test")
        model = built(ConvNet(), finished.own(client))
        assert score.test == pytest.approx(right(model, x, y)[0])


def test_test_examples_have_no_part_in_the_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ready = prepared_for(**FINISH)
    device, part = client_of(ready), ready.examples.part
    asked = []

    def noted(self: Any, client: int, name: str) -> Any:
        asked.append(name)
        return part(client, name)

    federation = Federation(3, ready.plan.initial)
    request = TrainRequests(federation, ready.plan, 4, is_finish=True)[2]
    monkeypatch.setattr(type(ready.examples), "part", noted)
    device.reply(request)
    assert set(asked) == {"train", "val"}


def test_a_better_model_of_ones_own_is_kept() -> None:
    """With a learning rate that ruins the model, and a server's model that is bad."""
    ready = prepared_for(mlp, **FINISH)
    good = {name: values.clone() for name, values in ready.plan.initial.items()}
    device = client_of(ready)
    federation = Federation(3, {n: torch.zeros_like(v) for n, v in good.items()})
    request = TrainRequests(federation, ready.plan, 4, is_finish=True)[0]
    x, y = ready.examples.part(0, "train")
    model = built(mlp(), good).train()
    for _ in range(60):
        everything = ready.plan.neurons.everything()
        slow_epoch(
            model, x, y, np.random.default_rng(0), 0.1, masks_of(ready, everything)
        )
    own = values_of(model)
    _, kept = device.take_turn(request, Memory(ModelState(own)))
    assert kept.own is not None
    assert same_bits(kept.own.state, own)


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ((1, 2, 3, 4, 5, 3, 0), "mean"),  # of 5, 4 and 3: no worse than the last
        ((1, 2, 3, 4, 5, 2, 0), 4),
        ((9, 2, 3, 4, 5, 2, 0), 0),
        ((1, 2, 3, 4, 5, math.nan, 0), 4),
        ((math.nan, math.nan, 3, math.nan, math.nan, 0), 2),  # there is no mean
        ((math.nan, math.nan, 3, math.nan, 2, 2, 0), "mean"),
        ((1, 2, 3, 4, 5, 6, 7), "own"),
        ((1, 2, 3, 4, 5, 6, 5), "own"),
        ((1, 2, 3, 4, 5, 3, 4), "mean"),
        ((math.nan,) * 5 + (0,), "own"),
    ],
)
def test_a_mean_worse_than_all_it_is_made_of_is_not_kept(
    scores: tuple[float, ...], kept: Any
) -> None:
    """In turn: the server's model, four that were trained, their mean, the own one."""
    ready = prepared_for(mlp, **FINISH)
    device, judged = client_of(ready), list[State]()
    own = {name: values + 1 for name, values in ready.plan.initial.items()}
    request = TrainRequests(Federation(3, ready.plan.initial), ready.plan, 4, True)[0]
    turn = device._turn(request, Memory(ModelState(own)))

    def judge(model: ModelState) -> Score:
        judged.append(model.state)
        return Score(1.0, scores[len(judged) - 1])

    best = finish(turn, ready.plan.method, ready.plan.settings, judge)
    assert len(judged) == len(scores)
    at = {"mean": 5, "own": -1}.get(kept, kept)
    assert same_bits(best.state, judged[at])
    assert same_bits(judged[-1], own)


def test_with_no_finite_score_the_turn_is_lost_and_says_why() -> None:
    ready = prepared_for(mlp, method="fedavg", **FINISH)
    request = TrainRequests(Federation(3, ready.plan.initial), ready.plan, 4, True)[0]
    turn = client_of(ready)._turn(request, Memory())

    def judge(model: ModelState) -> Score:
        return Score(math.inf, 0.5)

    with pytest.raises(TrainingError, match=r"none of its models has a finite score"):
        finish(turn, ready.plan.method, ready.plan.settings, judge)


def test_where_the_last_layer_is_frozen_the_last_that_trains_is_trained() -> None:
    def build() -> nn.Module:
        model = mlp()
        for parameter in list(model.parameters())[-2:]:
            parameter.requires_grad_(False)
        return model

    before = play_all(prepared_for(build, method="fedavg"))
    finished = play_all(prepared_for(build, method="fedavg", **FINISH_LAST))
    moved = set()
    for client in range(6):
        own, server = finished.own(client), before.federation.global_state
        moved |= {name for name in own if not torch.equal(own[name], server[name])}
    assert moved == {"3.weight", "3.bias"}


# Costs, records, engines, folders -----------------------------------------------------


def test_its_cost_is_shown_apart() -> None:
    plain, finished = run_for(), run_for(**FINISH)
    whole = sum(plain.plan.initial[name].nbytes for name in plain.plan.neurons.shapes)
    summary = finished.summary
    assert summary["finish_bytes_down"] == 6 * whole
    assert summary["finish_bytes_up"] == 0
    assert summary["finish_train_cpu_seconds"] > 0
    for name in ("bytes_down", "bytes_up", "index_bytes", "rounds_played"):
        assert summary[name] == plain.summary[name]
    assert not any(name.startswith("finish_") for name in plain.summary)
    assert [line.get("is_finish") for line in finished.rounds] == [None] * 3 + [True]
    assert summary["label"] == "fedspu@finish=3"
    assert run_for(**FINISH_LAST).summary["label"] == "fedspu@finish_last=3"


def test_it_ends_a_run_in_which_all_clients_have_stopped() -> None:
    given = {"early_stopping": True, "rounds": 60, "train__lr": 2.0, **FINISH}
    finished = play_all(prepared_for(mlp, **given))
    assert len(finished.federation.stopped) == 6
    assert finished.federation.is_finished
    assert finished.federation.round < 60
    assert sorted(finished.rounds[-1].answers) == list(range(6))


@pytest.mark.parametrize("finish", [FINISH, FINISH_LAST])
@pytest.mark.parametrize("method", ["fedspu", "fedavg"])
def test_two_workers_make_the_same_last_models(
    method: str, finish: dict[str, Any]
) -> None:
    one, two = (run_for(method=method, workers=number, **finish) for number in (1, 2))
    assert one.rounds == two.rounds
    for client in range(6):
        models = [run.personal_model(client).state_dict() for run in (one, two)]
        assert same_bits(*models)


def test_a_run_that_was_interrupted_before_it_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    """Also after it: nothing is played again."""
    given = {**named(**FINISH), "out": tmp_path / "run"}
    simulate = partial(fedspu.simulate, model=ConvNet, data=examples())
    whole = simulate({**given, "out": tmp_path / "whole"})

    def stop(plan: Any, played: Any) -> None:
        if played.federation.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(given, watch=stop)
    resumed = fedspu.resume(tmp_path / "run", model=ConvNet, data=examples())
    assert resumed.rounds == whole.rounds
    assert resumed.last.federation.is_finished
    for client in range(6):
        models = [run.personal_model(client).state_dict() for run in (whole, resumed)]
        assert same_bits(*models)
    again = fedspu.resume(tmp_path / "run", model=ConvNet, data=examples())
    assert again.rounds == whole.rounds
    loaded = fedspu.load_personal(tmp_path / "run", 2, ConvNet)
    assert same_bits(loaded.state_dict(), whole.personal_model(2).state_dict())
    with pytest.raises(SettingsError, match="no more rounds can be played"):
        fedspu.resume(tmp_path / "run", model=ConvNet, data=examples(), rounds=9)


# Bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"method": "local"}, "exchange nothing"),
        ({"method": "hermes"}, "have only a part of the model"),
        ({"method": "fjord"}, "have only a part of the model"),
        ({"method": "fedavg", "method__finetune": 1}, "in a way of their own"),
        ({"data__split": "paper"}, "the examples they are tested on"),
    ],
)
def test_it_is_refused_where_there_is_nothing_to_finish(
    given: dict[str, Any], why: str
) -> None:
    with pytest.raises(SettingsError, match=rf"^method\.finish = 3: .*{why}"):
        plan_for(**given, **FINISH)
    with pytest.raises(SettingsError, match=rf"^method\.finish_last = 3: .*{why}"):
        plan_for(**given, **FINISH_LAST)


@pytest.mark.parametrize("name", ["finish", "finish_last"])
def test_a_number_below_zero_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=rf"method\.{name} = -1: expected"):
        plan_for(mlp, **{f"method__{name}": -1})


def test_a_client_refuses_to_finish_a_run_that_has_no_last_models() -> None:
    finishing, plain = plan_for(**FINISH), plan_for()
    request = TrainRequests(Federation(3, plain.initial), finishing, 4, True)[0]
    packet = pack_request(finishing, request)
    assert isinstance(read_request(finishing, packet), TrainRequest)
    with pytest.raises(ModelError, match="this run makes no last models"):
        read_request(plain, packet)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"val_loss": None}, "has no validation loss"),
        ({"has_stopped": True}, "says that the client stops"),
        ({"val_loss": float("nan")}, "validation loss is nan"),
    ],
)
def test_the_server_refuses_other_replies(changed: dict[str, Any], why: str) -> None:
    plan = plan_for(**FINISH)
    request = TrainRequests(Federation(3, plan.initial), plan, 4, True)[0]
    reply = empty_reply(4, 0, val_loss=0.5)
    read_reply(plan, request, pack_reply(plan, request, reply))
    with pytest.raises(ModelError, match=why):
        read_reply(plan, request, pack_reply(plan, request, replace(reply, **changed)))


def test_values_in_a_reply_to_it_are_refused() -> None:
    plan = plan_for(**FINISH)
    request = TrainRequests(Federation(3, plan.initial), plan, 4, True)[0]
    assert request.offer is not None
    reply = empty_reply(
        4, 0, val_loss=0.5, active=request.offer.active, payload=request.payload
    )
    with pytest.raises(ModelError, match="nothing is exchanged"):
        read_reply(plan, request, pack_reply(plan, request, reply))


def test_when_a_run_has_ended_and_when_it_is_over() -> None:
    plan = plan_for(**FINISH)
    assert [has_ended(Federation(t, {}), plan) for t in (2, 3)] == [False, True]
    assert not is_over(Federation(3, {}), plan)
    assert is_over(Federation(4, {}, is_finished=True), plan)
    assert is_over(Federation(3, {}), plan_for())


# In the server's model ----------------------------------------------------------------


@pytest.mark.parametrize("build", [mlp, ConvNet])
def test_neurons_train_within_the_server_s_model(build: Any) -> None:
    ready = prepared_for(build, method__context="global")
    plan, device = ready.plan, client_of(ready)
    rng = torch.Generator().manual_seed(0)
    state = {
        name: values + 0.1 * torch.rand(values.shape, generator=rng)
        if values.is_floating_point()
        else values
        for name, values in plan.initial.items()
    }
    request = request_for(plan, Federation(1, state), 2, 1)
    assert sum(v.nbytes for v in request.payload.values()) == sum(
        state[name].nbytes for name in plan.neurons.shapes
    )
    reply, kept = device.take_turn(request, Memory())
    drawn = random_neurons(plan.client_round(2, 1)).active
    assert reply.active is not None
    assert reply.active.keys() == drawn.keys()
    assert all(torch.equal(reply.active[name], drawn[name]) for name in drawn)
    assert kept.own is not None
    for name, mask in masks_of(ready, drawn).items():
        own = kept.own.state[name]
        if name not in plan.neurons.statistics:
            assert torch.equal(own[~mask], state[name][~mask])
        if own.dim() > 1:
            assert not torch.equal(own[mask], state[name][mask])


def test_clients_send_as_much_as_in_the_paper_and_get_all() -> None:
    paper, ours = run_for(mlp), run_for(mlp, method__context="global")
    full = run_for(mlp, method="fedavg")
    assert ours.summary["bytes_up"] == paper.summary["bytes_up"]
    assert ours.summary["bytes_down"] == full.summary["bytes_down"]


@pytest.mark.parametrize("form", ["float16", "bfloat16"])
def test_only_what_goes_down_is_rounded(form: str) -> None:
    plain, half = run_for(mlp), run_for(mlp, wire__down=form)
    assert 2 * half.summary["bytes_down"] == plain.summary["bytes_down"]
    assert half.summary["bytes_up"] == plain.summary["bytes_up"]
    plan = plan_for(mlp, wire__values="float16", wire__down="float32")
    packet = pack_request(plan, request_for(plan, Federation(0, plan.initial), 1, 0))
    request = read_request(plan, packet)
    assert isinstance(request, TrainRequest)
    assert len(packet.values) == sum(v.nbytes for v in request.payload.values())


def test_too_large_a_value_names_the_setting_that_rounds_it() -> None:
    plan = plan_for(mlp, wire__down="float16")
    state = {name: values + 1e6 for name, values in plan.initial.items()}
    request = request_for(plan, Federation(0, state), 1, 0)
    with pytest.raises(FedSPUError, match=r"wire\.down = 'float16' holds at most"):
        pack_request(plan, request)


# The running mean of the server's model -----------------------------------------------


def test_the_mean_is_judged_and_rounds_go_on_from_the_last_model() -> None:
    last = play_all(prepared_for(rounds=4))
    mean = play_all(prepared_for(rounds=4, server__average="ema", server__decay=0.7))
    assert same_bits(last.federation.global_state, mean.federation.global_state)
    states = [played.federation.global_state for played in last.rounds]
    for name, found in mean.federation.shown_state.items():
        wanted = states[0][name].double()
        for state in states[1:]:
            wanted = 0.7 * wanted + 0.3 * state[name].double()
        if found.is_floating_point():
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(found, states[-1][name])
    assert any(name.startswith(EMA) for name in mean.federation.extra)
    scores = mean.rounds[-1].scores.global_
    assert scores is not None
    ready = prepared_for()
    each = [
        right(
            built(ConvNet(), mean.federation.shown_state),
            *ready.examples.part(k, "test"),
        )
        for k in range(6)
    ]
    assert scores.test == pytest.approx(float(np.mean([share for share, _ in each])))


def test_a_decay_without_a_mean_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"server\.decay = 0\.5: has no effect"):
        plan_for(server__decay=0.5)


# The preset ---------------------------------------------------------------------------


def test_fedspu_plus_sets_what_it_is_meant_to_be_used_with() -> None:
    settings = resolve({"method.name": "fedspu-plus"})
    assert settings.method.finish_last == 40
    assert settings.train.adjust_logits
    assert (settings.server.average, settings.wire.down) == ("ema", "bfloat16")
    changed = resolve(
        {"method.name": "fedspu-plus", "method.finish_last": 0, "wire.down": "float32"}
    )
    assert (changed.method.finishes, changed.wire.down) == (False, "float32")
    plain = resolve({})
    assert plain.method == MethodSettings()
    assert (plain.server.average, plain.wire.down) == ("last", None)
    assert not plain.train.adjust_logits
