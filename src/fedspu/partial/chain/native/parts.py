"""What trains of each stage, and which of its outputs carry gradient."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspu.partial.chain.native.stages import INPUT, NONE, NotAChainError, Stage
from fedspu.partial.spans import Span, Spans, positions_of

Positions = NDArray[np.int32]

SLOTS = ("weight", "bias", "scale", "shift")
"""The parameters of a stage: of its layer, and of its norm."""

NO_NORM, BATCH, RUNNING, GROUP = range(4)
"""Norms: none, by the batch's statistics, by running ones, by each image's own."""


@dataclass(frozen=True)
class Part:
    """What trains of a stage: outputs, inputs (channels), and which parameters."""

    rows: Positions
    cols: Positions
    trains: tuple[bool, ...]  # by slot


def parameters_of(stage: Stage) -> tuple[Tensor | None, ...]:
    """A stage's parameters, by slot."""
    layer, norm = stage.layer, stage.norm
    return (
        None if layer is None else layer.weight,
        None if layer is None else layer.bias,
        None if norm is None else norm.weight,
        None if norm is None else norm.bias,
    )


def read_parts(
    stages: Sequence[Stage],
    names_of: Callable[[Stage], list[str]],
    spans: Mapping[str, Spans],
    trains: Callable[[str], bool],
) -> list[Part]:
    """What trains of each stage; a NotAChainError if it is no block of its weights."""
    parts = []
    for stage in stages:
        names = names_of(stage)
        rows = [_positions(spans[n][0], stage.middle[0]) for n in names if n]
        if any(not np.array_equal(rows[0], other) for other in rows[1:]):
            raise NotAChainError("a layer and its norm that train other neurons")
        parts.append(
            Part(
                rows[0] if rows else np.empty(0, np.int32),
                _columns(stage, spans[names[0]]) if names[0] else NOTHING,
                tuple(bool(name) and trains(name) for name in names),
            )
        )
    return parts


NOTHING = np.empty(0, np.int32)


def _positions(span: Span, size: int) -> Positions:
    positions = positions_of(span)
    if positions is None:
        return np.arange(size, dtype=np.int32)
    return positions.numpy().astype(np.int32)


def _columns(stage: Stage, spans: Spans) -> Positions:
    """The input channels of a layer's trained weights."""
    channels, height, width = stage.input
    if isinstance(stage.layer, nn.Conv2d):
        if any(span is not None for span in spans[2:]):
            raise NotAChainError("a convolution that trains a part of its kernel")
        return _positions(spans[1], channels)
    pixels = height * width
    features = _positions(spans[1], channels * pixels).reshape(-1)
    whole = np.unique(features // pixels).astype(np.int32)
    if len(whole) * pixels != len(features):
        raise NotAChainError("a linear layer that trains a part of a map")
    return whole


def norm_kind(stage: Stage) -> int:
    """Which statistics a stage's norm uses now."""
    norm = stage.norm
    if norm is None:
        return NO_NORM
    if isinstance(norm, nn.GroupNorm):
        return GROUP
    return BATCH if norm.training or norm.running_mean is None else RUNNING


def find_needs(
    stages: tuple[Stage, ...], parts: Sequence[Part], is_truncated: bool
) -> list[Positions | None]:
    """The outputs of each stage that carry gradient; None if the stage needs none.

    Frozen outputs of a stage lead to no trained weight if nothing before it trains.
    """
    needs: list[Positions | None] = []
    for stage, part in zip(stages, parts, strict=True):
        below = needs[stage.source] if stage.source != INPUT else None
        aside = needs[stage.adds] if stage.adds != NONE else None
        if below is None and aside is None and not any(part.trains):
            needs.append(None)
            continue
        everything = np.arange(stage.middle[0], dtype=np.int32)
        wanted = part.rows if any(part.trains) else NOTHING
        if is_truncated:
            if stage.layer is None and below is not None:
                wanted = np.union1d(wanted, below)
            elif stage.layer is not None and below is not None:
                if not np.array_equal(part.cols, below):
                    raise NotAChainError("inputs that train, but not as outputs")
                wanted = part.rows
        elif below is not None:
            wanted = everything if stage.layer is not None else below
            if not np.isin(part.rows, wanted).all():
                wanted = everything
        if aside is not None:
            wanted = np.union1d(wanted, aside)
        if norm_kind(stage) == GROUP and not is_truncated:
            wanted = everything  # its channels are normed together
        needs.append(wanted.astype(np.int32))
    return needs


def trained_sizes(stage: Stage, part: Part) -> list[list[int] | None]:
    """The sizes of the blocks that train, by slot; None where nothing does."""
    sizes: list[list[int] | None] = []
    for parameter, trains in zip(parameters_of(stage), part.trains, strict=True):
        if parameter is None or not trains:
            sizes.append(None)
            continue
        size = [len(part.rows), *parameter.shape[1:]]
        if len(size) > 1:
            size[1] = size[1] // stage.input[0] * len(part.cols)
        sizes.append(size)
    return sizes
