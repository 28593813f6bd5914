import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import ceil, prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedspu import Active, Blocks, FedSPUError, Payload, choose_ordered, choose_random
from fedspu.federation.messages import (
    Packet,
    Reply,
    Request,
    pack_reply,
    pack_request,
    unpack_reply,
    unpack_request,
)
from fedspu.federation.plan import Plan
from fedspu.methods.method import Offer
from fedspu.streams import KEY_BYTES, generator, stream_key
from tests.oracles.federation import ConvNet, bits, mlp, plan_for, same_bits, wide_mlp

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "convnet": ConvNet,
    "mlp": mlp,
    "wide_mlp": wide_mlp,
}


@cache
def base_plan(model: str) -> Plan:
    return plan_for(MODELS[model])


def plan_at(model: str, p: float, dtype: str = "float32", norm: str = "local") -> Plan:
    """A plan whose clients all have capacity p, with its values in one dtype."""
    base = base_plan(model)
    clients = base.settings.clients.model_copy(update={"capacities": (p,)})
    policy = base.settings.norm.model_copy(update={"policy": norm})
    return replace(
        base,
        settings=base.settings.model_copy(update={"clients": clients, "norm": policy}),
        initial={
            name: t.to(DTYPES[dtype]) if t.is_floating_point() else t
            for name, t in base.initial.items()
        },
    )


def random_payload(plan: Plan, blocks: Blocks, rng: np.random.Generator) -> Payload:
    """Blocks of random bits: NaN, infinities and negative zeros among them."""
    payload = {}
    for name, where in blocks.items():
        like = plan.initial[name]
        shape = [
            n if axis is None else len(axis)
            for n, axis in zip(like.shape, where, strict=True)
        ]
        raw = rng.integers(0, 256, prod(shape) * like.element_size(), dtype=np.uint8)
        payload[name] = torch.from_numpy(raw).view(like.dtype).view(shape)
    return payload


def random_offer(plan: Plan, key: bytes) -> Offer:
    return Offer(choose_random(plan.neurons, plan.capacity(0), generator(key)), key)


def same_active(a: Active, b: Active) -> bool:
    return a.keys() == b.keys() and all(
        a[name].tolist() == b[name].tolist() for name in a
    )


shares = st.integers(1, 100).map(lambda percent: percent / 100)


@given(
    model=st.sampled_from(sorted(MODELS)),
    p=shares,
    dtype=st.sampled_from(sorted(DTYPES)),
    norm=st.sampled_from(["aggregate", "local"]),
    has_offer=st.booleans(),
    has_key=st.booleans(),
    has_initial=st.booleans(),
    numbers=st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 5)),
    seed=st.integers(0, 999),
)
def test_a_request_survives_its_bytes_bit_for_bit(
    model: str,
    p: float,
    dtype: str,
    norm: str,
    has_offer: bool,
    has_key: bool,
    has_initial: bool,
    numbers: tuple[int, int],
    seed: int,
) -> None:
    plan, rng = plan_at(model, p, dtype, norm), np.random.default_rng(seed)
    offer, payload = None, {}
    if has_offer:
        offer = random_offer(plan, rng.bytes(KEY_BYTES))
        offer = offer if has_key else Offer(offer.active)
        payload = random_payload(plan, plan.travelling(offer.active), rng)
    everything = plan.neurons.blocks(plan.neurons.everything())
    initial = None
    if has_initial:
        initial = {**plan.initial, **random_payload(plan, everything, rng)}
    request = Request(*numbers, offer, payload, initial)

    packet = pack_request(plan, request)
    read = unpack_request(plan, packet)

    assert (read.round, read.client) == numbers
    assert same_bits(read.payload, payload)
    assert (read.offer is None) == (offer is None)
    if offer is not None and read.offer is not None:
        assert same_active(read.offer.active, offer.active)
    assert (read.initial is None) == (initial is None)
    if initial is not None and read.initial is not None:
        assert same_bits(read.initial, initial)
    # What is sent is the values, and nothing beside them but the positions.
    assert packet.values == b"".join(map(bits, payload.values()))
    assert packet.index_bytes == len(packet.header) + len(packet.positions)


@given(p=shares, seed=st.integers(0, 999))
def test_neurons_that_were_not_drawn_from_the_key_arrive_all_the_same(
    p: float, seed: int
) -> None:
    plan, rng = plan_at("wide_mlp", p), np.random.default_rng(seed)
    active = choose_random(plan.neurons, plan.capacity(0), rng)
    offer = Offer(active, key=rng.bytes(KEY_BYTES))  # that of another choice
    payload = random_payload(plan, plan.travelling(active), rng)

    read = unpack_request(plan, pack_request(plan, Request(1, 0, offer, payload, None)))

    assert read.offer is not None
    assert same_active(read.offer.active, active)


@given(
    model=st.sampled_from(sorted(MODELS)),
    p=shares,
    dtype=st.sampled_from(sorted(DTYPES)),
    kind=st.sampled_from(["as offered", "others", "none"]),
    train_loss=st.floats(),
    val_loss=st.none() | st.floats(),
    has_stopped=st.booleans(),
    num_examples=st.integers(1, 2**32 - 1),
    seed=st.integers(0, 999),
)
def test_a_reply_survives_its_bytes_bit_for_bit(
    model: str,
    p: float,
    dtype: str,
    kind: str,
    train_loss: float,
    val_loss: float | None,
    has_stopped: bool,
    num_examples: int,
    seed: int,
) -> None:
    plan, rng = plan_at(model, p, dtype), np.random.default_rng(seed)
    offer = random_offer(plan, rng.bytes(KEY_BYTES))
    active = {
        "as offered": offer.active,
        "others": choose_ordered(plan.neurons, p),
        "none": None,
    }[kind]
    where = {} if active is None else plan.travelling(active)
    payload = random_payload(plan, where, rng)
    reply = Reply(active, payload, num_examples, train_loss, val_loss, has_stopped)

    packet = pack_reply(plan, reply, offer)
    read = unpack_reply(plan, packet, 0, offer)

    assert same_bits(read.payload, payload)
    assert (read.active is None) == (active is None)
    if active is not None and read.active is not None:
        assert same_active(read.active, active)
    assert struct.pack("d", read.train_loss) == struct.pack("d", train_loss)
    assert (read.val_loss is None) == (val_loss is None)
    if val_loss is not None and read.val_loss is not None:
        assert struct.pack("d", read.val_loss) == struct.pack("d", val_loss)
    assert (read.num_examples, read.has_stopped) == (num_examples, has_stopped)
    assert packet.values == b"".join(map(bits, payload.values()))


# Positions ---------------------------------------------------------------------------


def packed_offer(plan: Plan, offer: Offer) -> Packet:
    payload = random_payload(
        plan, plan.travelling(offer.active), np.random.default_rng(0)
    )
    return pack_request(plan, Request(1, 0, offer, payload, None))


def test_few_neurons_travel_as_a_bitmap() -> None:
    plan = plan_at("convnet", 0.5)  # 10 neurons: two bytes
    packet = packed_offer(plan, random_offer(plan, stream_key(0, "neurons", 1, 0)))
    assert len(packet.positions) == 1 + 2


def test_many_neurons_travel_as_their_stream_s_key() -> None:
    plan = plan_at("wide_mlp", 0.5)  # 200 neurons: 25 bytes
    key = stream_key(0, "neurons", 1, 0)
    packet = packed_offer(plan, random_offer(plan, key))
    assert packet.positions[1:] == key


def test_many_neurons_that_come_from_no_stream_travel_as_a_bitmap() -> None:
    plan = plan_at("wide_mlp", 0.5)
    packet = packed_offer(plan, Offer(choose_ordered(plan.neurons, 0.5)))
    assert len(packet.positions) == 1 + ceil(200 / 8)


@pytest.mark.parametrize(("size", "length"), [(120, 15), (128, 16), (129, 16)])
def test_the_shorter_of_the_two_forms_is_sent(size: int, length: int) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, size), nn.Linear(size, 3))
    plan = plan_for(lambda: model, clients__capacities=[0.5])
    packet = packed_offer(plan, random_offer(plan, stream_key(0, "neurons", 1, 0)))
    assert len(packet.positions) == 1 + length


def test_a_client_that_trained_what_it_was_sent_sends_one_byte_of_positions() -> None:
    plan = plan_at("wide_mlp", 0.5)
    offer = random_offer(plan, stream_key(0, "neurons", 1, 0))
    where = plan.travelling(offer.active)
    payload = random_payload(plan, where, np.random.default_rng(0))
    packet = pack_reply(plan, Reply(offer.active, payload, 9, 0.5, None, False), offer)
    assert len(packet.positions) == 1


# Norms -------------------------------------------------------------------------------


def test_norm_tensors_travel_by_default() -> None:
    plan = plan_at("convnet", 1.0, norm="aggregate")
    names = set(plan.travelling(plan.neurons.everything()))
    assert {"bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var"} <= names
    assert "bn1.num_batches_tracked" not in names


def test_under_the_local_policy_no_norm_tensor_travels() -> None:
    plan = plan_at("convnet", 1.0, norm="local")
    offer = Offer(plan.neurons.everything())
    where = plan.travelling(offer.active)
    rng = np.random.default_rng(0)
    packet = packed_offer(plan, offer)
    read = unpack_request(plan, packet)
    assert set(read.payload) == {
        f"{layer}.{name}"
        for layer in ("conv1", "conv2", "fc")
        for name in ("weight", "bias")
    }
    reply = Reply(offer.active, random_payload(plan, where, rng), 1, 0.0, None, False)
    num_values = 4 * 9 + 4 + 6 * 4 * 9 + 6 + 3 * 24 + 3
    assert len(packet.values) == 4 * num_values
    assert len(pack_reply(plan, reply, offer).values) == 4 * num_values


# Damage ------------------------------------------------------------------------------


def whole_request(form: str) -> tuple[Plan, Packet]:
    plan = plan_at("wide_mlp" if form == "stream" else "convnet", 0.5)
    offer = random_offer(plan, stream_key(0, "neurons", 1, 0))
    rng = np.random.default_rng(0)
    payload = random_payload(plan, plan.travelling(offer.active), rng)
    return plan, pack_request(plan, Request(1, 0, offer, payload, plan.initial))


@pytest.mark.parametrize("form", ["stream", "bitmap"])
@pytest.mark.parametrize("part", ["header", "positions", "values", "initial"])
@pytest.mark.parametrize("left", ["all but one byte", "half", "one byte", "none"])
def test_a_request_cut_short_is_refused(form: str, part: str, left: str) -> None:
    plan, packet = whole_request(form)
    content = getattr(packet, part)
    end = {
        "all but one byte": len(content) - 1,
        "half": len(content) // 2,
        "one byte": 1,
        "none": 0,
    }[left]
    if part == "initial" and end == 0:
        pytest.skip("a request without w0 is a request")
    with pytest.raises(FedSPUError):
        unpack_request(plan, replace(packet, **{part: content[:end]}))


@pytest.mark.parametrize("form", ["stream", "bitmap"])
@pytest.mark.parametrize("part", ["header", "positions", "values", "initial"])
def test_a_request_with_bytes_too_many_is_refused(form: str, part: str) -> None:
    plan, packet = whole_request(form)
    with pytest.raises(FedSPUError):
        unpack_request(plan, replace(packet, **{part: getattr(packet, part) + b"\0"}))


@pytest.mark.parametrize("part", ["header", "positions", "values"])
@pytest.mark.parametrize("end", [-1, 1, 0])
def test_a_reply_cut_short_is_refused(part: str, end: int) -> None:
    plan = plan_at("convnet", 0.5)
    offer = random_offer(plan, stream_key(0, "neurons", 1, 0))
    active = {
        name: torch.arange(len(indices)) for name, indices in offer.active.items()
    }
    where = plan.travelling(active)
    payload = random_payload(plan, where, np.random.default_rng(0))
    packet = pack_reply(plan, Reply(active, payload, 9, 0.5, None, False), offer)
    if part == "positions" and end == 0:
        pytest.skip("a reply without positions is one of a method without exchange")
    cut = replace(packet, **{part: getattr(packet, part)[:end]})
    with pytest.raises(FedSPUError):
        unpack_reply(plan, cut, 0, offer)


def test_positions_of_no_known_form_are_refused() -> None:
    plan, packet = whole_request("bitmap")
    with pytest.raises(FedSPUError):
        unpack_request(plan, replace(packet, positions=b"?" + packet.positions[1:]))


def test_what_is_read_shares_no_memory_with_what_was_sent() -> None:
    plan = plan_at("convnet", 1.0, norm="aggregate")
    state: dict[str, Tensor] = {n: t.clone() for n, t in plan.initial.items()}
    request = Request(1, 0, Offer(plan.neurons.everything()), {}, state)
    request = replace(
        request,
        payload={n: state[n] for n in plan.travelling(request.offer.active)},  # type: ignore[union-attr]  # it has one
    )
    read = unpack_request(plan, pack_request(plan, request))
    for tensor in state.values():
        tensor.zero_()
    assert float(read.payload["fc.weight"].abs().sum()) > 0
    assert read.initial is not None
    assert float(read.initial["fc.weight"].abs().sum()) > 0
