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
from fedspu.reproduce.tables import (
    PaperTable,
    Result,
    by_alpha,
    is_cut,
    saved_rounds,
)

GAIN, GAIN_WITH_STOPPING = 4.45, 5.11
"""Points that FedSPU is above the best rival, on average, by the paper."""

SAVED = (25, 71)
"""Percent of the rounds that early stopping saves, by the paper."""

SLOWER = 1.11
"""FedSPU takes less than this times the fastest rival's time, by the paper."""

NOISE = 0.2
"""A ratio of two times, of one run each, is read to plus or minus this."""

FEWEST_SECONDS = 1.0
"""CPU time of less than this decides nothing."""

NOT_PLAYED = ("not played", "-")


@dataclass(frozen=True)
class Gap:
    """How far FedSPU is above one other method, in points, for each seed of both."""

    dataset: Dataset
    alpha: float
    other: str
    by_seed: dict[int, float]

    @property
    def includes_zero(self) -> bool:
        """Whether its interval includes 0; not if it has none."""
        values = list(self.by_seed.values())
        half = half_interval(values)
        return half is not None and abs(mean(values)) <= half

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
            "so it decides nothing about accuracy or price.",
            "The best rival is chosen for each data set and alpha by the accuracy that "
            "is then compared, on the seeds that all rivals have. Where these are all "
            "seeds, that favours the rivals a little.",
            f"Rounds saved are shares of the paper's {ROUNDS}, compared case by case, "
            "also with one seed.",
            f"Times are of one seed: their ratios are read to ± {NOISE:g}, and less "
            "than a second of CPU time decides nothing.",
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
    if unclear := sum(gap.includes_zero for gap in gaps):
        ours += f"; by {'itself' if unclear == 1 else 'themselves'}, {unclear} of the "
        ours += f"{len(gaps)} cannot be told from 0"
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
    saved: list[float] = []
    at_most: list[float] = []  # of cases that still played at their limit
    for _, found in _of_fedspu(results, True):
        for alpha, share in saved_rounds(found).items():
            if share is None:
                limit = min(r.rounds for r in found if r.alpha == alpha and is_cut(r))
                at_most.append(100 * (1 - limit / ROUNDS))
            else:
                saved.append(share)
    left = f"{len(at_most)} still played at their limit" if at_most else ""
    if not saved:
        why = f"not decided: fewer than {ROUNDS} rounds"
        return (left, why) if at_most else NOT_PLAYED
    cases = f"{len(saved)} of 9 cases" + (f"; {left}" if left else "")
    ours = f"{min(saved):.0f} to {max(saved):.0f} % ({cases})"
    return ours, _verdict_on_rounds(saved, at_most)


def _verdict_on_rounds(saved: Sequence[float], at_most: Sequence[float]) -> str:
    outside = {
        "more": sum(share > SAVED[1] + 1 for share in saved),
        "less": sum(share < SAVED[0] - 1 for share in saved),
    }
    where = " and ".join(f"{word} in {n}" for word, n in outside.items() if n)
    verdict = f"refuted: it saves {where} of {len(saved)} cases"
    if not where:
        number = f"{len(saved)} case{'s' * (len(saved) > 1)}"
        verdict = f"confirmed in {number}" if at_most else "confirmed"
    if at_most:
        verdict += f" that ended; the others save at most {max(at_most):.0f} %"
        if max(at_most) >= SAVED[0]:
            verdict += " and may be inside"
    return verdict


def _price(results: Sequence[Result]) -> tuple[str, str]:
    """What early stopping costs FedSPU, in points of accuracy, for each data set."""
    plain = {
        (dataset, r.alpha, r.seed): 100 * r.summary["personal_accuracy"]
        for dataset, found in _of_fedspu(results, False)
        for r in found
    }
    ours = []
    data_by_verdict: dict[str, list[str]] = {}
    for dataset, found in _of_fedspu(results, True):
        prices: dict[float, dict[int, float]] = {}
        for r in found:
            without = plain.get((dataset, r.alpha, r.seed))
            if without is not None:
                price = 100 * r.summary["personal_accuracy"] - without
                prices.setdefault(r.alpha, {})[r.seed] = price
        if not prices:
            continue
        values = _mean_by_seed(
            [Gap(dataset, alpha, "fedspu", each) for alpha, each in prices.items()]
        )
        printed = TABLE_2[dataset]["fedspu"][0] - TABLE_1[dataset]["fedspu"][0]
        ours.append(f"{DATASETS[dataset]} {shown(values)} ({printed:+.1f})")
        has_stopped = any(r.summary["stopped_clients"] for r in found)
        verdict = _verdict_on_price(values, printed, has_stopped)
        data_by_verdict.setdefault(verdict, []).append(DATASETS[dataset])
    if not ours:
        return NOT_PLAYED
    text = f"{', '.join(ours)}; printed in brackets"
    if len(data_by_verdict) == 1:
        return text, next(iter(data_by_verdict))
    return text, "; ".join(
        f"{verdict} ({', '.join(names)})" for verdict, names in data_by_verdict.items()
    )


def _verdict_on_price(
    values: Sequence[float], printed: float, has_stopped: bool
) -> str:
    if not has_stopped:
        return "not decided: no client stopped"
    half = half_interval(values)
    if half is None:
        return "not decided: one seed"
    if mean(values) - half > printed:
        return "it costs less than printed"
    if mean(values) + half < printed:
        return "it costs more than printed"
    return "cannot be told from what is printed"


# Time ---------------------------------------------------------------------------------


def _time(results: Sequence[Result]) -> tuple[str, str]:
    """CPU time of training against the fastest rival, for the alphas that all have."""
    ratios: dict[Dataset, float] = {}
    least = FEWEST_SECONDS
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
            least = min(least, *rivals)
    if not ratios:
        return NOT_PLAYED
    ours = ", ".join(f"{DATASETS[d]} {ratio:.2f}" for d, ratio in ratios.items())
    if least < FEWEST_SECONDS:
        return ours, "not decided: less than a second of CPU time was measured"
    if slower := sum(ratio - NOISE >= SLOWER for ratio in ratios.values()):
        return ours, f"refuted on {slower} of {len(ratios)} data sets"
    if all(ratio + NOISE < SLOWER for ratio in ratios.values()):
        return ours, "confirmed"
    return ours, f"not decided: within {NOISE:g} of {SLOWER:g}"
