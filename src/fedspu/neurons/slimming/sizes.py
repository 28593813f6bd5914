"""Sizes that a model's code writes down, worked out anew in a slim copy.

``x.reshape(batch, tokens, channels)`` fails where ``channels`` is the width of
something else that was cut. With -1 instead, PyTorch works the size out from what is
there: the same in the full model, and right in a slim copy. Which size of which line
that is, is found by trial, and proved like all else (``proof.py``).
"""

import linecache
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from math import prod
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedspu.errors import ModelError

RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape}

Resized = tuple[int | None, int | None]
"""An axis that is to be as long as in what a line reshapes, one that is worked out."""


@dataclass(frozen=True)
class Reshape:
    """The sizes that a line asked for, and the shape of what it was given."""

    asked: tuple[int, ...]
    given: tuple[int, ...]

    def kept(self) -> set[int]:
        """If one is worked out, the axes that stay as long as they were.

        Counted from the front, and from the end (-1, -2 ...) if their number changes.
        """
        if -1 not in self.asked:
            return set()
        others = -prod(self.asked)
        got = [prod(self.given) // max(1, others) if n < 0 else n for n in self.asked]
        number = min(len(got), len(self.given))
        first = 0 if len(got) == len(self.given) else -number
        return {i for i in range(first, number) if got[i] == self.given[i]}


@dataclass(frozen=True)
class Mismatch:
    """A line whose sizes do not fit a slim copy, and what it does in the full model."""

    line: str
    now: Reshape
    usual: Reshape

    def mended(self, sizes: Collection[int]) -> list[Resized]:
        """How it might fit; also by sizes in the code, if groups of those were cut."""
        asked, usual = self.now.asked, self.usual.asked
        if len(asked) != len(usual):
            return []
        wrong = [axis for axis, size in enumerate(asked) if size != usual[axis]]
        wrong = wrong or [axis for axis, size in enumerate(usual) if size in sizes]
        wrong.reverse()  # channels come last in most
        if -1 not in asked:
            return [(None, axis) for axis in wrong if self._divides(axis)]
        free, lost = asked.index(-1), self.usual.kept() - self.now.kept()
        found: list[Resized] = [(axis, None) for axis in sorted(lost - {free})]
        if free in lost:
            found += [(free, axis) for axis in wrong]
        return found

    def _divides(self, axis: int) -> bool:
        others = self.now.asked[:axis] + self.now.asked[axis + 1 :]
        return prod(self.now.given) % max(1, prod(others)) == 0


class Sizes(TorchFunctionMode):
    """Inside, lines of a model's code that reshape may get other sizes."""

    def __init__(self, resized: Mapping[str, Resized]) -> None:
        super().__init__()
        self.resized = resized

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, a reshape perhaps with other sizes."""
        if func not in RESHAPES or kwargs or len(args) < 2:
            return func(*args, **(kwargs or {}))
        x, *sizes = args
        if isinstance(sizes[0], tuple | list):
            sizes = list(sizes[0])
        if not sizes or isinstance(sizes[0], torch.dtype):  # a number; another type
            return func(*args)
        line = line_of(calling_frame(sys._getframe(1)))
        kept, inferred = self.resized.get(line, (None, None))
        if kept is not None:
            sizes[kept] = x.shape[kept]
        if inferred is not None:
            sizes[inferred] = -1
        return self.reshape(func, x, sizes, line)

    def reshape(self, func: Any, x: Tensor, sizes: list[int], line: str) -> Any:
        """Run a reshape."""
        return func(x, sizes)


class WatchedSizes(Sizes):
    """The same, and every reshape is noted, also those that do not fit a slim copy.

    ``usual`` are the reshapes of the full model, by line, in their order.
    """

    def __init__(
        self,
        resized: Mapping[str, Resized],
        usual: Mapping[str, list[Reshape]] = MappingProxyType({}),
    ) -> None:
        super().__init__(resized)
        self.usual = usual
        self.seen: dict[str, list[Reshape]] = defaultdict(list)
        self.mismatches: list[Mismatch] = []

    def reshape(self, func: Any, x: Tensor, sizes: list[int], line: str) -> Any:
        """Run a reshape, and note it."""
        now, seen = Reshape(tuple(sizes), tuple(x.shape)), self.seen[line]
        seen.append(now)
        usual = self.usual.get(line, ())[len(seen) - 1 : len(seen)]
        mismatches = [Mismatch(line, now, then) for then in usual]
        try:
            out = func(x, sizes)
        except RuntimeError:
            self.mismatches += mismatches
            raise
        if usual and -1 in now.asked and usual[0].kept() - now.kept():
            self.mismatches += mismatches  # it folds examples or tokens together
        return out


def calling_frame(frame: FrameType | None) -> FrameType | None:
    """The first frame, from this one upwards, that is not on the way to a mode."""
    while frame is not None and frame.f_globals.get("__name__") in _ON_THE_WAY:
        frame = frame.f_back
    return frame


_ON_THE_WAY = {
    "torch.overrides", "torch.functional", "torch.nn.functional", "torch._tensor",
    "torch._jit_internal", __name__, "fedspu.neurons.slimming.uncounted",
}  # fmt: skip
"""Code between a model's and a mode of ours."""


def line_of(frame: FrameType | None) -> str:
    """The place of a frame in the code, as a table names it."""
    if frame is None:
        return ""
    code = frame.f_code
    return f"{frame.f_globals.get('__name__')}.{code.co_qualname}:{frame.f_lineno}"


def source_of(line: str) -> str:
    """The text of a line of a model's code; "" if its file is not known.

    Nothing is imported to find it.
    """
    place, _, number = line.rpartition(":")
    names, file, folders = place.split("."), None, None
    for end in range(1, len(names)):
        found = PathFinder.find_spec(".".join(names[:end]), folders)
        if found is None:  # from here on, a class
            break
        file, folders = found.origin, found.submodule_search_locations
        if folders is None:
            break
    return linecache.getline(file, int(number)).strip() if file else ""


def check_lines(source_by_line: Mapping[str, str]) -> None:
    """Refuse code that differs from that with which a table was made.

    Its lines are named by their numbers: in another version of a library, another line
    may have the same one.
    """
    for line, text in source_by_line.items():
        now = source_of(line)
        if text and now and now != text:
            raise ModelError(
                f"{line}: here the line is {now!r}, but the model's neurons were "
                f"mapped with code in which it is {text!r}; install the version of "
                f"{line.partition('.')[0]} with which the run was begun"
            )


def resize_lines(model: nn.Module, resized: Mapping[str, Resized]) -> None:
    """Let lines of a model have other sizes whenever it is called."""
    if resized:
        hook = _Hook(resized)
        model.register_forward_pre_hook(hook.enter)
        model.register_forward_hook(hook.leave, always_call=True)


class _Hook:
    """Lines have other sizes while a model runs."""

    def __init__(self, resized: Mapping[str, Resized]) -> None:
        self.resized = resized
        self.modes: list[Sizes] = []  # of passes under way

    def enter(self, model: nn.Module, given: Any) -> None:
        """Before the model runs."""
        self.modes.append(Sizes(self.resized))
        self.modes[-1].__enter__()  # type: ignore[no-untyped-call]  # PyTorch's

    def leave(self, model: nn.Module, given: Any, out: Any) -> None:
        """After it, also if it failed."""
        mode = self.modes.pop()
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # as above
