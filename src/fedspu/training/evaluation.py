"""Judge a model on examples: its mean loss, and the task's metric."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedspu.partial.chain.native.models import Kernels, make_judge, takes
from fedspu.tasks.task import Task, add_measured, checked_loss, value_of

BATCH = 512


@dataclass(frozen=True)
class Score:
    """Mean loss, and the value of the task's metric."""

    loss: float
    value: float


def evaluate(
    model: nn.Module, x: Tensor, y: Tensor, task: Task, kernels: Kernels = "auto"
) -> Score:
    """Judge a model in eval mode: nothing in it learns from what it is judged on."""
    (score,) = evaluate_each(model, [(x, y)], task, kernels)
    return score


@torch.no_grad()
def evaluate_each(
    model: nn.Module,
    parts: Sequence[tuple[Tensor, Tensor]],
    task: Task,
    kernels: Kernels = "auto",
) -> list[Score]:
    """Judge a model on several parts of a client's examples."""
    modes = {layer: layer.training for layer in model.modules()}
    model.eval()
    try:
        run: Callable[[Tensor], Tensor] = model
        if kernels != "torch" and all(takes(x) for x, _ in parts):
            run = make_judge(model, tuple(parts[0][0].shape[1:])) or model
        return [_score(run, x, y, task) for x, y in parts]
    finally:
        for layer, mode in modes.items():
            layer.training = mode


def _score(run: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, task: Task) -> Score:
    loss, count, sums = 0.0, 0, torch.zeros(1, dtype=torch.float64)
    loss_of = checked_loss(task, task.loss)
    for start in range(0, len(x), BATCH):
        output, target = run(x[start : start + BATCH]), y[start : start + BATCH]
        loss += float(loss_of(output, target, reduction="sum"))
        count += task.count(target)
        sums = add_measured(task, sums, output, target)
    return Score(loss / count, value_of(task, sums))
