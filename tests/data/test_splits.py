from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedspu.data.splits import SPLITS, Split, split
from fedspu.errors import DataError, SettingsError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@dataclass(frozen=True)
class Case:
    """A client that holds some of the examples of a data set."""

    indices: NDArray[np.int64]
    labels: NDArray[np.int64]
    seed: int

    def make(self, kind: str) -> Split:
        return split(self.indices, self.labels, kind, rng(self.seed))

    def counts(self, part: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.bincount(self.labels[part], minlength=self.labels.max() + 1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_examples = draw(st.integers(3, 200))
    num_held = draw(st.integers(3, num_examples))
    num_classes = draw(st.integers(1, 12))
    seed = draw(st.integers(0, 2**32))
    examples = rng(seed)
    return Case(
        indices=np.sort(examples.choice(num_examples, num_held, replace=False)),
        labels=examples.integers(0, num_classes, num_examples),
        seed=seed,
    )


kinds = st.sampled_from(sorted(SPLITS))


@given(cases())
def test_three_parts_are_disjoint_and_complete(case: Case) -> None:
    parts = case.make("three-way")
    together = np.concatenate([parts.train, parts.val, parts.test])
    assert sorted(together) == case.indices.tolist()


@given(cases())
def test_in_the_paper_s_split_one_part_validates_and_tests(case: Case) -> None:
    parts = case.make("paper")
    assert parts.val is parts.test
    together = np.concatenate([parts.train, parts.test])
    assert sorted(together) == case.indices.tolist()


@given(cases(), kinds)
def test_no_part_is_empty(case: Case, kind: str) -> None:
    parts = case.make(kind)
    assert min(len(parts.train), len(parts.val), len(parts.test)) >= 1


@given(cases())
def test_of_five_or_more_examples_seventy_percent_train(case: Case) -> None:
    for kind in SPLITS:
        train = case.make(kind).train
        if len(case.indices) > 4:
            assert abs(10 * len(train) - 7 * len(case.indices)) <= 5


@given(cases())
def test_validation_and_test_are_halves_of_the_rest(case: Case) -> None:
    parts = case.make("three-way")
    assert 0 <= len(parts.test) - len(parts.val) <= 1


@given(cases(), kinds)
def test_training_has_its_share_of_every_class(case: Case, kind: str) -> None:
    train = case.make(kind).train
    due = case.counts(case.indices) * len(train) / len(case.indices)
    assert (abs(case.counts(train) - due) < 1).all()


@given(cases())
def test_validation_and_test_share_every_class_evenly(case: Case) -> None:
    parts = case.make("three-way")
    held = case.counts(parts.val) + case.counts(parts.test)
    due = held * len(parts.test) / (len(parts.val) + len(parts.test))
    assert (abs(case.counts(parts.test) - due) < 1).all()


@given(cases())
def test_labels_are_alike_in_all_three_parts(case: Case) -> None:
    parts = case.make("three-way")
    held = case.counts(case.indices) / len(case.indices)
    for part in (parts.train, parts.val, parts.test):
        # Held out by one rounding, then halved by another: 1/2 and 1.
        assert (abs(case.counts(part) - held * len(part)) < 1.5).all()


def test_with_twenty_of_each_class_all_parts_have_the_same_mix() -> None:
    labels = np.repeat(np.arange(5), 20)
    parts = split(np.arange(100), labels, "three-way", rng())
    for part, number in ((parts.train, 14), (parts.val, 3), (parts.test, 3)):
        assert np.bincount(labels[part]).tolist() == [number] * 5


@given(cases())
def test_both_kinds_train_on_the_same_examples(case: Case) -> None:
    if len(case.indices) > 5:  # below, three parts need more than 30 %
        one, other = case.make("three-way"), case.make("paper")
        assert np.array_equal(one.train, other.train)


@given(cases(), kinds)
def test_the_same_stream_gives_the_same_split(case: Case, kind: str) -> None:
    one, other = case.make(kind), case.make(kind)
    assert np.array_equal(one.train, other.train)
    assert np.array_equal(one.val, other.val)
    assert np.array_equal(one.test, other.test)


@given(cases(), kinds)
def test_every_part_is_sorted(case: Case, kind: str) -> None:
    parts = case.make(kind)
    for part in (parts.train, parts.val, parts.test):
        assert (np.diff(part) > 0).all()


@pytest.mark.parametrize(
    ("num_examples", "expected"),
    [
        (3, (1, 1, 1)),
        (4, (2, 1, 1)),
        (5, (3, 1, 1)),
        (10, (7, 1, 2)),
        (20, (14, 3, 3)),
        (100, (70, 15, 15)),
    ],
)
def test_sizes_by_hand(num_examples: int, expected: tuple[int, int, int]) -> None:
    labels = np.zeros(num_examples, dtype=np.int64)
    parts = split(np.arange(num_examples), labels, "three-way", rng())
    assert (len(parts.train), len(parts.val), len(parts.test)) == expected


def test_ten_of_each_of_two_classes_by_hand() -> None:
    labels = np.repeat([0, 1], 10)
    parts = split(np.arange(20), labels, "three-way", rng())
    assert np.bincount(labels[parts.train]).tolist() == [7, 7]
    assert np.bincount(labels[parts.val]).sum() == 3


def test_each_example_is_tested_equally_often() -> None:
    labels = np.array([0, 0, 0, 0, 0, 1, 1, 1, 2, 2])
    stream = rng()
    times = np.zeros(10)
    for _ in range(4000):
        times[split(np.arange(10), labels, "three-way", stream).test] += 1
    np.testing.assert_allclose(times / 4000, 0.2, atol=0.03)


def test_neighbours_may_be_tested_together() -> None:
    labels = np.zeros(10, dtype=np.int64)
    tested = [split(np.arange(10), labels, "three-way", rng(s)).test for s in range(99)]
    assert any(np.array_equal(test, [0, 1]) for test in tested)


def test_another_stream_gives_another_split() -> None:
    labels = np.zeros(50, dtype=np.int64)
    one = split(np.arange(50), labels, "three-way", rng(0))
    other = split(np.arange(50), labels, "three-way", rng(1))
    assert not np.array_equal(one.test, other.test)


@pytest.mark.parametrize("kind", sorted(SPLITS))
@pytest.mark.parametrize("num_examples", [0, 1, 2])
def test_fewer_than_three_examples_are_refused(kind: str, num_examples: int) -> None:
    indices = np.arange(num_examples)
    with pytest.raises(DataError, match=f"^{num_examples} examples; .* at least 3"):
        split(indices, np.zeros(5, dtype=np.int64), kind, rng())


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"data\.split = 'half': expected one of paper, three-way"
    ):
        split(np.arange(5), np.zeros(5, dtype=np.int64), "half", rng())
