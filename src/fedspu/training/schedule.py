"""The learning rate over rounds: constant, cosine or step."""

from math import cos, pi

from fedspu.settings import TrainSettings


def in_round(settings: TrainSettings, t: int, rounds: int) -> TrainSettings:
    """The same settings with the learning rate that the schedule gives for round t."""
    if settings.schedule == "constant":
        return settings
    length = settings.schedule_rounds or rounds
    if settings.schedule == "cosine":
        factor = (1 + cos(pi * min(1.0, (t - 1) / length))) / 2
    else:
        factor = settings.schedule_factor ** ((t - 1) // length)
    return settings.model_copy(update={"lr": settings.lr * factor})
