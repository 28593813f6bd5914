"""A model by name, and examples with which a command can try it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedspu import models
from fedspu.cli.flags import sizes
from fedspu.data import load
from fedspu.errors import ModelError, SettingsError
from fedspu.federation.plan import first_line
from fedspu.tasks.classification import classification
from fedspu.tasks.task import Task, check_output


def model_and_example(
    name: str, shape: str | None, data: str | None, task: Task = classification
) -> tuple[nn.Module, Tensor]:
    """A model by name, and two examples: of a data set, a shape, or its own shape."""
    if data is not None:
        dataset = load(data, task=task)
        return models.build(name, dataset.num_outputs), dataset.take(slice(2))[0]
    example = _zeros(name, shape)
    return models.build(name), example


def model_and_batch(
    name: str,
    shape: str | None,
    data: str | None,
    batch_size: int,
    task: Task = classification,
) -> tuple[nn.Module, Tensor, Tensor]:
    """A model by name, and a batch with targets: of a data set, or else random."""
    if data is not None:
        return _of_data(name, data, batch_size, task)
    if not task.has_classes:
        raise SettingsError(
            f"--task {task.name}: needs examples with targets; give a data set, like "
            "--data arrays:FILE.npz"
        )
    model, example = model_and_example(name, shape, None)
    num_scores = _num_scores(_output(model, example))
    with _refusing(batch_size):
        rng = torch.Generator().manual_seed(0)
        x = torch.randn(batch_size, *example.shape[1:], generator=rng)
        y = torch.randint(num_scores, (batch_size,), generator=rng)
    return model, x, y


def _of_data(
    name: str, data: str, batch_size: int, task: Task
) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, and a batch of a data set; if it has too few, it begins again."""
    dataset = load(data, task=task)
    model = models.build(name, dataset.num_outputs)
    x, y = dataset.take(slice(2))
    try:
        check_output(task, _output(model, x), y, dataset.num_outputs)
    except ModelError as error:
        raise ModelError(f"model = {name!r}: {error} (data: {data})") from None
    with _refusing(batch_size):
        x, y = dataset.take(torch.arange(batch_size) % len(dataset.x))
    return model, x, y


@contextmanager
def _refusing(batch_size: int) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TypeError):  # out of memory, or no valid tensor size
        raise SettingsError(
            f"--batch-size {batch_size}: too many examples for the memory; try 16"
        ) from None


def _zeros(name: str, shape: str | None) -> Tensor:
    """Two examples of zeros, of the given shape or else the model's own."""
    own = getattr(models.find(name), "input_shape", None)
    if shape is None and own is not None:
        return torch.zeros(2, *own)
    if shape is None:
        raise SettingsError(
            f"model = {name!r}: give the shape of one example, like --input 3,32,32, "
            "or a data set, like --data arrays:FILE.npz"
        )
    try:
        return torch.zeros(2, *sizes(shape))
    except (RuntimeError, TypeError):
        raise SettingsError(
            f"--input {shape}: expected sizes that fit the memory, like 3,32,32"
        ) from None


def _output(model: nn.Module, example: Tensor) -> Any:
    """What a model in eval mode gives for an example."""
    was_training = model.training
    try:
        with torch.no_grad():
            return model.eval()(example)
    except Exception as error:  # the user's own code
        raise ModelError(
            f"the model failed on two examples of shape {tuple(example.shape[1:])}: "
            f"{first_line(error)}"
        ) from error
    finally:
        model.train(was_training)


def _num_scores(output: Any) -> int:
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != 2:
        is_tensor = isinstance(output, Tensor)
        found = tuple(output.shape) if is_tensor else type(output).__name__
        raise ModelError(
            f"the model returned {found} for 2 examples; expected (2, classes): one "
            "score for each class; for other tasks give --task and --data"
        )
    return output.shape[1]
