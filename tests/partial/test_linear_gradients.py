"""Linear layers where most rows of the gradient are zero."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspu.partial.block_gradients import Part
from fedspu.partial.linear_gradients import LinearPart, rows_that_matter


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 200),
    st.integers(1, 70),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_a_gradient_of_few_rows_gives_the_plain_one_in_the_block(
    num_rows: int, step: int, is_truncated: bool, is_picked: bool, seed: int
) -> None:
    x, weight, bias = drawn(num_rows, 7, seed=seed), drawn(9, 7), drawn(9)
    rows = torch.tensor([1, 4, 8]) if is_picked else torch.arange(3)
    columns = torch.tensor([0, 6]) if is_picked else torch.arange(2)
    grad = torch.zeros(num_rows, 9, dtype=torch.float64)
    grad[::step] = drawn(len(grad[::step]), 9, seed=seed + 1)

    own = [t.clone().requires_grad_() for t in (x, weight, bias)]
    F.linear(*own).backward(grad)

    leaves = weight[rows][:, columns].clone(), bias[rows].clone()
    given = [t.requires_grad_() for t in (x.clone(), *leaves)]
    spans = (rows, columns) if is_picked else (3, 2)
    part = Part(spans[0], spans[1], spans[0], spans[1], spans[0], is_truncated)
    LinearPart.apply(*given, weight, bias, part).backward(grad)  # type: ignore[no-untyped-call]  # torch has no hints here

    whole = own[1].grad, own[2].grad
    assert whole[0] is not None
    assert whole[1] is not None
    assert torch.allclose(given[1].grad, whole[0][rows][:, columns])  # type: ignore[arg-type]
    assert torch.allclose(given[2].grad, whole[1][rows])  # type: ignore[arg-type]
    passed = own[0].grad
    if is_truncated:
        passed = torch.zeros_like(x)
        passed[:, columns] = grad[:, rows] @ weight[rows][:, columns]
    assert torch.allclose(given[0].grad, passed)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e-45])
def test_rows_that_are_not_zero_are_found_whatever_is_in_them(bad: float) -> None:
    grad = torch.zeros(128, 5)
    grad[77, 3] = bad
    rows = rows_that_matter(grad)
    assert rows is not None
    assert rows.tolist() == [77]


def test_a_gradient_with_few_zeros_is_taken_as_it_is() -> None:
    grad = torch.ones(128, 5)
    grad[::3] = 0
    assert rows_that_matter(grad) is None
    assert rows_that_matter(torch.zeros(8, 5)) is None  # a small one, too
