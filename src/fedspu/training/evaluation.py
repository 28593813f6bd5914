"""Judge a model on examples: its mean loss, and the task's metric."""

from collections.abc import Callable
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


@torch.no_grad()
def evaluate(
    model: nn.Module, x: Tensor, y: Tensor, task: Task, kernels: Kernels = "auto"
) -> Score:
    """Judge a model in eval mode: nothing in it learns from what it is judged on."""
    modes = {layer: layer.training for layer in model.modules()}
    model.eval()
    loss, count, sums = 0.0, 0, torch.zeros(1, dtype=torch.float64)
    loss_of = checked_loss(task, task.loss)
    try:
        run: Callable[[Tensor], Tensor] = model
        if kernels != "torch" and takes(x):
            run = make_judge(model, tuple(x.shape[1:])) or model
        for start in range(0, len(x), BATCH):
            output, target = run(x[start : start + BATCH]), y[start : start + BATCH]
            loss += float(loss_of(output, target, reduction="sum"))
            count += task.count(target)
            sums = add_measured(task, sums, output, target)
    finally:
        for layer, mode in modes.items():
            layer.training = mode
    return Score(loss / count, value_of(task, sums))
