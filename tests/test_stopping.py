import pytest

from fedspu.training import blended_loss, has_stopped


@pytest.mark.parametrize(
    ("losses", "patience", "stops"),
    [
        ([], 1, False),
        ([2.0], 1, False),  # the first participation never stops
        ([2.0, 2.5], 1, True),
        ([2.0, 2.0], 1, False),  # strictly greater, as in Algorithm 2
        ([2.0, 1.5], 1, False),
        ([1.0, 2.0, 1.5], 1, False),  # compared with the one before, not with the best
        ([3.0, 1.0, 1.1], 1, True),
        ([2.0, 2.5], 2, False),
        ([2.0, 2.5, 2.6], 2, True),
        ([2.0, 2.5, 2.5], 2, False),
        ([2.0, 1.0, 1.5], 2, False),
        ([9.0, 1.0, 2.0, 3.0], 2, True),
        ([1.0, 2.0, 1.0, 2.0], 2, False),
        ([1.0, 2.0, 3.0], 3, False),
    ],
)
def test_a_client_stops_when_its_last_losses_each_exceed_the_one_before(
    losses: list[float], patience: int, stops: bool
) -> None:
    assert has_stopped(losses, patience) is stops


def test_one_worse_loss_is_enough_unless_told_otherwise() -> None:
    assert has_stopped([1.0, 1.1])


def test_the_blend_weighs_the_training_loss() -> None:
    # Eq. 5 with the paper's λ = .7: .7 * 2 + .3 * 4.
    assert blended_loss(train_loss=2.0, val_loss=4.0, blend=0.7) == pytest.approx(2.6)


@pytest.mark.parametrize(("blend", "loss"), [(1.0, 2.0), (0.0, 4.0)])
def test_a_blend_of_one_is_training_and_of_none_validation(
    blend: float, loss: float
) -> None:
    assert blended_loss(2.0, 4.0, blend) == loss
