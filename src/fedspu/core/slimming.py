"""Find the neuron groups that a physically smaller copy of a model can do without.

A slim copy must compute what the full model does with everything outside the blocks at
zero, its norms' statistics taken over the channels that are left. Sizes or positions
written into a model's code break that: with an error, or silently.
"""

import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedspu.core.neurons import NeuronGroup, Neurons
from fedspu.core.probe import Probe, call, flat_tensors
from fedspu.core.slim import slim_model
from fedspu.core.types import Active
from fedspu.errors import ModelError


def prove_slim(probe: Probe, table: Neurons) -> Neurons:
    """The same table, with groups that cannot be sliced marked so."""
    candidates = [group for group in table.groups if group.slim and group.size > 1]
    if not probe.shake(1):
        stuck = {group.name for group in candidates}
    elif _slims(probe, table, candidates):
        return table
    else:
        stuck = {g.name for g in candidates if not _slims(probe, table, [g])}
        rest = [group for group in candidates if group.name not in stuck]
        if not _slims(probe, table, rest):  # each alone, but not together
            stuck |= {group.name for group in rest}
    groups = tuple(
        replace(group, slim=group.slim and group.name not in stuck)
        for group in table.groups
    )
    return replace(table, groups=groups)


def _slims(probe: Probe, table: Neurons, groups: list[NeuronGroup]) -> bool:
    """Whether a slim copy without a random half of these neurons is right."""
    active = table.everything()
    for group in groups:
        half = torch.randperm(group.size)[: max(1, group.size // 2)]
        active[group.name] = half.sort().values
    output = probe.output
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            slim = slim_model(probe.model, table, active)
            slim_output = flat_tensors(call(slim, probe.example))
        probe.output = slim_output
        return [out.shape for out in slim_output] == [o.shape for o in output] and (
            _zeroed_agrees(probe, table, active)
        )
    except ModelError:
        return False
    finally:
        probe.output = output


def _zeroed_agrees(probe: Probe, table: Neurons, active: Active) -> bool:
    """Whether the full model, all else at zero, gives the probe's present output."""
    before = {name: tensor.detach().clone() for name, tensor in probe.tensors.items()}
    channels: dict[int, Tensor] = {}
    with torch.no_grad():
        for name, tensor in probe.tensors.items():
            for dim in range(tensor.dim()):
                kept = table.active_along(active, name, dim, tensor.shape[dim])
                if kept is not None:
                    is_dropped = torch.ones(tensor.shape[dim], dtype=torch.bool)
                    is_dropped[kept] = False
                    where = is_dropped.nonzero().flatten().to(tensor.device)
                    tensor.index_fill_(dim, where, 0)
                    channels[id(tensor)] = kept.to(tensor.device)
    with _NormsOver(channels):
        agrees = probe.is_unchanged()
    with torch.no_grad():
        for name, values in before.items():
            probe.tensors[name].copy_(values)
    return agrees


class _NormsOver(TorchFunctionMode):
    """Norms that mix channels take their statistics over some of them only.

    A norm is known by its weight: ``channels`` has, for each, those that count.
    """

    def __init__(self, channels: dict[int, Tensor]) -> None:
        self.channels = channels

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        names = _NORMS.get(func)
        given = dict(zip(names, args, strict=False)) | kwargs if names else {}
        channels = self.channels.get(id(given.get("weight")))
        if channels is None:
            return func(*args, **kwargs)
        if func is F.group_norm:
            return _group_norm(given, channels)
        seen = given["input"].index_select(-1, channels)
        part = {
            "normalized_shape": seen.shape[-1:],
            "weight": given["weight"].index_select(0, channels),
        }
        if given.get("bias") is not None:
            part["bias"] = given["bias"].index_select(0, channels)
        normed = func(**{**given, "input": seen, **part})
        return torch.zeros_like(given["input"]).index_copy(-1, channels, normed)


_NORMS: dict[Any, tuple[str, ...]] = {
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
}


def _group_norm(given: dict[str, Any], channels: Tensor) -> Tensor:
    """Each group of channels normed over those of it that count."""
    x, groups = given["input"], given["num_groups"]
    width = x.shape[1] // groups
    out = torch.zeros_like(x)
    for group in range(groups):
        seen = channels[channels // width == group]
        if len(seen):
            part = {k: given[k].index_select(0, seen) for k in ("weight", "bias")}
            normed = F.group_norm(x.index_select(1, seen), 1, **part, eps=given["eps"])
            out = out.index_copy(1, seen, normed)
    return out
