import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedspu.data.partition import PARTITIONS, partition
from fedspu.errors import SettingsError

Parts = list[NDArray[np.int64]]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def sizes(parts: Parts) -> list[int]:
    return [len(part) for part in parts]


@dataclass(frozen=True)
class Case:
    """A partition that can be made."""

    num_examples: int
    num_classes: int
    num_clients: int
    kind: str
    alpha: float
    min_examples: int
    seed: int

    def make(self) -> Parts:
        labels = rng(self.seed).integers(0, self.num_classes, self.num_examples)
        return partition(
            labels,
            self.num_clients,
            self.kind,
            self.alpha,
            self.min_examples,
            rng(self.seed),
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_examples = draw(st.integers(1, 300))
    num_clients = draw(st.integers(1, num_examples))
    return Case(
        num_examples=num_examples,
        num_classes=draw(st.integers(1, 12)),
        num_clients=num_clients,
        kind=draw(st.sampled_from(sorted(PARTITIONS))),
        alpha=draw(st.sampled_from([1e-6, 0.01, 0.1, 0.5, 1.0, 100.0])),
        min_examples=draw(st.integers(0, num_examples // num_clients)),
        seed=draw(st.integers(0, 2**32)),
    )


@given(cases())
def test_every_example_goes_to_exactly_one_client(case: Case) -> None:
    parts = case.make()
    assert len(parts) == case.num_clients
    assert sorted(np.concatenate(parts)) == list(range(case.num_examples))


@given(cases())
def test_every_client_has_the_minimum(case: Case) -> None:
    assert min(sizes(case.make())) >= case.min_examples


@given(cases())
def test_the_indices_of_a_client_are_sorted(case: Case) -> None:
    assert all((np.diff(part) > 0).all() for part in case.make())


@given(cases())
def test_the_same_stream_gives_the_same_partition(case: Case) -> None:
    for one, other in zip(case.make(), case.make(), strict=True):
        assert np.array_equal(one, other)


@given(cases())
def test_a_client_above_the_minimum_gives_only_if_it_is_among_the_largest(
    case: Case,
) -> None:
    free = Case(**{**vars(case), "min_examples": 0})
    before, after = np.array(sizes(free.make())), np.array(sizes(case.make()))
    givers = after < before
    if givers.any():
        # All that gave end at one level, or one above it, and nobody else is larger.
        assert after[givers].max() - after[givers].min() <= 1
        assert after[~givers].max(initial=0) <= after[givers].min() + 1


def test_the_clients_in_need_get_exactly_what_they_lack() -> None:
    labels = np.zeros(30, dtype=np.int64)
    before = np.array(sizes(partition(labels, 10, "dirichlet", 0.1, 0, rng(3))))
    after = np.array(sizes(partition(labels, 10, "dirichlet", 0.1, 2, rng(3))))
    assert before.min() == 0
    assert (after[before < 2] == 2).all()


def test_another_stream_gives_another_partition() -> None:
    labels = np.arange(100) % 10
    one = partition(labels, 5, "dirichlet", 0.5, 1, rng(0))
    other = partition(labels, 5, "dirichlet", 0.5, 1, rng(1))
    assert not all(map(np.array_equal, one, other))


def test_a_small_alpha_gives_a_class_to_few_clients_and_a_large_one_to_all() -> None:
    labels = np.arange(1000) % 10

    def share_of_the_largest_holder(alpha: float) -> float:
        parts = partition(labels, 10, "dirichlet", alpha, 0, rng())
        held = np.array([np.bincount(labels[part], minlength=10) for part in parts])
        return float(held.max(axis=0).mean() / 100)

    assert share_of_the_largest_holder(0.01) > 0.9
    assert share_of_the_largest_holder(1000.0) < 0.13


def test_shares_of_a_class_follow_the_dirichlet_law() -> None:
    # The share of one of K clients has mean 1/K and variance (K-1) / (K²(K alpha + 1)).
    labels = np.repeat(np.arange(4000), 50)
    parts = partition(labels, 4, "dirichlet", 0.5, 0, rng())
    shares = (
        np.array([np.bincount(labels[part], minlength=4000) for part in parts]) / 50
    )
    np.testing.assert_allclose(shares.mean(axis=1), 1 / 4, atol=0.015)
    np.testing.assert_allclose(shares.var(axis=1), 3 / (16 * 3), rtol=0.05)


def test_an_even_partition_is_even_and_random() -> None:
    labels = np.arange(1030) % 4
    parts = partition(labels, 4, "iid", 0.1, 0, rng())
    assert sorted(sizes(parts)) == [257, 257, 258, 258]
    assert all(np.bincount(labels[part], minlength=4).min() > 40 for part in parts)


def test_a_lone_example_of_a_class_goes_to_any_client() -> None:
    parts = partition(np.arange(4000), 4, "dirichlet", 1.0, 0, rng())
    np.testing.assert_allclose(sizes(parts), 1000, atol=100)


def test_labels_need_not_be_dense() -> None:
    labels = np.array([5, 900_000_000, 5, 7])
    parts = partition(labels, 2, "dirichlet", 0.5, 2, rng())
    assert sizes(parts) == [2, 2]


@pytest.mark.parametrize("kind", sorted(PARTITIONS))
def test_emnist_over_ten_thousand_clients_takes_under_two_seconds(kind: str) -> None:
    labels = rng().integers(0, 62, 814_255)
    start = time.perf_counter()
    parts = partition(labels, 10_000, kind, 0.1, 10, rng())
    assert time.perf_counter() - start < 2
    assert min(sizes(parts)) >= 10


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"num_clients": 11}, r"clients\.number = 11: .* from 1 to 10"),
        ({"num_clients": 0}, r"clients\.number = 0: .* from 1 to 10"),
        (
            {"num_clients": 4, "min_examples": 3},
            r"clients\.number = 4 with data\.min_examples = 3 needs 12 .* are 10",
        ),
        ({"min_examples": -1}, r"data\.min_examples = -1: expected 0 or more"),
        ({"alpha": 0.0}, r"data\.alpha = 0\.0: expected a number above 0"),
        ({"alpha": -0.5}, r"data\.alpha = -0\.5: expected a number above 0"),
        ({"alpha": float("nan")}, r"data\.alpha = nan: expected a number above 0"),
        ({"alpha": float("inf")}, r"data\.alpha = inf: expected a number above 0"),
        ({"kind": "even"}, r"data\.partition = 'even': .* one of dirichlet, iid"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    wrong: dict[str, object], complaint: str
) -> None:
    sound = Case(10, 2, 2, "dirichlet", 0.5, 1, seed=0)
    with pytest.raises(SettingsError, match=complaint):
        Case(**{**vars(sound), **wrong}).make()
