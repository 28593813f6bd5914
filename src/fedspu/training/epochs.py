"""Local epochs on one client's examples."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu.errors import TrainingError
from fedspu.neurons.blocks import is_finite
from fedspu.neurons.table import Active, Neurons, State
from fedspu.partial.chain.native.calls import Sgd, Training
from fedspu.partial.chain.native.models import draw_key, make_training
from fedspu.partial.context import partial_training
from fedspu.settings import TrainSettings
from fedspu.tasks.task import Loss, Task, checked_loss
from fedspu.training.augmentation import Augmentation
from fedspu.training.loading import load_optimizers
from fedspu.training.logit_adjustment import Offsets, adjusted


@dataclass(frozen=True)
class LocalTraining:
    """A model, and all that local epochs on it need.

    ``settings`` has the learning rate of the round. Batches are drawn from ``rng``;
    inside ``dropout()``, PyTorch's own generators draw from a stream of this training.
    """

    model: nn.Module
    neurons: Neurons  # the model's own table, slim if the model is slim
    active: Active
    x: Tensor
    y: Tensor
    task: Task
    settings: TrainSettings
    rng: np.random.Generator
    augmentation: Augmentation | None = None
    dropout: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def loss(self) -> Loss:
        """The loss to train with: the task's, with what settings ask for besides."""
        loss, weigh = self.task.loss, self.task.weigh_classes
        if self.settings.class_weights != "none" and weigh is not None:
            loss = weigh(loss, self.y)
        if self.offsets is not None:
            loss = adjusted(loss, self.offsets)
        return checked_loss(self.task, loss)

    @property
    def offsets(self) -> Offsets | None:
        """What the training loss adds to the classes' scores, if anything."""
        log_shares = self.task.log_shares
        if not self.settings.adjust_logits or log_shares is None:
            return None
        return partial(log_shares, self.y)

    def with_epochs(self, epochs: int) -> "LocalTraining":
        """The same for another number of epochs."""
        settings = self.settings.model_copy(update={"epochs": epochs})
        return replace(self, settings=settings)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The inputs and targets of one epoch, in random order, batch by batch."""
        for positions in batches(len(self.x), self.settings.batch_size, self.rng):
            x = self.x[positions]
            if self.augmentation is not None:
                x = self.augmentation(x)
            yield x, self.y[positions]


# Local epochs -------------------------------------------------------------------------


def train(
    local: LocalTraining,
    loss: Loss | None = None,
    after_backward: Callable[[], None] | None = None,
) -> float:
    """Train the active neurons in place; return the mean loss over targets and epochs.

    It is the loss seen while training (Eq. 5's training error), before each batch's own
    step. ``loss`` replaces the task's own; ``after_backward`` is called once the
    gradients of a batch are computed.
    """
    local.model.train()
    native = _native(local) if loss is None and after_backward is None else None
    if native is not None:
        return _train_natively(local, native)
    loss = loss or local.loss
    mean = RunningMean()
    training = partial_training(
        local.model,
        local.neurons,
        local.active,
        local.settings.gradient,
        saves=local.settings.saves,
        kernels=local.settings.kernels,
    )
    with local.dropout(), training as trainable:
        optimizer = make_optimizer(trainable, local.settings)
        for _ in range(local.settings.epochs):
            for x, y in local.batches():
                optimizer.zero_grad()
                value = loss(local.model(x), y)
                value.backward()
                if after_backward is not None:
                    after_backward()
                take_step(optimizer, local.settings)
                mean.add(value, local.task.count(y))
            mean.check(local.settings)
    return mean.value


def _native(local: LocalTraining) -> Training | None:
    """The same epochs as compiled code; None if something is not the usual."""
    settings = local.settings
    if (
        settings.kernels == "torch"
        or settings.optimizer != "sgd"
        or local.augmentation is not None
        or settings.class_weights != "none"
        or local.task.loss is not F.cross_entropy
    ):
        return None
    sgd = Sgd(settings.lr, settings.momentum, settings.weight_decay, settings.clip)
    # Also those that do not travel, because the user has frozen them.
    shapes = {name: tuple(p.shape) for name, p in local.model.named_parameters()}
    return make_training(
        local.model,
        local.neurons.blocks(local.active, shapes),
        local.x,
        local.y,
        sgd,
        is_truncated=settings.gradient == "truncated",
        offsets=local.offsets,
    )


def _train_natively(local: LocalTraining, native: Training) -> float:
    mean = RunningMean()
    with local.dropout():
        for _ in range(local.settings.epochs):
            positions = batches(len(local.x), local.settings.batch_size, local.rng)
            mean.total += native.epoch(positions, draw_key(native.network))
            mean.count += len(local.x)
            mean.check(local.settings)
    return mean.value


class RunningMean:
    """The mean loss over all targets, from the mean losses of batches."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, loss: Tensor, count: int) -> None:
        """Add the mean loss of ``count`` targets."""
        self.total += float(loss.detach()) * count
        self.count += count

    def check(self, settings: TrainSettings) -> None:
        """Refuse to continue with a loss that is not finite."""
        if not isfinite(self.total):
            raise TrainingError(
                f"the training loss is {self.total}; lower train.lr (it is "
                f"{settings.lr})"
            )

    @property
    def value(self) -> float:
        """The mean."""
        return self.total / self.count


def take_step(optimizer: torch.optim.Optimizer, settings: TrainSettings) -> None:
    """Clip the gradients if asked, and take an optimizer step."""
    if settings.clip:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(trained, settings.clip)
    try:
        optimizer.step()
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise TrainingError(
            f"the update overflowed; lower train.lr (it is {settings.lr})"
        ) from None


def check_finite(state: State, settings: TrainSettings) -> None:
    """Refuse weights that have overflowed, also in the very last step."""
    for name, values in state.items():
        if not is_finite(values):
            raise TrainingError(
                f"{name} is no longer finite; lower train.lr (it is {settings.lr})"
            )


def batches(
    num_examples: int, batch_size: int, rng: np.random.Generator
) -> Iterator[Tensor]:
    """The positions of one epoch's examples in random order, batch by batch.

    A last batch of one joins the batch before: batch norms cannot train on one example.
    """
    yield from cut(torch.from_numpy(rng.permutation(num_examples)), batch_size)


def cut(values: Tensor, batch_size: int) -> Iterator[Tensor]:
    """Values batch by batch; a last batch of one joins the batch before."""
    starts = list(range(0, len(values), batch_size))
    if len(starts) > 1 and len(values) - starts[-1] == 1:
        starts.pop()
    for start, end in zip(starts, [*starts[1:], len(values)], strict=True):
        yield values[start:end]


def make_optimizer(
    trainable: Sequence[Tensor], settings: TrainSettings
) -> torch.optim.Optimizer:
    """The optimizer that settings name, new for every round."""
    load_optimizers()
    given: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if settings.optimizer == "sgd":
        return torch.optim.SGD(trainable, momentum=settings.momentum, **given)
    return OPTIMIZERS[settings.optimizer](trainable, **given)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
