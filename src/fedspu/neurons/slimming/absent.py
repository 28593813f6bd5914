"""A full model in which some neurons do not exist."""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedspu.neurons.calls import Operations
from fedspu.neurons.tracing.rules.rule import argument, axes_of, name_of


def others(size: int, kept: Tensor) -> Tensor:
    """For each of so many channels, whether it is none of the kept ones."""
    is_other = torch.ones(size, dtype=torch.bool)
    is_other[kept.cpu()] = False
    return is_other


class Leaking(TorchFunctionMode):
    """Inside, functions like ReLU let a little through where they would give zero.

    So a channel is zero only if it is absent. To see which neurons are connected, any
    function of single values will do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_leaked = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, one like ReLU with a leak."""
        kwargs = kwargs or {}
        x = args[0] if args else kwargs.get("input")
        name = getattr(func, "__name__", "").rstrip("_")
        if (
            name not in _CLAMPS
            or not isinstance(x, Tensor)
            or not x.is_floating_point()
        ):
            return func(*args, **kwargs)
        self.has_leaked = True
        leak = x * 0.1
        out = func(*args, **kwargs)
        leaking = torch.where(out == 0, leak, out)
        return out.copy_(leaking) if out is x else leaking


_CLAMPS = {
    "relu", "relu6", "hardtanh", "clamp", "clamp_min", "clip", "threshold", "hardswish",
    "hardsigmoid",
}  # fmt: skip


class Patterns:
    """Finds out which channels of a tensor are absent.

    A tensor has absent channels along an axis if it is zero where one of the given
    patterns says so. Channels may be zero by themselves, too, and then fit the patterns
    of other groups: of several that fit, the one counts that a tensor fitted exactly
    just before.
    """

    def __init__(self, absent: Iterable[Tensor]) -> None:
        self._alike: dict[int, list[Tensor]] = defaultdict(list)  # by their length
        self._known: dict[int, tuple[Any, int, dict[int, list[Tensor]]]] = {}
        self._exact: dict[int, list[Tensor]] = defaultdict(list)  # the last one last
        for pattern in absent:
            alike = self._alike[len(pattern)]
            is_new = not any(torch.equal(pattern, other) for other in alike)
            if is_new and bool(pattern.any()):
                alike.append(pattern)

    def along(self, x: Tensor, dim: int) -> list[Tensor]:
        """The patterns of the channels that are absent along an axis; mostly one."""
        if not x.numel() or not self._alike.get(x.shape[dim]):
            return []
        ref, version, known = self._known.get(id(x), (None, 0, {}))
        if ref is None or ref() is not x or version != x._version:
            known = {}
            self._known[id(x)] = (weakref.ref(x), x._version, known)
        if dim not in known:
            known[dim] = self._along(x, dim)
        return known[dim]

    def _along(self, x: Tensor, dim: int) -> list[Tensor]:
        # Most patterns are ruled out by the first line and by the last one.
        ends = [x.movedim(dim, -1)[(at,) * (x.dim() - 1)] != 0 for at in (0, -1)]
        patterns = [
            pattern
            for pattern in self._alike[x.shape[dim]]
            if not any(bool((end & pattern).any()) for end in ends)
        ]
        if not patterns:
            return []
        others = [d for d in range(x.dim()) if d != dim]
        largest = torch.linalg.vector_norm(x, float("inf"), others) if others else x
        is_zero = largest == 0
        fitting = [pattern for pattern in patterns if bool(is_zero[pattern].all())]
        if bool(is_zero.all()) or not fitting:
            return []
        exact = [pattern for pattern in fitting if torch.equal(pattern, is_zero)]
        before = self._exact[len(is_zero)]
        before += exact
        known = [seen for seen in before if any(seen is fits for fits in fitting)]
        return known[-1:] or fitting


class Without(Operations):
    """Inside, channels that are absent count nowhere.

    They stay zero whatever is done to values one by one, and means, norms and the like
    are taken over the other channels.
    """

    def __init__(self, absent: Iterable[Tensor]) -> None:
        super().__init__()
        self.patterns = Patterns(absent)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        x = args[0] if args else None
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return func(*args, **kwargs)
        if name in SUMMARIES:
            for dim in axes_of(argument(func, args, kwargs, "dim"), x.dim()):
                if (left := self.left(x, dim)) is not None:
                    x = x.index_select(dim, left)
            return func(x, *args[1:], **kwargs)
        if name in _NORMS:
            dim, normed = _NORMS[name]
            left = self.left(x, dim % x.dim()) if -x.dim() <= dim < x.dim() else None
            if left is not None:
                return normed(func, args, left)
        out = func(*args, **kwargs)
        if name in _CHANNELWISE:
            self._empty(out[0], [x])
        elif torch.Tag.pointwise in func.tags and isinstance(out, Tensor):
            self._empty(out, [t for t in args if isinstance(t, Tensor)])
        return out

    def left(self, x: Tensor, dim: int) -> Tensor | None:
        """The channels along an axis that are not absent; None if none is absent."""
        patterns = self.patterns.along(x, dim)
        if not patterns:
            return None
        return (~torch.stack(patterns).any(0)).nonzero().flatten()

    def _empty(self, out: Tensor, given: list[Tensor]) -> None:
        """Set an output to zero where an operand is absent."""
        if not out.is_floating_point():
            return
        for x in given:
            missing = out.dim() - x.dim()
            for dim in range(x.dim()) if missing >= 0 else ():
                if (
                    out.shape[dim + missing] != x.shape[dim]
                    or not x.is_floating_point()
                ):
                    continue
                if (left := self.left(x, dim)) is not None:
                    where = others(x.shape[dim], left).nonzero().flatten()
                    out.index_fill_(dim + missing, where.to(out.device), 0)


SUMMARIES = {
    "mean", "var", "std", "var_mean", "std_mean", "amax", "amin", "max", "min",
    "median",
}  # fmt: skip
"""Operations in which a zero counts. (Softmax is none of them: it shares something out,
and fewer neurons would get more each.)"""

_CHANNELWISE = {
    "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm",
    "_native_batch_norm_legit_no_training", "_batch_norm_no_update",
}  # fmt: skip
"""Operations that treat channels one by one, besides those PyTorch calls pointwise."""


def _layer_norm(func: Any, args: tuple[Any, ...], left: Tensor) -> Any:
    """A norm over the last axis alone, over some of its channels."""
    x, shape, *values = args
    if len(shape) != 1:
        return func(*args)
    part = [v.index_select(0, left) if isinstance(v, Tensor) else v for v in values]
    out, *rest = func(x.index_select(-1, left), [len(left)], *part)
    return (torch.zeros_like(x).index_copy(-1, left, out), *rest)


def _group_norm(func: Any, args: tuple[Any, ...], left: Tensor) -> Any:
    """A group norm in which each group uses only its channels that are left."""
    x, weight, bias, number, channels, space, groups, eps = args
    out = torch.zeros_like(x)
    width = channels // groups
    for group in range(groups):
        seen = left[left // width == group]
        if len(seen):
            values = [
                v if v is None else v.index_select(0, seen) for v in (weight, bias)
            ]
            part = x.index_select(1, seen)
            normed = func(part, *values, number, len(seen), space, 1, eps)[0]
            out = out.index_copy(1, seen, normed)
    return out, x.new_empty(0), x.new_empty(0)


def _weight_norm(func: Any, args: tuple[Any, ...], left: Tensor) -> Any:
    """A batch norm of the rows of one weight, (1, rows, columns), over some columns."""
    x, *values = args
    if len(x) > 1 or x.dim() != 3:
        return func(*args)
    out, *rest = func(x.index_select(2, left), *values)
    return (torch.zeros_like(x).index_copy(2, left, out), *rest)


_NORMS: dict[str, tuple[int, Any]] = {
    "native_batch_norm": (2, _weight_norm),
    "native_layer_norm": (-1, _layer_norm),
    "_fused_rms_norm": (-1, _layer_norm),
    "native_group_norm": (1, _group_norm),
}
"""Norms over channels: the axis along which these lie, and a norm over some of them."""
