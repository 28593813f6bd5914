import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspu.data.partition import LabelCounts, count_labels, entropy, partition
from fedspu.errors import SettingsError

SHARES = LabelCounts(np.array([[4, 0, 0], [2, 2, 0], [1, 1, 2], [0, 0, 0]]))


def test_sizes_classes_and_entropies_by_hand() -> None:
    assert SHARES.sizes.tolist() == [4, 4, 4, 0]
    assert SHARES.num_classes.tolist() == [1, 2, 3, 0]
    assert SHARES.entropies.tolist() == [0, 1, 1.5, 0]
    assert SHARES.num_single == 1


def test_a_table_of_too_many_cells_is_refused() -> None:
    parts = [np.array([0]), np.array([1])]
    with pytest.raises(SettingsError, match=r"table of 20,000,002 cells; expected at"):
        count_labels(parts, np.array([0, 1]), 10_000_001)


def test_the_whole_has_an_entropy_too() -> None:
    # 7, 3 and 2 of 12.
    shares = np.array([7, 3, 2]) / 12
    expected = -(shares * np.log2(shares)).sum()
    assert SHARES.whole_entropy == pytest.approx(expected)


def test_a_single_class_has_no_entropy_and_no_minus_sign() -> None:
    assert str(entropy(np.array([[5, 0]]))[0]) == "0.0"


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 2**32))
def test_counts_are_those_of_the_plain_loop(
    num_clients: int, num_classes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, num_classes, 60)
    parts = partition(labels, num_clients, "dirichlet", 0.3, 0, rng)
    counts = count_labels(parts, labels, num_classes).counts
    for part, row in zip(parts, counts, strict=True):
        assert row.tolist() == [(labels[part] == c).sum() for c in range(num_classes)]
