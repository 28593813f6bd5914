"""Local epochs: train a model's active neurons on one client's examples."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu.errors import SettingsError, TrainingError
from fedspu.neurons.table import Active, Neurons, State
from fedspu.partial.context import partial_training
from fedspu.partial.weight import Mode, Saves


@dataclass(frozen=True)
class Recipe:
    """How a client trains."""

    epochs: int = 5
    batch_size: int = 16
    lr: float = 0.1
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    gradient: Mode = "exact"
    saves: Saves = "fast"


def train(
    model: nn.Module,
    neurons: Neurons,
    active: Active,
    x: Tensor,
    y: Tensor,
    recipe: Recipe,
    rng: np.random.Generator,
    loss_of: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    after_backward: Callable[[], None] = lambda: None,
) -> float:
    """Train the active neurons in place; the mean loss over all examples and epochs.

    The loss is the one seen while training (Eq. 5's training error): an example counts
    with the weights it met. ``loss_of`` takes scores and labels; ``after_backward`` is
    called when the gradients of a batch are there.
    """
    model.train()
    total, count = 0.0, 0
    with partial_training(
        model, neurons, active, recipe.gradient, saves=recipe.saves
    ) as trainable:
        optimizer = make_optimizer(trainable, recipe)
        for _ in range(recipe.epochs):
            for batch in batches(len(x), recipe.batch_size, rng):
                optimizer.zero_grad()
                loss = loss_of(model(x[batch]), y[batch])
                loss.backward()
                after_backward()
                take_step(optimizer, recipe)
                total += float(loss.detach()) * len(batch)
                count += len(batch)
            check_loss(total, recipe)
    return total / count


def take_step(optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """An optimizer's step; refuses one that no weight can hold."""
    try:
        optimizer.step()
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise TrainingError(
            f"no weight can hold such a step; lower train.lr (it is {recipe.lr})"
        ) from None


def check_loss(total: float, recipe: Recipe) -> None:
    """Refuse to go on with a loss that is not finite."""
    if not isfinite(total):
        raise TrainingError(
            f"the training loss is {total}; lower train.lr (it is {recipe.lr})"
        )


def check_finite(state: State, recipe: Recipe) -> None:
    """Refuse weights that have overflown, also in the very last step."""
    for name, values in state.items():
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise TrainingError(
                f"{name} is not finite any more; lower train.lr (it is {recipe.lr})"
            )


def batches(
    num_examples: int, batch_size: int, rng: np.random.Generator
) -> Iterator[Tensor]:
    """The positions of one epoch's examples in random order, batch by batch.

    A last batch of one joins the one before: a batch norm cannot train on one example.
    """
    yield from cut(torch.from_numpy(rng.permutation(num_examples)), batch_size)


def cut(values: Tensor, batch_size: int) -> Iterator[Tensor]:
    """Values batch by batch; a last batch of one joins the one before."""
    starts = list(range(0, len(values), batch_size))
    if len(starts) > 1 and len(values) - starts[-1] == 1:
        starts.pop()
    for start, end in zip(starts, [*starts[1:], len(values)], strict=True):
        yield values[start:end]


def make_optimizer(trainable: list[Tensor], recipe: Recipe) -> torch.optim.Optimizer:
    """The optimizer a recipe names, new for every round."""
    given: dict[str, Any] = {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(trainable, momentum=recipe.momentum, **given)
    if recipe.optimizer in OPTIMIZERS:
        return OPTIMIZERS[recipe.optimizer](trainable, **given)
    raise SettingsError(
        f"train.optimizer = {recipe.optimizer!r}: expected one of "
        f"{', '.join(sorted(OPTIMIZERS))}"
    )


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


BATCH = 512


@dataclass(frozen=True)
class Score:
    """Mean loss and share of right answers."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> Score:
    """Judge a model in eval mode: nothing in it learns from what it is judged on."""
    modes = {layer: layer.training for layer in model.modules()}
    model.eval()
    loss, right = 0.0, 0
    try:
        for start in range(0, len(x), BATCH):
            logits, labels = model(x[start : start + BATCH]), y[start : start + BATCH]
            loss += float(F.cross_entropy(logits, labels, reduction="sum"))
            right += int((logits.argmax(1) == labels).sum())
    finally:
        for layer, mode in modes.items():
            layer.training = mode
    return Score(loss / len(x), right / len(x))


def blended_loss(train_loss: float, val_loss: float, blend: float) -> float:
    """Eq. 5: L = λ L_train + (1 - λ) L_test, with ``blend`` for λ."""
    return blend * train_loss + (1 - blend) * val_loss


def has_stopped(losses: Sequence[float], patience: int = 1) -> bool:
    """Whether a client with these losses, one per participation, stops now.

    It stops once the last ``patience`` losses each exceed, strictly, the one before; so
    never at its first participation.
    """
    if len(losses) <= patience:
        return False
    recent = losses[-patience - 1 :]
    return all(now > before for before, now in pairwise(recent))
