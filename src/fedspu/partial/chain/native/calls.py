"""Calls of the compiled code: forward, backward, whole epochs, judging."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedspu.partial.chain.native.network import Network, Work, empty
from fedspu.partial.chain.native.parts import RUNNING, SLOTS, norm_kind, parameters_of
from fedspu.partial.chain.native.stages import NotAChainError

BatchNorm = nn.modules.batchnorm._BatchNorm


class _Tensors(ctypes.Structure):
    """A stage's parameters and statistics, and where its gradients go."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (*SLOTS, "mean", "variance", *(f"d_{slot}" for slot in SLOTS))
    ]


class _Sgd(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in ("lr", "momentum", "decay", "clip")]


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
        self.stages = network.stages
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
        for stage, of_stage in zip(self.stages, self.array, strict=True):
            if norm_kind(stage) != RUNNING:  # such a norm reads them
                of_stage.mean = of_stage.variance = None
        return self

    def _pointer(self, tensor: Tensor) -> int:
        if not tensor.is_contiguous() or tensor.dtype != torch.float32:
            raise NotAChainError("a weight that is not contiguous float32")
        self.tensors.append(tensor)
        return tensor.data_ptr()


def make_gradients(network: Network) -> Gradients:
    """Memory for the gradients of everything that trains."""
    return [
        [None if size is None else empty(size) for size in sizes]
        for sizes in network.trained_sizes
    ]


def forward(
    network: Network, work: Work, values: Values, x: Tensor, key: int
) -> Tensor:
    """The chain's output in training."""
    out = empty((len(x), *network.output))
    network.library.chain_forward(
        network.handle,
        work.handle,
        values.array,
        x.data_ptr(),
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
    out = empty((len(x), *network.output))
    network.library.chain_judge(
        network.handle,
        work.handle,
        values.array,
        x.data_ptr(),
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
    """Epochs of SGD on the mean cross-entropy, in place.

    ``offsets``, one for each class, are added to the scores, if there are any.
    """

    def __init__(
        self,
        network: Network,
        x: Tensor,
        y: Tensor,
        sgd: Sgd,
        offsets: Tensor | None = None,
    ) -> None:
        self.network, self.x, self.y, self.sgd = network, x, y, sgd
        self.offsets = offsets
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
            self.x.data_ptr(),
            self.y.data_ptr(),
            order.data_ptr(),
            starts.ctypes.data,
            len(given),
            ctypes.byref(
                _Sgd(self.sgd.lr, self.sgd.momentum, self.sgd.decay, self.sgd.clip)
            ),
            key,
            None if self.offsets is None else self.offsets.data_ptr(),
        )
        self.network.give_back(work)
        self.network.count_batches(len(given))
        return loss
