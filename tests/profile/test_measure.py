import pytest
import torch
from torch import nn

from fedspu import map_neurons, state_of
from fedspu.errors import ModelError
from fedspu.profile.measure import (
    Budget,
    Profile,
    Stepper,
    StepSetting,
    Stopwatch,
    choose,
    largest_share,
    profile,
)
from tests.oracles.federation import ConvNet

X, Y = torch.randn(8, 1, 4, 4), torch.randint(3, (8,))


def profiled(model: nn.Module | None = None, **given: object) -> Profile:
    model = model or ConvNet()
    usual: dict[str, object] = {"shares": [0.5, 1.0], "repetitions": 1}
    neurons = map_neurons(model, X)
    return profile(model, neurons, X, Y, **{**usual, **given})  # type: ignore[arg-type]  # each test gives the right ones


def test_there_is_a_row_for_each_setting_beside_the_dense_step() -> None:
    found = profiled(shares=[1.0, 0.5, 0.5], modes=["exact", "truncated"])
    assert [row.setting for row in found.rows] == [
        StepSetting(p, mode, saves)
        for mode in ("exact", "truncated")
        for saves in ("fast", "lean")
        for p in (0.5, 1.0)
    ]
    assert all(row.seconds > 0 for row in (found.dense, *found.rows))
    assert (found.dense.flop_limit, found.repetitions, found.clock) == (1.0, 1, "cpu")


def test_less_is_held_and_computed_where_neurons_are_frozen() -> None:
    found = profiled(saves=["fast"])
    half, whole = found.rows
    assert half.held.gradients < whole.held.gradients == found.dense.held.gradients
    assert half.paper_bytes < whole.paper_bytes == found.dense.paper_bytes
    assert half.flop_limit is not None
    assert half.flop_limit < 0.9
    assert whole.flop_limit == 1.0


def test_the_path_of_every_parameter_is_told() -> None:
    model = ConvNet()
    half, whole = profiled(model, saves=["fast"]).rows
    assert half.paths.keys() == dict(model.named_parameters()).keys()
    assert half.paths["fc.bias"] == "whole"
    assert half.paths["conv2.weight"] != "whole"
    assert set(whole.paths.values()) == {"whole"}


def test_the_model_threads_and_generators_are_left_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedspu.profile.measure.TURN", 0.0)
    model = ConvNet().eval()
    before, threads = state_of(model), torch.get_num_threads()
    generator = torch.get_rng_state()
    found = profiled(model, threads=2, shares=[0.5], saves=["lean"])
    assert all(torch.equal(v, before[name]) for name, v in state_of(model).items())
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), generator)
    assert found.clock == "wall"


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ModelError, match="no learnable parameter"):
        profiled(ConvNet().requires_grad_(False))


# Times --------------------------------------------------------------------------------


class Clock:
    """A clock that each look moves on by so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def stopwatch(seconds: float, repetitions: int, patience: float) -> Stopwatch:
    model = ConvNet()
    stepper = Stepper(model, map_neurons(model, X), X, Y, nn.CrossEntropyLoss())
    return Stopwatch(stepper, Clock(seconds), repetitions, patience, lambda text: None)


@pytest.mark.parametrize(("seconds", "steps"), [(1.0, 1), (0.003, 10), (1e-6, 100)])
def test_a_quick_model_takes_more_steps_in_a_turn(seconds: float, steps: int) -> None:
    assert stopwatch(seconds, 1, 60).steps == steps


def test_a_time_is_the_mean_of_a_turn_s_steps() -> None:
    assert stopwatch(0.003, 2, 60).seconds([None]) == {None: pytest.approx(0.0003)}


def test_the_first_step_of_a_turn_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = stopwatch(1.0, 1, 60)
    clock: list[float] = []
    monkeypatch.setattr(watch.stepper, "step", lambda optimizer: clock.append(0))
    monkeypatch.setattr(watch, "clock", lambda: float(len(clock)))
    assert watch.turn(None, 3) == 1.0
    assert len(clock) == 4


@pytest.mark.parametrize(("patience", "taken"), [(60, 7), (0, 3)])
def test_without_patience_few_repetitions_are_made(patience: float, taken: int) -> None:
    watch = stopwatch(1.0, 7, patience)
    watch.seconds([None, StepSetting(0.5, "exact", "fast")])
    assert watch.taken == taken


# The largest p that fits --------------------------------------------------------------

SHARES = [0.2, 0.4, 0.6, 0.8, 1.0]


def never(p: float) -> bool:
    return False


def test_if_the_smallest_share_costs_far_too_much_no_other_is_tried() -> None:
    tried: list[float] = []

    def is_hopeless(p: float) -> bool:
        tried.append(p)
        return True

    def fits(p: float) -> bool:
        raise AssertionError

    assert largest_share(fits, SHARES, (5, 1), is_hopeless) is None
    assert tried == [0.01]


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [(0.57, 0.57), (0.6, 0.6), (1.0, 1.0), (0.995, 0.99), (0.013, 0.01), (0.2, 0.2)],
)
def test_the_largest_share_is_found_to_a_hundredth(limit: float, wanted: float) -> None:
    tried: list[float] = []

    def fits(p: float) -> bool:
        tried.append(p)
        return p <= limit

    assert largest_share(fits, SHARES, (5, 1), never) == wanted
    assert len(tried) == len(set(tried)) <= len(SHARES) + 3 + 4


def test_no_share_fits() -> None:
    assert largest_share(lambda p: False, SHARES, (5, 1), never) is None


def test_a_larger_share_may_fit_though_a_smaller_does_not() -> None:
    assert largest_share(lambda p: p < 0.3 or p == 1, SHARES, (5, 1), never) == 1.0
    assert (
        largest_share(lambda p: p < 0.3 or 0.6 <= p < 0.64, SHARES, (5, 1), never)
        == 0.63
    )


def test_shares_above_the_ones_given_are_tried_too() -> None:
    assert largest_share(lambda p: p <= 0.93, [0.5], (5, 1), never) == 0.93


def peak(p: float) -> int:
    return round(1000 * p)


def seconds(p: float) -> float:
    return 2 * p


def test_a_budget_of_memory_is_met_without_a_clock() -> None:
    def never(p: float) -> float:
        raise AssertionError

    assert choose(Budget(num_bytes=433), SHARES, peak, never) == (0.43, True)
    assert choose(Budget(num_bytes=9), SHARES, peak, never) == (0.01, False)


def test_a_budget_of_time_is_met_in_steps_of_five_hundredths() -> None:
    assert choose(Budget(seconds=0.97), SHARES, peak, seconds) == (0.45, True)
    assert choose(Budget(seconds=0.01), SHARES, peak, seconds) == (0.05, False)


def test_both_budgets_are_met() -> None:
    assert choose(Budget(433, 0.97), SHARES, peak, seconds) == (0.4, True)
    assert choose(Budget(999, 0.97), SHARES, peak, seconds) == (0.45, True)


def test_the_largest_share_of_a_model_is_at_the_limit_of_its_measured_peak() -> None:
    rows = {row.setting.p: row.held for row in profiled(saves=["fast"]).rows}
    between = (rows[0.5].peak + rows[1.0].peak) / 2
    (choice,) = profiled(saves=["fast"], budget=Budget(between)).choices
    assert choice.fits
    assert 0.5 <= choice.setting.p < 1
    assert rows[0.5].peak <= choice.peak <= between
    assert choice.seconds is None


def test_a_budget_that_nothing_fits_names_the_cheapest_share_tried() -> None:
    (choice,) = profiled(saves=["fast"], budget=Budget(1, 1e-9)).choices
    assert not choice.fits
    assert choice.setting.p == 0.05
    assert choice.peak > 1
    assert choice.seconds is not None
