"""A chain as the compiled code knows it, and the memory that it works in."""

import ctypes
from collections.abc import Sequence
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor, nn

from fedspu.compiled.library import find
from fedspu.partial.chain.native.parts import (
    BATCH,
    GROUP,
    NOTHING,
    SLOTS,
    Part,
    Positions,
    find_needs,
    norm_kind,
    trained_sizes,
)
from fedspu.partial.chain.native.stages import Stage, padding_of

LANES = 16
"""Images that are computed together."""

OPS = {nn.Conv2d: 1, nn.Linear: 2, type(None): 0}
ACTS = ("none", "relu", "leaky", "tanh", "gelu", "gelu_tanh")
POOLS = ("none", "max", "average")


class _Description(ctypes.Structure):
    """One stage; the same fields in the same order as in network.h."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            *("op", "source", "adds", "in_channels", "in_h", "in_w"),
            *("channels", "h", "w", "kernel_h", "kernel_w", "stride_h", "stride_w"),
            *("pad_h", "pad_w", "dilation_h", "dilation_w", "norm", "num_groups"),
            *("act", "pool", "window_h", "window_w", "goes_back"),
            *("num_need", "num_rows", "num_cols"),
        )
    ]
    _fields_ += [(name, ctypes.c_void_p) for name in ("need", "rows", "cols")]
    _fields_ += [
        (name, ctypes.c_float) for name in ("slope", "dropout", "eps", "momentum")
    ]


class Network:
    """A chain of which some parts train, or none; ready to be called."""

    def __init__(
        self,
        stages: Sequence[Stage],
        parts: Sequence[Part] | None,
        shape: tuple[int, ...],
        is_truncated: bool = False,
    ) -> None:
        library: Any = find().library
        self.library = library
        self.stages, self.shape = tuple(stages), shape
        nothing = Part(NOTHING, NOTHING, (False,) * len(SLOTS))
        self.parts = list(parts or [nothing] * len(stages))
        needs = find_needs(self.stages, self.parts, is_truncated)
        self.is_trained = [need is not None for need in needs]
        kept: list[Any] = []  # arrays that must live until chain_new has read them
        described = [
            _describe(stage, part, need, kept)
            for stage, part, need in zip(self.stages, self.parts, needs, strict=True)
        ]
        channels, height, width = shape if len(shape) == 3 else (*shape, 1, 1)
        array = (_Description * len(described))(*described)
        self.handle = library.chain_new(array, len(described), channels, height, width)
        if not self.handle:
            raise MemoryError("not enough memory for a training step")
        finalize(self, library.chain_free, self.handle)
        output = self.stages[-1].output
        gives_maps = self.stages[-1].gives_maps
        self.output: tuple[int, ...] = output if gives_maps else output[:1]
        self.has_dropout = any(stage.dropout > 0 for stage in self.stages)
        self.trained_sizes = list(map(trained_sizes, self.stages, self.parts))
        self._free: list[Work] = []

    def work(self, num_images: int) -> "Work":
        """Memory for this many images, new or used before."""
        for work in self._free:
            if work.num_images >= num_images:
                self._free.remove(work)
                return work
        return Work(self, num_images, is_training=True)

    def give_back(self, work: "Work") -> None:
        """Keep memory for the next call; only the last that was given back."""
        self._free = [work]

    def check_batch(self, num_images: int) -> None:
        """Refuse a batch of one value per channel or group, as PyTorch does."""
        for stage in self.stages:
            channels, height, width = stage.middle
            norm, number = stage.norm, num_images * height * width
            size: Any = torch.Size([1, *stage.middle])
            if isinstance(norm, nn.BatchNorm1d):
                size = size[:2]
            if isinstance(norm, nn.GroupNorm):
                number *= channels // norm.num_groups
                is_flat = isinstance(stage.layer, nn.Linear)
                size = [1, norm.num_groups, *([] if is_flat else [1, 1])]
            if norm_kind(stage) in (BATCH, GROUP) and number == 1:
                raise ValueError(  # PyTorch's own words
                    "Expected more than 1 value per channel when training, got input "
                    f"size {size}"
                )

    def count_batches(self, number: int) -> None:
        """Let norms count the batches that they saw."""
        for stage in self.stages:
            tracked = getattr(stage.norm, "num_batches_tracked", None)
            if tracked is not None and norm_kind(stage) == BATCH:
                tracked.add_(number)


def empty(shape: Sequence[int]) -> Tensor:
    """Memory for values as the compiled code has them, whatever PyTorch's defaults."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


class Work:
    """Memory of the compiled code, for batches of up to a number of images."""

    def __init__(self, network: Network, num_images: int, is_training: bool) -> None:
        library = network.library
        self.num_images = -(-num_images // LANES) * LANES
        given = (network.handle, self.num_images, int(is_training))
        # PyTorch's memory: it is aligned as needed, and whoever counts can see it.
        self.memory = empty((library.chain_work_size(*given),))
        self.handle = library.chain_work_new(*given, self.memory.data_ptr())
        if not self.handle:
            raise MemoryError("not enough memory for a training step")
        finalize(self, library.chain_work_free, self.handle)


def _describe(
    stage: Stage, part: Part, need: Positions | None, kept: list[Any]
) -> _Description:
    layer, norm = stage.layer, stage.norm
    found = _Description(
        op=OPS[type(layer)],
        source=stage.source,
        adds=stage.adds,
        norm=norm_kind(stage),
        num_groups=norm.num_groups if isinstance(norm, nn.GroupNorm) else 1,
        act=ACTS.index(stage.act),
        pool=POOLS.index(stage.pool),
        slope=stage.slope,
        dropout=stage.dropout,
        goes_back=need is not None,
    )
    found.in_channels, found.in_h, found.in_w = stage.input
    found.channels, found.h, found.w = stage.middle
    found.window_h, found.window_w = stage.window
    found.stride_h = found.stride_w = found.dilation_h = found.dilation_w = 1
    if isinstance(layer, nn.Conv2d):
        found.kernel_h, found.kernel_w = layer.kernel_size
        found.stride_h, found.stride_w = layer.stride
        found.pad_h, found.pad_w = padding_of(layer)
        found.dilation_h, found.dilation_w = layer.dilation
    if norm is not None:
        found.eps = norm.eps
        found.momentum = getattr(norm, "momentum", 0.0)
    need = NOTHING if need is None else need
    rows = np.searchsorted(need, part.rows) if any(part.trains) else NOTHING
    for name, values in (("need", need), ("rows", rows), ("cols", part.cols)):
        array = np.ascontiguousarray(values, np.int32)
        kept.append(array)
        setattr(found, name, array.ctypes.data)
        setattr(found, f"num_{name}", len(array))
    return found
