"""Operations that move data, and labels with it."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fedspu.neurons.tracing.classes import NONE
from fedspu.neurons.tracing.follow import (
    Follower,
    Operand,
    Slots,
    dims,
    window,
)
from fedspu.neurons.tracing.live import tensors_in
from fedspu.neurons.tracing.rules.rule import (
    argument,
    last_aligned,
    name_of,
    rule,
)


@rule(
    "view _unsafe_view reshape _reshape_alias permute transpose t numpy_T expand "
    "slice select unsqueeze squeeze split split_with_sizes unsafe_split "
    "unsafe_split_with_sizes chunk unsafe_chunk unbind index_select index "
    "_unsafe_index flip roll repeat clone alias detach unfold im2col diagonal "
    "tril triu gather pixel_shuffle pixel_unshuffle channel_shuffle "
    "repeat_interleave rot90 take masked_select squeeze_copy narrow movedim "
    "take_along_dim diag_embed ravel native_channel_shuffle flatten unflatten "
    "tile set_data trace view_copy alias_copy swapaxes moveaxis"
)
def _moved(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Labels move as the values do."""
    x = args[0]
    outs = list(tensors_in(out))
    own = now.of(x).slots
    results: list[Slots] = [[] for _ in outs]
    for slot in own:
        moved = _labels_moved(slot, x, func, args[1:], kwargs, outs)
        for found, result in zip(results, moved, strict=True):
            found.append(result)
    overlapped = {
        (a, b) for a in range(len(own)) for b in range(a) if dims(own[a]) & dims(own[b])
    }
    raws: list[Slots] = [[] for _ in outs]
    for slot in now.of(x).raw:
        moved = _labels_moved(slot, x, func, args[1:], kwargs, outs)
        for raw, result in zip(raws, moved, strict=True):
            raw.append(_narrowed(result))
    for tensor, slots, raw in zip(outs, results, raws, strict=True):
        now.put(tensor, _apart(now, slots, overlapped), [x], raw)


def _labels_moved(
    slot: Tensor, x: Tensor, func: Any, args: Any, kwargs: Any, outs: list[Tensor]
) -> list[Tensor]:
    """The labels of all outputs, if those of the operand are these."""
    name = name_of(func)
    if name in _SAME:
        return [slot]
    if name in _VIEWS and x.numel() == outs[0].numel():
        return [_viewed(slot, x.shape, outs[0].shape)]
    return list(tensors_in(_plain(func)(slot.expand(x.shape), *args, **kwargs)))


_SAME = {"clone", "alias", "detach", "alias_copy"}
_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy"}


def _viewed(slot: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
    """The slot of a view; it stays small along axes on which it does not depend.

    The shapes are cut into pieces of as many elements each: the axes of a piece become
    those of the other shape's piece, whatever the rest does.
    """
    if 0 in old:
        return slot.expand(old).reshape(new)
    before: list[int] = []
    after: list[int] = []
    a = b = 0
    while a < len(old) or b < len(new):
        first_a, first_b = a, b
        a, b = min(a + 1, len(old)), min(b + 1, len(new))
        while prod(old[first_a:a]) != prod(new[first_b:b]):
            if prod(old[first_a:a]) < prod(new[first_b:b]):
                a += 1
            else:
                b += 1
        is_wide = any(size > 1 for size in slot.shape[first_a:a])
        before += old[first_a:a] if is_wide else [1] * (a - first_a)
        after += new[first_b:b] if is_wide else [1] * (b - first_b)
    return slot.expand(before).reshape(after)


def _narrowed(labels: Tensor) -> Tensor:
    """The same labels, of size one along the axes on which they do not depend."""
    for dim, size in enumerate(labels.shape):
        first = labels.narrow(dim, 0, min(size, 1))
        if size > 1 and bool((labels == first).all()):
            labels = first
    return labels


_COPYING = {
    "view": torch.ops.aten.reshape.default,
    "_unsafe_view": torch.ops.aten.reshape.default,
    "_reshape_alias": lambda t, size, stride: t.reshape(size),
}


def _plain(func: Any) -> Any:
    """The operation, in a form that works on labels in any memory layout."""
    return _COPYING.get(name_of(func), func)


@rule("as_strided as_strided_copy")
def _strided(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Any window of a tensor's memory."""
    x = args[0]
    slots = []
    for slot in now.of(x).slots:
        size = x.untyped_storage().nbytes() // x.element_size()
        memory = torch.full((size,), NONE)
        window(memory, x).copy_(slot.expand(x.shape))
        slots.append(window(memory, out))
    now.put(out, slots, [x])


def _apart(now: Follower, slots: Slots, overlapped: set[tuple[int, int]]) -> Slots:
    """Of two slots that came to lie along one axis, keep the one with more members."""
    tidied = [now.tidy(slot) for slot in slots]
    for a in range(len(tidied)):
        for b in range(a):
            one, two = tidied[a], tidied[b]
            if one is None or two is None or (a, b) in overlapped:
                continue
            if not dims(one) & dims(two):
                continue
            if one.shape == two.shape and torch.equal(one, two):
                tidied[a] = None
                continue
            number = now.classes.num_members()
            counts = [int(number[s[s >= 0].unique()].sum()) for s in (one, two)]
            weaker = a if counts[0] < counts[1] else b
            small = one if weaker == a else two  # of the same neurons as the slot
            now.tie(small, range(small.dim()))
            tidied[weaker] = None
    return [slot for slot in tidied if slot is not None]


@rule("constant_pad_nd")
def _padded(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    x, pads = args[0], args[1]
    slots = [func(slot.expand(x.shape), pads, NONE) for slot in now.of(x).slots]
    now.put(out, slots, [x])


@rule("view_as_complex")
def _as_complex(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    slots = now.tie_all(args[0], [args[0].dim() - 1])
    now.put(out, [slot.select(-1, 0) for slot in slots], args)


@rule("view_as_real")
def _as_real(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    now.put(out, [slot.unsqueeze(-1) for slot in now.of(args[0]).slots], args)


@rule("cat concat concatenate stack")
def _joined(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Pieces side by side; neurons that lie across the seam are the same in all."""
    pieces = list(args[0])
    dim = argument(func, args, kwargs, "dim") or 0
    sides = [now.operand(piece) for piece in pieces]
    if name_of(func) == "stack":
        dim %= out.dim()
        sides = [side.lifted(lambda t: t.unsqueeze(dim)) for side in sides]
    dim %= max(out.dim(), 1)
    sides = [s for s in sides if len(s.shape) == out.dim() and s.shape[dim] > 0]
    keys = dict.fromkeys(dims(s) - {dim} for side in sides for s in side.slots)
    slots = []
    for key in keys:
        parts = [_part(now, side, key, dim) for side in sides]
        if not any(dim in dims(part) for part in parts) and key:
            for part in parts[1:]:
                now.classes.join(parts[0], part)
            slots.append(torch.stack(torch.broadcast_tensors(*parts)).amax(0))
        else:
            slots.append(
                torch.cat(
                    [
                        part.expand(
                            [
                                n if d == dim else max(p.shape[d] for p in parts)
                                for d, n in enumerate(side.shape)
                            ]
                        )
                        for part, side in zip(parts, sides, strict=True)
                    ],
                    dim,
                )
            )
    now.put(out, slots, pieces)


def _part(now: Follower, side: Operand, key: frozenset[int], dim: int) -> Tensor:
    """A piece's slot along the given axes (and the seam); a new one if it has none."""
    for slot in side.slots:
        if dims(slot) - {dim} == key and (key or dim in dims(slot)):
            return slot
    shape = (1,) * len(side.shape)
    if all(side.is_even(d) for d in key | {dim}):
        return torch.full(shape, NONE)
    return now.classes.new(1).view(shape)


@rule("copy")
def _copied(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    target, source = args[:2]
    side = last_aligned(now.operand(source), target.dim())
    now.put(out, side.slots, [target, source])


@rule("index_put _index_put_impl _unsafe_index_put")
def _put_at(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Values go to some places; neurons may only lie along the last, whole axes."""
    x = args[0]
    values = args[2]
    indices = list(args[1])
    used = [d for d, index in enumerate(indices) if index is not None]
    taken = sum(
        indices[d].dim() if indices[d].dtype in (torch.bool, torch.uint8) else 1
        for d in used
    )
    trailing = x.dim() - (used[0] + taken if used else 0)
    if used != list(range(len(used))):
        trailing = 0
    sides = []
    for tensor in (x, values):
        first = max(tensor.dim() - trailing, 0)
        slots = now.tie_all(tensor, range(first))
        missing = (1,) * (trailing - (tensor.dim() - first))
        flat = tensor.reshape(-1, *missing, *tensor.shape[first:])
        slots = [s.reshape(1, *missing, *s.shape[first:]) for s in slots]
        sides.append(Operand(slots, tuple(flat.shape), flat))
    slots = now.combine(sides)
    slots = [s.reshape((1,) * (x.dim() - trailing) + tuple(s.shape[1:])) for s in slots]
    now.put(out, slots, [x, values])


@rule(
    "scatter scatter_add scatter_reduce index_add index_copy index_reduce "
    "slice_scatter select_scatter index_fill"
)
def _scattered(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Rows go to other rows; neurons may only lie along the other axes."""
    x, name = args[0], name_of(func)
    dim = argument(func, args, kwargs, "dim") or 0
    dim %= max(x.dim(), 1)
    source = argument(func, args, kwargs, "src", "source")
    sides = []
    for tensor in (x, source):
        if not isinstance(tensor, Tensor):
            continue
        if name == "select_scatter" and tensor is source:
            tensor = tensor.unsqueeze(dim)
        slots = now.tie_all(tensor, [dim])
        sides.append(Operand(slots, tuple(tensor.shape), tensor))
    now.put(out, now.combine(sides), [x, source])
