"""Compiled code for many rows at once, beside PyTorch's several operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspu import Update
from fedspu.compiled import library, rows
from fedspu.compiled.rows import scaled_rows
from fedspu.data.dataset import Dataset, Scaling
from fedspu.errors import ModelError
from fedspu.neurons.average import Average

quick = settings(max_examples=60, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    """These tests are about the compiled code, so it must be there."""
    assert library.find().library is not None, library.find().how


# Examples -----------------------------------------------------------------------------


@quick
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 70),
    st.booleans(),
    st.integers(0, 99),
)
def test_scaled_bytes_are_pytorchs_to_the_last_bit(
    shape: list[int], count: int, is_one_number: bool, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(256, (11, *shape), dtype=torch.uint8, generator=draw)
    positions = torch.randint(11, (count,), generator=draw)
    number = 1 if is_one_number else shape[0]
    mean, deviation = torch.rand(2, number, generator=draw) + 0.1
    scaling = Scaling(tuple(mean.tolist()), tuple(deviation.tolist()))
    found = scaled_rows(x, positions, scaling.mean, scaling.deviation)
    assert found is not None
    assert torch.equal(found, scaling.apply(x[positions]))


@pytest.mark.parametrize("wrong", [-1, 4])
def test_positions_outside_are_an_error(wrong: int) -> None:
    data = Dataset("tiny", torch.zeros(4, 3, dtype=torch.uint8), torch.zeros(4))
    with pytest.raises((IndexError, RuntimeError)):
        data.take(torch.tensor([0, wrong]))


def test_what_is_no_row_of_bytes_is_left_to_pytorch() -> None:
    bytes_ = torch.zeros(4, 3, dtype=torch.uint8)
    first = torch.tensor([0])
    given = [
        (bytes_.float(), first),
        (bytes_[:, :2], first),
        (bytes_[:, 0].contiguous(), first),
        (bytes_, first.int()),
        (bytes_, first[:0]),
    ]
    assert [scaled_rows(x, at, (0.0,), (1.0,)) for x, at in given] == [None] * 5


# Averages -----------------------------------------------------------------------------

SHAPES = ((4,), (3, 5), (4, 3, 2, 2), (2, 4, 3), (), (3, 2, 4))
AXES = (
    ("a",),
    ("b", None),
    ("a", "b", None, None),
    (None, "a", None),
    (),
    ("b", None, "a"),
)
SIZES = {"a": 4, "b": 3}


def average_of(
    state: dict[str, Tensor], updates: list[Update], by_compiled_code: bool
) -> dict[str, Tensor]:
    mean = Average(state)
    with pytest.MonkeyPatch.context() as patch:
        if not by_compiled_code:
            patch.setattr(rows, "loaded", lambda: None)
        for update in updates:
            mean.add(update)
    return mean.result()


@st.composite
def rounds(draw: st.DrawFn) -> tuple[dict[str, Tensor], list[Update]]:
    """A state of some tensors, and what up to four clients made of their blocks."""
    chosen = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    state = {f"t{i}": torch.randn(SHAPES[i], generator=seed) for i in chosen}
    updates = []
    for _ in range(draw(st.integers(1, 4))):
        active = {
            name: torch.tensor(sorted(draw(st.sets(st.integers(0, n - 1), min_size=1))))
            for name, n in SIZES.items()
        }
        where = {
            f"t{i}": tuple(None if axis is None else active[axis] for axis in AXES[i])
            for i in chosen
        }
        payload = {}
        for name, axes in where.items():
            block = state[name]
            for dim, positions in enumerate(axes):
                if positions is not None:
                    block = block.index_select(dim, positions)
            payload[name] = torch.randn(block.shape, generator=seed)
        updates.append(Update(where, payload, draw(st.integers(1, 50))))
    return state, updates


@quick
@given(rounds())
def test_an_average_is_pytorchs_to_the_last_bit(
    drawn: tuple[dict[str, Tensor], list[Update]],
) -> None:
    ours, theirs = (average_of(*drawn, by_compiled_code=c) for c in (True, False))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("wrong", [-1, 4])
def test_a_position_outside_is_an_error_and_nothing_is_added(wrong: int) -> None:
    state = {"a": torch.zeros(4, 2), "b": torch.zeros(4)}
    where = {"a": (torch.tensor([0, 1]), None), "b": (torch.tensor([0, wrong]),)}
    payload = {"a": torch.ones(2, 2), "b": torch.ones(2)}
    mean = Average(state)
    with pytest.raises(ModelError, match="axis 0: expected 0 to 3"):
        mean.add(Update(where, payload, 1))
    assert all(
        torch.equal(values, state[name]) for name, values in mean.result().items()
    )


@pytest.mark.parametrize("size", [1, 3])
def test_values_that_do_not_fill_their_block_are_an_error(size: int) -> None:
    mean = Average({"a": torch.zeros(4)})
    with pytest.raises((IndexError, RuntimeError)):
        mean.add(Update({"a": (torch.tensor([0, 1]),)}, {"a": torch.ones(size)}, 1))
