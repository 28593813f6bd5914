"""Call any model on any example, and find all tensors in its output."""

import copy
import dataclasses
import gc
import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedspu.errors import ModelError

SELDOM = 50_000
"""Python looks for garbage after so many new objects (elsewhere after 700 or 2000)."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, one thread and gradients on; every generator is restored afterwards."""
    threads = torch.get_num_threads()
    # Python looks for garbage among all objects again and again, which in a large
    # program takes longer than all else: seldom will do, and among new ones alone.
    thresholds, is_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    if thresholds[0]:
        gc.set_threshold(max(thresholds[0], SELDOM), *thresholds[1:])
    if not is_frozen:
        gc.freeze()
    # The user's model may also advance Python's and numpy's global generators.
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    torch.set_num_threads(1)
    try:
        with (
            torch.random.fork_rng(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)
        gc.set_threshold(*thresholds)
        if not is_frozen:
            gc.unfreeze()
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Inside, a model in ``torch.compile`` runs as it was before it was compiled."""
    if any(hasattr(layer, "_orig_mod") for layer in model.modules()):
        stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance
    return nullcontext()


@contextmanager
def without_shortcuts() -> Iterator[None]:
    """Inside, ``nn.TransformerEncoderLayer`` does not run as one fused operation."""
    was_on = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_on)


def call(model: nn.Module, example: Any) -> Any:
    """The model's output on an example: a tensor, a tuple or a dict of arguments."""
    try:
        if isinstance(example, dict):
            return model(**example)
        return model(*example) if isinstance(example, tuple) else model(example)
    except Exception as error:  # the user's own code
        raise ModelError(
            f"{type(model).__name__} failed on the example input: {error}"
        ) from error


def plain_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tables that layers keep as plain attributes: no parameters, no buffers."""
    seen = {_memory(tensor) for _, tensor in all_tensors(model)}
    for path, layer in model.named_modules():
        for name, value in vars(layer).items():
            if (
                isinstance(value, Tensor)
                and value.is_floating_point()
                and value.numel() > 1
                and _memory(value) not in seen
            ):
                seen.add(_memory(value))
                yield f"{path}.{name}".lstrip("."), value


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Operations(TorchDispatchMode):
    """Inside, every operation comes to ``__torch_dispatch__``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether PyTorch loads its compiler with the first operation: 1.5 s."""
        return False


class Wide(Operations):
    """Inside, nothing is converted to less than float64.

    Some models compute a norm or a softmax in float32 whatever they are given. What
    that rounds off would hide whether two float64 outputs are the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_widened = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") in _WIDER:
            kwargs = {**kwargs, "dtype": _WIDER[kwargs["dtype"]]}
            self.has_widened = True
        return func(*args, **kwargs)


_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}


def copy_model(model: nn.Module, shares: bool = False) -> nn.Module:
    """A deep copy, also of a model that keeps results of earlier forward passes.

    ``shares`` says that it has the same parameters, not copies of them.
    """
    kept: dict[int, Any] = {id(p): p for p in model.parameters()} if shares else {}
    for layer in model.modules():
        for value in vars(layer).values():
            for tensor in flat_tensors(value):
                if not tensor.is_leaf:  # PyTorch refuses to copy these
                    kept[id(tensor)] = tensor.detach().clone()
    return copy.deepcopy(model, kept)


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Inside, layers may be given other attributes; then they get theirs back.

    Tensors must not be written to. Quicker than a copy of the model.
    """
    before = []
    for layer in model.modules():
        attributes = dict(vars(layer))
        held = [v for v in attributes.values() if type(v) in (dict, OrderedDict, list)]
        before.append((layer, type(layer), attributes, [(v, v.copy()) for v in held]))
    try:
        yield
    finally:
        for layer, kind, attributes, lists in before:
            layer.__class__ = kind
            vars(layer).clear()
            vars(layer).update(attributes)
            for value, content in lists:
                value.clear()
                if isinstance(value, dict):
                    value.update(content)
                else:
                    value.extend(content)


def all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer once, under its first name, saved or not."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def flat_tensors(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, dicts and output objects."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping | type):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in flat_tensors(item)]
    return []


def outputs_of(value: Any) -> list[Tensor]:
    """The tensors that count as a model's output.

    An object with ``logits``, as Hugging Face's models return, may hold hidden states
    as well: these are not what is learned, and do not count.
    """
    logits = getattr(value, "logits", None)
    return [logits] if isinstance(logits, Tensor) else flat_tensors(value)


def as_double(value: Any) -> Any:
    """The same nested value with floating-point tensors in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: as_double(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(as_double(item) for item in value)
    return value
