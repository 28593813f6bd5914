"""A multi-layer perceptron; it is not in the paper."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


class MLP(nn.Sequential):
    """Linear layers and ReLU, on examples of any shape with ``num_inputs`` values."""

    input_shape = (1, 28, 28)

    def __init__(
        self,
        num_classes: int = 10,
        num_inputs: int = 28 * 28,
        widths: Sequence[int] = (1024, 1024, 1024, 1024),
    ) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise((num_inputs, *widths)):
            layers += [nn.Linear(before, after), nn.ReLU()]
        super().__init__(*layers, nn.Linear(widths[-1], num_classes))
