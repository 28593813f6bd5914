import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import ceil, prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedspu import (
    Active,
    Blocks,
    FedSPUError,
    Payload,
    State,
    choose_ordered,
    choose_random,
)
from fedspu.errors import ModelError
from fedspu.federation.messages import (
    JudgeReply,
    JudgeRequest,
    Packet,
    Request,
    TrainReply,
    TrainRequest,
    pack_reply,
    pack_request,
    pack_state,
    unpack_reply,
    unpack_request,
    unpack_state,
)
from fedspu.federation.plan import Plan
from fedspu.methods.method import Offer, Which
from fedspu.neurons.choose import as_fraction
from fedspu.random_streams import KEY_BYTES, generator, stream_key
from tests.oracles.federation import (
    ConvNet,
    bits,
    empty_reply,
    mlp,
    plan_for,
    same_bits,
    wide_mlp,
)

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
    policy = base.settings.norm.model_copy(update={"policy": norm})
    return replace(
        base,
        settings=base.settings.model_copy(update={"norm": policy}),
        capacities=(as_fraction(p),) * base.num_clients,
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
rounds = st.integers(0, 2**32 - 1)


def train_request(
    offer: Offer | None, payload: Payload, initial: State | None = None
) -> TrainRequest:
    """What client 0 is asked in round 1."""
    return TrainRequest(1, 0, 0, offer, payload, initial)


def sent(plan: Plan, request: Request) -> Request:
    """A request as it arrives."""
    return unpack_request(plan, pack_request(plan, request))


@given(
    model=st.sampled_from(sorted(MODELS)),
    p=shares,
    dtype=st.sampled_from(sorted(DTYPES)),
    norm=st.sampled_from(["aggregate", "local"]),
    has_offer=st.booleans(),
    has_key=st.booleans(),
    has_initial=st.booleans(),
    numbers=st.tuples(rounds, st.integers(0, 5), rounds),
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
    numbers: tuple[int, int, int],
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
    request = TrainRequest(*numbers, offer, payload, initial)

    packet = pack_request(plan, request)
    read = unpack_request(plan, packet)

    assert isinstance(read, TrainRequest)
    assert (read.round, read.client, read.last) == numbers
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

    read = sent(plan, train_request(offer, payload))

    assert isinstance(read, TrainRequest)
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
    numbers=st.tuples(rounds, rounds),
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
    numbers: tuple[int, int],
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
    reply = TrainReply(
        *numbers, active, payload, num_examples, train_loss, val_loss, has_stopped
    )
    request = train_request(offer, {})

    packet = pack_reply(plan, request, reply)
    read = unpack_reply(plan, request, packet)

    assert isinstance(read, TrainReply)
    assert (read.round, read.client) == numbers
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


@given(
    numbers=st.tuples(rounds, st.integers(0, 5), rounds),
    which=st.sampled_from(["personal", "global"]),
)
def test_a_judge_request_survives_its_bytes(
    numbers: tuple[int, int, int], which: Which
) -> None:
    plan, request = base_plan("mlp"), JudgeRequest(*numbers, which)
    packet = pack_request(plan, request)
    assert unpack_request(plan, packet) == request
    # The server's model goes beside requests, not in them.
    assert packet == Packet(packet.header)


@given(
    numbers=st.tuples(rounds, rounds, rounds),
    measured=st.tuples(st.floats(), st.floats(), st.floats()),
    which=st.sampled_from(["personal", "global"]),
)
def test_a_judge_reply_survives_its_bytes_bit_for_bit(
    numbers: tuple[int, int, int], measured: tuple[float, float, float], which: Which
) -> None:
    plan, request = base_plan("mlp"), JudgeRequest(1, 0, 0, which)
    packet = pack_reply(plan, request, JudgeReply(*numbers, *measured))
    read = unpack_reply(plan, request, packet)
    assert isinstance(read, JudgeReply)
    assert (read.round, read.client, read.num_examples) == numbers
    found = struct.pack("ddd", read.loss, read.value, read.val_value)
    assert found == struct.pack("ddd", *measured)
    assert packet == Packet(packet.header)


@given(
    model=st.sampled_from(sorted(MODELS)),
    dtype=st.sampled_from(sorted(DTYPES)),
    seed=st.integers(0, 99),
    rest=st.binary(max_size=3),
)
def test_a_whole_state_survives_its_bytes_bit_for_bit(
    model: str, dtype: str, seed: int, rest: bytes
) -> None:
    plan, rng = plan_at(model, 1.0, dtype), np.random.default_rng(seed)
    whole: Blocks = {name: (None,) * t.dim() for name, t in plan.initial.items()}
    state = random_payload(plan, whole, rng)
    # Of a place that is shared and larger than the state, the rest does not matter.
    assert same_bits(unpack_state(plan, pack_state(plan, state) + rest), state)


# Positions ---------------------------------------------------------------------------


def packed_offer(plan: Plan, offer: Offer) -> Packet:
    payload = random_payload(
        plan, plan.travelling(offer.active), np.random.default_rng(0)
    )
    return pack_request(plan, train_request(offer, payload))


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
    reply = empty_reply(1, 0, active=offer.active, payload=payload)
    packet = pack_reply(plan, train_request(offer, payload), reply)
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
    assert isinstance(read, TrainRequest)
    assert set(read.payload) == {
        f"{layer}.{name}"
        for layer in ("conv1", "conv2", "fc")
        for name in ("weight", "bias")
    }
    payload = random_payload(plan, where, rng)
    reply = empty_reply(1, 0, active=offer.active, payload=payload)
    num_values = 4 * 9 + 4 + 6 * 4 * 9 + 6 + 3 * 24 + 3
    assert len(packet.values) == 4 * num_values
    assert len(pack_reply(plan, read, reply).values) == 4 * num_values


# Damage ------------------------------------------------------------------------------


def whole_request(form: str) -> tuple[Plan, Packet]:
    plan = plan_at("wide_mlp" if form == "stream" else "convnet", 0.5)
    offer = random_offer(plan, stream_key(0, "neurons", 1, 0))
    rng = np.random.default_rng(0)
    payload = random_payload(plan, plan.travelling(offer.active), rng)
    return plan, pack_request(plan, train_request(offer, payload, plan.initial))


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
    request = train_request(offer, {})
    reply = empty_reply(1, 0, active=active, payload=payload)
    packet = pack_reply(plan, request, reply)
    if part == "positions" and end == 0:
        pytest.skip("a reply without positions is one of a method without exchange")
    cut = replace(packet, **{part: getattr(packet, part)[:end]})
    with pytest.raises(FedSPUError):
        unpack_reply(plan, request, cut)


def test_positions_of_no_known_form_are_refused() -> None:
    plan, packet = whole_request("bitmap")
    with pytest.raises(FedSPUError):
        unpack_request(plan, replace(packet, positions=b"?" + packet.positions[1:]))


def test_what_is_read_shares_no_memory_with_what_was_sent() -> None:
    plan = plan_at("convnet", 1.0, norm="aggregate")
    state: dict[str, Tensor] = {n: t.clone() for n, t in plan.initial.items()}
    offer = Offer(plan.neurons.everything())
    payload = {name: state[name] for name in plan.travelling(offer.active)}
    read = sent(plan, train_request(offer, payload, state))
    for tensor in state.values():
        tensor.zero_()
    assert isinstance(read, TrainRequest)
    assert float(read.payload["fc.weight"].abs().sum()) > 0
    assert read.initial is not None
    assert float(read.initial["fc.weight"].abs().sum()) > 0


# Other messages ----------------------------------------------------------------------


JUDGE = JudgeRequest(1, 0, 0, "personal")


def headers() -> dict[str, tuple[Callable[[Plan, Packet], object], Packet]]:
    """For every kind of message, how it is read, and one of them."""
    plan = base_plan("mlp")
    train = train_request(None, {})
    return {
        "train request": (unpack_request, pack_request(plan, train)),
        "judge request": (unpack_request, pack_request(plan, JUDGE)),
        "train reply": (
            lambda plan, packet: unpack_reply(plan, train, packet),
            pack_reply(plan, train, empty_reply(1, 0)),
        ),
        "judge reply": (
            lambda plan, packet: unpack_reply(plan, JUDGE, packet),
            pack_reply(plan, JUDGE, JudgeReply(1, 0, 4, 0.5, 0.5, 0.25)),
        ),
    }


MESSAGES = ["train request", "judge request", "train reply", "judge reply"]


def test_a_header_has_its_known_length() -> None:
    lengths = {name: len(packet.header) for name, (_, packet) in headers().items()}
    assert lengths == dict(zip(MESSAGES, [15, 15, 32, 38], strict=True))


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("version", [0, 1, 3, 255])
def test_a_message_of_another_version_is_refused(message: str, version: int) -> None:
    read, packet = headers()[message]
    other = replace(packet, header=bytes([version]) + packet.header[1:])
    with pytest.raises(ModelError, match=rf"version {version}; this fedspu speaks ver"):
        read(base_plan("mlp"), other)


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("kind", [0, 3, 4, 255])
def test_a_message_of_another_kind_is_refused(message: str, kind: int) -> None:
    if kind == 3 and "request" in message:
        return  # a request to make the last model
    read, packet = headers()[message]
    header = packet.header[:1] + bytes([kind]) + packet.header[2:]
    with pytest.raises(ModelError, match=rf"^a message of kind {kind}; expected 1 or"):
        read(base_plan("mlp"), replace(packet, header=header))


@pytest.mark.parametrize("message", MESSAGES)
def test_a_header_cut_short_or_too_long_is_refused(message: str) -> None:
    read, packet = headers()[message]
    whole = packet.header
    for header in (*(whole[:end] for end in range(len(whole))), whole + b"\0"):
        with pytest.raises(ModelError, match=rf"^a header of {len(header)} bytes"):
            read(base_plan("mlp"), replace(packet, header=header))


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("part", ["positions", "values"])
def test_bytes_that_a_message_has_no_place_for_are_refused(
    message: str, part: str
) -> None:
    read, packet = headers()[message]
    more: dict[str, Any] = {part: b"\0\0"}
    with pytest.raises(ModelError):
        read(base_plan("mlp"), replace(packet, **more))


def test_a_request_for_a_client_that_is_not_there_is_refused() -> None:
    plan = base_plan("mlp")
    for request in (
        replace(JUDGE, client=6),
        replace(train_request(None, {}), client=6),
    ):
        with pytest.raises(ModelError, match=r"client 6; expected 0 to 5$"):
            unpack_request(plan, pack_request(plan, request))
