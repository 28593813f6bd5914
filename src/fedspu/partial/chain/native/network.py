"""A chain as the compiled code knows it: sizes, what trains, memory, and its calls."""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspu.partial.chain.native.library import find
from fedspu.partial.chain.native.stages import (
    INPUT,
    NONE,
    NotAChainError,
    Stage,
    padding_of,
)
from fedspu.partial.spans import Span, Spans, positions_of

Positions = NDArray[np.int32]

LANES = 16
"""Images that are computed together."""

BatchNorm = nn.modules.batchnorm._BatchNorm

OPS = {nn.Conv2d: 1, nn.Linear: 2, type(None): 0}
NO_NORM, BATCH, RUNNING, GROUP = range(4)
ACTS = ("none", "relu", "leaky", "tanh", "gelu", "gelu_tanh")
POOLS = ("none", "max", "average")
SLOTS = ("weight", "bias", "scale", "shift")
"""The parameters of a stage: of its layer, and of its norm."""


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


class _Tensors(ctypes.Structure):
    """A stage's parameters and statistics, and where its gradients go."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (*SLOTS, "mean", "variance", *(f"d_{slot}" for slot in SLOTS))
    ]


class _Input(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("values", "scale", "shift")]


class _Sgd(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in ("lr", "momentum", "decay", "clip")]


# What trains --------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What trains of a stage: outputs, inputs (channels), and which parameters."""

    rows: Positions
    cols: Positions
    trains: tuple[bool, ...]  # by slot


def parameters_of(stage: Stage) -> tuple[Tensor | None, ...]:
    """A stage's parameters, by slot."""
    layer, norm = stage.layer, stage.norm
    return (
        None if layer is None else layer.weight,
        None if layer is None else layer.bias,
        None if norm is None else norm.weight,
        None if norm is None else norm.bias,
    )


def read_parts(
    stages: Sequence[Stage],
    names_of: Callable[[Stage], list[str]],
    spans: Mapping[str, Spans],
    trains: Callable[[str], bool],
) -> list[Part]:
    """What trains of each stage; a NotAChainError if it is no block of its weights."""
    parts = []
    for stage in stages:
        names = names_of(stage)
        rows = [_positions(spans[n][0], stage.middle[0]) for n in names if n]
        if any(not np.array_equal(rows[0], other) for other in rows[1:]):
            raise NotAChainError("a layer and its norm that train other neurons")
        parts.append(
            Part(
                rows[0] if rows else np.empty(0, np.int32),
                _columns(stage, spans[names[0]]) if names[0] else _NOTHING,
                tuple(bool(name) and trains(name) for name in names),
            )
        )
    return parts


_NOTHING = np.empty(0, np.int32)


def _positions(span: Span, size: int) -> Positions:
    positions = positions_of(span)
    if positions is None:
        return np.arange(size, dtype=np.int32)
    return positions.numpy().astype(np.int32)


def _columns(stage: Stage, spans: Spans) -> Positions:
    """The input channels of a layer's trained weights."""
    channels, height, width = stage.input
    if isinstance(stage.layer, nn.Conv2d):
        if any(span is not None for span in spans[2:]):
            raise NotAChainError("a convolution that trains a part of its kernel")
        return _positions(spans[1], channels)
    pixels = height * width
    features = _positions(spans[1], channels * pixels).reshape(-1)
    whole = np.unique(features // pixels).astype(np.int32)
    if len(whole) * pixels != len(features):
        raise NotAChainError("a linear layer that trains a part of a map")
    return whole


# The network --------------------------------------------------------------------------


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
        nothing = Part(_NOTHING, _NOTHING, (False,) * len(SLOTS))
        self.parts = list(parts or [nothing] * len(stages))
        needs = _needs(self.stages, self.parts, is_truncated)
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
        self.trained_sizes = list(map(_trained_sizes, self.stages, self.parts))
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
        """Refuse a batch of one value per channel, as PyTorch does."""
        for stage in self.stages:
            channels, height, width = stage.middle
            if norm_kind(stage) == BATCH and num_images * height * width == 1:
                size = [1, channels] if height == width == 1 else [1, *stage.middle]
                raise ValueError(  # PyTorch's own words
                    "Expected more than 1 value per channel when training, got input "
                    f"size {torch.Size(size)}"
                )

    def count_batches(self, number: int) -> None:
        """Let norms count the batches that they saw."""
        for stage in self.stages:
            tracked = getattr(stage.norm, "num_batches_tracked", None)
            if tracked is not None and norm_kind(stage) == BATCH:
                tracked.add_(number)


class Work:
    """Memory of the compiled code, for batches of up to a number of images."""

    def __init__(self, network: Network, num_images: int, is_training: bool) -> None:
        library = network.library
        self.num_images = -(-num_images // LANES) * LANES
        given = (network.handle, self.num_images, int(is_training))
        # PyTorch's memory: it is aligned as needed, and whoever counts can see it.
        self.memory = torch.empty(library.chain_work_size(*given))
        self.handle = library.chain_work_new(*given, self.memory.data_ptr())
        if not self.handle:
            raise MemoryError("not enough memory for a training step")
        finalize(self, library.chain_work_free, self.handle)


def norm_kind(stage: Stage) -> int:
    """Which statistics a stage's norm uses now."""
    norm = stage.norm
    if norm is None:
        return NO_NORM
    if isinstance(norm, nn.GroupNorm):
        return GROUP
    return BATCH if norm.training or norm.running_mean is None else RUNNING


def _needs(
    stages: tuple[Stage, ...], parts: Sequence[Part], is_truncated: bool
) -> list[Positions | None]:
    """The outputs of each stage that carry gradient; None if the stage needs none.

    Frozen outputs of a stage lead to no trained weight if nothing before it trains.
    """
    needs: list[Positions | None] = []
    for stage, part in zip(stages, parts, strict=True):
        below = needs[stage.source] if stage.source != INPUT else None
        aside = needs[stage.adds] if stage.adds != NONE else None
        if below is None and aside is None and not any(part.trains):
            needs.append(None)
            continue
        everything = np.arange(stage.middle[0], dtype=np.int32)
        wanted = part.rows if any(part.trains) else _NOTHING
        if is_truncated:
            if stage.layer is None and below is not None:
                wanted = np.union1d(wanted, below)
            elif stage.layer is not None and below is not None:
                if not np.array_equal(part.cols, below):
                    raise NotAChainError("inputs that train, but not as outputs")
                wanted = part.rows
        elif below is not None:
            wanted = everything if stage.layer is not None else below
            if not np.isin(part.rows, wanted).all():
                wanted = everything
        if aside is not None:
            wanted = np.union1d(wanted, aside)
        if norm_kind(stage) == GROUP and not is_truncated:
            wanted = everything  # its channels are normed together
        needs.append(wanted.astype(np.int32))
    return needs


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
    need = _NOTHING if need is None else need
    rows = np.searchsorted(need, part.rows) if any(part.trains) else _NOTHING
    for name, values in (("need", need), ("rows", rows), ("cols", part.cols)):
        array = np.ascontiguousarray(values, np.int32)
        kept.append(array)
        setattr(found, name, array.ctypes.data)
        setattr(found, f"num_{name}", len(array))
    return found


# Calls --------------------------------------------------------------------------------

Gradients = list[list[Tensor | None]]
"""For each stage, the gradients of its parameters, by slot; None if not wanted."""


class Values:
    """The tensors of a call; they must live as long as the compiled code uses them."""

    def __init__(
        self,
        network: Network,
        value: Callable[[Tensor], Tensor] = Tensor.detach,
        grads: Gradients | None = None,
    ) -> None:
        self.tensors: list[Tensor] = []
        self.parameters: list[Tensor] = []
        self.array = (_Tensors * len(network.stages))()
        for i, stage in enumerate(network.stages):
            for slot, parameter in zip(SLOTS, parameters_of(stage), strict=True):
                if parameter is not None:
                    now = value(parameter)
                    self.parameters.append(now)
                    setattr(self.array[i], slot, self._pointer(now))
            norm = stage.norm
            if isinstance(norm, BatchNorm) and norm.running_mean is not None:
                assert norm.running_var is not None
                self.array[i].mean = self._pointer(norm.running_mean)
                self.array[i].variance = self._pointer(norm.running_var)
        if grads is not None:
            self.put_gradients(grads)

    def put_gradients(self, grads: Gradients) -> None:
        """Let gradients go to these tensors, which the caller keeps alive.

        Only the caller has them, so that autograd takes them over without a copy.
        """
        for stage, of_stage in zip(self.array, grads, strict=True):
            for slot, grad in zip(SLOTS, of_stage, strict=True):
                if grad is not None:
                    setattr(stage, f"d_{slot}", grad.data_ptr())

    def without_statistics(self) -> "Values":
        """The same; batches do not move the running statistics any more."""
        for stage in self.array:
            stage.mean = stage.variance = None
        return self

    def _pointer(self, tensor: Tensor) -> int:
        if not tensor.is_contiguous() or tensor.dtype != torch.float32:
            raise NotAChainError("a weight that is not contiguous float32")
        self.tensors.append(tensor)
        return tensor.data_ptr()


def make_gradients(network: Network) -> Gradients:
    """Memory for the gradients of everything that trains."""
    return [
        [None if size is None else torch.empty(size) for size in sizes]
        for sizes in network.trained_sizes
    ]


def _trained_sizes(stage: Stage, part: Part) -> list[list[int] | None]:
    """The sizes of the blocks that train, by slot; None where nothing does."""
    sizes: list[list[int] | None] = []
    for parameter, trains in zip(parameters_of(stage), part.trains, strict=True):
        if parameter is None or not trains:
            sizes.append(None)
            continue
        size = [len(part.rows), *parameter.shape[1:]]
        if len(size) > 1:
            size[1] = size[1] // stage.input[0] * len(part.cols)
        sizes.append(size)
    return sizes


def as_input(x: Tensor, scaling: tuple[Tensor, Tensor] | None = None) -> _Input:
    """Examples as the compiled code reads them; bytes come with their scaling."""
    if scaling is None:
        return _Input(x.data_ptr(), None, None)
    return _Input(x.data_ptr(), scaling[0].data_ptr(), scaling[1].data_ptr())


def forward(
    network: Network, work: Work, values: Values, x: Tensor, key: int
) -> Tensor:
    """The chain's output in training."""
    out = torch.empty((len(x), *network.output))
    network.library.chain_forward(
        network.handle,
        work.handle,
        values.array,
        ctypes.byref(as_input(x)),
        len(x),
        key,
        out.data_ptr(),
    )
    return out


def backward(
    network: Network, work: Work, values: Values, grad: Tensor, key: int
) -> None:
    """Fill in the gradients that ``values`` name."""
    network.library.chain_backward(
        network.handle, work.handle, values.array, grad.data_ptr(), len(grad), key
    )


def judge(network: Network, work: Work, values: Values, x: Tensor) -> Tensor:
    """The chain's output in eval mode, for any number of examples."""
    out = torch.empty((len(x), *network.output))
    network.library.chain_judge(
        network.handle,
        work.handle,
        values.array,
        ctypes.byref(as_input(x)),
        None,
        len(x),
        out.data_ptr(),
    )
    return out


@dataclass(frozen=True)
class Sgd:
    """Plain SGD, as in ``torch.optim.SGD``; ``clip`` 0: no limit."""

    lr: float
    momentum: float = 0.0
    decay: float = 0.0
    clip: float = 0.0


class Training:
    """Epochs of SGD on the mean cross-entropy, in place."""

    def __init__(self, network: Network, x: Tensor, y: Tensor, sgd: Sgd) -> None:
        self.network, self.x, self.y, self.sgd = network, x, y, sgd
        self._kept = make_gradients(network)
        self.values = Values(network, grads=self._kept)
        self.moments = None
        if sgd.momentum:
            self._begin = make_gradients(network)
            for tensor in (t for of_stage in self._begin for t in of_stage):
                if tensor is not None:
                    tensor.zero_()
            self.moments = Values(network, grads=self._begin)

    def epoch(self, batches: Iterator[Tensor], key: int) -> float:
        """Take a step for each batch of positions; the sum of all losses."""
        given = list(batches)
        for batch in given:
            self.network.check_batch(len(batch))
        order = torch.cat(given).contiguous()
        starts = np.cumsum([0, *map(len, given)], dtype=np.int64)
        work = self.network.work(max(map(len, given)))
        loss: float = self.network.library.chain_epoch(
            self.network.handle,
            work.handle,
            self.values.array,
            self.moments.array if self.moments else None,
            ctypes.byref(as_input(self.x)),
            self.y.data_ptr(),
            order.data_ptr(),
            starts.ctypes.data,
            len(given),
            ctypes.byref(
                _Sgd(self.sgd.lr, self.sgd.momentum, self.sgd.decay, self.sgd.clip)
            ),
            key,
        )
        self.network.give_back(work)
        self.network.count_batches(len(given))
        return loss
