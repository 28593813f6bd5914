"""Find out which of a model's groups a slim copy can do without.

A slim copy must give what the full model gives if the dropped neurons did not exist:
their entries are zero, and norms, means and the like do not count them. A copy may fail
because the model has the number of its neurons written down somewhere: stored in a
layer, or in a line that reshapes. Both are looked for.
"""

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod

import torch
from torch import Tensor

from fedspu.errors import ModelError
from fedspu.neurons.calls import restored, without_shortcuts
from fedspu.neurons.probe import NUM_QUICK, Probe
from fedspu.neurons.search import alike_groups, failing, without_numbers
from fedspu.neurons.shaking import distance, tolerance
from fedspu.neurons.slim import cut_model, slimmable
from fedspu.neurons.slimming.absent import Leaking, Without, others
from fedspu.neurons.slimming.padding import padding_of
from fedspu.neurons.slimming.sizes import Sizes, WatchedSizes
from fedspu.neurons.slimming.uncounted import Watching
from fedspu.neurons.table import Active, NeuronGroup, Neurons

MOST_DRAWS, DRAWS_UNCOUNTED = 10, 3
"""So often a part is drawn that no other group has, and calls are tried with others."""

MOST_TRIALS, LEAST_TRIALS = 60, 2
MOST_ENTRIES, MOST_RUNS = 450_000_000, 24_000
"""So many slim copies are tried, fewer of a large model: until their full models have
this many entries, or layers, together. A group that was not shown to be right by then
is padded, or stays whole.
"""


def prove_slim(probe: Probe, table: Neurons, may_pad: bool = True) -> Neurons:
    """The same table, with ``slim`` False for the groups that cannot be sliced.

    ``may_pad`` says that groups that were not to be sliced may be padded.
    """
    num_layers = sum(1 for _ in probe.model.modules())
    affordable = min(MOST_ENTRIES // _size(probe), MOST_RUNS // num_layers)
    probe.trials_left = max(LEAST_TRIALS, min(MOST_TRIALS, affordable))
    candidates = _sliceable(table)
    others = [group for group in table.groups if not group.slim and may_pad]
    if not candidates and not others:
        return table
    leaking = Leaking()
    with leaking:
        # With all examples: of few, a channel may be zero although it is not absent.
        is_shaken = probe.shake(NUM_QUICK, False)
    if not is_shaken:
        return table.with_facts([replace(group, slim=False) for group in candidates])
    with leaking if leaking.has_leaked else nullcontext():  # else it only costs
        if candidates and not _slims(probe, table, candidates):
            table = _sliced(probe, table, candidates)
        return _trainable(probe, _also_padded(probe, table, others))


def _sliced(probe: Probe, table: Neurons, candidates: list[NeuronGroup]) -> Neurons:
    """The table with which most of some groups can be sliced; all at once cannot be."""
    stuck: set[str] = set()
    with WatchedSizes({}) as sizes:
        probe.run()
    probe.reshapes = sizes.seen
    names = {group.name for group in candidates}
    work = partial(_slim_together, probe, table)
    for alike in failing(alike_groups(candidates), work, is_sure=True):
        table, failed = _repaired(probe, table, alike)
        stuck |= failed
    rest = [g for g in table.groups if g.name in names - stuck]
    probe.trials_left = max(LEAST_TRIALS, probe.trials_left)
    # Each can be sliced, but perhaps not all at once.
    if rest and (mended := _mended(probe, table, rest)) is not None:
        table = mended
    elif rest:
        together: list[NeuronGroup] = []
        for alike in alike_groups(rest):
            if not _slims(probe, table, [*together, *alike]):
                alike = [replace(g, padded=True, counts=()) for g in alike]
                padded = table.with_facts(alike)
                if not _slims(probe, padded, [*together, *alike]):
                    continue
                table = padded
            together += alike
        stuck |= {g.name for g in rest} - {g.name for g in together}
    return table.with_facts(
        replace(g, slim=False) for g in table.groups if g.name in stuck
    )


def _also_padded(probe: Probe, table: Neurons, groups: list[NeuronGroup]) -> Neurons:
    """The table with those of some groups padded that can be, beside all others."""
    classes = alike_groups(groups)
    if len(classes) > 1:  # mostly all can be, and at once it takes less time
        together = _all_padded(probe, table, groups)
        if together is not None and _slims(probe, together, _sliceable(together)):
            return together
    for alike in classes:
        wider, _ = _padded(probe, table, alike)
        if _slims(probe, wider, _sliceable(wider)):
            table = wider
    return table


def _trainable(probe: Probe, table: Neurons) -> Neurons:
    """The table with groups padded if slices of them fail in training.

    Some models do something else there: they mask tokens with a parameter that is as
    wide as the stream, and that nothing is known about.
    """
    groups = _sliceable(table)
    if not groups or _runs_in_training(probe, table, groups):
        return table
    padded = _all_padded(probe, table, groups)
    if padded is not None and _runs_in_training(probe, padded, groups):
        return padded
    return table.with_facts(replace(group, slim=False) for group in groups)


def _runs_in_training(probe: Probe, table: Neurons, groups: list[NeuronGroup]) -> bool:
    """Whether a slim copy runs in training, or the full model does not either."""
    with _cut(probe, table, _drawn(table, groups, is_half=True)):
        if probe.runs_in_training():
            return True
    return not probe.runs_in_training()


def _all_padded(
    probe: Probe, table: Neurons, groups: list[NeuronGroup]
) -> Neurons | None:
    """The table with all of some groups padded; None if they cannot be together."""
    tried, padded = _as_padded(table, groups)
    probe.trials_left = max(LEAST_TRIALS, probe.trials_left)
    is_right = _slims(probe, padded, tried)
    return padded if is_right else _uncounted(probe, padded, tried)


def _as_padded(
    table: Neurons, groups: list[NeuronGroup]
) -> tuple[list[NeuronGroup], Neurons]:
    """These groups as padded ones, and the table with them."""
    tried = [replace(g, slim=True, padded=True, counts=()) for g in groups]
    return tried, table.with_facts(tried)


def _sliceable(table: Neurons) -> list[NeuronGroup]:
    return [group for group in table.groups if group.slim and group.size > 1]


def _repaired(
    probe: Probe, table: Neurons, alike: list[NeuronGroup]
) -> tuple[Neurons, set[str]]:
    """The table with which some alike groups can be sliced, and those that cannot."""
    if (mended := _mended(probe, table, alike)) is not None:
        return mended, set()
    failed = _stuck(probe, table, alike)
    wrong = [group for group in alike if group.name in failed]
    mended = _counted(probe, table, wrong)
    if mended is None:
        mended = _mended(probe, table, wrong, _sizes_of(wrong))
    return _padded(probe, table, wrong) if mended is None else (mended, set())


def _padded(
    probe: Probe, table: Neurons, groups: list[NeuronGroup]
) -> tuple[Neurons, set[str]]:
    """The table with those of some groups padded that can be, and the others."""
    tried, padded = _as_padded(table, groups)
    probe.trials_left = max(LEAST_TRIALS, probe.trials_left)
    stuck = _stuck(probe, padded, tried, is_sure=False)
    table = table.with_facts(g for g in tried if g.name not in stuck)
    rest = [g for g in tried if g.name in stuck]
    if rest and (wider := _uncounted(probe, table.with_facts(rest), rest)) is not None:
        return wider, set()
    return table, stuck


def _uncounted(
    probe: Probe, table: Neurons, groups: list[NeuronGroup]
) -> Neurons | None:
    """The table with the calls in which some padded neurons must not count."""
    active = _drawn(table, groups, is_half=True)
    try:
        with _cut(probe, table, active), torch.no_grad():
            masks = padding_of(probe.model).masks(probe.model)
            with Watching(probe.model, masks) as watching:
                probe.run()
        calls = dict(table.uncounted)
        for call, found in watching.seen.items():
            if found:
                calls[call] = tuple(dict.fromkeys((*calls.get(call, ()), *found)))
        table = table.with_facts(uncounted=calls)
        with _cut(probe, table, active):
            can_train = probe.has_finite_gradients()
    except ModelError:
        return None
    probe.trials_left = max(DRAWS_UNCOUNTED, probe.trials_left)
    is_right = can_train and _slims(probe, table, groups, DRAWS_UNCOUNTED)
    return table if is_right else None


@contextmanager
def _cut(probe: Probe, table: Neurons, active: Active) -> Iterator[None]:
    """Inside, the probe's model is a slim copy."""
    with warnings.catch_warnings(), restored(probe.model), Sizes(table.resized):
        warnings.simplefilter("ignore")
        cut_model(probe.model, table, slimmable(table, active))
        yield


def _size(probe: Probe) -> int:
    return 1 + sum(tensor.numel() for tensor in probe.tensors.values())


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


def _counted(probe: Probe, table: Neurons, alike: list[NeuronGroup]) -> Neurons | None:
    """The table with these groups' ``counts``; None if no numbers explain them."""
    stored = [_stored(probe, group) for group in alike]
    keys = sorted(stored[0]) if stored else []
    choices = [keys, *([k for k in keys if k != key] for key in keys if len(keys) > 1)]
    choices += [[key] for key in keys if len(keys) > 2]
    for choice in choices[:MOST_CHOICES] if keys else ():
        counted = [
            replace(group, counts=tuple(chain(*(found.get(k, ()) for k in choice))))
            for group, found in zip(alike, stored, strict=True)
        ]
        known = table.with_facts(counted)
        mended = _mended(probe, known, counted, _sizes_of(counted))
        if mended is not None:
            return mended
    return None


def _stored(probe: Probe, group: NeuronGroup) -> dict[str, list[str]]:
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
    # A layer that has parameters, but none of the group's, counts other neurons.
    owned = {id(probe.tensors[name]) for name in group.tensors}
    layers = {
        path: layer
        for path, layer in layers.items()
        if owned & (ids := {id(p) for p in layer.parameters(False)}) or not ids
    }
    sizes = _sizes_of([group])
    found: dict[str, list[str]] = defaultdict(list)
    for path, layer in layers.items():
        short = without_numbers(path.removeprefix(prefix))
        is_own = not type(layer).__module__.startswith("torch.")
        for key, value in vars(layer).items() if is_own else ():
            if _number(value) in sizes:
                found[f"{short}.{key}"].append(f"{path}.{key}".lstrip("."))
    return found


def _number(value: object) -> int | None:
    """The number, if a value is one or holds a single one."""
    if type(value) is tuple and len(value) == 1:
        value = value[0]
    return value if type(value) is int else None


# Numbers of neurons in lines that reshape ---------------------------------------------

MOST_LINES = 6


def _mended(
    probe: Probe,
    table: Neurons,
    groups: list[NeuronGroup],
    sizes: Collection[int] = (),
    lines: int = MOST_LINES,
) -> Neurons | None:
    """The table with which these groups can be sliced; None if none was found.

    Lines that reshape get other sizes where that helps: those that follow from other
    sizes, and those that are written down, if they are among ``sizes``.
    """
    if _slims(probe, table, groups):
        return table
    unfit = [m for m in probe.mismatches if m.line not in table.resized]
    for resized in unfit[0].mended(sizes) if unfit and lines else ():
        lines_now = {**table.resized, unfit[0].line: resized}
        changed = table.with_facts(resized=lines_now)
        mended = _mended(probe, changed, groups, sizes, lines - 1)
        if mended is not None:
            return mended
    return None


def _sizes_of(groups: list[NeuronGroup]) -> set[int]:
    """Sizes of axes along which these groups lie, alone or with others."""
    found = {group.size for group in groups}
    for group in groups:
        for axis in group.axes:
            found |= {group.size * axis.repeat, group.size * axis.repeat * axis.copies}
    return found


# Whether a slim copy is right ---------------------------------------------------------


def _slims(
    probe: Probe, table: Neurons, groups: list[NeuronGroup], draws: int = 1
) -> bool:
    """Whether slim copies without a random half of these neurons are right.

    A half may happen to keep shuffled channels in step, so these need more draws.
    """
    is_shuffled = any(axis.index for group in groups for axis in group.axes)
    return all(
        _is_slim_right(probe, table, _drawn(table, groups, is_half=draw == 0))
        for draw in range(5 if is_shuffled else draws)
    )


def _drawn(table: Neurons, groups: list[NeuronGroup], is_half: bool) -> Active:
    """A random half of the neurons of these groups, or another random part.

    Groups of one size have different parts, if there are enough: else one might be
    taken for another.
    """
    active, seen = table.everything(), set()
    for group in groups:
        for _ in range(MOST_DRAWS):
            part = _part(group.size, is_half)
            key = group.size, *part.tolist()
            if key not in seen:
                break
        seen.add(key)
        active[group.name] = part
    return active


def _part(size: int, is_half: bool) -> Tensor:
    """Some of so many neurons: a half, or any number of them.

    Of a half, one of the first two is gone: else it might happen to be whole groups of
    a norm, whose other groups are right without them.
    """
    number = size // 2 if is_half else int(torch.randint(size, ()))
    order = torch.randperm(size)
    if is_half and size > 2:
        ends = order < 2
        order = torch.cat([order[ends][:1], order[~ends], order[ends][1:]])
    return order[: max(1, number)].sort().values


def _is_slim_right(probe: Probe, table: Neurons, active: Active) -> bool:
    """Whether a slim copy with these neurons agrees with the full model.

    Also False if it may not be tried any more.
    """
    probe.trials_left -= 1
    if probe.trials_left < 0:
        return False
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sizes = WatchedSizes(table.resized, probe.reshapes)
            probe.mismatches = sizes.mismatches
            with restored(probe.model):
                cut_model(probe.model, table, slimmable(table, active))
                with sizes:
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
        others(group.size, active[group.name])
        for group in table.groups
        if len(active[group.name]) < group.size
    ]
    with probe.trying(probe.tensors):
        for name, tensor in probe.tensors.items():
            places = {}
            for dim, size in enumerate(tensor.shape):
                kept = table.active_along(active, name, dim, size)
                if kept is not None and len(kept) < size:
                    gone = others(size, kept)
                    places[dim] = gone.nonzero().flatten()
                    behind = prod(tensor.shape[dim + 1 :])  # a weight may be flattened
                    absent += [gone, gone.repeat_interleave(behind)]
            if places:
                probe.blank(name, places)
        with without_shortcuts(), Without(absent):
            return probe.run()
