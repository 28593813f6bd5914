"""Calls in which neurons that a padded copy is without must not count, as zeros.

A mean or a norm over channels counts zeros, too, and what is added to a zero is no zero
any more. Which calls of a model those are is found by running a padded copy once;
that they are right is proved like all else (``proof.py``).
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedspu.errors import ModelError
from fedspu.neurons.slimming.absent import SUMMARIES, Patterns
from fedspu.neurons.slimming.sizes import calling_frame, line_of
from fedspu.neurons.table import Absence, Along, Call, Uncounted
from fedspu.neurons.tracing.rules.rule import axes_of

Masks = Mapping[Along, Tensor]
"""For each of some channels, whether it is absent."""

Kept = dict[int, tuple[int, list[int]]]
"""For each of some axes, how long it is, and where the channels are that count.

Numbers, not tensors: what is exported must not depend on data."""


def settled(calls: Uncounted, masks: Masks) -> dict[Call, Kept]:
    """The calls in which some channels are absent, and those that are not."""
    kept = {call: _kept(absences, masks) for call, absences in calls.items()}
    return {call: axes for call, axes in kept.items() if axes}


def _kept(absences: Iterable[Absence], masks: Masks) -> Kept:
    gone: dict[int, Tensor] = {}
    for axis, along in absences:
        if (mask := masks.get(along)) is not None:
            gone[axis] = gone[axis] | mask if axis in gone else mask
    return {
        axis: (len(mask), (~mask).nonzero()[:, 0].tolist())
        for axis, mask in gone.items()
    }


class Uncounting(TorchFunctionMode):
    """Inside, absent neurons of a model do not count in some calls."""

    def __init__(self, model: nn.Module, calls: Mapping[Call, Kept]) -> None:
        super().__init__()
        self.calls = calls
        self.operations = {call.operation for call in calls}
        self.paths = {id(layer): path for path, layer in model.named_modules()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation."""
        kwargs, name = kwargs or {}, _name(func)
        if name in self.operations and (kept := self.calls.get(self.call(name))):
            return _run(func, name, args, kwargs, kept)
        return func(*args, **kwargs)

    def call(self, operation: str) -> Call:
        """Where in the model's code the present operation is."""
        frame = calling_frame(sys._getframe(1))
        line = line_of(frame)
        while frame is not None:
            path = self.paths.get(id(frame.f_locals.get("self")))
            if path is not None:
                return Call(path, line, operation)
            frame = frame.f_back
        return Call("", line, operation)


class Watching(Uncounting):
    """The same, and finds out which calls these are: ``seen`` has them."""

    def __init__(self, model: nn.Module, masks: Masks) -> None:
        super().__init__(model, {})
        self.seen: dict[Call, tuple[Absence, ...]] = {}
        self.masks = masks
        self._patterns = Patterns(masks.values())
        self._along = {id(mask): along for along, mask in masks.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and note if absent neurons would have counted."""
        kwargs, name = kwargs or {}, _name(func)
        given = [t for t in args if isinstance(t, Tensor) and t.is_floating_point()]
        if not given or not (name in _COUNTING or is_pointwise(name)):
            return func(*args, **kwargs)
        absences = [list(self._absences(x)) for x in given]
        if name in _COUNTING:
            axes = _axes(name, args, kwargs)
            found = tuple(a for a in absences[0] if a[0] in axes)
            out = _run(func, name, args, kwargs, _kept(found, self.masks))
        else:
            out = func(*args, **kwargs)
            found = tuple(dict.fromkeys(a for some in absences for a in some))
            found = tuple(a for a in found if self._is_filled(out, a))
            out = _run(lambda *_: out, name, args, {}, _kept(found, self.masks))
        call = self.call(name)
        if self.seen.setdefault(call, found) != found:
            raise ModelError(f"{call.line}: neurons are absent in some calls alone")
        return out

    def _absences(self, x: Tensor) -> Iterator[Absence]:
        for dim in range(x.dim()):
            for pattern in self._patterns.along(x, dim):
                yield dim - x.dim(), self._along[id(pattern)]

    def _is_filled(self, out: Any, absence: Absence) -> bool:
        """Whether something stands in the place of absent neurons."""
        axis, along = absence
        mask = self.masks[along]
        return (
            isinstance(out, Tensor)
            and out.is_floating_point()
            and out.dim() >= -axis
            and out.shape[axis] == len(mask)
            and bool(out.index_select(axis, mask.nonzero()[:, 0].to(out.device)).any())
        )


def _name(func: Any) -> str:
    """The name of a function, as PyTorch's operations are called."""
    name: str = getattr(func, "__name__", "").strip("_")
    return {"rdiv": "div", "rtruediv": "div", "truediv": "div"}.get(name, name)


@cache
def is_pointwise(name: str) -> bool:
    """Whether an operation treats values one by one."""
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags
        for overload in packet.overloads()
    )


# Operations in which a zero counts ----------------------------------------------------

Counting = Callable[[Any, tuple[Any, ...], dict[str, Any], dict[int, list[int]]], Any]
"""Runs a function with these arguments over the kept channels of some axes."""


def _run(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], kept: Kept
) -> Any:
    """Run an operation in which only some channels count."""
    if not kept:
        return func(*args, **kwargs)
    if name in _COUNTING:
        return _COUNTING[name](func, args, kwargs, _checked(args[0], kept))
    out = func(*args, **kwargs)
    for axis, left in _checked(out, kept).items():
        where = torch.ones(out.shape[axis], dtype=torch.bool)
        where[left] = False
        where = where.to(out.device).view(-1, *(1,) * (-axis - 1))
        out = (out.masked_fill_ if out is args[0] else out.masked_fill)(where, 0)
    return out


def _checked(x: Tensor, kept: Kept) -> dict[int, list[int]]:
    """The channels that count, if the tensor has as many as it should."""
    for axis, (size, _) in kept.items():
        if x.shape[axis] != size:
            raise ModelError(
                f"a slim copy expects {size} channels where it was given "
                f"{tuple(x.shape)}; make it again from this version of the model's code"
            )
    return {axis: left for axis, (_, left) in kept.items()}


def _some(x: Tensor, axis: int, left: list[int]) -> Tensor:
    return x.index_select(axis, torch.tensor(left, device=x.device))


def _axes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """The axes over which an operation counts, from the end."""
    ndim = args[0].dim()
    if name == "group_norm":
        return {1 - ndim}
    if name == "batch_norm":  # of the rows of one weight, (1, rows, columns)
        return {-1} if ndim == 3 and len(args[0]) == 1 else set()
    if name in ("layer_norm", "rms_norm"):
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        return {-1} if len(shape) == 1 else set()
    chosen = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if isinstance(chosen, bool | Tensor):  # std(x, unbiased), max(x, y)
        return set(range(-ndim, 0)) if isinstance(chosen, bool) else set()
    return {d - ndim for d in axes_of(chosen, ndim)}


def _summary(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kept: dict[int, list[int]]
) -> Any:
    x, *rest = args
    for axis, left in kept.items():
        x = _some(x, axis, left)
    return func(x, *rest, **kwargs)


def _layer_norm(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kept: dict[int, list[int]]
) -> Any:
    """A norm over the last axis."""

    def part(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _some(value, -1, kept[-1])
        return value if isinstance(value, float | None) else (len(kept[-1]),)

    out = func(*map(part, args), **{name: part(v) for name, v in kwargs.items()})
    return _spread(out, args[0], -1, kept[-1])


def _weight_norm(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kept: dict[int, list[int]]
) -> Any:
    """A batch norm of the rows of one weight, over some of its columns."""
    out = func(_some(args[0], -1, kept[-1]), *args[1:], **kwargs)
    return _spread(out, args[0], -1, kept[-1])


def _group_norm(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kept: dict[int, list[int]]
) -> Any:
    """A group norm in which each group uses only its channels that are kept."""
    names = ("input", "num_groups", "weight", "bias", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, width = given["input"], given["input"].shape[1] // given["num_groups"]
    (left,) = kept.values()
    parts = []
    for group in range(given["num_groups"]):
        if seen := [channel for channel in left if channel // width == group]:
            own = {
                name: _some(v, int(name == "input"), seen)
                for name, v in given.items()
                if isinstance(v, Tensor)
            }
            parts.append(func(**{**given, **own, "num_groups": 1}))
    return _spread(torch.cat(parts, 1), x, 1, left)


def _spread(part: Tensor, x: Tensor, dim: int, left: list[int]) -> Tensor:
    """Channels put back to their places along an axis, with zeros beside them."""
    where = torch.tensor(left, device=part.device)
    return part.new_zeros(x.shape).index_copy(dim, where, part)


_COUNTING: dict[str, Counting] = {
    **dict.fromkeys(SUMMARIES, _summary),
    "layer_norm": _layer_norm,
    "rms_norm": _layer_norm,
    "group_norm": _group_norm,
    "batch_norm": _weight_norm,
}
