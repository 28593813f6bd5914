"""Our packets as the content of Flower's messages, and back.

A packet's header and positions go into a config record, its values into arrays, so that
Flower can cut large ones. Besides these there are only the seat of a client, which says
who it is in this run, and the seconds that its work took.
"""

import re
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from typing import Annotated, Any, Literal, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fedspu.errors import ModelError
from fedspu.federation.messages import Packet, Seconds

PACKET, ARRAYS = "fedspu", "values"
"""The names of our records in a message."""

BYTES = "fedspu.bytes"
"""The kind of our arrays: plain bytes."""

Capacity = Annotated[float, Field(gt=0, le=1)]
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
Name = Annotated[str, Field(pattern=NAME)]
Key = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
LARGEST_EXAMPLE = 2**26
"""The most numbers that an example may have: a server makes two of the same shape."""


def _is_possible(shape: tuple[int, ...]) -> tuple[int, ...]:
    if prod(shape) > LARGEST_EXAMPLE:
        raise ValueError(f"an example of more than {LARGEST_EXAMPLE} numbers")
    return shape


Shape = Annotated[
    tuple[Annotated[int, Field(ge=0, le=LARGEST_EXAMPLE)], ...],
    Field(max_length=8),
    AfterValidator(_is_possible),
]
Word = Annotated[str, Field(max_length=200)]

T = TypeVar("T")


class Strict(BaseModel):
    """Something that the other side sent."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Like(Strict):
    """In what all devices of a run must be alike."""

    version: Word  # of fedspu
    protocol: int
    task: Word
    x_shape: Shape  # of one example
    x_dtype: Word
    y_shape: Shape
    y_dtype: Word

    def differs(self, other: "Like") -> str:
        """In what another one is not like this, in words; empty if it is."""
        for name in Like.model_fields:
            own, others = getattr(other, name), getattr(self, name)
            if own != others:
                return f"{NAMES[name]} is {own}, in this run it is {others}"
        return ""


NAMES = {
    "version": "its version of fedspu",
    "protocol": "its version of messages",
    "task": "its task",
    "x_shape": "the shape of its examples",
    "x_dtype": "the type of its examples",
    "y_shape": "the shape of its targets",
    "y_dtype": "the type of its targets",
}


class Seat(Strict):
    """What a device must know of a run besides its settings.

    ``run`` tells runs apart, ``client`` is the device's number in it, ``table`` is the
    digest of the server's table of neurons, ``frozen`` that of its values that never
    train, if there are any. ``like`` is what every device must be like: a device may be
    started again with other data or another version of fedspu, without the server
    noticing.
    """

    run: Key
    like: Like
    client: Annotated[int, Field(ge=0)]
    num_clients: Annotated[int, Field(ge=1)]
    capacity: Capacity
    capacities: tuple[Capacity, ...]  # of all clients, each once
    num_outputs: Annotated[int, Field(ge=0)]
    table: Key
    frozen: Key | Literal[""] = ""


class Hello(Like):
    """What a device says of itself before it takes part."""

    name: Name
    capacity: Capacity
    num_outputs: Annotated[int, Field(ge=0, le=10_000_000)]
    num_examples: Annotated[int, Field(ge=1)]

    @property
    def like(self) -> Like:
        """Only that in which all devices must be alike."""
        return Like(**self.model_dump(include=set(Like.model_fields)))


class Refusal(Strict):
    """Why a device did not do what it was asked.

    ``has_failed``: its turn went wrong; else it cannot take part at all. ``is_fatal``:
    nobody can; only a simulation may say so. ``begins_anew``: it has lost what it kept,
    and asks to be taken for a new one. ``name`` is given where nobody knows it yet.
    """

    reason: Annotated[str, Field(max_length=1000)]
    name: Name | None = None
    begins_anew: bool = False
    has_failed: bool = False
    is_fatal: bool = False


@dataclass(frozen=True)
class Content:
    """What a message holds, read but not yet trusted."""

    packet: Packet
    seat: Seat | None = None
    state: bytes | None = None  # the server's model, to be judged


def pack(
    packet: Packet, seat: Seat | None = None, state: Array | None = None
) -> RecordDict:
    """A packet as a message's content; ``state`` is the server's model, as bytes."""
    about: dict[str, Any] = {
        "header": packet.header,
        "positions": packet.positions,
        "seconds": list(packet.took),
    }
    if seat is not None:
        about["seat"] = seat.model_dump_json()
    arrays = {}
    if packet.values:
        arrays["values"] = as_array(packet.values)
    if packet.initial:
        arrays["initial"] = as_array(packet.initial)
    if state is not None:
        arrays["state"] = state
    return RecordDict({PACKET: ConfigRecord(about), ARRAYS: ArrayRecord(arrays)})


def unpack(content: RecordDict) -> Content | Refusal:
    """What a message holds; raises ModelError if it is none of ours."""
    try:
        about = dict(content.config_records[PACKET])
        if "refusal" in about:
            return Refusal.model_validate_json(_of(about["refusal"], str))
        arrays = content.array_records[ARRAYS]
        if not arrays.keys() <= {"values", "initial", "state"}:
            raise ModelError(f"a message with arrays {', '.join(sorted(arrays))}")
        seat = None
        if "seat" in about:
            seat = Seat.model_validate_json(_of(about["seat"], str))
        packet = Packet(
            header=_of(about["header"], bytes),
            positions=_of(about["positions"], bytes),
            values=_bytes(arrays, "values") or b"",
            initial=_bytes(arrays, "initial") or b"",
            took=Seconds(*(_of(n, float) for n in _of(about["seconds"], list))),
        )
        return Content(packet, seat, _bytes(arrays, "state"))
    except (KeyError, TypeError, ValidationError) as error:
        raise ModelError(f"a message that is not fedspu's ({_short(error)})") from None


def refuse(reason: str, **more: Any) -> RecordDict:
    """The content of a message that says why there is no answer: a ``Refusal``."""
    refusal = Refusal(reason=reason[:1000], **more)
    about = ConfigRecord({"refusal": refusal.model_dump_json()})
    return RecordDict({PACKET: about})


def pack_hello(hello: Hello) -> RecordDict:
    """A device's words about itself."""
    return RecordDict({PACKET: ConfigRecord({"hello": hello.model_dump_json()})})


def unpack_hello(content: RecordDict) -> Hello | Refusal:
    """What a device says of itself; raises ModelError if it is not in our form."""
    try:
        about = content.config_records[PACKET]
        if "refusal" in about:
            return Refusal.model_validate_json(_of(about["refusal"], str))
        return Hello.model_validate_json(_of(about["hello"], str))
    except (KeyError, TypeError, ValidationError) as error:
        raise ModelError(f"a message that is not fedspu's ({_short(error)})") from None


def as_array(content: bytes) -> Array:
    """Bytes as one of Flower's arrays."""
    return Array("uint8", (len(content),), BYTES, content)


def _bytes(arrays: ArrayRecord, name: str) -> bytes | None:
    if name not in arrays:
        return None
    return _of(arrays[name].data, bytes)


def _of(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value


def _short(error: Exception) -> str:
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"[:200]
    return str(error)[:200]


def is_name(text: str) -> bool:
    """Whether a device can have this name."""
    return bool(re.fullmatch(NAME, text))


def fedspu_version() -> str:
    """The version of fedspu that is installed."""
    return version("fedspu")
