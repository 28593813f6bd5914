"""Loss and accuracy of a model on some examples."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
