"""Which operations of a forward pass its output depends on."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from fedspu.neurons.calls import Operations


class Live(Operations):
    """Inside, it is recorded which operations read the results of which others."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.reads: list[set[int]] = []
        self.live: set[int] = set()
        self._maker: dict[int, tuple[Any, int]] = {}
        self._writers: dict[int, set[int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = list(tensors_in((args, kwargs or {})))
        read = set().union(*map(self._made_by, given))
        shared = {memory_of(tensor) for tensor in given}
        out = func(*args, **(kwargs or {}))
        number = len(self.names)
        self.names.append(func.overloadpacket.__name__)
        self.reads.append(read)
        for tensor in tensors_in(out):
            self._maker[id(tensor)] = (weakref.ref(tensor), number)
            memory = memory_of(tensor)
            if memory not in shared:
                self._writers[memory] = {number}
            elif self.names[-1].endswith("_"):
                self._writers.setdefault(memory, set()).add(number)
        return out

    def _made_by(self, tensor: Tensor) -> set[int]:
        ref, number = self._maker.get(id(tensor), (None, -1))
        own = {number} if ref is not None and ref() is tensor else set()
        return own | self._writers.get(memory_of(tensor), set())

    def end(self, outputs: Iterable[Tensor]) -> None:
        """Find all operations on which these outputs depend."""
        todo = [number for out in outputs for number in self._made_by(out)]
        while todo:
            number = todo.pop()
            if number not in self.live:
                self.live.add(number)
                todo.extend(self.reads[number])
        self._maker.clear()
        self._writers.clear()

    def has(self, number: int, name: str) -> bool:
        """Whether an operation matters; one that was not there before does."""
        is_same = number < len(self.names) and self.names[number] == name
        return not is_same or number in self.live


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors among an operation's arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def memory_of(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
