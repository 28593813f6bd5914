from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspu import (
    Axis,
    NeuronGroup,
    Neurons,
    choose_ordered,
    choose_random,
    choose_top,
)
from fedspu.errors import ModelError, SettingsError
from fedspu.neurons.choose import P, as_fraction, num_active


def table(*sizes: int) -> Neurons:
    """Groups a, b, ... of the sizes given, each along one tensor of its own."""
    groups = [
        NeuronGroup(name, size, (Axis(f"{name}.weight", 0),))
        for name, size in zip("abcdef", sizes, strict=False)
    ]
    return Neurons(tuple(groups), {f"{g.name}.weight": (g.size, 2) for g in groups})


@pytest.mark.parametrize(
    ("p", "size", "count"),
    [
        (0.7, 90, 63),  # in binary int(.7 * 90) is 62
        (0.1, 30, 3),
        (0.29, 100, 29),  # in binary 28
        (0.57, 100, 57),  # in binary 56
        (0.2, 20, 4),
        (0.5, 7, 3),
        (0.999, 7, 6),
        (1, 7, 7),
        (1.0, 7, 7),
        ("0.7", 90, 63),
        (Fraction(1, 3), 9, 3),
        (np.float64(0.7), 90, 63),
    ],
)
def test_the_number_of_active_neurons_is_p_times_n_as_typed(
    p: P, size: int, count: int
) -> None:
    assert num_active(p, size) == count


@pytest.mark.parametrize(("p", "size"), [(0.2, 4), (0.001, 1), (0.5, 1), (1e-9, 84)])
def test_at_least_one_neuron_is_active(p: float, size: int) -> None:
    assert num_active(p, size) == 1


@given(st.integers(1, 1000), st.integers(1, 500))
@settings(max_examples=100, deadline=None)
def test_a_decimal_of_three_digits_is_counted_in_integers(
    thousandths: int, size: int
) -> None:
    assert num_active(thousandths / 1000, size) == max(1, thousandths * size // 1000)


@pytest.mark.parametrize("p", [0, -1, -0.5, 1.2, float("nan"), float("inf"), "abc", ""])
def test_p_outside_its_range_is_refused_by_its_value(p: P) -> None:
    with pytest.raises(
        SettingsError, match=r"p = .*expected a number in \(0, 1\]"
    ) as e:
        as_fraction(p)
    assert str(p) in str(e.value)


@pytest.mark.parametrize("p", [0, 1.2])
def test_no_way_of_choosing_takes_a_p_outside_its_range(p: float) -> None:
    neurons, scores = table(4), {"a": torch.ones(4)}
    with pytest.raises(SettingsError):
        choose_random(neurons, p, np.random.default_rng(0))
    with pytest.raises(SettingsError):
        choose_ordered(neurons, p)
    with pytest.raises(SettingsError):
        choose_top(neurons, p, scores)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(1, 100),
    st.integers(0, 99),
)
@settings(max_examples=50, deadline=None)
def test_every_choice_is_sorted_distinct_and_of_the_right_size(
    sizes: list[int], percent: int, seed: int
) -> None:
    neurons, rng = table(*sizes), np.random.default_rng(seed)
    p = percent / 100
    scores = {g.name: torch.from_numpy(rng.random(g.size)) for g in neurons.groups}
    for active in (
        choose_random(neurons, p, rng),
        choose_ordered(neurons, p),
        choose_top(neurons, p, scores),
    ):
        assert list(active) == [group.name for group in neurons.groups]
        for group in neurons.groups:
            indices = active[group.name].tolist()
            assert indices == sorted(set(indices))
            assert len(indices) == max(1, percent * group.size // 100)
            assert set(indices) <= set(range(group.size))


def test_ordered_neurons_are_the_first() -> None:
    active = choose_ordered(table(10, 3), 0.5)
    assert active["a"].tolist() == [0, 1, 2, 3, 4]
    assert active["b"].tolist() == [0]


def test_top_neurons_are_the_best_in_their_own_order() -> None:
    active = choose_top(table(5), 0.6, {"a": torch.tensor([1.0, 9, -2, 5, 7])})
    assert active["a"].tolist() == [1, 3, 4]


def test_of_equal_scores_the_first_are_taken() -> None:
    scores = torch.tensor([1.0, 2, 2, 1, 2, 2])
    assert choose_top(table(6), 0.5, {"a": scores})["a"].tolist() == [1, 2, 4]
    assert choose_top(table(90), 0.5, {"a": torch.zeros(90)})["a"].tolist() == list(
        range(45)
    )


@pytest.mark.parametrize("scores", [{}, {"a": torch.ones(3)}, {"b": torch.ones(4)}])
def test_missing_or_too_few_scores_are_refused_by_group(
    scores: dict[str, torch.Tensor],
) -> None:
    with pytest.raises(ModelError, match="group a: expected 4 numbers"):
        choose_top(table(4), 0.5, scores)


def test_every_neuron_is_drawn_equally_often() -> None:
    neurons, rng = table(10), np.random.default_rng(0)
    draws = 4000
    counts = torch.zeros(10)
    for _ in range(draws):
        counts[choose_random(neurons, 0.3, rng)["a"]] += 1
    # A count is binomial(4000, .3): mean 1200, deviation 29; five of those.
    assert (counts - 1200).abs().max() < 145


def test_every_pair_of_neurons_is_drawn_equally_often() -> None:
    neurons, rng = table(5), np.random.default_rng(0)
    draws = 5000
    pairs: dict[tuple[int, ...], int] = {}
    for _ in range(draws):
        pair = tuple(choose_random(neurons, 0.4, rng)["a"].tolist())
        pairs[pair] = pairs.get(pair, 0) + 1
    # Ten pairs, each binomial(5000, .1): mean 500, deviation 21.
    assert len(pairs) == 10
    assert all(abs(count - 500) < 106 for count in pairs.values())


def test_groups_of_one_size_are_drawn_apart() -> None:
    neurons = table(30, 30)
    active = choose_random(neurons, 0.5, np.random.default_rng(0))
    assert active["a"].tolist() != active["b"].tolist()


def test_a_draw_depends_on_the_generator_alone() -> None:
    neurons = table(30)
    draws = [
        choose_random(neurons, 0.5, np.random.default_rng(seed))["a"].tolist()
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_p_of_one_activates_every_neuron() -> None:
    neurons = table(7, 1, 3)
    everything = {
        name: indices.tolist() for name, indices in neurons.everything().items()
    }
    assert everything == {"a": list(range(7)), "b": [0], "c": [0, 1, 2]}
    scores = {g.name: torch.randn(g.size) for g in neurons.groups}
    for active in (
        choose_random(neurons, 1, np.random.default_rng(0)),
        choose_ordered(neurons, 1),
        choose_top(neurons, 1, scores),
    ):
        assert {name: i.tolist() for name, i in active.items()} == everything
