"""A profile as it might have been measured, with round numbers."""

from dataclasses import replace

from fedspu.neurons.table import Fixed, Neurons
from fedspu.partial.weight import Mode, Saves
from fedspu.profile.measure import Choice, Costs, Profile, Row, StepSetting
from fedspu.profile.peak_memory import StepBytes

NEURONS = Neurons((), {}, fixed=(Fixed(("fc.bias",), "they reach the model's output"),))

PATHS = {"a.weight": "block", "b.weight": "full", "fc.bias": "whole"}


def held(total: int, peak: int) -> StepBytes:
    kept = StepBytes(1_000_000, 0, 0, 500_000, 0, peak)
    return replace(kept, saved=total - kept.total)


DENSE = Costs(0.020, held(4_000_000, 5_000_000), 1.0, 6_000_000)


def row(p: float, mode: Mode = "exact", saves: Saves = "fast") -> Row:
    costs = held(round(4_000_000 * p), round(5_500_000 * p))
    setting = StepSetting(p, mode, saves)
    return Row(0.016 * p, costs, p, round(6_000_000 * p), setting, PATHS)


PROFILE = Profile(
    dense=DENSE,
    rows=(row(0.5), row(1.0), row(0.5, "truncated", "lean")),
    choices=(
        Choice(StepSetting(0.37, "exact", "fast"), True, 3_990_000, None),
        Choice(StepSetting(1.0, "exact", "lean"), True, 3_000_000, 0.0081),
        Choice(StepSetting(0.05, "truncated", "lean"), False, 4_200_000, 0.0125),
    ),
    steps=4,
    repetitions=15,
    clock="cpu",
    why_not_native="norm, a LayerNorm",
)
