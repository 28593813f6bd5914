"""A model by name, and examples with which a command can try it."""

import torch
from torch import Tensor, nn

from fedspu import models
from fedspu.data import load
from fedspu.errors import ModelError, SettingsError
from fedspu.federation.plan import first_line


def model_and_example(
    name: str, shape: str | None, data: str | None
) -> tuple[nn.Module, Tensor]:
    """A model by name, and two examples: of a data set, a shape, or its own shape."""
    if data is not None:
        dataset = load(data)
        return models.build(name, dataset.num_outputs), dataset.take(slice(2))[0]
    example = _zeros(name, shape)
    return models.build(name), example


def model_and_batch(
    name: str, shape: str | None, data: str | None, batch_size: int
) -> tuple[nn.Module, Tensor, Tensor]:
    """A model by name, and a batch with labels: of a data set, or else random."""
    model, example = model_and_example(name, shape, data)
    num_scores = _num_scores(model, example)
    try:
        if data is not None:
            dataset = load(data)
            picked = torch.arange(batch_size) % len(dataset.x)
            x, y = dataset.take(picked)
        else:
            rng = torch.Generator().manual_seed(0)
            x = torch.randn(batch_size, *example.shape[1:], generator=rng)
            y = torch.randint(num_scores, (batch_size,), generator=rng)
    except (RuntimeError, TypeError):  # out of memory, or no valid tensor size
        raise SettingsError(
            f"--batch-size {batch_size}: too many examples for the memory; try 16"
        ) from None
    if int(y.max()) >= num_scores:
        raise ModelError(
            f"model = {name!r}: it has scores for {num_scores} classes, but the labels "
            f"of {data} go up to {int(y.max())}"
        )
    return model, x, y


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
        return torch.zeros(2, *(int(part) for part in shape.split(",")))
    except (ValueError, RuntimeError, TypeError):
        raise SettingsError(
            f"--input {shape}: expected sizes separated by commas, like 3,32,32"
        ) from None


def _num_scores(model: nn.Module, example: Tensor) -> int:
    was_training = model.training
    try:
        with torch.no_grad():
            out = model.eval()(example)
    except Exception as error:  # the user's own code
        raise ModelError(
            f"the model failed on two examples of shape {tuple(example.shape[1:])}: "
            f"{first_line(error)}"
        ) from error
    finally:
        model.train(was_training)
    if not isinstance(out, Tensor) or out.dim() != 2 or len(out) != 2:
        found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ModelError(
            f"the model returned {found} for 2 examples; expected (2, classes): one "
            "score for each class"
        )
    return out.shape[1]
