"""Find out which of a model's groups a slim copy can do without.

A slim copy must give what the full model gives if the dropped neurons did not exist:
their entries are zero, and norms, means and the like do not count them. A copy may fail
because the model has the number of its neurons written down somewhere.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedspu.errors import ModelError
from fedspu.neurons.calls import Operations, restored, without_shortcuts
from fedspu.neurons.probe import NUM_QUICK, Probe, distance, tolerance
from fedspu.neurons.proof import failing, pattern_of, without_numbers
from fedspu.neurons.slim import cut_model, slimmable
from fedspu.neurons.table import Active, NeuronGroup, Neurons
from fedspu.neurons.tracing.rules.rule import argument, axes_of, name_of


def prove_slim(probe: Probe, table: Neurons) -> Neurons:
    """The same table, with ``slim`` False for the groups that cannot be sliced."""
    candidates = [group for group in table.groups if group.slim and group.size > 1]
    # With all examples: of few, a channel may be zero although it is not absent.
    if not probe.shake(NUM_QUICK):
        stuck = {group.name for group in candidates}
    elif _slims(probe, table, candidates):
        return table
    else:
        stuck = set()
        work = partial(_slim_together, probe, table)
        for alike in failing(_alike(candidates), work, is_sure=True):
            failed = _stuck(probe, table, alike)
            counted = _counted(probe, table, [g for g in alike if g.name in failed])
            table = _with(table, counted)
            stuck |= failed - {group.name for group in counted}
        rest = [g for g in table.groups if g in candidates or g.counts]
        rest = [group for group in rest if group.name not in stuck]
        if not _slims(probe, table, rest):  # each can be sliced, but not all at once
            together: list[NeuronGroup] = []
            for alike in _alike(rest):
                if _slims(probe, table, [*together, *alike]):
                    together += alike
            stuck |= {group.name for group in rest if group not in together}
    return _with(
        table, [replace(g, slim=False) for g in table.groups if g.name in stuck]
    )


def _alike(groups: list[NeuronGroup]) -> list[list[NeuronGroup]]:
    """Groups that differ only in the numbers in their names: the blocks of a model."""
    found: dict[Any, list[NeuronGroup]] = defaultdict(list)
    for group in groups:
        found[tuple(pattern_of(group))].append(group)
    return list(found.values())


def _slim_together(
    probe: Probe, table: Neurons, classes: list[list[NeuronGroup]]
) -> bool:
    return _slims(probe, table, [group for alike in classes for group in alike])


def _stuck(
    probe: Probe, table: Neurons, alike: list[NeuronGroup], is_sure: bool = True
) -> set[str]:
    """Those of some groups that cannot be sliced; alike groups mostly fail together.

    ``is_sure`` says that all of them together cannot be.
    """
    if not is_sure and _slims(probe, table, alike):
        return set()
    first, rest = alike[0], alike[1:]
    if not rest or not _slims(probe, table, [first]):
        return {group.name for group in alike}
    half = len(rest) // 2
    parts = [part for part in (rest[:half], rest[half:]) if part]
    return set().union(*(_stuck(probe, table, part, False) for part in parts))


# Numbers of neurons that a model stores -----------------------------------------------

MOST_CHOICES = 8
MOST_LAYERS = 60


def _counted(
    probe: Probe, table: Neurons, alike: list[NeuronGroup]
) -> list[NeuronGroup]:
    """The same groups with their ``counts``; none if no stored numbers explain them."""
    stored = [_stored(probe, group) for group in alike]
    keys = sorted(stored[0]) if stored else []
    choices = [keys, *([k for k in keys if k != key] for key in keys if len(keys) > 1)]
    choices += [[key] for key in keys if len(keys) > 2]
    for choice in choices[:MOST_CHOICES] if keys else ():
        counted = [
            replace(group, counts=tuple(found[key] for key in choice if key in found))
            for group, found in zip(alike, stored, strict=True)
        ]
        if _slims(probe, _with(table, counted), counted):
            return counted
    return []


def _stored(probe: Probe, group: NeuronGroup) -> dict[str, str]:
    """The integers near a group that may be its size: their paths, by a short name."""
    paths = [name.split(".")[:-1] for name in group.tensors if name not in probe.plain]
    common = paths[0]
    for path in paths:
        while common != path[: len(common)]:
            common = common[:-1]
    prefix = ".".join(common)
    layers = dict(probe.model.get_submodule(prefix).named_modules(prefix=prefix))
    if len(layers) > MOST_LAYERS:
        return {}
    sizes = {group.size} | {group.size * axis.repeat for axis in group.axes}
    return {
        f"{without_numbers(path.removeprefix(prefix))}.{key}": f"{path}.{key}".lstrip(
            "."
        )
        for path, layer in layers.items()
        if not type(layer).__module__.startswith("torch.")
        for key, value in vars(layer).items()
        if type(value) is int and value in sizes
    }


def _with(table: Neurons, changed: list[NeuronGroup]) -> Neurons:
    """The same table with other groups of the same names."""
    by_name = {group.name: group for group in changed}
    groups = tuple(by_name.get(group.name, group) for group in table.groups)
    return replace(table, groups=groups)


# Whether a slim copy is right ---------------------------------------------------------


def _slims(probe: Probe, table: Neurons, groups: list[NeuronGroup]) -> bool:
    """Whether a slim copy without a random half of these neurons is right.

    A half may happen to keep shuffled channels in step, so these need more draws.
    """
    is_shuffled = any(axis.index for group in groups for axis in group.axes)
    return all(
        _is_slim_right(probe, table, _drawn(table, groups, is_half=draw == 0))
        for draw in range(5 if is_shuffled else 1)
    )


def _drawn(table: Neurons, groups: list[NeuronGroup], is_half: bool) -> Active:
    """A random half of the neurons of these groups, or another random part."""
    active = table.everything()
    for group in groups:
        number = group.size // 2 if is_half else int(torch.randint(group.size, ()))
        part = torch.randperm(group.size)[: max(1, number)]
        active[group.name] = part.sort().values
    return active


def _is_slim_right(probe: Probe, table: Neurons, active: Active) -> bool:
    """Whether a slim copy with these neurons agrees with the full model."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with restored(probe.model):
                cut_model(probe.model, table, slimmable(table, active))
                outputs = probe.run()
            if [out.shape for out in outputs] != [out.shape for out in probe.output]:
                return False
            wanted = _output_without(probe, table, active)
    except ModelError:
        return False
    return all(map(_agree, outputs, wanted, probe.output))


def _agree(slim: Tensor, wanted: Tensor, full: Tensor) -> bool:
    """Whether the outputs agree, measured by how much the dropped neurons matter."""
    if not full.numel():
        return True
    allowed = tolerance(full)
    matters = 1e-4 * distance(wanted, full) + 1e-3 * allowed
    return bool(distance(slim, wanted) <= torch.minimum(allowed, matters))


def _output_without(probe: Probe, table: Neurons, active: Active) -> list[Tensor]:
    """The output of the full model if the dropped neurons did not exist."""
    absent = [
        _others(group.size, active[group.name])
        for group in table.groups
        if len(active[group.name]) < group.size
    ]
    with probe.trying(probe.tensors):
        for name, tensor in probe.tensors.items():
            places = {}
            for dim, size in enumerate(tensor.shape):
                kept = table.active_along(active, name, dim, size)
                if kept is not None and len(kept) < size:
                    absent.append(_others(size, kept))
                    places[dim] = absent[-1].nonzero().flatten()
            if places:
                probe.blank(name, places)
        with without_shortcuts(), Without(absent):
            return probe.run()


def _others(size: int, kept: Tensor) -> Tensor:
    is_other = torch.ones(size, dtype=torch.bool)
    is_other[kept.cpu()] = False
    return is_other


# A full model in which some neurons do not exist --------------------------------------


class Without(Operations):
    """Inside, channels that are absent count nowhere.

    A tensor has absent channels along an axis if it is zero exactly where one of the
    given patterns says so. They stay zero whatever is done to values one by one, and
    means, norms and the like are taken over the other channels.
    """

    def __init__(self, absent: Iterable[Tensor]) -> None:
        super().__init__()
        self.patterns: dict[int, list[Tensor]] = defaultdict(list)
        for pattern in absent:
            alike = self.patterns[len(pattern)]
            if not any(torch.equal(pattern, other) for other in alike):
                alike.append(pattern)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        x = args[0] if args else None
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return func(*args, **kwargs)
        if name in _SUMMARIES:
            for dim in axes_of(argument(func, args, kwargs, "dim"), x.dim()):
                if (left := self.left(x, dim)) is not None:
                    x = x.index_select(dim, left)
            return func(x, *args[1:], **kwargs)
        if name in _NORMS:
            dim, normed = _NORMS[name]
            if (left := self.left(x, dim % x.dim())) is not None:
                return normed(func, args, left)
        out = func(*args, **kwargs)
        if name in _CHANNELWISE:
            self._empty(out[0], [x])
        elif torch.Tag.pointwise in func.tags and isinstance(out, Tensor):
            self._empty(out, [t for t in args if isinstance(t, Tensor)])
        return out

    def left(self, x: Tensor, dim: int) -> Tensor | None:
        """The channels along an axis that are not absent; None if none is absent."""
        patterns = self.patterns.get(x.shape[dim], ()) if x.numel() else ()
        found = None
        for pattern in patterns:
            where = pattern.nonzero().flatten().to(x.device)
            line = x.movedim(dim, -1)[(0,) * (x.dim() - 1)]  # most are ruled out by it
            if bool(line[where].any()) or bool(x.index_select(dim, where).any()):
                continue
            if bool(x.any()):
                found = pattern if found is None else found | pattern
        return None if found is None else (~found).nonzero().flatten().to(x.device)

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
                    where = _others(x.shape[dim], left).nonzero().flatten()
                    out.index_fill_(dim + missing, where.to(out.device), 0)


_SUMMARIES = {
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


_NORMS: dict[str, tuple[int, Any]] = {
    "native_layer_norm": (-1, _layer_norm),
    "_fused_rms_norm": (-1, _layer_norm),
    "native_group_norm": (1, _group_norm),
}
"""Norms over channels: the axis along which these lie, and a norm over some of them."""
