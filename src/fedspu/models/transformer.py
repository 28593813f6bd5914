"""A small Transformer over the patches of an image; it is not in the paper.

Dosovitskiy and others, "An Image is Worth 16x16 Words", ICLR 2021, without dropout and
with the mean of all tokens instead of a class token.
"""

import torch
from torch import Tensor, nn


class Transformer(nn.Module):
    """Four layers, 256 wide, over the 64 patches of a colour image of 32x32 pixels.

    For sequences of words, use an ``nn.Embedding`` instead of ``patches``.
    """

    input_shape = (3, 32, 32)

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 256, kernel_size=4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 64, 256))
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """The class scores of a batch of images (n, 3, 32, 32)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        scores: Tensor = self.head(self.encoder(tokens).mean(1))
        return scores
