"""A parameter of which only one block trains.

It reads as the full weight everywhere. Weighted operations (``operations.py``) compute
only the block's gradient and send it to the leaf; any other operation computes the full
gradient and passes on the block's part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from fedspu.errors import ModelError
from fedspu.neurons.blocks import mesh
from fedspu.partial.spans import Span, Spans, positions_of, take_spans

Mode = Literal["exact", "truncated"]
Saves = Literal["fast", "lean"]

Arguments = dict[str, Any]


@dataclass(frozen=True)
class How:
    """What ``partial_training`` was asked for.

    ``rounds_as_torch``: a forward pass must equal the plain model's bit for bit.
    ``has_code``: compiled code may run.
    """

    is_truncated: bool = False
    is_lean: bool = False
    rounds_as_torch: bool = False
    has_code: bool = False


OPERATIONS: dict[Any, tuple[tuple[str, ...], Callable[[Any, Arguments], Any]]] = {}
"""Weighted operation -> the names of its arguments, and the function that runs it here.

The function may return NotImplemented: then the plain operation runs.
"""


class PartialWeight(Tensor):
    """A parameter of which only one block trains: ``leaf``.

    Reads as the full weight in every operation.
    """

    leaf: Tensor
    full: Tensor
    spans: Spans
    how: How
    is_view: bool  # whether the leaf is a part of the full weight's own memory
    written: tuple[int, int]  # the leaf's version and memory when last written back
    shown: Callable[[Tensor], Tensor]  # its value, in the order that the caller sees
    path: str  # how its gradient was last computed: see ``paths`` in context.py

    @staticmethod
    def of(parameter: nn.Parameter, spans: Spans, how: How) -> "PartialWeight":
        """A stand-in for ``parameter``, with which it shares memory."""
        full = parameter.detach()
        weight = full.as_subclass(PartialWeight)
        weight.full, weight.spans, weight.how = full, spans, how
        leaf = take_spans(full, spans).detach()
        weight.leaf = leaf.requires_grad_(parameter.requires_grad)
        weight.written = (weight.leaf._version, weight.leaf.data_ptr())
        weight.path = "unused"
        weight.is_view = not any(isinstance(span, Tensor) for span in spans)
        return weight

    def write_back(self) -> None:
        """Put the leaf's values into the full weight."""
        if self.is_view and self.leaf.data_ptr() == self.full.data_ptr():
            return
        where = tuple(map(positions_of, self.spans))
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self.full[mesh(self.full, where)] = self.leaf
            self.written = (self.leaf._version, self.leaf.data_ptr())

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refuse: a copy would train nothing."""
        raise ModelError(
            "a model in partial training cannot be copied; leave the context first, or "
            "copy its state_dict()"
        )

    def now(self) -> Tensor:
        """The full weight as it is now, without a gradient."""
        leaf, full = self.leaf, self.full
        if self.is_view and leaf.data_ptr() == full.data_ptr():
            return full
        if (leaf._version, leaf.data_ptr()) != self.written:
            self.write_back()
        return full

    def value(self) -> Tensor:
        """The full weight as it is now, sending its block's gradient to the leaf."""
        self.path = "full"
        value: Tensor = _Full.apply(self.leaf, self.now(), self.spans)  # type: ignore[no-untyped-call]  # torch has no hints here
        return self.shown(value)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` on full weights, or by its own kernel if it is weighted."""
        if torch.compiler.is_compiling():
            refuse_to_compile()
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in OPERATIONS and "out" not in kwargs:
                names, run = OPERATIONS[func]
                out = run(func, dict(zip(names, args, strict=False)) | kwargs)
                if out is not NotImplemented:
                    return out
            if func in _OF_LEAF:
                return func(args[0].leaf, *args[1:])
            if func in _PROPERTIES:
                return func(*args, **kwargs)
            if _is_in_place(func, args, kwargs):
                refuse_to_change()
            return func(*with_full_weights(args), **with_full_weights(kwargs))


def refuse_to_compile() -> NoReturn:
    """Raise the error for ``torch.compile``, which would see the whole weight."""
    raise ModelError(
        "a model in partial training cannot be compiled; leave torch.compile out, or "
        "use it outside of the context"
    )


# The compiler then calls the function instead of tracing it. ``torch.compiler.disable``
# would do the same, but imports the compiler.
refuse_to_compile._torchdynamo_disable = True  # type: ignore[attr-defined]


_PROPERTIES = {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "is_leaf")
}

_OF_LEAF = {
    getattr(getattr(Tensor, name), way)
    for name in ("grad", "requires_grad")
    for way in ("__get__", "__set__", "__delete__")
} | {Tensor.requires_grad_}
"""The leaf answers these, for code that reads gradients of ``model.parameters()``."""


def _is_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function would write to a partial weight, or hand out its memory."""
    if func in (Tensor.data.__get__, Tensor.data.__set__):  # type: ignore[attr-defined]
        return True
    name = getattr(func, "__name__", "")
    if name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"):
        return isinstance(args[0], PartialWeight)
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        first = next(iter((*args, *kwargs.values())), None)
        return isinstance(first, PartialWeight)
    return isinstance(kwargs.get("out"), PartialWeight)


def refuse_to_change() -> NoReturn:
    """Raise the error for a weight that is changed in place by name."""
    raise ModelError(
        "a weight in partial training cannot be changed in place by name; change the "
        "tensors that partial_training yields, or leave the context first"
    )


class _Full(torch.autograd.Function):
    """The full weight; its gradient is cut down to the leaf's block."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, full: Tensor, spans: Spans) -> Tensor:
        ctx.spans = spans
        return full.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # A copy: the next operation may add to it, or another leaf may share it.
        block = take_spans(grad, ctx.spans)
        return block.clone(memory_format=torch.contiguous_format), None, None


class Piece:
    """A parameter as a kernel wants it: what trains, the full value, and where."""

    def __init__(self, weight: Tensor | None) -> None:
        self.leaf, self.full = weight, weight
        self.spans: Spans = ()
        self.how = How()
        if isinstance(weight, PartialWeight):
            self.leaf, self.full, self.spans = weight.leaf, weight.now(), weight.spans
            self.how = weight.how
        elif weight is not None:
            self.full, self.spans = weight.detach(), (None,) * weight.dim()

    @property
    def span(self) -> Span:
        """The active positions along the first axis."""
        return self.spans[0] if self.spans else None


def with_full_weights(value: Any) -> Any:
    """The same nested value with full weights instead of partial ones."""
    if isinstance(value, PartialWeight):
        return value.value()
    if isinstance(value, dict):
        return {key: with_full_weights(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(with_full_weights(item) for item in value)
    return value
