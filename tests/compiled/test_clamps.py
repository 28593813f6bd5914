"""Clamps that keep one bit per value, beside PyTorch's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspu.compiled import clamps, library
from fedspu.compiled.clamps import clamped, clamped_back, format_of

LIMITS = [(0.0, float("inf")), (0.0, 6.0), (-1.0, 1.0)]


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    """These tests are about the compiled code, so it must be there."""
    assert library.find().library is not None, library.find().how


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=4),
    st.sampled_from(LIMITS),
    st.booleans(),
    st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_pytorch(
    shape: list[int], limits: tuple[float, float], is_in_place: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, grad = torch.randn(2, *shape)
    x.mul_(4).flatten()[::3] = limits[0]
    if len(shape) == 4 and seed % 2:
        x = x.contiguous(memory_format=torch.channels_last)
    order, given = format_of(x), x.clone()
    done = clamped(given, *limits, is_in_place)
    assert done is not None
    y, bits = done
    assert (y is given) == is_in_place
    assert torch.equal(y, x.clamp(*limits))
    inside = (y > limits[0]) & (y < limits[1])
    assert torch.equal(clamped_back(bits, grad, order), grad * inside)


def test_nan_stays() -> None:
    done = clamped(torch.tensor([float("nan"), 1.0]), 0.0, 6.0, False)
    assert done is not None
    assert done[0].isnan().tolist() == [True, False]


def test_what_it_cannot_read_is_left_to_pytorch() -> None:
    assert clamped(torch.ones(2, dtype=torch.float64), 0.0, 1.0, False) is None
    assert clamped(torch.ones(4, 4).t()[1:, 1:], 0.0, 1.0, False) is None


def test_without_compiled_code_pytorch_clamps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clamps, "loaded", lambda: None)
    assert clamped(torch.ones(2), 0.0, 1.0, False) is None
