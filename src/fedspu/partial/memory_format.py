"""Maps with their channels side by side in memory, where that is faster.

PyTorch calls this memory format channels_last. On a CPU, its convolutions and norms are
faster in it, and a 1x1 convolution is a plain product of matrices. Only strides differ,
not values; but ``view`` may fail in one format and not in the other, so a model is
run in this way only if its graph shows that it never asks.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from fedspu.partial.chain.find import is_in_place, is_watched, trace


def is_last(x: Tensor) -> bool:
    """Whether the channels of maps lie side by side."""
    return x.dim() == 4 and x.stride(1) == 1 and x.shape[1] > 1


def format_of(x: Tensor) -> torch.memory_format:
    """The memory format of a tensor, which may be a part of a larger one."""
    return torch.channels_last if is_last(x) else torch.contiguous_format


def compact(x: Tensor) -> Tensor:
    """The same values without gaps, in the same memory format; a copy if need be."""
    return x.contiguous(memory_format=format_of(x))


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """A tensor of this shape, not filled, in the memory format of another one."""
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=format_of(like)
    )


def rows_of(x: Tensor) -> Tensor:
    """Maps as a matrix (places, channels): a view if channels lie side by side."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def picks_channels(model: nn.Module) -> bool:
    """Whether active channels have to be picked out of maps, one by one.

    With group norms, neurons keep their places. A lean step needs more memory at its
    peak in the faster format; but these models are much faster in it.
    """
    kinds = {type(layer) for layer in model.modules()}
    return nn.GroupNorm in kinds and nn.BatchNorm2d not in kinds


def usual_forward(
    model: nn.Module,
    num_hooks: int,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[..., Any] | None:
    """How to run a model with maps in the faster format; None for other models.

    ``num_hooks``: how many forward hooks of each kind we put on every layer ourselves.
    Inside of ``around()``, steps run.
    """
    graph = trace(model).graph
    if graph is None or not _fits(graph):
        return None
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not _is_batch_of_maps(args[0]):
            return own(*args, **kwargs)
        if is_watched(model, num_hooks):  # hooks may ask for a view
            return own(*args)
        x = args[0].contiguous(memory_format=torch.channels_last)
        with around() if torch.is_grad_enabled() else nullcontext():
            out = own(x)
        return out.contiguous() if isinstance(out, Tensor) else out

    return forward


def _is_batch_of_maps(x: Any) -> bool:
    return (
        isinstance(x, Tensor)
        and x.dim() == 4
        and x.dtype in (torch.float32, torch.float64)
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and not x.requires_grad
    )


def _fits(graph: torch.fx.GraphModule) -> bool:
    """Whether a model has convolutions, and only operations that take any strides.

    Dropout of maps does not: it draws its masks in the order of memory.
    """
    num_convolutions = 0
    flat: set[torch.fx.Node] = set()  # features, no longer maps
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        what: Any = node.target
        if node.op == "call_module":
            what = type(graph.get_submodule(str(node.target)))
        name = what if isinstance(what, str) else what.__name__
        inputs = node.all_input_nodes
        if is_in_place(graph, node) and inputs[0].op == "placeholder":
            return False  # it would change a copy
        if name in _FLATTEN or (inputs and flat.issuperset(inputs)):
            flat.add(node)
        elif name not in _KEEP_MAPS:
            return False
        num_convolutions += name in ("Conv2d", "conv2d")
    return num_convolutions > 0


_FLATTEN = {"Flatten", "flatten"}
_KEEP_MAPS = {
    *("Conv2d", "ConvTranspose2d", "BatchNorm2d", "GroupNorm", "InstanceNorm2d"),
    *("ReLU", "ReLU6", "LeakyReLU", "Hardtanh", "Hardswish", "Hardsigmoid", "SiLU"),
    *("GELU", "ELU", "Mish", "Sigmoid", "Tanh", "Identity", "Upsample", "ZeroPad2d"),
    *("MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d", "AdaptiveMaxPool2d"),
    *("relu", "relu_", "relu6", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid"),
    *("silu", "gelu", "elu", "mish", "sigmoid", "tanh", "interpolate", "pad", "mean"),
    *("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d"),
    *("add", "add_", "iadd", "mul", "mul_", "imul", "cat", "concat", "reshape"),
}
"""Layers and operations on maps whose values do not depend on strides, by name."""
