"""Everything that server and clients send each other, as bytes.

A request asks a client to train, or to judge a model on its own test and validation
examples. A message is a header, positions and values. Values are the blocks of the
payload one after the other, in the order of the neuron table, which both sides have;
positions say which neurons are active: as a bitmap, or as the random stream they were
drawn from, whichever is shorter. Nothing else is sent, and the bytes counted are the
bytes sent. ``wire.values`` and ``wire.down`` may round values for the journey, here
alone, so every engine rounds alike; w0 and a state for all clients are always exact.
Messages are written and read here; ``checks.py`` says which may be used.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from mmap import mmap
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedspu.errors import ModelError, TrainingError
from fedspu.federation.plan import Plan
from fedspu.methods.method import Offer, Which
from fedspu.neurons.blocks import is_finite
from fedspu.neurons.choose import choose_random
from fedspu.neurons.table import Active, Blocks, Payload, State
from fedspu.random_streams import KEY_BYTES, generator

VERSION = 2
"""The version of the message format; others are refused."""


@dataclass(frozen=True)
class TrainRequest:
    """Asks one client to train in this round, with this offer and these values.

    ``last`` is the round in which the client last took part, as far as the server
    knows: the client begins from its memory of that round. It is 0 if it never did.
    ``is_finish``: the run has ended, and the client makes its last model; it sends
    nothing back.
    """

    round: int
    client: int
    last: int
    offer: Offer | None  # None: nothing is exchanged
    payload: Payload
    initial: State | None  # w0, at first contact
    is_finish: bool = False


@dataclass(frozen=True)
class JudgeRequest:
    """Asks one client to judge the model it would use now, or the server's.

    Where the server's model is needed, it is sent to all judged clients alike, beside
    their requests.
    """

    round: int
    client: int
    last: int
    which: Which


Request = TrainRequest | JudgeRequest


@dataclass(frozen=True)
class TrainReply:
    """A client's answer: the values of what it trained, counts and losses."""

    round: int
    client: int
    active: Active | None
    payload: Payload
    num_examples: int
    train_loss: float
    val_loss: float | None  # None without early stopping
    has_stopped: bool


@dataclass(frozen=True)
class JudgeReply:
    """How well a model does on a client's own test and validation examples."""

    round: int
    client: int
    num_examples: int  # to test
    loss: float
    value: float  # of the task's metric
    val_value: float  # the same, on the validation examples


Reply = TrainReply | JudgeReply


class Seconds(NamedTuple):
    """How long a client's work took: by the clock, and in time of its processors."""

    wall: float
    cpu: float


NO_TIME = Seconds(0.0, 0.0)


@dataclass(frozen=True)
class Packet:
    """A serialised message, in parts that are counted separately.

    ``took`` is not part of the message: it is how long the client's work took.
    """

    header: bytes
    positions: bytes = b""
    values: bytes = b""
    initial: bytes = b""
    took: Seconds = NO_TIME

    @property
    def index_bytes(self) -> int:
        """Bytes of the header and the positions."""
        return len(self.header) + len(self.positions)


_TRAIN, _JUDGE, _FINISH = 1, 2, 3
_BITMAP, _STREAM, _SAME = b"b", b"s", b"="

# Version, kind, round and client come first in every header.
_START = struct.Struct("<BBII")
_TRAIN_REQUEST = struct.Struct("<BBIII?")
_JUDGE_REQUEST = struct.Struct("<BBIII?")
_TRAIN_REPLY = struct.Struct("<BBIII??dd")
_JUDGE_REPLY = struct.Struct("<BBIIIddd")

LONGEST_HEADER = max(
    form.size for form in (_TRAIN_REQUEST, _JUDGE_REQUEST, _TRAIN_REPLY, _JUDGE_REPLY)
)
"""The bytes of the longest header."""


# Requests -----------------------------------------------------------------------------


def pack_request(plan: Plan, request: Request) -> Packet:
    """Serialise a request."""
    if isinstance(request, JudgeRequest):
        is_global = request.which == "global"
        return Packet(
            _JUDGE_REQUEST.pack(
                VERSION, _JUDGE, request.round, request.client, request.last, is_global
            )
        )
    has_offer = request.offer is not None
    return Packet(
        header=_TRAIN_REQUEST.pack(
            VERSION,
            _FINISH if request.is_finish else _TRAIN,
            request.round,
            request.client,
            request.last,
            has_offer,
        ),
        positions=_pack_offer(plan, request.offer, request.client),
        values=pack_values(
            rounded(
                plan, request.payload, f"round {request.round}: the server's", "down"
            )
        ),
        initial=pack_values(_initial_values(plan, request.initial)),
    )


def unpack_request(plan: Plan, packet: Packet) -> Request:
    """Read a request from its bytes, with the plan and nothing else."""
    kind, round, client = _read_start(packet.header, (_TRAIN, _JUDGE, _FINISH))
    if not client < plan.num_clients:
        raise ModelError(
            f"a request for client {client}; expected 0 to {plan.num_clients - 1}"
        )
    if kind == _JUDGE:
        _refuse_more_than_a_header(packet)
        last, is_global = _header(_JUDGE_REQUEST, packet.header)
        which: Which = "global" if is_global else "personal"
        return JudgeRequest(round, client, last, which)
    last, has_offer = _header(_TRAIN_REQUEST, packet.header)
    offer: Offer | None = None
    payload: Payload = {}
    if has_offer:
        offer = _unpack_offer(plan, packet.positions, client)
        where = plan.travelling(offer.active)
        payload = unpack_rounded(plan, where, packet.values, "down")
    elif packet.positions or packet.values:
        raise ModelError("a request without an offer has positions or values")
    initial = None
    if packet.initial:
        sent = _whole(plan, plan.sent_initially)
        initial = {**plan.initial, **unpack_values(plan, sent, packet.initial)}
    return TrainRequest(round, client, last, offer, payload, initial, kind == _FINISH)


# Replies ------------------------------------------------------------------------------


def pack_reply(plan: Plan, request: Request, reply: Reply) -> Packet:
    """Serialise the reply to a request."""
    if isinstance(reply, JudgeReply):
        return Packet(
            _JUDGE_REPLY.pack(
                VERSION,
                _JUDGE,
                reply.round,
                reply.client,
                reply.num_examples,
                reply.loss,
                reply.value,
                reply.val_value,
            )
        )
    val_loss = float("nan") if reply.val_loss is None else reply.val_loss
    return Packet(
        header=_TRAIN_REPLY.pack(
            VERSION,
            _TRAIN,
            reply.round,
            reply.client,
            reply.num_examples,
            reply.has_stopped,
            reply.val_loss is not None,
            reply.train_loss,
            val_loss,
        ),
        positions=_pack_returned(plan, request, reply.active),
        values=pack_values(rounded(plan, reply.payload, "its", "up")),
    )


def unpack_reply(plan: Plan, request: Request, packet: Packet) -> Reply:
    """Read the reply to a request from its bytes."""
    kind, round, client = _read_start(packet.header, (_TRAIN, _JUDGE))
    if kind == _JUDGE:
        _refuse_more_than_a_header(packet)
        return JudgeReply(round, client, *_header(_JUDGE_REPLY, packet.header))
    num_examples, has_stopped, has_val, train_loss, val_loss = _header(
        _TRAIN_REPLY, packet.header
    )
    active: Active | None = None
    payload: Payload = {}
    if not packet.positions and packet.values:
        raise ModelError(
            f"a reply without positions has {len(packet.values)} bytes of values"
        )
    if packet.positions:
        offer = request.offer if isinstance(request, TrainRequest) else None
        if packet.positions == _SAME and offer is not None:
            active = offer.active
        else:
            active = _unpack_offer(plan, packet.positions, request.client).active
        payload = unpack_rounded(plan, plan.travelling(active), packet.values, "up")
    return TrainReply(
        round=round,
        client=client,
        active=active,
        payload=payload,
        num_examples=num_examples,
        train_loss=train_loss,
        val_loss=val_loss if has_val else None,
        has_stopped=has_stopped,
    )


# Headers and positions ----------------------------------------------------------------


def _read_start(header: bytes, kinds: tuple[int, ...]) -> tuple[int, int, int]:
    """The kind, round and client of a message of one of these kinds."""
    if len(header) < _START.size:
        raise ModelError(
            f"a header of {len(header)} bytes; expected at least {_START.size}"
        )
    version, kind, round, client = _START.unpack_from(header)
    if version != VERSION:
        raise ModelError(
            f"a message of version {version}; this fedspu speaks version {VERSION}: "
            "use the same fedspu on both sides"
        )
    if kind not in kinds:
        expected = " or ".join(map(str, kinds))
        raise ModelError(f"a message of kind {kind}; expected {expected}")
    return kind, round, client


def _refuse_more_than_a_header(packet: Packet) -> None:
    if packet.positions or packet.values or packet.initial:
        raise ModelError("a message about judging has more than a header")


def _header(form: struct.Struct, header: bytes) -> tuple[Any, ...]:
    """The fields of a header after its start."""
    if len(header) != form.size:
        raise ModelError(f"a header of {len(header)} bytes; expected {form.size}")
    return form.unpack(header)[4:]


def _pack_offer(plan: Plan, offer: Offer | None, client: int) -> bytes:
    """An offer as the key it was drawn from if that is shorter, else as a bitmap."""
    if offer is None:
        return b""
    key = offer.key
    is_short = key is not None and len(key) < _bitmap_bytes(plan)
    if key is not None and is_short and _is_drawn_from_key(plan, offer, client):
        return _STREAM + key
    return _pack_bitmap(plan, offer.active)


def _is_drawn_from_key(plan: Plan, offer: Offer, client: int) -> bool:
    """Whether the client would draw exactly the neurons that are offered."""
    return offer.key is not None and _equal(
        _draw(plan, offer.key, client), offer.active
    )


def _draw(plan: Plan, key: bytes, client: int) -> Active:
    return choose_random(plan.neurons, plan.capacity(client), generator(key))


def _pack_returned(plan: Plan, request: Request, active: Active | None) -> bytes:
    if active is None:
        return b""
    offer = request.offer if isinstance(request, TrainRequest) else None
    is_same = offer is not None and _equal(active, offer.active)
    return _SAME if is_same else _pack_bitmap(plan, active)


def _pack_bitmap(plan: Plan, active: Active) -> bytes:
    bits = [
        np.isin(np.arange(group.size), active[group.name].numpy())
        for group in plan.neurons.groups
    ]
    flat = np.concatenate(bits) if bits else np.zeros(0, dtype=bool)
    return _BITMAP + np.packbits(flat).tobytes()


def longest_positions(plan: Plan) -> int:
    """The most bytes that positions take, in either form."""
    return 1 + max(KEY_BYTES, _bitmap_bytes(plan))


def _bitmap_bytes(plan: Plan) -> int:
    return (sum(group.size for group in plan.neurons.groups) + 7) // 8


def _unpack_offer(plan: Plan, positions: bytes, client: int) -> Offer:
    kind, rest = positions[:1], positions[1:]
    if kind == _STREAM:
        if len(rest) != KEY_BYTES:
            raise ModelError(f"a stream's key has {KEY_BYTES} bytes; got {len(rest)}")
        return Offer(_draw(plan, rest, client), rest)
    sizes = [group.size for group in plan.neurons.groups]
    if kind != _BITMAP or len(rest) != (sum(sizes) + 7) // 8:
        raise ModelError(
            f"positions of {len(positions)} bytes that begin with {kind!r}: neither a "
            f"stream nor a bitmap of {sum(sizes)} neurons"
        )
    bits = np.unpackbits(np.frombuffer(rest, np.uint8), count=sum(sizes)).astype(bool)
    parts = np.split(bits, np.cumsum(sizes)[:-1]) if sizes else []
    return Offer(
        {
            group.name: torch.from_numpy(part.nonzero()[0])
            for group, part in zip(plan.neurons.groups, parts, strict=True)
        }
    )


def _equal(a: Active, b: Active) -> bool:
    if a is b:
        return True
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Values -------------------------------------------------------------------------------


def _initial_values(plan: Plan, initial: State | None) -> Payload:
    """The part of w0 that is sent."""
    if initial is None:
        return {}
    return {name: initial[name] for name in plan.sent_initially}


def pack_values(payload: Payload) -> bytes:
    """The values of tensors, one after the other."""
    return b"".join(
        tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for tensor in payload.values()
    )


def unpack_values(
    plan: Plan,
    blocks: Blocks,
    values: bytes,
    types: Mapping[str, torch.dtype] | None = None,
) -> Payload:
    """The values of these blocks, from their bytes; w0's types, if none are given."""
    types = types or {name: plan.initial[name].dtype for name in blocks}
    shapes = {
        name: [
            n if axis is None else len(axis)
            for n, axis in zip(plan.initial[name].shape, where, strict=True)
        ]
        for name, where in blocks.items()
    }
    counts = [prod(shape) for shape in shapes.values()]
    lengths = [types[name].itemsize * n for name, n in zip(shapes, counts, strict=True)]
    if sum(lengths) != len(values):
        raise ModelError(f"{len(values)} bytes of values; expected {sum(lengths)}")
    if not values:
        return {}
    flat = torch.from_numpy(np.frombuffer(values, np.uint8).copy())
    if len({types[name] for name in shapes}) == 1:
        parts = flat.view(types[next(iter(shapes))]).split(counts)
    else:  # copied, so that each begins where its type may
        parts = tuple(
            part.clone().view(types[name])
            for name, part in zip(shapes, flat.split(lengths), strict=True)
        )
    return {
        name: part.view(shape)
        for part, (name, shape) in zip(parts, shapes.items(), strict=True)
    }


# Rounding -----------------------------------------------------------------------------

FORMS = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""The types that ``wire.values`` names."""

Way = Literal["down", "up"]
"""To a client, or to the server."""


def _form(plan: Plan, way: Way) -> str:
    wire = plan.settings.wire
    return wire.down if way == "down" and wire.down is not None else wire.values


def wire_type(plan: Plan, name: str, way: Way) -> torch.dtype:
    """The type in which the values of a tensor travel.

    Only float32 is rounded. Norm statistics are not: a variance of 65505 is nothing
    unusual, one that becomes 0 may be divided by, and they are few.
    """
    own = plan.initial[name].dtype
    if own != torch.float32 or name in plan.neurons.statistics:
        return own
    return FORMS[_form(plan, way)]


def rounded(plan: Plan, payload: Payload, whose: str, way: Way) -> Payload:
    """The values in the types they travel in, to the nearest; refuses an overflow."""
    if _form(plan, way) == "float32":
        return payload
    found = {}
    for name, values in payload.items():
        found[name] = values
        # Values of another type than w0's are refused where they arrive.
        if values.dtype == plan.initial[name].dtype:
            found[name] = values.detach().cpu().to(wire_type(plan, name, way))
        if not is_finite(found[name]) and is_finite(values):
            _refuse_overflow(plan, f"{whose} {name}", values, way)
    return found


def _refuse_overflow(plan: Plan, whose: str, values: Tensor, way: Way) -> None:
    form, wire = _form(plan, way), plan.settings.wire
    setting = "wire.down" if way == "down" and wire.down is not None else "wire.values"
    wider = "bfloat16 or float32" if form == "float16" else "float32"
    raise TrainingError(
        f"{whose} has a value of size {float(values.abs().max()):g}, and {setting} = "
        f"{form!r} holds at most {torch.finfo(FORMS[form]).max:g}; set {setting} to "
        f"{wider}, or lower train.lr (it is {plan.settings.train.lr})"
    )


def unpack_rounded(plan: Plan, blocks: Blocks, values: bytes, way: Way) -> Payload:
    """The values of these blocks in w0's types, from the bytes they travelled as."""
    if _form(plan, way) == "float32":  # nothing was rounded
        return unpack_values(plan, blocks, values)
    types = {name: wire_type(plan, name, way) for name in blocks}
    found = unpack_values(plan, blocks, values, types)
    return {name: part.to(plan.initial[name].dtype) for name, part in found.items()}


# Whole states -------------------------------------------------------------------------


def pack_state(plan: Plan, state: State) -> bytes:
    """The values of a whole state, in the order of names; none that never train.

    The order of w0 itself may differ: a file does not keep it.
    """
    return pack_values({name: state[name] for name in _changing(plan)})


def unpack_state(plan: Plan, values: bytes | mmap) -> State:
    """A whole state, from its bytes; what never trains is as in w0."""
    names = _changing(plan)
    length = sum(plan.initial[name].nbytes for name in names)
    found = unpack_values(plan, _whole(plan, names), values[:length])
    return {**{name: plan.initial[name] for name in plan.untrained}, **found}


def _changing(plan: Plan) -> list[str]:
    return [name for name in sorted(plan.initial) if name not in plan.untrained]


def _whole(plan: Plan, names: Iterable[str]) -> Blocks:
    """All of these tensors."""
    return {name: (None,) * plan.initial[name].dim() for name in names}
