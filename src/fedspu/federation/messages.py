"""Request and Reply: all that crosses between server and client, as bytes.

A message is a header, positions and values. Values are the payload's blocks one after
the other, in the order of the neuron table, which both sides have; positions say which
neurons are active: as a bitmap, or as the random stream they were drawn from, whichever
is shorter. Nothing else is sent, and what is counted is the length of what is sent.
"""

import struct
from dataclasses import dataclass
from math import prod
from mmap import mmap
from typing import Any

import numpy as np
import torch

from fedspu.errors import ModelError
from fedspu.federation.plan import Plan
from fedspu.methods.method import Offer
from fedspu.neurons.choose import choose_random
from fedspu.neurons.table import Active, Blocks, Payload, State
from fedspu.streams import KEY_BYTES, generator


@dataclass(frozen=True)
class Request:
    """The server's word to one client: this round, this offer, these values."""

    round: int
    client: int
    offer: Offer | None  # None: nothing is exchanged
    payload: Payload
    initial: State | None  # w0, at first contact


@dataclass(frozen=True)
class Reply:
    """A client's answer: the values of what it trained, counts and losses."""

    active: Active | None
    payload: Payload
    num_examples: int
    train_loss: float
    val_loss: float | None  # None without early stopping
    has_stopped: bool


@dataclass(frozen=True)
class Packet:
    """A serialised message, in parts that are counted apart."""

    header: bytes
    positions: bytes
    values: bytes
    initial: bytes = b""

    @property
    def index_bytes(self) -> int:
        """All that is sent beside values."""
        return len(self.header) + len(self.positions)


_REQUEST = struct.Struct("<II?")
_REPLY = struct.Struct("<I??dd")
_BITMAP, _STREAM, _SAME = b"b", b"s", b"="


def pack_request(plan: Plan, request: Request) -> Packet:
    """Serialise a request."""
    positions = b""
    if request.offer is not None:
        positions = _pack_offer(plan, request.offer, request.client)
    return Packet(
        header=_REQUEST.pack(request.round, request.client, request.offer is not None),
        positions=positions,
        values=_pack_values(request.payload),
        initial=_pack_values(_initial_values(plan, request.initial)),
    )


def unpack_request(plan: Plan, packet: Packet) -> Request:
    """Read a request again, from its bytes and the plan alone."""
    round, client, has_offer = _header(_REQUEST, packet.header)
    offer: Offer | None = None
    payload: Payload = {}
    if has_offer:
        offer = _unpack_active(plan, packet.positions, client)
        payload = _unpack_values(plan, plan.travelling(offer.active), packet.values)
    elif packet.positions or packet.values:
        raise ModelError("a request without an offer that has positions or values")
    initial = None
    if packet.initial:
        whole = plan.neurons.blocks(plan.neurons.everything())
        initial = {**plan.initial, **_unpack_values(plan, whole, packet.initial)}
    return Request(round, client, offer, payload, initial)


def pack_reply(plan: Plan, reply: Reply, offer: Offer | None) -> Packet:
    """Serialise a reply to a request with this offer."""
    positions = b""
    if reply.active is not None:
        is_same = offer is not None and _equal(reply.active, offer.active)
        positions = _SAME if is_same else _pack_bitmap(plan, reply.active)
    val_loss = float("nan") if reply.val_loss is None else reply.val_loss
    return Packet(
        header=_REPLY.pack(
            reply.num_examples,
            reply.has_stopped,
            reply.val_loss is not None,
            reply.train_loss,
            val_loss,
        ),
        positions=positions,
        values=_pack_values(reply.payload),
    )


def unpack_reply(plan: Plan, packet: Packet, client: int, offer: Offer | None) -> Reply:
    """Read a reply again; ``offer`` is what the server had sent."""
    num_examples, has_stopped, has_val, train_loss, val_loss = _header(
        _REPLY, packet.header
    )
    active: Active | None = None
    payload: Payload = {}
    if not packet.positions and packet.values:
        raise ModelError(f"{len(packet.values)} bytes of values without positions")
    if packet.positions:
        if packet.positions == _SAME and offer is not None:
            active = offer.active
        else:
            active = _unpack_active(plan, packet.positions, client).active
        payload = _unpack_values(plan, plan.travelling(active), packet.values)
    return Reply(
        active=active,
        payload=payload,
        num_examples=num_examples,
        train_loss=train_loss,
        val_loss=val_loss if has_val else None,
        has_stopped=has_stopped,
    )


def _header(form: struct.Struct, header: bytes) -> tuple[Any, ...]:
    if len(header) != form.size:
        raise ModelError(f"a header of {len(header)} bytes; expected {form.size}")
    return form.unpack(header)


def _pack_offer(plan: Plan, offer: Offer, client: int) -> bytes:
    """The stream that the offer was drawn from, if that is shorter and says it all."""
    bitmap = _pack_bitmap(plan, offer.active)
    if offer.key is None or len(offer.key) >= len(bitmap) - len(_BITMAP):
        return bitmap
    return _STREAM + offer.key if _is_drawn_from_key(plan, offer, client) else bitmap


def _is_drawn_from_key(plan: Plan, offer: Offer, client: int) -> bool:
    """Whether the client would draw the very neurons that are offered."""
    return offer.key is not None and _equal(
        _draw(plan, offer.key, client), offer.active
    )


def _draw(plan: Plan, key: bytes, client: int) -> Active:
    return choose_random(plan.neurons, plan.capacity(client), generator(key))


def _pack_bitmap(plan: Plan, active: Active) -> bytes:
    bits = [
        np.isin(np.arange(group.size), active[group.name].numpy())
        for group in plan.neurons.groups
    ]
    flat = np.concatenate(bits) if bits else np.zeros(0, dtype=bool)
    return _BITMAP + np.packbits(flat).tobytes()


def _unpack_active(plan: Plan, positions: bytes, client: int) -> Offer:
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
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _initial_values(plan: Plan, initial: State | None) -> Payload:
    """What of w0 a client cannot know: its travelling tensors."""
    if initial is None:
        return {}
    return {name: initial[name] for name in plan.neurons.shapes}


def _pack_values(payload: Payload) -> bytes:
    return b"".join(
        tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for tensor in payload.values()
    )


def _unpack_values(plan: Plan, blocks: Blocks, values: bytes) -> Payload:
    shapes = {
        name: [
            n if axis is None else len(axis)
            for n, axis in zip(plan.initial[name].shape, where, strict=True)
        ]
        for name, where in blocks.items()
    }
    lengths = [plan.initial[n].element_size() * prod(s) for n, s in shapes.items()]
    if sum(lengths) != len(values):
        raise ModelError(f"{len(values)} bytes of values; expected {sum(lengths)}")
    if not values:
        return {}
    flat = np.frombuffer(values, np.uint8)
    parts = np.split(flat, np.cumsum(lengths)[:-1])
    return {
        name: torch.from_numpy(part.copy())
        .view(plan.initial[name].dtype)
        .view(shapes[name])
        for name, part in zip(shapes, parts, strict=True)
    }


def pack_state(plan: Plan, state: State) -> bytes:
    """The values of all tensors of a whole state, in w0's order."""
    return _pack_values({name: state[name] for name in plan.initial})


def unpack_state(plan: Plan, values: bytes | mmap) -> State:
    """A whole state again, from the values of all its tensors."""
    blocks: Blocks = {
        name: (None,) * tensor.dim() for name, tensor in plan.initial.items()
    }
    length = sum(tensor.nbytes for tensor in plan.initial.values())
    return _unpack_values(plan, blocks, values[:length])
