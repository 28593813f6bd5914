"""Groups of two neurons: whether they are read where the table says.

Exchanging both neurons cannot show that a table has them the wrong way round where they
are read. So the first neuron's readers are cut off, and then it must be silent.
"""

import torch

from fedspu.neurons.probe import Probe
from fedspu.neurons.table import Axis, NeuronGroup

Readers = set[tuple[str, int]]
"""The axes along which neurons are read, not made."""


def read_elsewhere(
    probe: Probe, groups: list[NeuronGroup], readers: Readers
) -> list[NeuronGroup]:
    """Those of some groups of two whose neurons are not read where the table says.

    Many are tried at once. That proves a group only if the output still hears its
    second readers while all first ones are cut off: through these a neuron that is the
    wrong way round would be heard. Otherwise the group is tried among fewer, or alone.
    """
    if not groups:
        return []
    is_silent, live = _cut_and_disturb(probe, groups, readers)
    if len(groups) == 1:
        return [] if is_silent else groups
    unheard = [group for group in groups if group.name not in live]
    if is_silent:
        groups = unheard
        if not live:
            return [g for g in groups if read_elsewhere(probe, [g], readers)]
        return read_elsewhere(probe, groups, readers)
    half = len(groups) // 2
    return read_elsewhere(probe, groups[:half], readers) + read_elsewhere(
        probe, groups[half:], readers
    )


def _cut_and_disturb(
    probe: Probe, groups: list[NeuronGroup], readers: Readers
) -> tuple[bool, set[str]]:
    """Whether all first neurons are silent once their readers are cut off.

    And the names of the groups whose second readers are heard then; they are not looked
    for if there is one group alone.
    """
    output, live = probe.output, set()
    with probe.trying({name for group in groups for name in group.tensors}):
        for group in groups:
            for axis in _axes(group, readers, are_read=True):
                _write(probe, group, axis, is_random=False)
        if len(groups) == 1:
            probe.output = probe.run()
        else:
            live = _heard_seconds(probe, groups, readers)
        for group in groups:
            for axis in _axes(group, readers, are_read=False):
                _write(probe, group, axis, is_random=True)
        is_silent = probe.is_unchanged()
    probe.output = output
    return is_silent, live


def _axes(group: NeuronGroup, readers: Readers, are_read: bool) -> list[Axis]:
    return [a for a in group.axes if ((a.tensor, a.dim) in readers) == are_read]


def _write(probe: Probe, group: NeuronGroup, axis: Axis, is_random: bool) -> None:
    """Give the first neuron zeros or random numbers along one axis."""
    tensor = probe.tensors[axis.tensor]
    rows = axis.positions(group.size)[0].to(tensor.device)
    part = tensor.data.index_select(axis.dim, rows)
    part = torch.rand_like(part) if is_random else torch.zeros_like(part)
    tensor.data = tensor.data.index_copy(axis.dim, rows, part)


def _heard_seconds(
    probe: Probe, groups: list[NeuronGroup], readers: Readers
) -> set[str]:
    """Names of the groups whose second readers the output hears, by its gradients."""
    probe.record()
    axes = {group.name: _axes(group, readers, are_read=True) for group in groups}
    asked = {axis.tensor for some in axes.values() for axis in some}
    influences, least = probe.influences(asked) or {}, probe.least()
    probe.forget_gradients()
    heard = set()
    for group in groups:
        for axis in axes[group.name]:
            moves = influences.get(axis.tensor)
            if moves is not None:
                second = axis.positions(group.size)[1].to(moves.device)
                if float(moves.index_select(axis.dim, second).sum()) > least:
                    heard.add(group.name)
    return heard
