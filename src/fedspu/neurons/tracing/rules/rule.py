"""The table of rules, and what they share."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fedspu.neurons.tracing.follow import Follower, Operand, Slots
from fedspu.neurons.tracing.live import tensors_in

Rule = Callable[[Follower, Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Brings what is known up to date after ``out = func(*args, **kwargs)``."""

RULES: dict[str, Rule] = {}
"""ATen's name of an operation -> what it does to neurons."""

VOCABULARY = "they are the words of a vocabulary"


def rule(names: str) -> Callable[[Rule], Rule]:
    """Make a rule known for these operations, whose names are separated by spaces."""

    def known(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return known


def argument(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], *names: str
) -> Any:
    """An argument by name, wherever it was given; None if it was not."""
    for place, known in enumerate(func._schema.arguments):
        if known.name in names:
            if known.name in kwargs:
                return kwargs[known.name]
            return args[place] if place < len(args) else known.default_value
    return None


def axes_of(chosen: Any, ndim: int) -> list[int]:
    """The axes that a ``dim`` argument means; none or nothing means all."""
    if chosen is None or (isinstance(chosen, list | tuple) and not chosen):
        return list(range(ndim))
    listed = [chosen] if isinstance(chosen, int) else list(chosen)
    return [d % max(ndim, 1) for d in listed]


def name_of(func: Any) -> str:
    """The name of an operation."""
    name: str = func.overloadpacket.__name__
    return name


def last_aligned(operand: Operand, size: int) -> Operand:
    """An operand in a space with more axes, aligned at its last ones."""
    missing = size - len(operand.shape)
    return operand.lifted(lambda t: t.reshape((1,) * missing + tuple(t.shape)))


def that_fit(slots: Slots, tensor: Tensor) -> Slots:
    """The slots whose sizes are those of a tensor."""
    return [
        slot
        for slot in slots
        if all(n in (1, m) for n, m in zip(slot.shape, tensor.shape, strict=True))
    ]


def anything(now: Follower, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Nothing is known of the operation: places matter."""
    given = list(tensors_in((args, kwargs)))
    for tensor in given:
        now.tie_all(tensor)
    for tensor in tensors_in(out):
        now.put(tensor, [], given)
