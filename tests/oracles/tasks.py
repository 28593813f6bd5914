"""The four tasks as their definitions have them, worked out one target at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp, log

import numpy as np
import torch
from torch import Tensor

from fedspu.tasks.classification import classification
from fedspu.tasks.language_model import language_model
from fedspu.tasks.regression import regression
from fedspu.tasks.segmentation import segmentation
from fedspu.tasks.task import IGNORED, Task

CLASSES = 4

# Slow definitions ---------------------------------------------------------------------


def minus_log(scores: list[float], label: int) -> float:
    """What the model takes the right class to be: -log p."""
    top = max(scores)
    return log(sum(exp(score - top) for score in scores)) - (scores[label] - top)


def scored(y: Tensor) -> Iterator[tuple[int, ...]]:
    """Where there are targets that count."""
    for place in np.ndindex(*y.shape):
        if int(y[place]) != IGNORED:
            yield place


def scores_at(task: Task, output: Tensor, place: tuple[int, ...]) -> list[float]:
    """The scores of all classes at one place; classes come second but in text."""
    if task is language_model:
        found: list[float] = output[place].tolist()
        return found
    return [float(output[place[0], k][place[1:]]) for k in range(output.shape[1])]


def slow_cross_entropy(task: Task, output: Tensor, y: Tensor) -> list[float]:
    return [
        minus_log(scores_at(task, output, place), int(y[place])) for place in scored(y)
    ]


def slow_squares(task: Task, output: Tensor, y: Tensor) -> list[float]:
    pairs = zip(output.flatten().tolist(), y.flatten().tolist(), strict=True)
    return [(said - true) ** 2 for said, true in pairs]


def slow_accuracy(output: Tensor, y: Tensor) -> float:
    rows: list[list[float]] = output.tolist()
    said, labels = [row.index(max(row)) for row in rows], list(map(int, y))
    return sum(a == b for a, b in zip(said, labels, strict=True)) / len(said)


def slow_mae(output: Tensor, y: Tensor) -> float:
    pairs = zip(output.flatten().tolist(), y.flatten().tolist(), strict=True)
    gaps = [abs(float(said) - float(true)) for said, true in pairs]
    return sum(gaps) / len(gaps)


def slow_perplexity(output: Tensor, y: Tensor) -> float:
    surprises = slow_cross_entropy(language_model, output, y)
    return exp(sum(surprises) / len(surprises))


def slow_iou(output: Tensor, y: Tensor) -> float:
    """Of each class, the pixels said and true: their intersection over their union."""
    said: dict[int, set[tuple[int, ...]]] = {k: set() for k in range(output.shape[1])}
    true: dict[int, set[tuple[int, ...]]] = {k: set() for k in range(output.shape[1])}
    for place in scored(y):
        scores = scores_at(segmentation, output, place)
        said[scores.index(max(scores))].add(place)
        true[int(y[place])].add(place)
    shares = [
        len(said[k] & true[k]) / len(said[k] | true[k])
        for k in said
        if said[k] | true[k]
    ]
    return sum(shares) / len(shares)


def slow_balanced(task: Task, output: Tensor, y: Tensor, own: Tensor) -> float:
    """Each scored target weighs one over how many of its class there are."""
    counts: dict[int, int] = {}
    for place in scored(own):
        counts[int(own[place])] = counts.get(int(own[place]), 0) + 1
    places = list(scored(y))
    weights = [1 / counts[int(y[place])] for place in places]
    losses = slow_cross_entropy(task, output, y)
    weighed = sum(w * loss for w, loss in zip(weights, losses, strict=True))
    return weighed / sum(weights)


# A batch of each task -----------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A task, how batches for it are made, and its slow definitions."""

    task: Task
    target_shape: tuple[int, ...]
    losses: Callable[[Task, Tensor, Tensor], list[float]]
    metric: Callable[[Tensor, Tensor], float]

    def batch(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """An output and targets; some are not scored where the task allows it."""
        draw = torch.Generator().manual_seed(seed)
        shape = (count, *self.target_shape)
        if self.task is regression:
            return (
                torch.randn(shape, generator=draw),
                torch.randn(shape, generator=draw),
            )
        y = torch.randint(CLASSES, shape, generator=draw)
        output = torch.randn(*shape, CLASSES, generator=draw)
        if self.task is not classification:
            is_scored = torch.rand(shape, generator=draw) < 0.7
            is_scored.view(count, -1)[:, 0] = True  # at least one of each example
            y[~is_scored] = IGNORED
        if self.task is segmentation:
            output = output.movedim(-1, 1)
        return output, y


KINDS = {
    "classification": Kind(classification, (), slow_cross_entropy, slow_accuracy),
    "regression": Kind(regression, (3,), slow_squares, slow_mae),
    "language-model": Kind(language_model, (5,), slow_cross_entropy, slow_perplexity),
    "segmentation": Kind(segmentation, (2, 3), slow_cross_entropy, slow_iou),
}
