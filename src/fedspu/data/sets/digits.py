"""The 1,797 handwritten digits that ship with fedspu.

"Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, 1998, https://doi.org/10.24432/C50P49, CC BY 4.0: its test part, as
distributed with scikit-learn. An image is 8x8 counts of ink, from 0 to 16.
"""

from importlib.resources import files
from pathlib import Path

import numpy as np
import torch

from fedspu.data.dataset import Dataset


def load(folder: Path | None = None) -> Dataset:
    """The digits, with ink from 0 to 1 and shape (1797, 1, 8, 8)."""
    with (files("fedspu.data.sets") / "digits.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        ink, labels = arrays["x"], arrays["y"]
    return Dataset(
        name="digits",
        x=torch.from_numpy(ink).unsqueeze(1).float() / 16,
        y=torch.from_numpy(labels).long(),
        num_classes=10,
    )
