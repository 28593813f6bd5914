"""What each operation does to the neurons of its operands, by operation name.

The names are those of ATen, to which every PyTorch function comes down. An operation
that has no rule here, and not PyTorch's own mark of a pointwise operation or a
reduction, is taken to depend on the place of each value: whatever reaches it is tied
together and stays always active. A new rule is one function in one of these files.
"""

from typing import Any

import torch
from torch import Tensor

from fedspu.neurons.tracing.follow import Follower
from fedspu.neurons.tracing.live import tensors_in
from fedspu.neurons.tracing.rules import elementwise, images, moves, products
from fedspu.neurons.tracing.rules.rule import RULES, VOCABULARY, anything, name_of

__all__ = [
    "VOCABULARY",
    "elementwise",
    "follow",
    "images",
    "moves",
    "products",
]


def follow(
    now: Follower, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> None:
    """Bring what is known of tensors up to date after an operation."""
    given = list(tensors_in((args, kwargs)))
    if not any(now.of(t).slots or now.of(t).from_example for t in given):
        if any(now.of(t).from_weights for t in given):
            for tensor in tensors_in(out):
                now.put(tensor, [], given)
        return
    name = name_of(func)
    is_written = name.endswith("_") and not name.endswith("__")
    name = name.removesuffix("_") if is_written else name
    try:
        _apply(now, name, func, args, kwargs, out)
    except Exception:  # a rule that does not fit costs only what it was applied to
        anything(now, func, args, kwargs, out)
    if is_written and isinstance(out, Tensor):
        now.written(out)


def _apply(
    now: Follower, name: str, func: Any, args: Any, kwargs: Any, out: Any
) -> None:
    if name in RULES:
        RULES[name](now, func, args, kwargs, out)
    elif torch.Tag.pointwise in func.tags or _is_pointwise(func):
        elementwise.pointwise(now, func, args, kwargs, out)
    elif torch.Tag.reduction in func.tags:
        elementwise.reduction(now, func, args, kwargs, out)
    else:
        anything(now, func, args, kwargs, out)


def _is_pointwise(func: Any) -> bool:
    """Whether the variant of an operation that is not in place is pointwise."""
    base = getattr(torch.ops.aten, name_of(func).removesuffix("_"), None)
    return base is not None and any(
        torch.Tag.pointwise in getattr(base, overload).tags
        for overload in base.overloads()
    )
