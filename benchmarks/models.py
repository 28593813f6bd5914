"""The networks that are measured, besides the paper's own."""

from torch import Tensor, nn

from fedspu.models.mlp import MLP
from fedspu.models.mobilenet import MobileNet
from fedspu.models.resnet import ResNet18

mlp = MLP
resnet18 = ResNet18
mobilenet = MobileNet


class Transformer(nn.Module):
    """An encoder of four layers, 256 wide, over the vectors of 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The class scores of sequences (n, 64, 64)."""
        scores: Tensor = self.head(self.encoder(self.embed(x)).mean(1))
        return scores
