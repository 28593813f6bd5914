"""``wire.values``: what is rounded on the way, and what is not."""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fedspu
from fedspu import State
from fedspu.engines.workers import can_fork
from fedspu.errors import ModelError, StorageError, TrainingError
from fedspu.federation.checks import largest, read_reply, read_request
from fedspu.federation.client import Client
from fedspu.federation.engine import Answer
from fedspu.federation.messages import (
    TrainReply,
    TrainRequest,
    pack_reply,
    pack_request,
    unpack_reply,
    unpack_request,
)
from fedspu.federation.plan import Plan
from fedspu.federation.rounds import Round
from fedspu.federation.server import Federation
from fedspu.methods.method import Memory, Offer
from fedspu.settings import SAME_BITS, Settings
from tests.oracles.federation import (
    ConvNet,
    bits,
    client_of,
    empty_reply,
    examples,
    folder_content,
    mlp,
    named,
    plan_for,
    prepared_for,
    request_for,
    run_for,
    same_bits,
)

HALVES = ["float16", "bfloat16"]
FORMS = ["float32", *HALVES]

needs_fork = pytest.mark.skipif(not can_fork(), reason="workers are forked")


@cache
def mlp_plan(form: str) -> Plan:
    return plan_for(mlp, wire__values=form)


def in_half(values: Tensor, form: str) -> Tensor:
    """Values rounded to the nearest, ties to even, by numpy or by hand."""
    if form == "float16":
        return torch.from_numpy(values.numpy().astype(np.float16).astype(np.float32))
    whole = values.numpy().view(np.uint32).astype(np.uint64)
    whole += 0x7FFF + ((whole >> 16) & 1)
    cut = (whole & 0xFFFF0000).astype(np.uint32)
    return torch.from_numpy(cut.view(np.float32))


def everything(plan: Plan, state: State) -> tuple[Offer, State]:
    """An offer of all neurons, and the values that go with it."""
    offer = Offer(plan.neurons.everything())
    return offer, {name: state[name] for name in plan.travelling(offer.active)}


def there(plan: Plan, state: State) -> State:
    """The values of a state as a client reads them."""
    offer, payload = everything(plan, state)
    request = TrainRequest(1, 0, 0, offer, payload, plan.initial)
    read = unpack_request(plan, pack_request(plan, request))
    assert isinstance(read, TrainRequest)
    assert read.initial is not None
    assert same_bits(read.initial, plan.initial)  # w0 is exact
    return read.payload


def and_back(plan: Plan, state: State) -> State:
    """The values of a state as the server reads them in a reply."""
    offer, payload = everything(plan, state)
    request = TrainRequest(1, 0, 0, offer, {}, None)
    reply = empty_reply(1, 0, active=offer.active, payload=payload)
    read = unpack_reply(plan, request, pack_reply(plan, request, reply))
    assert isinstance(read, TrainReply)
    return read.payload


def with_entry(state: State, name: str, value: float) -> State:
    changed = state[name].clone()
    changed.view(-1)[0] = value
    return {**state, name: changed}


# What is rounded ----------------------------------------------------------------------


@pytest.mark.parametrize("way", [there, and_back])
@pytest.mark.parametrize("form", HALVES)
@given(number=st.floats(-65504, 65504, width=32))
def test_a_value_arrives_as_the_nearest_that_the_form_has(
    way: Any, form: str, number: float
) -> None:
    plan = mlp_plan(form)
    state = with_entry(plan.initial, "1.weight", number)
    read = way(plan, state)
    assert same_bits(read, {name: in_half(v, form) for name, v in state.items()})


@pytest.mark.parametrize("way", [there, and_back])
@pytest.mark.parametrize("form", HALVES)
def test_what_was_rounded_once_is_not_rounded_again(way: Any, form: str) -> None:
    plan = plan_for(mlp, wire__values=form)
    once = way(plan, plan.initial)
    assert not same_bits(once, plan.initial)
    assert same_bits(way(plan, once), once)


@pytest.mark.parametrize("way", [there, and_back])
def test_by_default_nothing_is_rounded(way: Any) -> None:
    plan = plan_for(mlp)
    assert same_bits(way(plan, plan.initial), plan.initial)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_values_that_are_not_float32_travel_as_they_are(
    form: str, dtype: torch.dtype
) -> None:
    plan = plan_for(mlp, wire__values=form)
    initial = {name: values.to(dtype) for name, values in plan.initial.items()}
    plan = replace(plan, initial=initial)
    assert same_bits(there(plan, initial), initial)
    assert same_bits(and_back(plan, initial), initial)


@pytest.mark.parametrize("form", HALVES)
def test_norm_statistics_travel_as_they_are(form: str) -> None:
    """A variance may be too large for float16, or so small that it would become 0."""
    plan = plan_for(ConvNet, wire__values=form)
    state = with_entry(plan.initial, "bn1.running_var", 1e-12)
    state = with_entry(state, "bn2.running_var", 1e6)
    state = with_entry(state, "bn1.running_mean", 0.1)
    for read in (there(plan, state), and_back(plan, state)):
        for name in plan.neurons.statistics:
            assert bits(read[name]) == bits(state[name])
        assert bits(read["conv2.weight"]) != bits(state["conv2.weight"])
        assert "bn1.num_batches_tracked" not in read  # counters do not travel


@pytest.mark.parametrize("form", HALVES)
def test_a_client_keeps_what_it_trained_unrounded_and_the_frozen_as_they_were(
    form: str,
) -> None:
    ready = prepared_for(mlp, wire__values=form, clients__capacities=[0.5])
    plan, client = ready.plan, client_of(ready)
    request = request_for(plan, Federation(0, plan.initial), 1, 0)
    down = pack_request(plan, request)
    answer = client.respond(down)
    assert isinstance(answer, Answer)
    reply = read_reply(plan, request, answer.up)
    own = client.shelf.get(0, 1).own
    assert own is not None
    assert isinstance(reply, TrainReply)
    assert reply.active is not None
    where = plan.travelling(reply.active)
    trained = fedspu.extract(own.state, where)
    assert not same_bits(trained, reply.payload)
    assert same_bits({n: in_half(v, form) for n, v in trained.items()}, reply.payload)
    # With the entries that it received put back, its model is w0 again.
    before = fedspu.extract(plan.initial, where)
    assert same_bits(fedspu.merge(own.state, where, before), plan.initial)


@pytest.mark.parametrize("form", HALVES)
def test_a_client_that_learns_nothing_has_what_it_received_rounded(form: str) -> None:
    ready = prepared_for(mlp, wire__values=form, train__lr=0.0)
    plan, client = ready.plan, client_of(ready)
    request = request_for(plan, Federation(0, plan.initial), 1, 0)
    client.respond(pack_request(plan, request))
    own = client.shelf.get(0, 1).own
    assert own is not None
    assert request.offer is not None
    where = plan.travelling(request.offer.active)
    received = {n: in_half(v, form) for n, v in request.payload.items()}
    assert same_bits(own.state, fedspu.merge(plan.initial, where, received))


# Bytes --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", HALVES)
def test_the_bytes_of_values_halve_exactly(form: str) -> None:
    exact, half = run_for(mlp), run_for(mlp, wire__values=form)
    for name in ("bytes_down", "bytes_up"):
        assert half.summary[name] * 2 == exact.summary[name] > 0
    for name in ("bytes_initial", "index_bytes"):
        assert half.summary[name] == exact.summary[name] > 0


@pytest.mark.parametrize("form", HALVES)
def test_the_largest_message_is_smaller(form: str) -> None:
    exact, half = largest(plan_for(ConvNet)), largest(plan_for(wire__values=form))
    statistics = 2 * (4 + 6)  # means and variances of both norms
    assert half.values == (exact.values - 4 * statistics) // 2 + 4 * statistics
    assert replace(half, values=exact.values) == exact
    plan = plan_for(ConvNet, wire__values=form)
    packet = pack_request(
        plan, TrainRequest(1, 0, 0, *everything(plan, plan.initial), plan.initial)
    )
    assert len(packet.values) == half.values
    long = replace(packet, values=packet.values + b"\0")
    with pytest.raises(ModelError, match=rf"of values; expected at most {half.values}"):
        read_request(plan, long)


def test_values_in_the_form_of_another_setting_are_refused() -> None:
    ready = prepared_for(mlp, wire__values="float16")
    plan = ready.plan
    exact = plan_for(mlp)
    request = request_for(plan, Federation(0, plan.initial), 1, 2)
    with pytest.raises(ModelError, match="bytes of values; expected"):
        read_request(plan, pack_request(exact, request))
    with pytest.raises(ModelError, match="bytes of values; expected"):
        read_request(exact, pack_request(plan, request))


# Values that are too large ------------------------------------------------------------

SERVER = (
    r"^round 1: the server's 1\.weight has a value of size 70000, and wire\.values = "
    r"'float16' holds at most 65504; set wire\.values to bfloat16 or float32, or lower "
    r"train\.lr \(it is 0\.1\)$"
)


@pytest.mark.parametrize("sign", [1, -1])
def test_float16_goes_as_far_as_it_rounds_down(sign: int) -> None:
    plan = plan_for(mlp, wire__values="float16")
    edge = with_entry(plan.initial, "1.weight", sign * 65519.9)
    assert float(there(plan, edge)["1.weight"].view(-1)[0]) == sign * 65504
    beyond = with_entry(plan.initial, "1.weight", sign * 65520.0)
    for way in (there, and_back):
        with pytest.raises(TrainingError, match=r"1\.weight has a value of size 65520"):
            way(plan, beyond)


def test_bfloat16_goes_almost_as_far_as_float32() -> None:
    plan = plan_for(mlp, wire__values="bfloat16")
    there(plan, with_entry(plan.initial, "1.weight", 3.38e38))
    with pytest.raises(
        TrainingError, match=r"3\.38953e\+38; set wire\.values to float"
    ):
        there(plan, with_entry(plan.initial, "1.weight", 3.4e38))


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=needs_fork)])
def test_if_the_server_s_own_values_are_too_large_the_run_ends(workers: int) -> None:
    def huge() -> torch.nn.Module:
        model = mlp()
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] = 70000.0
        return model

    given: dict[str, Any] = {"workers": workers, "clients__capacities": [1.0]}
    with pytest.raises(TrainingError, match=SERVER):
        run_for(huge, wire__values="float16", **given)
    run_for(huge, wire__values="bfloat16", train__lr=1e-9, **given)


def overflowing(monkeypatch: pytest.MonkeyPatch, t: int, clients: set[int]) -> None:
    """Let the weights of some clients be large after their training in one round."""
    original = Client.take_turn

    def turn(self: Client, request: TrainRequest, memory: Memory) -> Any:
        reply, kept = original(self, request, memory)
        if request.round == t and request.client in clients:
            reply.payload["5.weight"].fill_(-1e5)
        return reply, kept

    monkeypatch.setattr(Client, "take_turn", turn)


CLIENT = (
    "its 5.weight has a value of size 100000, and wire.values = 'float16' holds at "
    "most 65504; set wire.values to bfloat16 or float32, or lower train.lr (it is 0.1)"
)


@pytest.mark.filterwarnings("ignore:1 of clients' turns were lost")
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=needs_fork)])
def test_a_client_whose_values_are_too_large_loses_its_turn(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = run_for(mlp).rounds[1]["clients"][0]
    overflowing(monkeypatch, 2, {victim})
    out = str(tmp_path / "run")
    run = run_for(mlp, wire__values="float16", workers=workers, out=out)
    missing = [line["missing_clients"] for line in run.rounds]
    assert missing == [{}, {str(victim): CLIENT}, {}]
    # It goes on from what it had before.
    assert run.last.federation.last.get(victim) != 2
    run.memory(victim)


def test_if_all_clients_values_are_too_large_the_run_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overflowing(monkeypatch, 1, set(range(6)))
    with pytest.raises(TrainingError) as caught:
        run_for(mlp, wire__values="float16")
    assert CLIENT in str(caught.value)
    assert str(caught.value).startswith("round 1, client ")
    assert str(caught.value).endswith("; the other 2 failed too")


def test_infinities_that_arrive_are_refused_by_both_sides() -> None:
    plan = plan_for(mlp, wire__values="float16")
    request = request_for(plan, Federation(0, plan.initial), 1, 2)
    down = pack_request(plan, request)
    infinite = b"\x00\x7c" + down.values[2:]  # the first value
    with pytest.raises(ModelError, match=r"^the server's 1\.weight is not finite$"):
        read_request(plan, replace(down, values=infinite))
    reply = empty_reply(
        1, 2, active=request.offer and request.offer.active, payload=request.payload
    )
    up = replace(pack_reply(plan, request, reply), values=infinite)
    with pytest.raises(ModelError, match=r"^its 1\.weight is not finite$"):
        read_reply(plan, request, up)


# Whole runs ---------------------------------------------------------------------------


def test_it_changes_results() -> None:
    assert "wire.values" not in SAME_BITS
    ends = [run_for(mlp, wire__values=form).last.federation for form in FORMS]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not same_bits(ends[one].global_state, ends[other].global_state)


@needs_fork
@pytest.mark.parametrize("method", ["fedspu", "hermes", "feddrop", "ditto", "apfl"])
@pytest.mark.parametrize("form", HALVES)
def test_one_and_two_workers_give_the_same_bits(
    form: str, method: str, tmp_path: Path
) -> None:
    for workers in (1, 2):
        out = str(tmp_path / str(workers))
        run_for(method=method, wire__values=form, workers=workers, out=out)
    assert folder_content(tmp_path / "1") == folder_content(tmp_path / "2")


@pytest.mark.parametrize("form", HALVES)
@pytest.mark.parametrize("rule", ["clip", "trimmed-mean", "median", "krum"])
def test_guards_take_rounded_values(rule: str, form: str) -> None:
    given: dict[str, Any] = {"guard__rule": rule, "clients__per_round": 5}
    run = run_for(mlp, wire__values=form, **given)
    assert run.summary["missing_turns"] == run.summary["refused_turns"] == 0
    exact = run_for(mlp, **given).last.federation.global_state
    for name, values in run.last.federation.global_state.items():
        assert torch.allclose(values, exact[name], atol=0.05)


class Stop(Exception):  # noqa: N818  # not an error: it is intended
    """Interrupts a run."""


def interrupted(path: Path, **given: Any) -> None:
    """A run folder after one round."""

    def stop(plan: Plan, played: Round) -> None:
        raise Stop

    settings = named(out=str(path), **given)
    with pytest.raises(Stop):
        fedspu.simulate(settings, model=mlp, data=examples(), watch=stop)


@pytest.mark.parametrize("form", HALVES)
def test_a_resumed_run_goes_on_with_the_form_it_began_with(
    form: str, tmp_path: Path
) -> None:
    interrupted(tmp_path / "mine", wire__values=form)
    fedspu.resume(tmp_path / "mine", model=mlp, data=examples())
    run_for(mlp, wire__values=form, out=str(tmp_path / "whole"))
    assert folder_content(tmp_path / "mine") == folder_content(tmp_path / "whole")


def test_the_form_cannot_be_changed_in_the_middle_of_a_run(tmp_path: Path) -> None:
    interrupted(tmp_path / "mine", wire__values="float16")
    file = tmp_path / "mine" / "settings.toml"
    file.write_text(file.read_text().replace('"float16"', '"bfloat16"'))
    with pytest.raises(StorageError, match=r"wire\.values = bfloat16, but the run beg"):
        fedspu.resume(tmp_path / "mine", model=mlp, data=examples())


def without_wire(settings: Settings) -> str:
    """The settings as they were written before there was the setting."""
    found: Mapping[str, Any] = tomllib.loads(REAL_TOML(settings))
    return tomli_w.dumps({name: v for name, v in found.items() if name != "wire"})


REAL_TOML = Settings.to_toml


def test_a_folder_from_before_the_setting_is_resumed_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(Settings, "to_toml", without_wire)
        interrupted(tmp_path / "mine")
    assert "wire" not in (tmp_path / "mine" / "settings.toml").read_text()
    run = fedspu.resume(tmp_path / "mine", model=mlp, data=examples())
    assert run.plan.settings.wire.values == "float32"
    run_for(mlp, out=str(tmp_path / "whole"))
    assert folder_content(tmp_path / "mine") == folder_content(tmp_path / "whole")
