"""Random changes of training images: flips and crops."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedspu.settings import TrainSettings

Augmentation = Callable[[Tensor], Tensor]
"""Changes a batch of training inputs at random."""

CROP = 4
"""An image is padded by this many pixels on each side, then cropped again."""


def make_augmentation(
    settings: TrainSettings, rng: np.random.Generator
) -> Augmentation | None:
    """The random changes that settings ask for, drawn from ``rng``; None if none."""
    if not settings.augment:
        return None

    def augment(x: Tensor) -> Tensor:
        if "flip" in settings.augment:
            is_flipped = torch.from_numpy(rng.random(len(x)) < 0.5).to(x.device)
            x = torch.where(is_flipped.view(-1, 1, 1, 1), x.flip(3), x)
        if "crop" in settings.augment:
            x = _cropped(
                x, torch.from_numpy(rng.integers(2 * CROP + 1, size=(2, len(x))))
            )
        return x

    return augment


def _cropped(x: Tensor, corners: Tensor) -> Tensor:
    """Each image moved by up to CROP pixels; its edge is repeated."""
    height, width = x.shape[2:]
    wide = F.pad(x, (CROP,) * 4, mode="replicate")
    rows, columns = corners.to(x.device)
    rows = rows[:, None] + torch.arange(height, device=x.device)
    columns = columns[:, None] + torch.arange(width, device=x.device)
    example = torch.arange(len(x), device=x.device).view(-1, 1, 1)
    # Indices around a slice put the channels last.
    return wide[example, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
