"""CIFAR-10's python batches, read without running any code in them.

A pickle is a program: it may name any function and have it called. Nothing here runs
one. This reader knows the few steps that Python and NumPy use to write a dictionary of
lists and an array; the names of NumPy's functions are only words to it. It refuses any
other step or name, and more steps or bytes than a batch needs.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspu.data import bounds
from fedspu.data.files import reason
from fedspu.errors import DataError

ARRAY = "numpy array"
KNOWN = {
    "numpy.core.multiarray._reconstruct": ARRAY,
    "numpy._core.multiarray._reconstruct": ARRAY,
    "numpy.ndarray": "class",
    "numpy.dtype": "dtype",
    "_codecs.encode": "encode",
}
"""The names that a batch may have -> what they stand for here."""


@dataclass(frozen=True)
class _Name:
    stands_for: str


@dataclass
class _Array:
    """An array as NumPy wrote it: its state is a tuple."""

    state: Any = None


@dataclass(frozen=True)
class _Kind:
    """The code of a dtype."""

    code: Any


class _Mark:
    """The start of what a later step takes all at once."""


class _Reader:
    """Takes the steps of a pickle one by one, on a stack of plain values."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self, content: bytes, most_steps: int) -> Any:
        """The value that the pickle describes."""
        for number, (step, argument, _) in enumerate(pickletools.genops(content)):
            if number == most_steps:
                raise ValueError(f"more than {most_steps:,} steps")
            if step.name == "STOP":
                break
            if step.name in PUSHED:
                self.stack.append(argument)
            elif step.name in STEPS:
                STEPS[step.name](self, argument)
            else:
                raise ValueError(f"the step {step.name}, which no batch has")
        return self.pop()

    def pop(self) -> Any:
        """The last value; refuses a mark."""
        if not self.stack or isinstance(self.stack[-1], _Mark):
            raise ValueError("a step has no value to take")
        return self.stack.pop()

    def last(self, kind: type) -> Any:
        """The last value, which must be of this kind; it stays."""
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise ValueError(f"a step finds no {kind.__name__.strip('_').lower()}")
        return self.stack[-1]

    def pop_marked(self) -> list[Any]:
        """The values after the last mark; both go."""
        for place in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[place], _Mark):
                found = self.stack[place + 1 :]
                del self.stack[place:]
                return found
        raise ValueError("a step has no mark")

    def several(self, number: int) -> None:
        values = [self.pop() for _ in range(number)]
        self.stack.append(tuple(reversed(values)))

    def name(self, full: str) -> None:
        if full not in KNOWN:
            raise ValueError(f"it asks for {full}")
        self.stack.append(_Name(KNOWN[full]))

    def append(self, values: list[Any]) -> None:
        self.last(list).extend(values)

    def set_items(self, items: list[Any]) -> None:
        table = self.last(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | bytes):  # the hash of others may take for ever
                raise ValueError("a key that is no text")
            table[key if isinstance(key, str) else key.decode("latin1")] = value

    def make_dict(self) -> None:
        items = self.pop_marked()
        self.stack.append({})
        self.set_items(items)

    def set_one(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def put(self, place: int) -> None:
        self.memo[place] = self.last(object)

    def get(self, place: int) -> None:
        if place not in self.memo:
            raise ValueError(f"it asks for value {place} before it has one")
        self.stack.append(self.memo[place])

    def call(self) -> None:
        """Stand in for the function that the pickle wants called."""
        arguments, name = self.pop(), self.pop()
        kind = name.stands_for if isinstance(name, _Name) else "nothing"
        if kind == ARRAY:
            self.stack.append(_Array())
        elif kind == "dtype" and isinstance(arguments, tuple) and arguments:
            self.stack.append(_Kind(arguments[0]))
        elif kind == "encode" and isinstance(arguments, tuple) and arguments:
            self.stack.append(_bytes(arguments[0]))
        elif kind == "encode":  # how Python 3 writes no bytes at all
            self.stack.append(b"")
        else:
            raise ValueError("it calls what is no function")

    def build(self) -> None:
        state = self.pop()
        made = self.last(object)
        if isinstance(made, _Array):
            made.state = state
        elif not isinstance(made, _Kind):  # byte order and the like: bytes have none
            raise ValueError("it changes what is no array")


PUSHED = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
    )
)
"""The steps that give a number or a text."""

STEPS: dict[str, Callable[[_Reader, Any], None]] = {
    "PROTO": lambda reader, version: None,
    "FRAME": lambda reader, length: None,
    "NONE": lambda reader, _: reader.stack.append(None),
    "NEWTRUE": lambda reader, _: reader.stack.append(True),
    "NEWFALSE": lambda reader, _: reader.stack.append(False),
    "MARK": lambda reader, _: reader.stack.append(_Mark()),
    "EMPTY_TUPLE": lambda reader, _: reader.several(0),
    "TUPLE1": lambda reader, _: reader.several(1),
    "TUPLE2": lambda reader, _: reader.several(2),
    "TUPLE3": lambda reader, _: reader.several(3),
    "TUPLE": lambda reader, _: reader.stack.append(tuple(reader.pop_marked())),
    "EMPTY_LIST": lambda reader, _: reader.stack.append([]),
    "LIST": lambda reader, _: reader.stack.append(reader.pop_marked()),
    "APPEND": lambda reader, _: reader.append([reader.pop()]),
    "APPENDS": lambda reader, _: reader.append(reader.pop_marked()),
    "EMPTY_DICT": lambda reader, _: reader.stack.append({}),
    "DICT": lambda reader, _: reader.make_dict(),
    "SETITEM": lambda reader, _: reader.set_one(),
    "SETITEMS": lambda reader, _: reader.set_items(reader.pop_marked()),
    "PUT": lambda reader, place: reader.put(place),
    "BINPUT": lambda reader, place: reader.put(place),
    "LONG_BINPUT": lambda reader, place: reader.put(place),
    "MEMOIZE": lambda reader, _: reader.put(len(reader.memo)),
    "GET": lambda reader, place: reader.get(place),
    "BINGET": lambda reader, place: reader.get(place),
    "LONG_BINGET": lambda reader, place: reader.get(place),
    "GLOBAL": lambda reader, name: reader.name(name.replace(" ", ".")),
    "STACK_GLOBAL": lambda reader, _: reader.name(
        ".".join(reversed([_text(reader.pop()), _text(reader.pop())]))
    ),
    "REDUCE": lambda reader, _: reader.call(),
    "BUILD": lambda reader, _: reader.build(),
}
"""Every other step -> what it does."""


def largest(num_images: int) -> int:
    """The most bytes that a batch of so many images has."""
    return num_images * bounds.PICKLE_BYTES + bounds.PICKLE_REST


def read_batch(
    content: bytes, file: PurePath, num_images: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The pixels (n, 3072) and the labels (n,) of one batch of ``num_images``."""
    try:
        if len(content) > largest(num_images):
            raise ValueError(f"more than {largest(num_images):,} bytes")
        steps = num_images * bounds.PICKLE_STEPS + bounds.PICKLE_REST
        found = _Reader().read(content, steps)
        if not isinstance(found, dict) or not {"data", "labels"} <= found.keys():
            raise ValueError("it holds no data and labels")
        return _pixels(found["data"]), _labels(found["labels"])
    # The parser of the standard library raises whatever a damaged pickle leads to.
    except Exception as error:
        raise DataError(
            f"{file}: expected a batch of CIFAR-10, a pickle of data and labels; "
            f"{reason(error)}. Download the file again"
        ) from None


def _pixels(data: Any) -> NDArray[np.uint8]:
    if not isinstance(data, _Array) or not isinstance(data.state, tuple):
        raise ValueError("its data is no array")
    _, shape, kind, is_fortran, content = data.state
    if not isinstance(kind, _Kind) or is_fortran:
        raise ValueError("its data is no array of bytes")
    if _text(kind.code) != "u1":
        raise ValueError(f"data of kind {_text(kind.code)}")
    pixels = np.frombuffer(_bytes(content), dtype=np.uint8)
    if not _are_small(shape, tuple) or len(shape) != 2:
        raise ValueError("its data has no shape (n, 3072)")
    return pixels.reshape(shape)


def _labels(labels: Any) -> NDArray[np.int64]:
    if not _are_small(labels, list):
        raise ValueError("its labels are no list of whole numbers")
    return np.array(labels, dtype=np.int64)


def _are_small(values: Any, kind: type) -> bool:
    """Whether this is a list or tuple of whole numbers, none of them large."""
    return isinstance(values, kind) and all(
        type(value) is int and abs(value) < 2**31
        for value in values  # type: ignore[attr-defined]  # a list or a tuple
    )


def _text(value: Any) -> str:
    if not isinstance(value, str | bytes):
        raise ValueError("a name that is no text")
    return value if isinstance(value, str) else value.decode("latin1")


def _bytes(value: Any) -> bytes:
    if not isinstance(value, str | bytes):
        raise ValueError("values that are no bytes")
    return value if isinstance(value, bytes) else value.encode("latin1")
