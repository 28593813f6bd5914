from dataclasses import dataclass, replace
from typing import Any

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
    shards: int = 2
    num_owners: int = 0

    @property
    def labels(self) -> NDArray[np.int64]:
        return rng(self.seed).integers(0, self.num_classes, self.num_examples)

    @property
    def owners(self) -> NDArray[np.int64] | None:
        if self.num_owners == 0:
            return None
        # Each owns at least one example, and some own many.
        dealt = np.arange(self.num_examples) % self.num_owners
        others = rng(self.seed).integers(0, self.num_owners, self.num_examples) // 2
        first = np.arange(self.num_examples) < self.num_owners
        return rng(self.seed).permutation(np.where(first, dealt, others))

    def make(
        self,
        labels: NDArray[np.integer] | None = None,
        owners: NDArray[np.integer] | None = None,
    ) -> Parts:
        return partition(
            self.labels if labels is None else labels,
            self.num_clients,
            self.kind,
            self.alpha,
            self.min_examples,
            rng(self.seed),
            self.shards,
            self.owners if owners is None else owners,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_examples = draw(st.integers(1, 300))
    num_clients = draw(st.integers(1, num_examples))
    return Case(
        num_examples=num_examples,
        num_classes=draw(st.integers(1, 12)),
        num_clients=num_clients,
        kind="dirichlet",
        alpha=draw(st.sampled_from([1e-300, 1e-6, 0.01, 0.1, 0.5, 1.0, 100.0, 1e9])),
        min_examples=draw(st.integers(0, num_examples // num_clients)),
        seed=draw(st.integers(0, 2**32)),
        shards=draw(st.integers(1, num_examples // num_clients)),
        num_owners=draw(st.integers(num_clients, num_examples)),
    )


# Laws, of every kind -----------------------------------------------------------------

every_kind = pytest.mark.parametrize("kind", sorted(PARTITIONS))


@every_kind
@given(case=cases())
def test_every_example_goes_to_exactly_one_client(kind: str, case: Case) -> None:
    case = replace(case, kind=kind)
    parts = case.make()
    assert len(parts) == case.num_clients
    assert sorted(np.concatenate(parts)) == list(range(case.num_examples))


@every_kind
@given(case=cases())
def test_every_client_has_the_minimum(kind: str, case: Case) -> None:
    case = replace(case, kind=kind)
    assert min(sizes(case.make())) >= case.min_examples


@every_kind
@given(case=cases())
def test_the_indices_of_a_client_are_sorted(kind: str, case: Case) -> None:
    case = replace(case, kind=kind)
    assert all((np.diff(part) > 0).all() for part in case.make())


@every_kind
@given(case=cases())
def test_the_same_stream_gives_the_same_partition(kind: str, case: Case) -> None:
    case = replace(case, kind=kind)
    for one, other in zip(case.make(), case.make(), strict=True):
        assert np.array_equal(one, other)


@every_kind
@given(case=cases())
def test_nothing_but_stream_labels_and_owners_matters(kind: str, case: Case) -> None:
    case = replace(case, kind=kind)
    parts = case.make()
    np.random.seed(case.seed % 1000)  # noqa: NPY002  # what must not be read
    owners = case.owners
    assert owners is not None
    # Other names in the same order, in another type, and memory laid out otherwise.
    labels = np.repeat((3 * case.labels + 5).astype(np.int32), 2)[::2]
    other = case.make(labels, (7 * owners - 40).astype(np.int16))
    assert all(map(np.array_equal, parts, other))


@every_kind
@given(case=cases())
def test_the_inputs_are_left_as_they_were(kind: str, case: Case) -> None:
    case = replace(case, kind=kind)
    labels, owners = case.labels, case.owners
    labels.setflags(write=False)
    assert owners is not None
    owners.setflags(write=False)
    case.make(labels, owners)


@every_kind
@given(case=cases())
def test_a_client_above_the_minimum_gives_only_if_it_is_among_the_largest(
    kind: str, case: Case
) -> None:
    case = replace(case, kind=kind)
    free = replace(case, min_examples=0)
    before, after = np.array(sizes(free.make())), np.array(sizes(case.make()))
    givers = after < before
    if givers.any():
        # All that gave end at one level, or one above it, and nobody else is larger.
        assert after[givers].max() - after[givers].min() <= 1
        assert after[~givers].max(initial=0) <= after[givers].min() + 1


@pytest.mark.parametrize("kind", sorted(set(PARTITIONS) - {"natural"}))
def test_another_stream_gives_another_partition(kind: str) -> None:
    labels = np.arange(100) % 10
    one = partition(labels, 5, kind, 0.5, 1, rng(0))
    other = partition(labels, 5, kind, 0.5, 1, rng(1))
    assert not all(map(np.array_equal, one, other))


def test_the_clients_in_need_get_exactly_what_they_lack() -> None:
    labels = np.zeros(30, dtype=np.int64)
    before = np.array(sizes(partition(labels, 10, "dirichlet", 0.1, 0, rng(3))))
    after = np.array(sizes(partition(labels, 10, "dirichlet", 0.1, 2, rng(3))))
    assert before.min() == 0
    assert (after[before < 2] == 2).all()


# dirichlet ---------------------------------------------------------------------------


def slow_dirichlet(
    labels: NDArray[np.int64], num_clients: int, alpha: float, stream: Any
) -> list[list[int]]:
    """The definition, an example at a time."""
    parts: list[list[int]] = [[] for _ in range(num_clients)]
    for label in sorted(set(labels.tolist())):
        examples = np.flatnonzero(labels == label)
        shares = stream.dirichlet([alpha] * num_clients)
        start = stream.random()
        for i, example in enumerate(stream.permutation(examples)):
            place, client = (i + start) / len(examples), 0
            while client < num_clients - 1 and shares[: client + 1].sum() < place:
                client += 1
            parts[client].append(int(example))
    return [sorted(part) for part in parts]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("alpha", [0.1, 0.5, 10.0])
def test_the_quick_way_is_the_plain_one(alpha: float, seed: int) -> None:
    labels = rng(seed).integers(0, 7, 300)
    parts = partition(labels, 9, "dirichlet", alpha, 0, rng(seed))
    plain = slow_dirichlet(labels, 9, alpha, rng(seed))
    assert [part.tolist() for part in parts] == plain


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


def test_a_lone_example_of_a_class_goes_to_any_client() -> None:
    parts = partition(np.arange(4000), 4, "dirichlet", 1.0, 0, rng())
    np.testing.assert_allclose(sizes(parts), 1000, atol=100)


def test_labels_need_not_be_dense() -> None:
    labels = np.array([5, 900_000_000, 5, 7])
    parts = partition(labels, 2, "dirichlet", 0.5, 2, rng())
    assert sizes(parts) == [2, 2]


# dirichlet-client --------------------------------------------------------------------


def slow_dirichlet_client(
    labels: NDArray[np.int64], num_clients: int, alpha: float, stream: Any
) -> NDArray[np.int64]:
    """FedDyn's loop: random clients in turn draw a class, again if it has run out."""
    num_classes = int(labels.max()) + 1
    left = np.bincount(labels)
    mixes = stream.dirichlet([alpha] * num_classes, num_clients)
    wanted = np.bincount(np.arange(len(labels)) % num_clients)
    held = np.zeros((num_clients, num_classes), dtype=np.int64)
    while wanted.any():
        client = stream.choice(np.flatnonzero(wanted))
        mix = mixes[client] * (left > 0)
        mix = mix if mix.sum() > 0 else (left > 0) * 1.0
        drawn = stream.choice(num_classes, p=mix / mix.sum())
        held[client, drawn] += 1
        left[drawn] -= 1
        wanted[client] -= 1
    return held


def held_by(parts: Parts, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    classes = int(labels.max()) + 1
    return np.array([np.bincount(labels[part], minlength=classes) for part in parts])


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_clients_are_as_concentrated_as_by_the_plain_loop(alpha: float) -> None:
    labels = np.repeat(np.arange(5), 16)

    def concentration(held: NDArray[np.int64]) -> float:
        return float(((held / held.sum(1, keepdims=True)) ** 2).sum(1).mean())

    quick, slow, stream = [], [], rng()
    for _ in range(150):
        parts = partition(labels, 8, "dirichlet-client", alpha, 0, stream)
        quick.append(concentration(held_by(parts, labels)))
        held = slow_dirichlet_client(labels, 8, alpha, stream)
        slow.append(concentration(held))
    assert np.mean(quick) == pytest.approx(np.mean(slow), abs=0.03)


def test_while_nothing_runs_out_mixes_follow_the_dirichlet_law() -> None:
    # The share of one of C classes has mean 1/C and variance (C-1) / (C²(C alpha + 1)),
    # and n draws from it have (1/n) (C-1)/C² (1 - 1/(C alpha + 1)) more.
    labels = np.repeat([0, 1], 60_000)
    parts = partition(labels, 3000, "dirichlet-client", 0.5, 0, rng())
    shares = held_by(parts, labels)[:, 0] / 40
    assert shares.mean() == pytest.approx(1 / 2, abs=0.02)
    expected = 1 / (4 * 2) + (1 / 40) * (1 / 4) * (1 - 1 / 2)
    assert shares.var() == pytest.approx(expected, rel=0.06)


def test_mixes_are_drawn_for_clients_of_equal_size() -> None:
    labels = rng().integers(0, 10, 1030)
    parts = partition(labels, 4, "dirichlet-client", 0.1, 0, rng())
    assert sorted(sizes(parts)) == [257, 257, 258, 258]


# iid ---------------------------------------------------------------------------------


def test_an_even_partition_is_even_and_random() -> None:
    labels = np.arange(1030) % 4
    parts = partition(labels, 4, "iid", 0.1, 0, rng())
    assert sorted(sizes(parts)) == [257, 257, 258, 258]
    assert all(np.bincount(labels[part], minlength=4).min() > 40 for part in parts)


# shards ------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_clients_have_as_many_whole_shards_as_asked(shards: int) -> None:
    # Ten classes of 60, ten clients: a shard has 60 / shards examples.
    labels = np.repeat(np.arange(10), 60)
    parts = partition(labels, 10, "shards", 0.1, 0, rng(), shards=shards)
    assert sizes(parts) == [60] * 10
    held = held_by(parts, labels)
    assert (held % (60 // shards) == 0).all()
    assert np.count_nonzero(held, axis=1).max() <= shards


def test_shards_are_dealt_at_random() -> None:
    # Of ten clients, how often does the first have class 0? A shard in ten: 2 x 0.1.
    labels = np.repeat(np.arange(10), 20)
    stream = rng()
    times = 0
    for _ in range(1000):
        parts = partition(labels, 10, "shards", 0.1, 0, stream)
        times += int((labels[parts[0]] == 0).sum()) // 10
    assert times / 1000 == pytest.approx(0.2, abs=0.04)


def test_examples_of_a_class_are_random_in_a_shard() -> None:
    labels = np.zeros(40, dtype=np.int64)
    firsts = [partition(labels, 2, "shards", 0.1, 0, rng(s))[0] for s in range(200)]
    mean = np.mean([part.mean() for part in firsts])
    assert mean == pytest.approx(19.5, abs=1.5)
    assert len({part.tobytes() for part in firsts}) == 200


# quantity ----------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_sizes_follow_the_power_law(alpha: float) -> None:
    labels = rng().integers(0, 10, 100_000)
    parts = partition(labels, 50, "quantity", alpha, 0, rng())
    shares = [k ** (-1 / alpha) for k in range(1, 51)]
    expected = [100_000 * share / sum(shares) for share in shares]
    np.testing.assert_allclose(sorted(sizes(parts), reverse=True), expected, atol=1)


def test_any_client_may_be_the_largest_and_all_have_the_same_mix() -> None:
    labels = rng().integers(0, 2, 4000)
    parts = [partition(labels, 4, "quantity", 1.0, 0, rng(s)) for s in range(200)]
    largest = np.bincount([int(np.argmax(sizes(part))) for part in parts], minlength=4)
    assert largest.min() > 30
    mixes = [labels[part[0]].mean() for part in parts]
    assert np.mean(mixes) == pytest.approx(labels.mean(), abs=0.01)


# natural -----------------------------------------------------------------------------

OWNERS = np.array([30, 10, 20, 30, 10, 10, 20, 20, 30])


def natural(num_clients: int, min_examples: int = 0, seed: int = 0) -> Parts:
    labels = np.zeros(9, dtype=np.int64)
    return partition(
        labels, num_clients, "natural", 0.1, min_examples, rng(seed), owners=OWNERS
    )


@pytest.mark.parametrize("seed", range(3))
def test_with_an_owner_for_each_client_they_are_in_order(seed: int) -> None:
    found = [part.tolist() for part in natural(3, seed=seed)]
    assert found == [[1, 4, 5], [2, 6, 7], [0, 3, 8]]


def test_more_owners_than_clients_are_grouped_whole_and_at_random() -> None:
    groups = set()
    for seed in range(40):
        parts = natural(2, seed=seed)
        assert sorted(len(set(OWNERS[part])) for part in parts) == [1, 2]
        groups.add(tuple(sorted(set(OWNERS[parts[0]].tolist()))))
    assert len(groups) == 3


@given(cases())
def test_without_a_minimum_no_owner_is_torn_apart(case: Case) -> None:
    whole = replace(case, kind="natural", min_examples=0)
    owners = whole.owners
    assert owners is not None
    found = [set(owners[part].tolist()) for part in whole.make()]
    assert sum(map(len, found)) == len(set.union(*found)) == whole.num_owners
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_fewer_owners_than_clients_are_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"^clients\.number = 4: .*natural.* at most 3, the number"
    ):
        natural(4)


def test_a_data_set_without_owners_is_refused() -> None:
    labels = np.zeros(9, dtype=np.int64)
    with pytest.raises(SettingsError, match=r"'natural': .* does not say who"):
        partition(labels, 2, "natural", 0.1, 0, rng())


# Many -------------------------------------------------------------------------------


@every_kind
def test_as_many_examples_as_emnist_go_to_ten_thousand_clients(kind: str) -> None:
    # Frequencies as uneven as EMNIST's: digits are half, rare letters a few hundred.
    frequencies = 1.0 / (1 + np.arange(62))
    labels = rng().choice(62, 814_255, p=frequencies / frequencies.sum())
    owners = rng().integers(0, 20_000, 814_255)
    parts = partition(labels, 10_000, kind, 0.1, 10, rng(), owners=owners)
    assert min(sizes(parts)) >= 10


# What is refused ---------------------------------------------------------------------


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
        (
            {"kind": "shard"},
            r"data\.partition = 'shard': .* one of dirichlet, dirichlet-client, iid, "
            r"natural, quantity, shards \(did you mean shards\?\)$",
        ),
        ({"kind": ""}, r"data\.partition = '': .* quantity, shards$"),
        ({"kind": "shards", "shards": 0}, r"data\.shards = 0: expected 1 or more"),
        (
            {"kind": "shards", "shards": 6},
            r"clients\.number = 2 with data\.shards = 6 makes 12 shards, but .* 10 ",
        ),
        ({"kind": "natural"}, r"data\.partition = 'natural': .* array `client`"),
        (
            {"kind": "natural", "num_owners": 3, "num_clients": 4},
            r"clients\.number = 4: .* at most 3",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    wrong: dict[str, object], complaint: str
) -> None:
    sound = Case(10, 2, 2, "dirichlet", 0.5, 1, seed=0)
    with pytest.raises(SettingsError, match=complaint):
        Case(**{**vars(sound), **wrong}).make()
