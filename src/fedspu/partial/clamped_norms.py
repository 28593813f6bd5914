"""Batch norm and the ReLU behind it as one compiled operation.

For models that are no chain, in training, with channels side by side in memory. Norm
and ReLU (or ReLU6, or any clamp) by themselves pass every value through memory nine
times in a step; here it is five times, and what the ReLU would keep is not kept.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from fedspu.compiled.library import find
from fedspu.partial.block_gradients import fill
from fedspu.partial.chain.find import trace
from fedspu.partial.chain.native.models import why_not
from fedspu.partial.memory_format import compact, is_last, usual_forward
from fedspu.partial.norms import NormPart
from fedspu.partial.operations import norm_pieces
from fedspu.partial.remake import is_in_checkpoint, note
from fedspu.partial.spans import take_span
from fedspu.partial.weight import Arguments

Limits = tuple[float, float]
NO_LIMITS: Limits = (-float("inf"), float("inf"))
RELU: Limits = (0.0, float("inf"))
RELU6: Limits = (0.0, 6.0)
NUM_COEFFICIENTS = 5
"""How many numbers for each channel the compiled code keeps for the backward pass."""


class ClampedNorm(torch.autograd.Function):
    """``F.batch_norm`` in training, and a clamp of its output."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_leaf: Tensor,
        bias_leaf: Tensor,
        weight: Tensor,
        bias: Tensor,
        running: tuple[Tensor | None, Tensor | None],
        numbers: tuple[float, float],
        limits: Limits,
        part: NormPart,
    ) -> Tensor:
        """The clamped output; ``numbers`` are momentum and epsilon."""
        y = torch.empty_like(x)
        kept = x.new_empty(NUM_COEFFICIENTS, x.shape[1])
        values = (weight.contiguous(), bias.contiguous())
        moved = [None if given is None else given.data_ptr() for given in running]
        rows = x.numel() // x.shape[1]
        _call("map_norm_forward", rows, x, *values, *moved, *numbers, *limits, kept, y)
        need = part.need
        if need is not None:
            x, kept = compact(take_span(x, 1, need)), take_span(kept, 1, need)
        # The weight is not read again; but torch then notices if it is changed.
        ctx.save_for_backward(x, kept.contiguous(), weight)
        ctx.part, ctx.shape, ctx.limits = part, y.shape, limits
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input and of the leaves."""
        x, kept, _ = ctx.saved_tensors
        part: NormPart = ctx.part
        grad = take_span(grad, 1, part.need)
        grad = grad.contiguous(memory_format=torch.channels_last)
        grad_x = torch.empty_like(x)
        of_weight, of_bias = x.new_empty(2, x.shape[1])
        rows = x.numel() // x.shape[1]
        results = (grad_x, of_weight, of_bias)
        _call("map_norm_backward", rows, x, kept, *ctx.limits, grad, *results)
        if part.need is None:  # else only the active channels are left
            of_weight = take_span(of_weight, 0, part.weight)
            of_bias = take_span(of_bias, 0, part.bias)
        grad_x = fill(grad_x, 1, part.need, ctx.shape)
        return grad_x, of_weight.clone(), of_bias.clone(), *[None] * 6


def _call(name: str, rows: int, x: Tensor, *rest: Any) -> None:
    given = [value.data_ptr() if isinstance(value, Tensor) else value for value in rest]
    function = getattr(find().library, name)
    if function(rows, x.shape[1], x.data_ptr(), *given):
        raise MemoryError("not enough memory for a training step")


# In a model's forward pass ------------------------------------------------------------


def clamping_norms(model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
    """What a forward pass of this model runs in, for norms and their ReLUs as one."""
    clamped = _clamped_norms(model)

    def mode() -> AbstractContextManager[Any]:
        return _ClampingNorms({id(norm.weight): clamped[norm] for norm in clamped})

    return mode


class _ClampingNorms(TorchFunctionMode):
    """Runs norms, with the clamp behind each; the clamp itself then does nothing."""

    def __init__(self, limits: Mapping[int, Limits]) -> None:
        super().__init__()
        self.limits = limits  # by the id of the norm's weight

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm and not is_in_checkpoint():
            given = dict(zip(_NORM, args, strict=False)) | kwargs
            y = _normed(given, self.limits.get(id(given.get("weight")), NO_LIMITS))
            if y is not None:
                return y
        elif func in _CLAMPS:
            names, limits_of = _CLAMPS[func]
            given = dict(zip(names, args, strict=False)) | kwargs
            done = getattr(given.get("input"), "_fedspu_clamped", None)
            if done is not None and done == (limits_of(given), given["input"]._version):
                return given["input"]
        return func(*args, **kwargs)


def _normed(given: Arguments, limits: Limits) -> Tensor | None:
    """The output of a norm and a clamp; None if PyTorch has to run them."""
    x = given["input"]
    if not is_last(x) or x.dtype != torch.float32 or x.device.type != "cpu":
        return None
    pieces = norm_pieces(given)
    if pieces is None:
        return None
    weight, bias, part = pieces
    running = given.get("running_mean"), given.get("running_var")
    if any(t is not None and not _is_plain(t) for t in running):
        return None
    y: Tensor = ClampedNorm.apply(  # type: ignore[no-untyped-call]  # torch has no hints here
        x,
        weight.leaf,
        bias.leaf,
        weight.full,
        bias.full,
        running,
        (given.get("momentum", 0.1), given.get("eps", 1e-5)),
        limits,
        part,
    )
    y._fedspu_clamped = (limits, y._version)  # type: ignore[attr-defined]
    return note(y, need=part.need)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.dtype == torch.float32


_NORM = tuple(signature(F.batch_norm).parameters)


def why_not_compiled(model: nn.Module, shape: tuple[int, ...]) -> str | None:
    """Why no part of a model's steps runs as compiled code; None if a part or all does.

    ``shape``: of one example.
    """
    reason = why_not(model, shape)
    if reason is None or find().library is None or usual_forward(model, 0) is None:
        return reason
    has_norms = any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
    return None if has_norms else reason


# Which norms have a clamp behind them -------------------------------------------------


def _clamped_norms(model: nn.Module) -> dict[nn.BatchNorm2d, Limits]:
    """The norms whose output goes into a clamp, and nowhere else."""
    graph = trace(model).graph
    if graph is None:
        return {}
    calls: Counter[nn.Module] = Counter()
    found: dict[nn.BatchNorm2d, Limits] = {}
    for node in graph.graph.nodes:
        if node.op != "call_module":
            continue
        layer = graph.get_submodule(str(node.target))
        calls[layer] += 1
        if isinstance(layer, nn.BatchNorm2d) and len(node.users) == 1:
            limits = _limits(graph, next(iter(node.users)))
            if limits is not None:
                found[layer] = limits
    return {norm: limits for norm, limits in found.items() if calls[norm] == 1}


def _limits(graph: torch.fx.GraphModule, node: torch.fx.Node) -> Limits | None:
    """Between which values an operation clamps its input; None if it does not."""
    if node.op == "call_module":
        layer = graph.get_submodule(str(node.target))
        if isinstance(layer, nn.Hardtanh):  # a ReLU6 is one
            return float(layer.min_val), float(layer.max_val)
        return RELU if isinstance(layer, nn.ReLU) else None
    if node.op == "call_method":
        return RELU if node.target in ("relu", "relu_") else None
    if node.target is F.relu6:
        return RELU6
    return RELU if node.target in (F.relu, F.relu_, torch.relu, torch.relu_) else None


def _hardtanh_limits(given: Arguments) -> Limits:
    return float(given.get("min_val", -1.0)), float(given.get("max_val", 1.0))


_CLAMPS: dict[Any, tuple[tuple[str, ...], Callable[[Arguments], Limits]]] = {
    **dict.fromkeys(
        (F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_),
        (("input", "inplace"), lambda given: RELU),
    ),
    F.relu6: (("input", "inplace"), lambda given: RELU6),
    F.hardtanh: (tuple(signature(F.hardtanh).parameters), _hardtanh_limits),
}
