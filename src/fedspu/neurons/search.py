"""Find those of many groups that fail a test in which all of them can take part."""

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

from fedspu.neurons.table import NeuronGroup

T = TypeVar("T")


def failing(
    items: list[T], work: Callable[[list[T]], bool], is_sure: bool = False
) -> list[T]:
    """Those of some items that do not work; halves that do are not cut further.

    ``is_sure`` says that all of them together are known not to work.
    """
    if not items or (not is_sure and work(items)):
        return []
    if len(items) == 1:
        return items
    half = len(items) // 2
    first = failing(items[:half], work)
    return first + failing(items[half:], work, is_sure=not first)


def failing_alike(
    groups: list[NeuronGroup],
    work: Callable[[list[NeuronGroup]], bool],
    is_sure: bool = False,
) -> list[NeuronGroup]:
    """The groups that do not work; of many alike, a few are asked for all.

    So a group that works may be among them, but none that does not is left out.
    ``is_sure`` says that all of them together are known not to work.
    """
    found: list[NeuronGroup] = []
    classes = alike_groups(groups)
    for alike in failing(
        classes, lambda some: work([g for c in some for g in c]), is_sure
    ):
        if all_fail(alike, lambda group: work([group])):
            found += alike
        else:
            found += failing(alike, work, is_sure=True)
    return found


def all_fail(alike: list[NeuronGroup], works: Callable[[NeuronGroup], bool]) -> bool:
    """Whether many groups that are alike may be taken to fail, because a few do."""
    few = (alike[0], alike[-1], alike[len(alike) // 2])
    return len(alike) > 2 * len(few) and not any(map(works, few))


def alike_groups(groups: list[NeuronGroup]) -> list[list[NeuronGroup]]:
    """Groups that differ only in the numbers in their names: the blocks of a model."""
    found: dict[Any, list[NeuronGroup]] = defaultdict(list)
    for group in sorted(groups, key=pattern_of):
        found[tuple(pattern_of(group))].append(group)
    return list(found.values())


def pattern_of(group: NeuronGroup) -> list[tuple[str, int]]:
    """The group's axes without numbers: alike in all blocks of a model."""
    return sorted({(without_numbers(axis.tensor), axis.dim) for axis in group.axes})


def without_numbers(path: str) -> str:
    """The path of a tensor or layer without the numbers of blocks."""
    return re.sub(r"\d+", "", path)
