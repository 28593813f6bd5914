"""MobileNetV2 for small images; it is not in the paper.

Sandler, Howard, Zhu, Zhmoginov and Chen, "MobileNetV2: Inverted Residuals and Linear
Bottlenecks", CVPR 2018.
"""

from torch import Tensor, nn

from fedspu.models.resnet import conv_norm

# Widening factor, channels, number of blocks, stride of the first.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """Widen by 1x1, filter each channel by 3x3, narrow by 1x1."""

    def __init__(self, before: int, after: int, stride: int, factor: int) -> None:
        super().__init__()
        wide = before * factor
        filters = {"kernel_size": 3, "stride": stride, "padding": 1, "groups": wide}
        widen = [conv_norm(before, wide, kernel_size=1), nn.ReLU6()]
        self.body = nn.Sequential(
            *(widen if factor > 1 else []),
            conv_norm(wide, wide, **filters),
            nn.ReLU6(),
            conv_norm(wide, after, kernel_size=1),
        )
        self.is_residual = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        """Feature maps in, feature maps out."""
        y: Tensor = self.body(x)
        return x + y if self.is_residual else y


class MobileNet(nn.Sequential):
    """MobileNetV2 for colour images of 32x32 pixels, with no stride at the start."""

    input_shape = (3, 32, 32)

    def __init__(self, num_classes: int = 10) -> None:
        width = 32
        layers: list[nn.Module] = [
            conv_norm(3, width, kernel_size=3, padding=1),
            nn.ReLU6(),
        ]
        for factor, after, number, stride in STAGES:
            for i in range(number):
                first = stride if i == 0 else 1
                layers.append(InvertedResidual(width, after, first, factor))
                width = after
        layers += [conv_norm(width, 1280, kernel_size=1), nn.ReLU6()]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, num_classes)]
        super().__init__(*layers, *head)
