"""Language modelling: the next token at every place of a text; perplexity."""

from math import exp

import torch
import torch.nn.functional as F
from torch import Tensor

from fedspu.errors import DataError
from fedspu.tasks.task import (
    IGNORED,
    Metric,
    Task,
    dtype_of,
    num_scored,
    refuse_large,
    refuse_negative,
    refuse_unscored,
    sums_of,
)

MOST_TOKENS = 2**20
"""The largest vocabulary: a model has an output for each token."""


def _next_tokens(x: Tensor) -> Tensor:
    """Each token's successor; not scored at the end of a row, or if either is padding.

    Tokens below 0 are padding.
    """
    _refuse_pixels(x)
    is_padding = x < 0
    after = torch.full_like(x, IGNORED)
    after[:, :-1] = x[:, 1:].masked_fill(
        is_padding[:, 1:] | is_padding[:, :-1], IGNORED
    )
    return after


def _refuse_pixels(x: Tensor) -> None:
    if x.dtype == torch.uint8:
        raise DataError(
            f"x is {tuple(x.shape)} of uint8, which means pixels; expected "
            "token numbers as int64"
        )


def _tokens(x: Tensor, y: Tensor) -> Tensor:
    _refuse_pixels(x)
    if x.is_floating_point() or y.is_floating_point() or x.dim() != 2:
        raise DataError(
            f"x is {tuple(x.shape)} of {dtype_of(x)}, y {tuple(y.shape)} of "
            f"{dtype_of(y)}; expected token numbers of each example, (n, length)"
        )
    if x.shape != y.shape:
        raise DataError(
            f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}; expected one target "
            "for each token"
        )
    if bool((x < 0).any()):
        first = (x < 0).nonzero()[0].tolist()
        raise DataError(f"x{first} is below 0; expected token numbers from 0 upwards")
    refuse_negative(y, but=IGNORED)
    refuse_large(y, MOST_TOKENS, "token")
    if int(x.max()) >= MOST_TOKENS:
        raise DataError(
            f"x has the token {int(x.max())}; expected numbers below {MOST_TOKENS:,}"
        )
    refuse_unscored(y)
    return y.long()


def _of_tokens(output: Tensor, y: Tensor, /, *, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(
        output.flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def _vocabulary(x: Tensor, y: Tensor) -> int:
    return max(int(x.max()), int(y.max())) + 1


def _surprise(output: Tensor, y: Tensor) -> Tensor:
    return sums_of(_of_tokens(output, y, reduction="sum"), num_scored(y))


def _perplexity(sums: Tensor) -> float:
    try:
        return exp(float(sums[0] / sums[1]))
    except OverflowError:
        return float("inf")


def _wants_tokens(output: Tensor, y: Tensor, num_outputs: int) -> str | None:
    if output.dim() != 3 or output.shape[:2] != y.shape:
        return (
            f"the model returned {tuple(output.shape)} for two examples of "
            f"{y.shape[1]} tokens; expected (2, {y.shape[1]}, {num_outputs}): a score "
            "for each possible next token"
        )
    if output.shape[2] < num_outputs:
        return (
            f"the model has scores for {output.shape[2]} tokens, but the data has "
            f"tokens up to {num_outputs - 1}; it needs {num_outputs} outputs"
        )
    return None


language_model = Task(
    name="language-model",
    loss=_of_tokens,
    metric=Metric("perplexity", _surprise, _perplexity, is_higher_better=False),
    targets=_tokens,
    num_outputs=_vocabulary,
    check_output=_wants_tokens,
    strata=None,
    count=num_scored,
    make_targets=_next_tokens,
    can_augment=False,
)
