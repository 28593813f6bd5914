"""Call any model on any example, and find all tensors in its output."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedspu.errors import ModelError


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, one thread and gradients on; every generator is restored afterwards."""
    threads = torch.get_num_threads()
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
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


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


def all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer once, under its first name, saved or not."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def flat_tensors(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in flat_tensors(item)]
    return []


def as_double(value: Any) -> Any:
    """The same nested value with floating-point tensors in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: as_double(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(as_double(item) for item in value)
    return value
