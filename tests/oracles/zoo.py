"""Small models of every kind, each with its neuron groups worked out by hand.

The tables here are an oracle for ``fedspu.map_neurons``: they were written from the
model definitions alone, before and without any mapping code. Each model stands right
above its table. All counts are plain arithmetic, one term per tensor in the order of
the model, so that a reader can check them: at p = .5 a group of n neurons has
``max(1, floor(n / 2))`` active ones, and an entry is active when all the neurons it
connects are. Input features and whatever reaches the output are always active.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu.models.paper import CIFARNet, EMNISTNet, SpeechNet

Axes = frozenset[tuple[str, int]]


@dataclass(frozen=True)
class Group:
    """An expected group: its number of neurons, and every axis they lie along.

    An axis is (tensor name, dim), of a learnable parameter or of the running mean or
    variance of a norm. After a concatenation several groups share one axis.
    """

    size: int
    axes: Axes


@dataclass(frozen=True)
class Entry:
    """A model, an example input for it, and the table expected of it."""

    name: str
    build: Callable[[], nn.Module]
    example: Callable[[], Any]  # a tensor, a tuple of arguments or a dict of keywords
    groups: tuple[Group, ...]  # without what is always active
    active_at_half: int  # active entries at p = .5, norm statistics included
    total: int  # all those entries: learnable ones and norm statistics
    slim: bool = True  # a physically slimmer copy must be possible for all groups
    may_be_active: bool = False  # always active is right, and so are right groups


# How the tables are written: a group is made by one layer, normed by others, read by
# others. Convolution and linear weights are (outputs, inputs, ...).


def group(size: int, *axes: Iterable[tuple[str, int]]) -> Group:
    """Join what the functions below list to one group."""
    return Group(size, frozenset().union(*axes))


def made_by(*layers: str) -> Axes:
    """Output axes of layers with a bias."""
    return along(0, *(f"{layer}.{t}" for layer in layers for t in ("weight", "bias")))


def made_by_weight(*layers: str) -> Axes:
    """Output axes of layers without a bias."""
    return along(0, *(f"{layer}.weight" for layer in layers))


def read_by(*layers: str) -> Axes:
    """Input axes of layers."""
    return along(1, *(f"{layer}.weight" for layer in layers))


def normed_by(*layers: str) -> Axes:
    """Axes of batch norms, or of instance norms with all they can have."""
    tensors = ("weight", "bias", "running_mean", "running_var")
    return along(0, *(f"{layer}.{t}" for layer in layers for t in tensors))


def scaled_by(*layers: str) -> Axes:
    """Axes of norms without running statistics: layer norms, group norms."""
    return made_by(*layers)


def along(dim: int, *tensors: str) -> Axes:
    """One axis of each of some tensors."""
    return frozenset((tensor, dim) for tensor in tensors)


# How the models are written.


def chain(**layers: nn.Module) -> nn.Sequential:
    """Run named layers one after the other."""
    return nn.Sequential(OrderedDict(layers))


def noise(*shape: int) -> Tensor:
    """Draw the same normal values at every call, leaving the global generator alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    """Count through the vocabulary in steps of seven."""
    return (7 * torch.arange(batch * length) % vocabulary).reshape(batch, length)


# ----------------------------------------------------------------- the paper's networks

EMNIST_CNN = Entry(
    name="emnist_cnn",
    build=EMNISTNet,
    example=lambda: noise(2, 1, 28, 28),
    groups=(
        group(20, made_by("conv1"), normed_by("bn1"), read_by("conv2")),
        group(20, made_by("conv2"), normed_by("bn2"), read_by("fc")),
    ),
    active_at_half=(
        10 * 1 * 9 + 10  # conv1: weight, bias
        + 4 * 10  # bn1: weight, bias, running mean, running variance
        + 10 * 10 * 9 + 10  # conv2
        + 4 * 10  # bn2
        + 62 * (10 * 7 * 7) + 62  # fc: 7x7 map of each channel, flattened
    ),
    total=(
        20 * 1 * 9 + 20  # conv1
        + 4 * 20  # bn1
        + 20 * 20 * 9 + 20  # conv2
        + 4 * 20  # bn2
        + 62 * 980 + 62  # fc
    ),
)  # fmt: skip

CIFAR_CNN = Entry(
    name="cifar_cnn",
    build=CIFARNet,
    example=lambda: noise(2, 3, 32, 32),
    groups=(
        group(6, made_by("conv1"), normed_by("bn1"), read_by("conv2")),
        group(16, made_by("conv2"), normed_by("bn2"), read_by("fc1")),
        group(120, made_by_weight("fc1"), read_by("fc2")),
        group(84, made_by_weight("fc2"), read_by("fc3")),
    ),
    active_at_half=(
        3 * 3 * 9 + 3  # conv1
        + 4 * 3  # bn1
        + 8 * 3 * 9 + 8  # conv2
        + 4 * 8  # bn2
        + 60 * (8 * 8 * 8)  # fc1: 8x8 map of each of 8 channels
        + 42 * 60  # fc2
        + 10 * 42 + 10  # fc3
    ),
    total=(
        6 * 3 * 9 + 6  # conv1
        + 4 * 6  # bn1
        + 16 * 6 * 9 + 16  # conv2
        + 4 * 16  # bn2
        + 120 * 1024  # fc1
        + 84 * 120  # fc2
        + 10 * 84 + 10  # fc3
    ),
)  # fmt: skip

SPEECH_CNN = Entry(
    name="speech_cnn",
    build=SpeechNet,
    example=lambda: noise(2, 1, 32, 32),
    groups=(
        group(50, made_by("conv1"), normed_by("bn1"), read_by("conv2")),
        group(50, made_by("conv2"), normed_by("bn2"), read_by("fc")),
    ),
    active_at_half=(
        25 * 1 * 4 + 25  # conv1
        + 4 * 25  # bn1
        + 25 * 25 * 4 + 25  # conv2
        + 4 * 25  # bn2
        + 35 * (25 * 3 * 3) + 35  # fc: 3x3 map of each channel
    ),
    total=(
        50 * 1 * 4 + 50  # conv1
        + 4 * 50  # bn1
        + 50 * 50 * 4 + 50  # conv2
        + 4 * 50  # bn2
        + 35 * 450 + 35  # fc
    ),
)  # fmt: skip


# --------------------------------------------------------------- convolutional networks


def vgg() -> nn.Module:
    """Three convolutions with batch norms, flattened into two linear layers."""
    return chain(
        conv1=nn.Conv2d(3, 6, 3, padding=1),
        bn1=nn.BatchNorm2d(6),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 10, 3, padding=1),
        bn2=nn.BatchNorm2d(10),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        conv3=nn.Conv2d(10, 7, 3, padding=1),
        bn3=nn.BatchNorm2d(7),
        relu3=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(7 * 2 * 2, 9),
        relu4=nn.ReLU(),
        dropout=nn.Dropout(0.5),
        fc2=nn.Linear(9, 4),
    )


VGG = Entry(
    name="vgg",
    build=vgg,
    example=lambda: noise(2, 3, 8, 8),
    groups=(
        group(6, made_by("conv1"), normed_by("bn1"), read_by("conv2")),
        group(10, made_by("conv2"), normed_by("bn2"), read_by("conv3")),
        group(7, made_by("conv3"), normed_by("bn3"), read_by("fc1")),
        group(9, made_by("fc1"), read_by("fc2")),
    ),
    active_at_half=(
        3 * 3 * 9 + 3  # conv1: 3 of 6, all 3 colours
        + 4 * 3  # bn1
        + 5 * 3 * 9 + 5  # conv2: 5 of 10
        + 4 * 5  # bn2
        + 3 * 5 * 9 + 3  # conv3: 3 of 7
        + 4 * 3  # bn3
        + 4 * (3 * 2 * 2) + 4  # fc1: 4 of 9; 2x2 map of 3 channels
        + 4 * 4 + 4  # fc2: all 4 classes
    ),
    total=(
        6 * 3 * 9 + 6  # conv1
        + 4 * 6  # bn1
        + 10 * 6 * 9 + 10  # conv2
        + 4 * 10  # bn2
        + 7 * 10 * 9 + 7  # conv3
        + 4 * 7  # bn3
        + 9 * 28 + 9  # fc1
        + 4 * 9 + 4  # fc2
    ),
)  # fmt: skip


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = chain(
                conv=nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                bn=nn.BatchNorm2d(outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + self.shortcut(x))


def resnet_basic() -> nn.Module:
    """A stem, a block of 6 channels, then two of 10, the first with stride 2."""
    return chain(
        stem=nn.Conv2d(3, 6, 3, padding=1, bias=False),
        bn=nn.BatchNorm2d(6),
        relu=nn.ReLU(),
        stage1=chain(a=_BasicBlock(6, 6, stride=1)),
        stage2=chain(a=_BasicBlock(6, 10, stride=2), b=_BasicBlock(10, 10, stride=1)),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(10, 4),
    )


RESNET_BASIC = Entry(
    name="resnet_basic",
    build=resnet_basic,
    example=lambda: noise(2, 3, 8, 8),
    groups=(
        group(  # what the first stage adds up, and the second reads
            6,
            made_by_weight("stem", "stage1.a.conv2"),
            normed_by("bn", "stage1.a.bn2"),
            read_by("stage1.a.conv1", "stage2.a.conv1", "stage2.a.shortcut.conv"),
        ),
        group(
            6,
            made_by_weight("stage1.a.conv1"),
            normed_by("stage1.a.bn1"),
            read_by("stage1.a.conv2"),
        ),
        group(
            10,
            made_by_weight("stage2.a.conv1"),
            normed_by("stage2.a.bn1"),
            read_by("stage2.a.conv2"),
        ),
        group(  # what the second stage adds up
            10,
            made_by_weight("stage2.a.conv2", "stage2.a.shortcut.conv"),
            made_by_weight("stage2.b.conv2"),
            normed_by("stage2.a.bn2", "stage2.a.shortcut.bn", "stage2.b.bn2"),
            read_by("stage2.b.conv1", "fc"),
        ),
        group(
            10,
            made_by_weight("stage2.b.conv1"),
            normed_by("stage2.b.bn1"),
            read_by("stage2.b.conv2"),
        ),
    ),
    active_at_half=(
        3 * 3 * 9 + 4 * 3  # stem, bn
        + 3 * 3 * 9 + 4 * 3  # stage1.a.conv1, bn1
        + 3 * 3 * 9 + 4 * 3  # stage1.a.conv2, bn2
        + 5 * 3 * 9 + 4 * 5  # stage2.a.conv1, bn1
        + 5 * 5 * 9 + 4 * 5  # stage2.a.conv2, bn2
        + 5 * 3 * 1 + 4 * 5  # stage2.a.shortcut: conv, bn
        + 5 * 5 * 9 + 4 * 5  # stage2.b.conv1, bn1
        + 5 * 5 * 9 + 4 * 5  # stage2.b.conv2, bn2
        + 4 * 5 + 4  # fc
    ),
    total=(
        6 * 3 * 9 + 4 * 6  # stem, bn
        + 6 * 6 * 9 + 4 * 6  # stage1.a.conv1, bn1
        + 6 * 6 * 9 + 4 * 6  # stage1.a.conv2, bn2
        + 10 * 6 * 9 + 4 * 10  # stage2.a.conv1, bn1
        + 10 * 10 * 9 + 4 * 10  # stage2.a.conv2, bn2
        + 10 * 6 * 1 + 4 * 10  # stage2.a.shortcut: conv, bn
        + 10 * 10 * 9 + 4 * 10  # stage2.b.conv1, bn1
        + 10 * 10 * 9 + 4 * 10  # stage2.b.conv2, bn2
        + 4 * 10 + 4  # fc
    ),
)  # fmt: skip


class _Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution beside a shortcut."""

    def __init__(self, inputs: int, middle: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = chain(
                conv=nn.Conv2d(inputs, outputs, 1, bias=False),
                bn=nn.BatchNorm2d(outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        return F.relu(self.bn3(self.conv3(h)) + self.shortcut(x))


def resnet_bottleneck() -> nn.Module:
    """A stem and two bottleneck blocks, the first with a convolution as shortcut."""
    return chain(
        stem=nn.Conv2d(3, 8, 3, padding=1, bias=False),
        bn=nn.BatchNorm2d(8),
        relu=nn.ReLU(),
        block1=_Bottleneck(8, 5, 12),
        block2=_Bottleneck(12, 7, 12),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(12, 4),
    )


RESNET_BOTTLENECK = Entry(
    name="resnet_bottleneck",
    build=resnet_bottleneck,
    example=lambda: noise(2, 3, 8, 8),
    groups=(
        group(
            8,
            made_by_weight("stem"),
            normed_by("bn"),
            read_by("block1.conv1", "block1.shortcut.conv"),
        ),
        group(
            5,
            made_by_weight("block1.conv1"),
            normed_by("block1.bn1"),
            read_by("block1.conv2"),
        ),
        group(
            5,
            made_by_weight("block1.conv2"),
            normed_by("block1.bn2"),
            read_by("block1.conv3"),
        ),
        group(  # what both blocks add up
            12,
            made_by_weight("block1.conv3", "block1.shortcut.conv", "block2.conv3"),
            normed_by("block1.bn3", "block1.shortcut.bn", "block2.bn3"),
            read_by("block2.conv1", "fc"),
        ),
        group(
            7,
            made_by_weight("block2.conv1"),
            normed_by("block2.bn1"),
            read_by("block2.conv2"),
        ),
        group(
            7,
            made_by_weight("block2.conv2"),
            normed_by("block2.bn2"),
            read_by("block2.conv3"),
        ),
    ),
    active_at_half=(
        4 * 3 * 9 + 4 * 4  # stem, bn: 4 of 8
        + 2 * 4 * 1 + 4 * 2  # block1.conv1, bn1: 2 of 5
        + 2 * 2 * 9 + 4 * 2  # block1.conv2, bn2: 2 of 5
        + 6 * 2 * 1 + 4 * 6  # block1.conv3, bn3: 6 of 12
        + 6 * 4 * 1 + 4 * 6  # block1.shortcut: conv, bn
        + 3 * 6 * 1 + 4 * 3  # block2.conv1, bn1: 3 of 7
        + 3 * 3 * 9 + 4 * 3  # block2.conv2, bn2: 3 of 7
        + 6 * 3 * 1 + 4 * 6  # block2.conv3, bn3
        + 4 * 6 + 4  # fc
    ),
    total=(
        8 * 3 * 9 + 4 * 8  # stem, bn
        + 5 * 8 * 1 + 4 * 5  # block1.conv1, bn1
        + 5 * 5 * 9 + 4 * 5  # block1.conv2, bn2
        + 12 * 5 * 1 + 4 * 12  # block1.conv3, bn3
        + 12 * 8 * 1 + 4 * 12  # block1.shortcut: conv, bn
        + 7 * 12 * 1 + 4 * 7  # block2.conv1, bn1
        + 7 * 7 * 9 + 4 * 7  # block2.conv2, bn2
        + 12 * 7 * 1 + 4 * 12  # block2.conv3, bn3
        + 4 * 12 + 4  # fc
    ),
)  # fmt: skip


class _InvertedResidual(nn.Module):
    """Widen by a 1x1, filter each channel by a depthwise 3x3, narrow by a 1x1."""

    def __init__(self, inputs: int, middle: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.expand = nn.Conv2d(inputs, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.depthwise = nn.Conv2d(
            middle, middle, 3, stride, padding=1, groups=middle, bias=False
        )
        self.bn2 = nn.BatchNorm2d(middle)
        self.project = nn.Conv2d(middle, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.has_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu6(self.bn1(self.expand(x)))
        h = F.relu6(self.bn2(self.depthwise(h)))
        narrow: Tensor = self.bn3(self.project(h))
        return x + narrow if self.has_residual else narrow


def mobilenet() -> nn.Module:
    """Two inverted residual blocks, the first of them with an addition."""
    return chain(
        stem=nn.Conv2d(3, 6, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(6),
        relu1=nn.ReLU6(),
        block1=_InvertedResidual(6, 12, 6, stride=1),
        block2=_InvertedResidual(6, 13, 10, stride=2),
        last=nn.Conv2d(10, 15, 1, bias=False),
        bn2=nn.BatchNorm2d(15),
        relu2=nn.ReLU6(),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(15, 4),
    )


MOBILENET = Entry(
    name="mobilenet",
    build=mobilenet,
    example=lambda: noise(2, 3, 8, 8),
    groups=(
        group(
            6,
            made_by_weight("stem", "block1.project"),
            normed_by("bn1", "block1.bn3"),
            read_by("block1.expand", "block2.expand"),
        ),
        group(  # a depthwise channel is the same neuron before and after
            12,
            made_by_weight("block1.expand", "block1.depthwise"),
            normed_by("block1.bn1", "block1.bn2"),
            read_by("block1.project"),
        ),
        group(
            13,
            made_by_weight("block2.expand", "block2.depthwise"),
            normed_by("block2.bn1", "block2.bn2"),
            read_by("block2.project"),
        ),
        group(
            10,
            made_by_weight("block2.project"),
            normed_by("block2.bn3"),
            read_by("last"),
        ),
        group(15, made_by_weight("last"), normed_by("bn2"), read_by("fc")),
    ),
    active_at_half=(
        3 * 3 * 9 + 4 * 3  # stem, bn1: 3 of 6
        + 6 * 3 + 4 * 6  # block1.expand, bn1: 6 of 12
        + 6 * 1 * 9 + 4 * 6  # block1.depthwise, bn2
        + 3 * 6 + 4 * 3  # block1.project, bn3
        + 6 * 3 + 4 * 6  # block2.expand, bn1: 6 of 13
        + 6 * 1 * 9 + 4 * 6  # block2.depthwise, bn2
        + 5 * 6 + 4 * 5  # block2.project, bn3: 5 of 10
        + 7 * 5 + 4 * 7  # last, bn2: 7 of 15
        + 4 * 7 + 4  # fc
    ),
    total=(
        6 * 3 * 9 + 4 * 6  # stem, bn1
        + 12 * 6 + 4 * 12  # block1.expand, bn1
        + 12 * 1 * 9 + 4 * 12  # block1.depthwise, bn2
        + 6 * 12 + 4 * 6  # block1.project, bn3
        + 13 * 6 + 4 * 13  # block2.expand, bn1
        + 13 * 1 * 9 + 4 * 13  # block2.depthwise, bn2
        + 10 * 13 + 4 * 10  # block2.project, bn3
        + 15 * 10 + 4 * 15  # last, bn2
        + 4 * 15 + 4  # fc
    ),
)  # fmt: skip


class _Densenet(nn.Module):
    """Each layer reads all features before it: 8, then 8 + 5, then 8 + 5 + 5."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.grow1 = nn.Conv2d(8, 5, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(13)
        self.grow2 = nn.Conv2d(13, 5, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(18)
        self.transition = nn.Conv2d(18, 9, 1, bias=False)
        self.bn4 = nn.BatchNorm2d(9)
        self.fc = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.grow1(F.relu(self.bn1(x)))], dim=1)
        x = torch.cat([x, self.grow2(F.relu(self.bn2(x)))], dim=1)
        x = F.avg_pool2d(self.transition(F.relu(self.bn3(x))), 2)
        x = F.adaptive_avg_pool2d(F.relu(self.bn4(x)), 1).flatten(1)
        logits: Tensor = self.fc(x)
        return logits


DENSENET = Entry(
    name="densenet",
    build=_Densenet,
    example=lambda: noise(2, 3, 8, 8),
    groups=(
        group(
            8,
            made_by_weight("stem"),
            normed_by("bn1", "bn2", "bn3"),  # all of bn1, 0-7 of bn2 and bn3
            read_by("grow1", "grow2", "transition"),
        ),
        group(
            5,
            made_by_weight("grow1"),
            normed_by("bn2", "bn3"),  # 8-12
            read_by("grow2", "transition"),
        ),
        group(
            5,
            made_by_weight("grow2"),
            normed_by("bn3"),  # 13-17
            read_by("transition"),
        ),
        group(9, made_by_weight("transition"), normed_by("bn4"), read_by("fc")),
    ),
    active_at_half=(
        4 * 3 * 9  # stem: 4 of 8
        + 4 * 4  # bn1
        + 2 * 4 * 9  # grow1: 2 of 5
        + 4 * (4 + 2)  # bn2
        + 2 * (4 + 2) * 9  # grow2: 2 of 5
        + 4 * (4 + 2 + 2)  # bn3
        + 4 * (4 + 2 + 2)  # transition: 4 of 9
        + 4 * 4  # bn4
        + 4 * 4 + 4  # fc
    ),
    total=(
        8 * 3 * 9  # stem
        + 4 * 8  # bn1
        + 5 * 8 * 9  # grow1
        + 4 * 13  # bn2
        + 5 * 13 * 9  # grow2
        + 4 * 18  # bn3
        + 9 * 18  # transition
        + 4 * 9  # bn4
        + 4 * 9 + 4  # fc
    ),
)  # fmt: skip


class _Unet(nn.Module):
    """Down, up again, and the features of before beside those of after."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(1, 5, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(5)
        self.down2 = nn.Conv2d(5, 10, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(10)
        self.up = nn.ConvTranspose2d(10, 6, 2, stride=2)
        self.merge = nn.Conv2d(6 + 5, 7, 3, padding=1)
        self.bn3 = nn.BatchNorm2d(7)
        self.out = nn.Conv2d(7, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = F.relu(self.bn1(self.down1(x)))
        low = F.relu(self.bn2(self.down2(F.max_pool2d(high, 2))))
        both = torch.cat([self.up(low), high], dim=1)
        pixels: Tensor = self.out(F.relu(self.bn3(self.merge(both))))
        return pixels


UNET = Entry(
    name="unet",
    build=_Unet,
    example=lambda: noise(2, 1, 8, 8),
    groups=(
        group(
            5,
            made_by("down1"),
            normed_by("bn1"),
            read_by("down2", "merge"),  # all of down2, 6-10 of merge
        ),
        group(  # the weight of a transposed convolution is (inputs, outputs, ...)
            10,
            made_by("down2"),
            normed_by("bn2"),
            along(0, "up.weight"),
        ),
        group(
            6,
            along(1, "up.weight"),
            along(0, "up.bias"),
            read_by("merge"),  # 0-5
        ),
        group(7, made_by("merge"), normed_by("bn3"), read_by("out")),
    ),
    active_at_half=(
        2 * 1 * 9 + 2  # down1: 2 of 5
        + 4 * 2  # bn1
        + 5 * 2 * 9 + 5  # down2: 5 of 10
        + 4 * 5  # bn2
        + 5 * 3 * 4 + 3  # up: 3 of 6
        + 3 * (3 + 2) * 9 + 3  # merge: 3 of 7
        + 4 * 3  # bn3
        + 2 * 3 + 2  # out: both output channels
    ),
    total=(
        5 * 1 * 9 + 5  # down1
        + 4 * 5  # bn1
        + 10 * 5 * 9 + 10  # down2
        + 4 * 10  # bn2
        + 10 * 6 * 4 + 6  # up
        + 7 * 11 * 9 + 7  # merge
        + 4 * 7  # bn3
        + 2 * 7 + 2  # out
    ),
)  # fmt: skip


def audio_cnn() -> nn.Module:
    """Two convolutions over time, flattened into a linear layer."""
    return chain(
        conv1=nn.Conv1d(1, 6, 3, padding=1),
        bn1=nn.BatchNorm1d(6),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool1d(2),
        conv2=nn.Conv1d(6, 9, 3, padding=1),
        bn2=nn.BatchNorm1d(9),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool1d(2),
        flatten=nn.Flatten(),
        fc=nn.Linear(9 * 4, 3),
    )


AUDIO_CNN = Entry(
    name="audio_cnn",
    build=audio_cnn,
    example=lambda: noise(2, 1, 16),
    groups=(
        group(6, made_by("conv1"), normed_by("bn1"), read_by("conv2")),
        group(9, made_by("conv2"), normed_by("bn2"), read_by("fc")),
    ),
    active_at_half=(
        3 * 1 * 3 + 3  # conv1: 3 of 6
        + 4 * 3  # bn1
        + 4 * 3 * 3 + 4  # conv2: 4 of 9
        + 4 * 4  # bn2
        + 3 * (4 * 4) + 3  # fc: 4 moments of 4 channels
    ),
    total=(
        6 * 1 * 3 + 6  # conv1
        + 4 * 6  # bn1
        + 9 * 6 * 3 + 9  # conv2
        + 4 * 9  # bn2
        + 3 * 36 + 3  # fc
    ),
)  # fmt: skip


def conv_head() -> nn.Module:
    """A last convolution whose averaged channels are the output: always active."""
    return chain(
        conv1=nn.Conv2d(3, 7, 3, padding=1),
        relu=nn.ReLU(),
        conv2=nn.Conv2d(7, 4, 1),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
    )


CONV_HEAD = Entry(
    name="conv_head",
    build=conv_head,
    example=lambda: noise(2, 3, 8, 8),
    groups=(group(7, made_by("conv1"), read_by("conv2")),),
    active_at_half=(
        3 * 3 * 9 + 3  # conv1: 3 of 7
        + 4 * 3 + 4  # conv2: all 4 classes
    ),
    total=(
        7 * 3 * 9 + 7  # conv1
        + 4 * 7 + 4  # conv2
    ),
)  # fmt: skip


def grouped_conv() -> nn.Module:
    """As in ResNeXt: a 3x3 convolution in four groups between two of 1x1."""
    return chain(
        conv1=nn.Conv2d(3, 16, 1),
        bn1=nn.BatchNorm2d(16),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(16, 12, 3, padding=1, groups=4),  # weight: (12, 4, 3, 3)
        bn2=nn.BatchNorm2d(12),
        relu2=nn.ReLU(),
        conv3=nn.Conv2d(12, 7, 1),
        relu3=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(7, 4),
    )


GROUPED_CONV = Entry(
    name="grouped_conv",
    build=grouped_conv,
    example=lambda: noise(2, 3, 8, 8),
    groups=(
        # Neuron j is channels j, j + 4, j + 8, j + 12: place j in each of 4 groups.
        group(4, made_by("conv1"), normed_by("bn1"), read_by("conv2")),
        # Neuron j is channels j, j + 3, j + 6, j + 9.
        group(3, made_by("conv2"), normed_by("bn2"), read_by("conv3")),
        group(7, made_by("conv3"), read_by("fc")),
    ),
    active_at_half=(
        (4 * 2) * 3 + (4 * 2)  # conv1: 2 of 4 neurons, 4 channels each
        + 4 * (4 * 2)  # bn1
        + (4 * 1) * 2 * 9 + (4 * 1)  # conv2: 1 of 3 neurons, 4 channels each
        + 4 * (4 * 1)  # bn2
        + 3 * (4 * 1) + 3  # conv3: 3 of 7
        + 4 * 3 + 4  # fc
    ),
    total=(
        16 * 3 + 16  # conv1
        + 4 * 16  # bn1
        + 12 * 4 * 9 + 12  # conv2
        + 4 * 12  # bn2
        + 7 * 12 + 7  # conv3
        + 4 * 7 + 4  # fc
    ),
)  # fmt: skip


def depthwise_multiplier() -> nn.Module:
    """A depthwise convolution that makes two channels of each."""
    return chain(
        conv1=nn.Conv2d(3, 5, 3, padding=1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(5, 10, 3, padding=1, groups=5),  # weight: (10, 1, 3, 3)
        relu2=nn.ReLU(),
        conv3=nn.Conv2d(10, 6, 1),
        relu3=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(6, 4),
    )


DEPTHWISE_MULTIPLIER = Entry(
    name="depthwise_multiplier",
    build=depthwise_multiplier,
    example=lambda: noise(2, 3, 8, 8),
    groups=(
        # Neuron i is channel i of conv1 and channels 2i, 2i + 1 of conv2.
        group(5, made_by("conv1", "conv2"), read_by("conv3")),
        group(6, made_by("conv3"), read_by("fc")),
    ),
    active_at_half=(
        2 * 3 * 9 + 2  # conv1: 2 of 5
        + (2 * 2) * 1 * 9 + (2 * 2)  # conv2: 2 channels each
        + 3 * (2 * 2) + 3  # conv3: 3 of 6
        + 4 * 3 + 4  # fc
    ),
    total=(
        5 * 3 * 9 + 5  # conv1
        + 10 * 1 * 9 + 10  # conv2
        + 6 * 10 + 6  # conv3
        + 4 * 6 + 4  # fc
    ),
)  # fmt: skip


class _SqueezeExcite(nn.Module):
    """Channels multiplied by gates that are computed from all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 10, 3, padding=1)
        self.bn = nn.BatchNorm2d(10)
        self.squeeze = nn.Conv2d(10, 5, 1)
        self.excite = nn.Conv2d(5, 10, 1)
        self.fc = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))
        gate = F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))
        x = x * torch.sigmoid(self.excite(gate))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


SQUEEZE_EXCITE = Entry(
    name="squeeze_excite",
    build=_SqueezeExcite,
    example=lambda: noise(2, 3, 8, 8),
    groups=(
        group(10, made_by("conv", "excite"), normed_by("bn"), read_by("squeeze", "fc")),
        group(5, made_by("squeeze"), read_by("excite")),
    ),
    active_at_half=(
        5 * 3 * 9 + 5  # conv: 5 of 10
        + 4 * 5  # bn
        + 2 * 5 + 2  # squeeze: 2 of 5
        + 5 * 2 + 5  # excite
        + 4 * 5 + 4  # fc
    ),
    total=(
        10 * 3 * 9 + 10  # conv
        + 4 * 10  # bn
        + 5 * 10 + 5  # squeeze
        + 10 * 5 + 10  # excite
        + 4 * 10 + 4  # fc
    ),
)  # fmt: skip


def prelu_instancenorm() -> nn.Module:
    """Instance norms with statistics; one slope per channel, then one for all."""
    return chain(
        conv1=nn.Conv2d(3, 7, 3, padding=1),
        norm1=nn.InstanceNorm2d(7, affine=True, track_running_stats=True),
        prelu1=nn.PReLU(7),
        conv2=nn.Conv2d(7, 6, 3, padding=1),
        norm2=nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        prelu2=nn.PReLU(),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(6, 4),
    )


PRELU_INSTANCENORM = Entry(
    name="prelu_instancenorm",
    build=prelu_instancenorm,
    example=lambda: noise(2, 3, 8, 8),
    groups=(
        group(
            7,
            made_by("conv1"),
            normed_by("norm1"),
            along(0, "prelu1.weight"),
            read_by("conv2"),
        ),
        group(6, made_by("conv2"), normed_by("norm2"), read_by("fc")),
    ),
    active_at_half=(
        3 * 3 * 9 + 3  # conv1: 3 of 7
        + 4 * 3  # norm1
        + 3  # prelu1
        + 3 * 3 * 9 + 3  # conv2: 3 of 6
        + 4 * 3  # norm2
        + 1  # prelu2: no neuron's own, always active
        + 4 * 3 + 4  # fc
    ),
    total=(
        7 * 3 * 9 + 7  # conv1
        + 4 * 7  # norm1
        + 7  # prelu1
        + 6 * 7 * 9 + 6  # conv2
        + 4 * 6  # norm2
        + 1  # prelu2
        + 4 * 6 + 4  # fc
    ),
)  # fmt: skip


def groupnorm() -> nn.Module:
    """A group norm over two halves of the channels, which keep their places."""
    return chain(
        conv1=nn.Conv2d(3, 8, 3, padding=1),
        norm=nn.GroupNorm(2, 8),
        relu=nn.ReLU(),
        conv2=nn.Conv2d(8, 7, 3, padding=1),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(7, 4),
    )


GROUPNORM = Entry(
    name="groupnorm",
    build=groupnorm,
    example=lambda: noise(2, 3, 8, 8),
    groups=(
        group(8, made_by("conv1"), scaled_by("norm"), read_by("conv2")),
        group(7, made_by("conv2"), read_by("fc")),
    ),
    active_at_half=(
        4 * 3 * 9 + 4  # conv1: 4 of 8
        + 2 * 4  # norm: weight, bias
        + 3 * 4 * 9 + 3  # conv2: 3 of 7
        + 4 * 3 + 4  # fc
    ),
    total=(
        8 * 3 * 9 + 8  # conv1
        + 2 * 8  # norm
        + 7 * 8 * 9 + 7  # conv2
        + 4 * 7 + 4  # fc
    ),
    slim=False,
)  # fmt: skip


def frozen_part() -> nn.Module:
    """A convolution in the middle that does not learn."""
    model = chain(
        conv1=nn.Conv2d(3, 6, 3, padding=1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(6, 7, 3, padding=1),
        bn=nn.BatchNorm2d(7),
        relu2=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(7, 4),
    )
    model.get_submodule("conv2").requires_grad_(False)
    return model


FROZEN_PART = Entry(
    name="frozen_part",
    build=frozen_part,
    example=lambda: noise(2, 3, 8, 8),
    groups=(
        group(6, made_by("conv1")),  # and read by conv2
        group(7, normed_by("bn"), read_by("fc")),  # and made by conv2
    ),
    active_at_half=(
        3 * 3 * 9 + 3  # conv1: 3 of 6
        + 4 * 3  # bn: 3 of 7
        + 4 * 3 + 4  # fc
    ),
    total=(
        6 * 3 * 9 + 6  # conv1
        + 4 * 7  # bn
        + 4 * 7 + 4  # fc
    ),
)  # fmt: skip


def frozen_depthwise() -> nn.Module:
    """A depthwise convolution that does not learn, between two that do."""
    model = chain(
        conv1=nn.Conv2d(3, 7, 3, padding=1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(7, 7, 3, padding=1, groups=7),
        relu2=nn.ReLU(),
        conv3=nn.Conv2d(7, 5, 1),
        relu3=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(5, 4),
    )
    model.get_submodule("conv2").requires_grad_(False)
    return model


FROZEN_DEPTHWISE = Entry(
    name="frozen_depthwise",
    build=frozen_depthwise,
    example=lambda: noise(2, 3, 8, 8),
    groups=(
        group(7, made_by("conv1"), read_by("conv3")),  # tied by conv2
        group(5, made_by("conv3"), read_by("fc")),
    ),
    active_at_half=(
        3 * 3 * 9 + 3  # conv1: 3 of 7
        + 2 * 3 + 2  # conv3: 2 of 5
        + 4 * 2 + 4  # fc
    ),
    total=(
        7 * 3 * 9 + 7  # conv1
        + 5 * 7 + 5  # conv3
        + 4 * 5 + 4  # fc
    ),
)  # fmt: skip


# ---------------------------------------------------------- linear layers and attention


def mlp_layernorm() -> nn.Module:
    """Two hidden layers, each with a layer norm."""
    return chain(
        fc1=nn.Linear(6, 10),
        norm1=nn.LayerNorm(10),
        gelu1=nn.GELU(),
        fc2=nn.Linear(10, 7),
        norm2=nn.LayerNorm(7),
        gelu2=nn.GELU(),
        fc3=nn.Linear(7, 3),
    )


MLP_LAYERNORM = Entry(
    name="mlp_layernorm",
    build=mlp_layernorm,
    example=lambda: noise(2, 6),
    groups=(
        group(10, made_by("fc1"), scaled_by("norm1"), read_by("fc2")),
        group(7, made_by("fc2"), scaled_by("norm2"), read_by("fc3")),
    ),
    active_at_half=(
        5 * 6 + 5  # fc1: 5 of 10
        + 2 * 5  # norm1: weight, bias
        + 3 * 5 + 3  # fc2: 3 of 7
        + 2 * 3  # norm2
        + 3 * 3 + 3  # fc3
    ),
    total=(
        10 * 6 + 10  # fc1
        + 2 * 10  # norm1
        + 7 * 10 + 7  # fc2
        + 2 * 7  # norm2
        + 3 * 7 + 3  # fc3
    ),
)  # fmt: skip


class _SharedLinear(nn.Module):
    """A square hidden layer used twice: its outputs are also its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.hidden = nn.Linear(9, 9)
        self.last = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        h = F.relu(self.hidden(h))
        h = F.relu(self.hidden(h))
        logits: Tensor = self.last(h)
        return logits


SHARED_LINEAR = Entry(
    name="shared_linear",
    build=_SharedLinear,
    example=lambda: noise(2, 6),
    groups=(group(9, made_by("first", "hidden"), read_by("hidden", "last")),),
    active_at_half=(
        4 * 6 + 4  # first: 4 of 9
        + 4 * 4 + 4  # hidden
        + 3 * 4 + 3  # last
    ),
    total=(
        9 * 6 + 9  # first
        + 9 * 9 + 9  # hidden
        + 3 * 9 + 3  # last
    ),
)  # fmt: skip


class _TiedEmbedding(nn.Module):
    """The output layer's weight is the embedding's: named ``embedding.weight``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.fc1 = nn.Linear(7, 10)
        self.fc2 = nn.Linear(10, 7)
        self.decoder = nn.Linear(7, 11)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc2(F.relu(self.fc1(self.embedding(x).mean(dim=1))))
        logits: Tensor = self.decoder(h)
        return logits


TIED_EMBEDDING = Entry(
    name="tied_embedding",
    build=_TiedEmbedding,
    example=lambda: tokens(2, 5, vocabulary=11),
    groups=(
        # The weight is (vocabulary, features) for both: what fc1 reads and what fc2
        # makes lie along one axis of it, so they are one group.
        group(7, along(1, "embedding.weight"), read_by("fc1"), made_by("fc2")),
        group(10, made_by("fc1"), read_by("fc2")),
    ),
    active_at_half=(
        11 * 3  # embedding, decoder.weight: all 11 words, 3 of 7 features
        + 5 * 3 + 5  # fc1: 5 of 10
        + 3 * 5 + 3  # fc2
        + 11  # decoder.bias
    ),
    total=(
        11 * 7  # embedding, decoder.weight
        + 10 * 7 + 10  # fc1
        + 7 * 10 + 7  # fc2
        + 11  # decoder.bias
    ),
)  # fmt: skip


def heads_of(*attentions: str) -> Axes:
    """Axes of the heads of ``nn.MultiheadAttention`` layers.

    Head i of h with d features each is rows i * d ... of each third of in_proj, and
    columns i * d ... of out_proj.
    """
    rows = (f"{a}.in_proj_{t}" for a in attentions for t in ("weight", "bias"))
    return along(0, *rows) | read_by(*(f"{a}.out_proj" for a in attentions))


def stream_of(*layers: str) -> Axes:
    """Axes of the residual stream in ``nn.TransformerEncoderLayer`` layers."""
    axes: Axes = frozenset()
    for layer in layers:
        axes |= along(1, f"{layer}.self_attn.in_proj_weight")
        axes |= made_by(f"{layer}.self_attn.out_proj")
        axes |= read_by(f"{layer}.linear1") | made_by(f"{layer}.linear2")
        axes |= scaled_by(f"{layer}.norm1", f"{layer}.norm2")
    return axes


class _Transformer(nn.Module):
    """Tokens and positions through two encoder layers of three heads."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            12, 3, dim_feedforward=10, dropout=0.0, batch_first=True
        )
        self.embedding = nn.Embedding(11, 12)
        self.position = nn.Parameter(torch.zeros(1, 5, 12))
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(self.embedding(x) + self.position)
        logits: Tensor = self.head(h.mean(dim=1))
        return logits


TRANSFORMER = Entry(
    name="transformer",
    build=_Transformer,
    example=lambda: tokens(2, 5, vocabulary=11),
    groups=(
        group(
            12,
            along(1, "embedding.weight"),
            along(2, "position"),
            stream_of("encoder.layers.0", "encoder.layers.1"),
            read_by("head"),
        ),
        group(3, heads_of("encoder.layers.0.self_attn")),
        group(
            10, made_by("encoder.layers.0.linear1"), read_by("encoder.layers.0.linear2")
        ),
        group(3, heads_of("encoder.layers.1.self_attn")),
        group(
            10, made_by("encoder.layers.1.linear1"), read_by("encoder.layers.1.linear2")
        ),
    ),
    active_at_half=(
        11 * 6  # embedding: 6 of 12 in the stream
        + 5 * 6  # position
        + 2  # layers, each with
        * (
            (3 * 1 * 4) * 6 + (3 * 1 * 4)  # in_proj: 1 of 3 heads of 4 features
            + 6 * (1 * 4) + 6  # out_proj
            + 5 * 6 + 5  # linear1: 5 of 10
            + 6 * 5 + 6  # linear2
            + 2 * 6 + 2 * 6  # norm1, norm2: weight, bias
        )
        + 4 * 6 + 4  # head
    ),
    total=(
        11 * 12  # embedding
        + 5 * 12  # position
        + 2  # layers, each with
        * (
            36 * 12 + 36  # in_proj
            + 12 * 12 + 12  # out_proj
            + 10 * 12 + 10  # linear1
            + 12 * 10 + 12  # linear2
            + 2 * 12 + 2 * 12  # norm1, norm2
        )
        + 4 * 12 + 4  # head
    ),
)  # fmt: skip


class _Vit(nn.Module):
    """Four patches and a class token through one pre-norm encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, 10))
        self.position = nn.Parameter(torch.zeros(1, 5, 10))
        self.patches = nn.Conv2d(3, 10, 4, stride=4)
        self.layer = nn.TransformerEncoderLayer(
            10, 2, 9, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(len(x), -1, -1)
        h = self.layer(torch.cat([class_token, patches], dim=1) + self.position)
        logits: Tensor = self.head(self.norm(h[:, 0]))
        return logits


VIT = Entry(
    name="vit",
    build=_Vit,
    example=lambda: noise(2, 3, 8, 8),
    groups=(
        group(
            10,
            along(2, "class_token", "position"),
            made_by("patches"),
            stream_of("layer"),
            scaled_by("norm"),
            read_by("head"),
        ),
        group(2, heads_of("layer.self_attn")),
        group(9, made_by("layer.linear1"), read_by("layer.linear2")),
    ),
    active_at_half=(
        5  # class_token: 5 of 10 in the stream
        + 5 * 5  # position: 5 tokens
        + 5 * 3 * 16 + 5  # patches
        + (3 * 1 * 5) * 5 + (3 * 1 * 5)  # in_proj: 1 of 2 heads of 5 features
        + 5 * (1 * 5) + 5  # out_proj
        + 4 * 5 + 4  # linear1: 4 of 9
        + 5 * 4 + 5  # linear2
        + 2 * 5 + 2 * 5  # norm1, norm2
        + 2 * 5  # norm
        + 4 * 5 + 4  # head
    ),
    total=(
        10  # class_token
        + 5 * 10  # position
        + 10 * 3 * 16 + 10  # patches
        + 30 * 10 + 30  # in_proj
        + 10 * 10 + 10  # out_proj
        + 9 * 10 + 9  # linear1
        + 10 * 9 + 10  # linear2
        + 2 * 10 + 2 * 10  # norm1, norm2
        + 2 * 10  # norm
        + 4 * 10 + 4  # head
    ),
)  # fmt: skip


# ------------------------------------------------------------------ more than one input


class _TwoInputs(nn.Module):
    """An image and a vector, concatenated once both are features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.side = nn.Linear(5, 7)
        self.fc = nn.Linear(6 + 7, 4)

    def forward(self, image: Tensor, numbers: Tensor) -> Tensor:
        seen = F.relu(self.conv(image)).mean(dim=(2, 3))
        both = torch.cat([seen, F.relu(self.side(numbers))], dim=1)
        logits: Tensor = self.fc(both)
        return logits


TWO_INPUTS = Entry(
    name="two_inputs",
    build=_TwoInputs,
    example=lambda: (noise(2, 3, 8, 8), noise(2, 5)),
    groups=(
        group(6, made_by("conv"), read_by("fc")),  # 0-5 of fc
        group(7, made_by("side"), read_by("fc")),  # 6-12 of fc
    ),
    active_at_half=(
        3 * 3 * 9 + 3  # conv: 3 of 6
        + 3 * 5 + 3  # side: 3 of 7
        + 4 * (3 + 3) + 4  # fc
    ),
    total=(
        6 * 3 * 9 + 6  # conv
        + 7 * 5 + 7  # side
        + 4 * 13 + 4  # fc
    ),
)  # fmt: skip


class _DictInput(nn.Module):
    """Words and numbers, by keyword, added up in one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 9)
        self.side = nn.Linear(5, 9)
        self.fc = nn.Linear(9, 3)

    def forward(self, *, words: Tensor, numbers: Tensor) -> Tensor:
        h = F.relu(self.embedding(words).mean(dim=1) + self.side(numbers))
        logits: Tensor = self.fc(h)
        return logits


DICT_INPUT = Entry(
    name="dict_input",
    build=_DictInput,
    example=lambda: {"words": tokens(2, 4, vocabulary=11), "numbers": noise(2, 5)},
    groups=(group(9, along(1, "embedding.weight"), made_by("side"), read_by("fc")),),
    active_at_half=(
        11 * 4  # embedding: all 11 words, 4 of 9 features
        + 4 * 5 + 4  # side
        + 3 * 4 + 3  # fc
    ),
    total=(
        11 * 9  # embedding
        + 9 * 5 + 9  # side
        + 3 * 9 + 3  # fc
    ),
)  # fmt: skip


# -------------------------------------------------------------------------------- traps
#
# Tables that naive tools get wrong without a word. Right groups are welcome here, but
# "always active" is right as well, so none is listed, and no slim copy is asked for.


def trap(
    name: str, build: Callable[[], nn.Module], example: Callable[[], Any], total: int
) -> Entry:
    """Expect that everything is active, or that the groups found are right."""
    return Entry(
        name=name,
        build=build,
        example=example,
        groups=(),
        active_at_half=total,
        total=total,
        slim=False,
        may_be_active=True,
    )


class _Glu(nn.Module):
    """Half of the hidden layer gates the other: rows j and j + 7 are one neuron."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 14)
        self.fc2 = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.fc1(x).chunk(2, dim=-1)
        logits: Tensor = self.fc2(value * torch.sigmoid(gate))
        return logits


GLU = trap(
    name="glu",
    build=_Glu,
    example=lambda: noise(2, 6),
    total=(
        14 * 6 + 14  # fc1
        + 3 * 7 + 3  # fc2
    ),
)  # fmt: skip


class _FGlu(_Glu):
    """The same by ``F.glu``."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(F.glu(self.fc1(x)))
        return logits


FGLU = trap(
    name="fglu",
    build=_FGlu,
    example=lambda: noise(2, 6),
    total=(
        14 * 6 + 14  # fc1
        + 3 * 7 + 3  # fc2
    ),
)  # fmt: skip


class _OwnAttention(nn.Module):
    """Two heads of four features, cut by hand out of one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 3 * 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, 2, 4)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        weights = torch.softmax(query @ key.transpose(-2, -1) / 2, dim=-1)
        mixed = (weights @ value).transpose(1, 2).reshape(batch, length, 8)
        logits: Tensor = self.out(mixed).mean(dim=1)
        return logits


OWN_ATTENTION = trap(
    name="own_attention",
    build=_OwnAttention,
    example=lambda: noise(2, 5, 6),
    total=(
        24 * 6 + 24  # qkv
        + 3 * 8 + 3  # out
    ),
)  # fmt: skip


class _ViewSizes(nn.Module):
    """Linear units laid out as an image: rows 4c ... 4c + 3 are channel c."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5 * 2 * 2)
        self.conv = nn.Conv2d(5, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        image = F.relu(self.fc(x)).view(-1, 5, 2, 2)
        logits: Tensor = self.conv(image).mean(dim=(2, 3))
        return logits


VIEW_SIZES = trap(
    name="view_sizes",
    build=_ViewSizes,
    example=lambda: noise(2, 6),
    total=(
        20 * 6 + 20  # fc
        + 3 * 5 * 9 + 3  # conv
    ),
)  # fmt: skip


class _TokensFlattened(nn.Module):
    """Features of all tokens in one row: unit j is columns j, j + 5, j + 10, j + 15."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 5)
        self.fc2 = nn.Linear(4 * 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(F.relu(self.fc1(x)).flatten(1))
        return logits


TOKENS_FLATTENED = trap(
    name="tokens_flattened",
    build=_TokensFlattened,
    example=lambda: noise(2, 4, 6),
    total=(
        5 * 6 + 5  # fc1
        + 3 * 20 + 3  # fc2
    ),
)  # fmt: skip


class _PixelShuffle(nn.Module):
    """Four channels become one of four times the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pixel_shuffle(F.relu(self.conv1(x)), 2)
        logits: Tensor = self.conv2(x).mean(dim=(2, 3))
        return logits


PIXEL_SHUFFLE = trap(
    name="pixel_shuffle",
    build=_PixelShuffle,
    example=lambda: noise(2, 3, 4, 4),
    total=(
        12 * 3 * 9 + 12  # conv1
        + 4 * 3 * 9 + 4  # conv2
    ),
)  # fmt: skip


class _ChannelShuffle(nn.Module):
    """Channel 4i + j of the first convolution is channel 2j + i of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        batch, channels, height, width = x.shape
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2)
        x = x.reshape(batch, channels, height, width)
        logits: Tensor = self.conv2(x).mean(dim=(2, 3))
        return logits


CHANNEL_SHUFFLE = trap(
    name="channel_shuffle",
    build=_ChannelShuffle,
    example=lambda: noise(2, 3, 8, 8),
    total=(
        8 * 3 * 9 + 8  # conv1
        + 4 * 8 * 9 + 4  # conv2
    ),
)  # fmt: skip


class _FlipChannels(nn.Module):
    """Unit j of the hidden layer is column 6 - j of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 7)
        self.fc2 = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(F.relu(self.fc1(x)).flip(-1))
        return logits


FLIP_CHANNELS = trap(
    name="flip_channels",
    build=_FlipChannels,
    example=lambda: noise(2, 6),
    total=(
        7 * 6 + 7  # fc1
        + 3 * 7 + 3  # fc2
    ),
)  # fmt: skip


class _Cumsum(nn.Module):
    """Every channel adds up all before it: no two are interchangeable."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3, padding=1)
        self.fc = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cumsum(F.relu(self.conv(x)), dim=1)
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


CUMSUM = trap(
    name="cumsum",
    build=_Cumsum,
    example=lambda: noise(2, 3, 8, 8),
    total=(
        7 * 3 * 9 + 7  # conv
        + 4 * 7 + 4  # fc
    ),
)  # fmt: skip


class _BareParameter(nn.Module):
    """Hidden layers without a module, one (inputs, outputs), one the other way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight1 = nn.Parameter(noise(6, 7))
        self.bias1 = nn.Parameter(torch.zeros(7))
        self.weight2 = nn.Parameter(noise(5, 7))
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(x @ self.weight1 + self.bias1)
        logits: Tensor = self.fc(F.relu(F.linear(h, self.weight2)))
        return logits


BARE_PARAMETER = trap(
    name="bare_parameter",
    build=_BareParameter,
    example=lambda: noise(2, 6),
    total=(
        6 * 7 + 7  # weight1, bias1
        + 5 * 7  # weight2
        + 3 * 5 + 3  # fc
    ),
)  # fmt: skip


class _UntakenBranch(nn.Module):
    """One of two layers reads the hidden units; the example never shows the other."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 7)
        self.above = nn.Linear(7, 5)
        self.below = nn.Linear(7, 5)
        self.fc2 = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.fc1(x))
        h = F.relu(self.above(h) if x.mean() > 0 else self.below(h))
        logits: Tensor = self.fc2(h)
        return logits


UNTAKEN_BRANCH = trap(
    name="untaken_branch",
    build=_UntakenBranch,
    example=lambda: noise(2, 6).abs(),
    total=(
        7 * 6 + 7  # fc1
        + 5 * 7 + 5  # above
        + 5 * 7 + 5  # below
        + 3 * 5 + 3  # fc2
    ),
)  # fmt: skip


class _Gru(nn.Module):
    """One recurrent layer: unit j is rows j, j + 7, j + 14 and column j."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(5, 7, batch_first=True)
        self.fc = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(x)
        logits: Tensor = self.fc(states[:, -1])
        return logits


GRU = trap(
    name="gru",
    build=_Gru,
    example=lambda: noise(2, 6, 5),
    total=(
        3 * 7 * 5 + 3 * 7 * 7  # gru: weight_ih, weight_hh
        + 3 * 7 + 3 * 7  # gru: bias_ih, bias_hh
        + 3 * 7 + 3  # fc
    ),
)  # fmt: skip


class _Lstm(nn.Module):
    """Tokens through two recurrent layers in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x))
        # The last state alone would leave weight_hh_l1_reverse without any effect.
        logits: Tensor = self.fc(states.mean(dim=1))
        return logits


LSTM = trap(
    name="lstm",
    build=_Lstm,
    example=lambda: tokens(2, 6, vocabulary=11),
    total=(
        11 * 6  # embedding
        + 2 * (4 * 5 * 6 + 4 * 5 * 5 + 4 * 5 + 4 * 5)  # layer 0, both directions
        + 2 * (4 * 5 * 10 + 4 * 5 * 5 + 4 * 5 + 4 * 5)  # layer 1, both directions
        + 3 * 10 + 3  # fc
    ),
)  # fmt: skip


ZOO: tuple[Entry, ...] = (
    EMNIST_CNN,
    CIFAR_CNN,
    SPEECH_CNN,
    VGG,
    RESNET_BASIC,
    RESNET_BOTTLENECK,
    MOBILENET,
    DENSENET,
    UNET,
    AUDIO_CNN,
    CONV_HEAD,
    GROUPED_CONV,
    DEPTHWISE_MULTIPLIER,
    SQUEEZE_EXCITE,
    PRELU_INSTANCENORM,
    GROUPNORM,
    FROZEN_PART,
    FROZEN_DEPTHWISE,
    MLP_LAYERNORM,
    SHARED_LINEAR,
    TIED_EMBEDDING,
    TRANSFORMER,
    VIT,
    TWO_INPUTS,
    DICT_INPUT,
    GLU,
    FGLU,
    OWN_ATTENTION,
    VIEW_SIZES,
    TOKENS_FLATTENED,
    PIXEL_SHUFFLE,
    CHANNEL_SHUFFLE,
    FLIP_CHANNELS,
    CUMSUM,
    BARE_PARAMETER,
    UNTAKEN_BRANCH,
    GRU,
    LSTM,
)
ZOO_BY_NAME = {entry.name: entry for entry in ZOO}
