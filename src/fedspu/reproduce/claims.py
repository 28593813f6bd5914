"""What runs say about each claim of the paper: confirmed, refuted, or not decided."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import get_args

from fedspu.reports.intervals import half_interval
from fedspu.reproduce.printed import (
    ALPHAS,
    DATASETS,
    METHODS,
    ROUNDS,
    TABLE_1,
    TABLE_2,
    Dataset,
)
from fedspu.reproduce.tables import PaperTable, Result, by_alpha

GAIN, GAIN_WITH_STOPPING = 4.45, 5.11
"""Points that FedSPU is above the best rival, on average, by the paper."""

SAVED = (25, 71)
"""Percent of the rounds that early stopping saves, by the paper."""

SLOWER = 1.11
"""FedSPU takes less than this times the fastest rival's time, by the paper."""

NOT_PLAYED = ("not played", "-")


@dataclass(frozen=True)
class Gap:
    """How far FedSPU is above one other method, in points, for each seed of both."""

    dataset: Dataset
    alpha: float
    other: str
    by_seed: dict[int, float]

    def __str__(self) -> str:
        return shown(list(self.by_seed.values()))


def shown(values: Sequence[float]) -> str:
    """A mean with its interval, if there is one."""
    half = half_interval(values)
    return f"{mean(values):+.1f}" + ("" if half is None else f" ± {half:.1f}")


def claims_table(
    results: Sequence[Result], what_cut: str, timed: Sequence[Result] | None = None
) -> PaperTable:
    """The paper's claims, each with what these runs say about it.

    ``timed`` are other runs for what is said about time: on a quiet machine, say.
    """
    rows = (
        ("+4.45 points over the best rival", *_gain(results, False, GAIN)),
        (
            "+5.11 points with early stopping",
            *_gain(results, True, GAIN_WITH_STOPPING),
        ),
        ("early stopping saves 25 to 71 % of the rounds", *_rounds(results)),
        ("… at a price of 4.2 points", *_price(results)),
        (
            "less than 1.11 x the fastest rival's time",
            *_time(results if timed is None else timed),
        ),
    )
    return PaperTable(
        "What the paper claims, and what these runs say",
        ("", "these runs", "verdict"),
        rows,
        (
            what_cut,
            "± is the 95 % interval over seeds, which are paired: runs of one seed "
            "have the same clients, splits and cohorts. One seed gives no interval, "
            "so it decides nothing.",
            "The best rival is chosen for each data set and alpha by the accuracy that "
            "is then compared, on the seeds that all rivals have. Where these are all "
            "seeds, that favours the rivals a little.",
        ),
    )


# Accuracy -----------------------------------------------------------------------------


def gaps_to_best(results: Sequence[Result], with_stopping: bool) -> list[Gap]:
    """FedSPU against the best of the paper's rivals, wherever all six were played.

    The best is chosen by the seeds that all rivals have, if there are any: a rival with
    fewer seeds might look better by chance.
    """
    found = []
    for dataset in get_args(Dataset):
        for alpha in ALPHAS:
            each = [
                gap
                for method in METHODS
                if method != "fedspu"
                and (gap := gap_to(results, dataset, alpha, with_stopping, method))
            ]
            if len(each) == len(METHODS) - 1:
                common = set.intersection(*(set(gap.by_seed) for gap in each))
                found.append(min(each, key=partial(_lead, seeds=common)))
    return found


def _lead(gap: Gap, seeds: set[int]) -> float:
    return mean(gap.by_seed[seed] for seed in seeds or gap.by_seed)


def gap_to(
    results: Sequence[Result],
    dataset: Dataset,
    alpha: float,
    with_stopping: bool,
    other: str,
) -> Gap | None:
    """FedSPU against another method, by the seeds that both have; None if none."""
    scores: dict[str, dict[int, float]] = {"fedspu": {}, other: {}}
    for r in results:
        case = (r.dataset, r.alpha, r.with_stopping)
        if case == (dataset, alpha, with_stopping) and r.method in scores:
            scores[r.method][r.seed] = 100 * r.summary["personal_accuracy"]
    ours, theirs = scores["fedspu"], scores[other]
    by_seed = {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}
    return Gap(dataset, alpha, other, by_seed) if by_seed else None


def _gain(
    results: Sequence[Result], with_stopping: bool, printed: float
) -> tuple[str, str]:
    gaps = gaps_to_best(results, with_stopping)
    if not gaps:
        return NOT_PLAYED
    values = _mean_by_seed(gaps)
    half = half_interval(values)
    data = len({gap.dataset for gap in gaps})
    ours = (
        f"{shown(values)} ({len(gaps)} of 9 cases, {data} of 3 data sets, "
        f"{len(values)} seed{'s' * (len(values) > 1)})"
    )
    if half is None:
        return ours, "not decided: one seed"
    low, high = mean(values) - half, mean(values) + half
    if high < 0:
        return ours, "refuted: it is behind"
    if low <= 0:
        return ours, "not confirmed: cannot be told from 0"
    if high < printed:
        return ours, "refuted in size: it is ahead, by less"
    return ours, "confirmed"


def _mean_by_seed(gaps: Sequence[Gap]) -> list[float]:
    """The mean over cases, for each seed that all cases have."""
    common = set.intersection(*(set(gap.by_seed) for gap in gaps))
    if not common:  # cases with different seeds: one number
        return [mean(mean(gap.by_seed.values()) for gap in gaps)]
    return [mean(gap.by_seed[seed] for gap in gaps) for seed in sorted(common)]


# Early stopping -----------------------------------------------------------------------


def _of_fedspu(
    results: Sequence[Result], with_stopping: bool
) -> Iterator[tuple[Dataset, list[Result]]]:
    for dataset in get_args(Dataset):
        found = [
            r
            for r in results
            if (r.dataset, r.method, r.with_stopping)
            == (dataset, "fedspu", with_stopping)
        ]
        if found:
            yield dataset, found


def _rounds(results: Sequence[Result]) -> tuple[str, str]:
    """What early stopping saves of the paper's rounds.

    Nobody knows when a run would have ended that reached a lower limit than these.
    """
    saved: dict[tuple[Dataset, float], float] = {}
    cut: set[tuple[Dataset, float]] = set()
    for dataset, found in _of_fedspu(results, True):
        cut |= {(dataset, r.alpha) for r in found if _is_cut(r)}
        whole = [r for r in found if (dataset, r.alpha) not in cut]
        shares = by_alpha(
            whole, lambda r: 100 * (1 - r.summary["rounds_played"] / ROUNDS)
        )
        saved |= {(dataset, alpha): share for alpha, share in shares.items()}
    left = f"{len(cut)} still played at their limit" if cut else ""
    if not saved:
        return (left, f"not decided: fewer than {ROUNDS} rounds") if cut else NOT_PLAYED
    least, most = min(saved.values()), max(saved.values())
    cases = f"{len(saved)} of 9 cases" + (f"; {left}" if left else "")
    ours = f"{least:.0f} to {most:.0f} % ({cases})"
    outside = sum(not SAVED[0] - 1 <= s <= SAVED[1] + 1 for s in saved.values())
    if outside:
        return ours, f"refuted: {outside} of {len(saved)} cases are outside"
    return ours, "confirmed"


def _is_cut(result: Result) -> bool:
    """Whether a run was still going on at a limit that is lower than the paper's."""
    return result.rounds < ROUNDS and result.summary["rounds_played"] >= result.rounds


def _price(results: Sequence[Result]) -> tuple[str, str]:
    """What early stopping costs FedSPU, in points of accuracy."""
    scores: dict[bool, dict[tuple[Dataset, float, int], float]] = {True: {}, False: {}}
    for es, by_case in scores.items():
        for dataset, found in _of_fedspu(results, es):
            for r in found:
                score = 100 * r.summary["personal_accuracy"]
                by_case[dataset, r.alpha, r.seed] = score
    both = [case for case in scores[True] if case in scores[False]]
    if not both:
        return NOT_PLAYED
    by_data: dict[Dataset, list[float]] = {}
    for case in both:
        by_data.setdefault(case[0], []).append(scores[True][case] - scores[False][case])
    ours = ", ".join(
        f"{DATASETS[dataset]} {mean(each):+.1f} "
        f"({TABLE_2[dataset]['fedspu'][0] - TABLE_1[dataset]['fedspu'][0]:+.1f})"
        for dataset, each in by_data.items()
    )
    printed = [TABLE_2[d]["fedspu"][0] - TABLE_1[d]["fedspu"][0] for d in by_data]
    price = mean(mean(each) for each in by_data.values())
    costs_less = price > mean(printed)
    return (
        f"{ours}; printed in brackets",
        "it costs less" if costs_less else "it costs more",
    )


# Time ---------------------------------------------------------------------------------


def _time(results: Sequence[Result]) -> tuple[str, str]:
    """CPU time of training against the fastest rival, for the alphas that all have."""
    ratios: dict[Dataset, float] = {}
    for dataset in get_args(Dataset):
        seconds = {}
        for method in METHODS:
            found = [
                r
                for r in results
                if (r.dataset, r.method, r.with_stopping, r.seed)
                == (dataset, method, False, 0)
            ]
            seconds[method] = by_alpha(found, lambda r: r.summary["train_cpu_seconds"])
        common = set.intersection(*(set(each) for each in seconds.values()))
        if common:
            sums = {m: sum(each[a] for a in common) for m, each in seconds.items()}
            rivals = [s for method, s in sums.items() if method != "fedspu"]
            ratios[dataset] = sums["fedspu"] / min(rivals)
    if not ratios:
        return NOT_PLAYED
    ours = ", ".join(f"{DATASETS[d]} {ratio:.2f}" for d, ratio in ratios.items())
    if max(ratios.values()) < SLOWER:
        return ours, "confirmed"
    return ours, "refuted: freezing costs more than dropping"
