"""Bytes of a training step, measured by taking it."""

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu.neurons.calls import call, flat_tensors

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one training step, each storage counted once; the batch is not counted.

    ``copies`` are leaves outside of the weights' own memory, ``saved`` is what the
    forward pass keeps for the backward pass. ``peak`` is the most that is alive at any
    moment, temporary tensors included, according to PyTorch's allocator.
    """

    weights: int
    buffers: int
    copies: int
    gradients: int
    saved: int
    peak: int

    @property
    def total(self) -> int:
        """All but the temporary tensors."""
        kept = self.weights + self.buffers + self.copies
        return kept + self.gradients + self.saved


def step_bytes(
    model: nn.Module,
    trainable: Iterable[Tensor],
    x: Any,
    y: Any,
    loss: Loss = F.cross_entropy,
) -> StepBytes:
    """What a step of plain SGD on ``loss(model(x), y)`` holds, measured by taking it.

    The model's weights stay as they are; its running statistics move, as in training.
    """
    trainable = list(trainable)
    with torch._C.DisableTorchFunctionSubclass():  # a partial weight as stored
        batch = _Storages(flat_tensors((x, y)))
        weights = batch.besides(model.parameters())
        buffers = weights.besides(model.buffers())
        copies = buffers.besides(trainable)
    _clear(trainable)
    boxes: weakref.WeakSet[_Box] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Box:
        box = _Box(tensor.detach())  # else the graph would keep itself alive
        boxes.add(box)
        return box

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        value = loss(call(model, x), y)
    kept = [box.tensor for box in boxes]  # boxes of dropped branches are gone
    saved = copies.besides([*kept, *_kept_on_graph(value)])
    del kept
    value.backward()
    # Gradients may lie where saved tensors, which are freed by now, used to be.
    gradients = copies.besides(t.grad for t in trainable if t.grad is not None)
    _clear(trainable)
    always = weights.num_bytes + buffers.num_bytes + copies.num_bytes
    return StepBytes(
        weights=weights.num_bytes,
        buffers=buffers.num_bytes,
        copies=copies.num_bytes,
        gradients=gradients.num_bytes,
        saved=saved.num_bytes,
        peak=always + peak_of(lambda: _step(model, trainable, x, y, loss)),
    )


def _clear(trainable: Iterable[Tensor]) -> None:
    for tensor in trainable:
        tensor.grad = None


def _step(
    model: nn.Module, trainable: list[Tensor], x: Any, y: Any, loss: Loss
) -> None:
    optimizer = torch.optim.SGD(trainable, lr=0.0)
    loss(call(model, x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


class _Box:
    """Holds a tensor that the graph keeps; a weak reference shows for how long."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Storages:
    """Bytes of the storages of some tensors, other than ``known`` ones."""

    def __init__(self, tensors: Iterable[Tensor], known: Iterable[int] = ()) -> None:
        before = set(known)
        found = {
            storage.data_ptr(): storage.nbytes()
            for tensor in tensors
            for storage in _storages(tensor)
            if storage.data_ptr() not in before
        }
        self.num_bytes = sum(found.values())
        self.known = before | found.keys()

    def besides(self, tensors: Iterable[Tensor]) -> "_Storages":
        """The storages of more tensors, without those counted so far."""
        return _Storages(tensors, self.known)


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.is_sparse:
            tensor = tensor.detach()
            parts = (tensor._indices(), tensor._values())
            return [part.untyped_storage() for part in parts]
        return [tensor.untyped_storage()]


# Tensors kept beside save_for_backward ------------------------------------------------


def _kept_on_graph(value: Tensor) -> Iterator[Tensor]:
    """Tensors that functions written in Python keep as attributes for their backward.

    No hook sees these; in the graph such a function's node is its own context.
    """
    nodes: list[Any] = [value.grad_fn]
    met: set[Any] = set()
    seen: set[int] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in met:
            continue
        met.add(node)
        nodes += [below for below, _ in node.next_functions]
        yield from _tensors_in(getattr(node, "__dict__", {}), seen)


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Tensors in containers and in attributes of objects; layers are skipped."""
    if id(value) in seen or isinstance(value, nn.Module | type | ModuleType):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    for item in _inside(value):
        yield from _tensors_in(item, seen)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())


# The peak -----------------------------------------------------------------------------


def peak_of(step: Callable[[], None]) -> int:
    """The most bytes that PyTorch's allocator has handed out at once in a step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        _without_garbage(),
        _without_log(),
        torch.profiler.profile(activities=activities, profile_memory=True) as watch,
    ):
        step()
    assert watch.profiler is not None
    events = watch.profiler.kineto_results.events()
    changes = sorted(
        (event for event in events if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    )
    peak: int = max(accumulate((e.nbytes() for e in changes), initial=0))
    return peak


@contextmanager
def _without_garbage() -> Iterator[None]:
    """Without Python's collector, which may run at any moment of a step.

    If it freed there what an earlier measured step has left, PyTorch's profiler would
    take these bytes off this step.
    """
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _without_log() -> Iterator[None]:
    """Without the lines that PyTorch's profiler logs to the terminal by itself."""
    sys.stderr.flush()
    terminal, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(nowhere)
