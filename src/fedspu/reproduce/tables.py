"""The paper's tables from our runs: ours beside what is printed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, pstdev
from typing import Any

from fedspu.reproduce.printed import (
    ALPHAS,
    DATASETS,
    METHODS,
    NOTES,
    ROUNDS,
    TABLE_1,
    TABLE_2,
    TABLE_3_GB,
    TABLE_3_HOURS,
    TABLE_4,
    WITH_STOPPING,
    Dataset,
)
from fedspu.units import duration, paper_gb


@dataclass(frozen=True)
class Result:
    """A finished run of the paper's experiments."""

    dataset: Dataset
    method: str
    alpha: float
    seed: int
    with_stopping: bool
    rounds: int  # at most
    summary: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Sent and received by all clients."""
        return int(self.summary["bytes_down"] + self.summary["bytes_up"])


@dataclass(frozen=True)
class PaperTable:
    """A table as text: its title, columns, rows and notes."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


NONE = "-"


def accuracy_table(name: str, results: Sequence[Result], what_cut: str) -> PaperTable:
    """Table 1, or 2 with early stopping: personal accuracy, mean over alphas."""
    with_stopping = name == "table2"
    printed = TABLE_2 if with_stopping else TABLE_1
    rows = []
    for dataset, title in DATASETS.items():
        found = _of(results, dataset, with_stopping)
        if not found:
            continue
        rows.append(
            (title, "ours", *(_accuracy(_of_method(found, m)) for m in METHODS))
        )
        rows.append(
            (
                "",
                "paper",
                *(f"{v:g}±{spread:g}" for v, spread in printed[dataset].values()),
            )
        )
    how = "with" if with_stopping else "without"
    return PaperTable(
        f"Table {name[-1]}: accuracy in %, {how} early stopping",
        ("", "", *METHODS.values()),
        tuple(rows),
        (what_cut, *_unequal_seeds(results, with_stopping), *NOTES[name]),
    )


def _unequal_seeds(results: Sequence[Result], with_stopping: bool) -> tuple[str, ...]:
    """A note if some cells are means over more seeds than others."""
    seeds: dict[tuple[Dataset, str, float], set[int]] = {}
    for r in results:
        if r.with_stopping == with_stopping and r.method in METHODS:
            seeds.setdefault((r.dataset, r.method, r.alpha), set()).add(r.seed)
    numbers = sorted({len(found) for found in seeds.values()})
    if len(numbers) < 2:
        return ()
    return (
        f"Cells are means over {numbers[0]} to {numbers[-1]} seeds, so differences of "
        "cells, or of Tables 1 and 2, are not those that the claims are judged by: "
        "these are between runs of the same seeds.",
    )


def _accuracy(results: Sequence[Result]) -> str:
    """The mean over alphas of the mean over seeds, and the spread over alphas."""
    if not results:
        return NONE
    means = by_alpha(results, lambda r: 100 * r.summary["personal_accuracy"])
    spread = f"±{pstdev(means.values()):.1f}" if len(means) > 1 else ""
    return f"{mean(means.values()):.1f}{spread}"


def by_alpha(
    results: Sequence[Result], value: Callable[[Result], float]
) -> dict[float, float]:
    """Alpha -> the mean over its runs."""
    found: dict[float, list[float]] = {}
    for result in results:
        found.setdefault(result.alpha, []).append(value(result))
    return {alpha: mean(values) for alpha, values in sorted(found.items())}


def cost_table(
    results: Sequence[Result], what_cut: str, timed: Sequence[Result] | None = None
) -> PaperTable:
    """Table 3: time of local training and transmitted size; mean over alphas.

    ``timed`` are other runs for what is said about time: on a quiet machine, say.
    """
    names = [*METHODS, WITH_STOPPING]
    how = "that of all clients' turns on this machine"
    if timed is not None:
        rounds = max((r.rounds for r in timed), default=0)
        how = (
            f"from other runs, of {rounds} rounds each, on a machine with no other work"
        )
    rows = []
    for dataset, title in DATASETS.items():
        groups, clocked = (
            _with_and_without_stopping(some, dataset)
            for some in (results, results if timed is None else timed)
        )
        if not any(groups[m] for m in METHODS):
            continue
        seconds = {
            m: _mean(group, lambda r: r.summary["train_cpu_seconds"])
            for m, group in clocked.items()
        }
        sizes = {m: _mean(group, lambda r: r.num_bytes) for m, group in groups.items()}
        rivals = [s for m, s in seconds.items() if s and m != WITH_STOPPING]
        fastest = min(rivals, default=1.0)
        hours, paper_sizes = TABLE_3_HOURS[dataset], TABLE_3_GB[dataset]
        theirs = min(hours[m] for m in METHODS)
        shown: dict[str, list[str]] = {
            "CPU time, ours": [_shown(seconds[m], duration) for m in names],
            "hours, paper": [f"{hours[m]:g}" for m in names],
            "/ fastest, ours": [
                NONE if s is None else f"{s / fastest:.2f}" for s in seconds.values()
            ],
            "/ fastest, paper": [f"{hours[m] / theirs:.2f}" for m in names],
            "GB sent, ours": [
                _shown(sizes[m], lambda n: f"{n / 1e9:.3f}") for m in names
            ],
            "its unit, ours": [_shown(sizes[m], paper_gb) for m in names],
            "its unit, paper": [f"{paper_sizes[m]:g}" for m in names],
        }
        rows += [
            (title if i == 0 else "", what, *cells)
            for i, (what, cells) in enumerate(shown.items())
        ]
    return PaperTable(
        "Table 3: time of local training, and what is transmitted",
        ("", "", *METHODS.values(), "FedSPU+ES"),
        tuple(rows),
        (
            what_cut,
            f"CPU time is {how}; ratios are to the fastest method without early "
            "stopping.",
            *NOTES["table3"],
        ),
    )


def _with_and_without_stopping(
    results: Sequence[Result], dataset: Dataset
) -> dict[str, list[Result]]:
    """The results of each method, and of FedSPU with early stopping."""
    plain, stopping = (_of(results, dataset, es) for es in (False, True))
    groups = {m: _of_method(plain, m) for m in METHODS}
    return {**groups, WITH_STOPPING: _of_method(stopping, "fedspu")}


def rounds_table(results: Sequence[Result], what_cut: str) -> PaperTable:
    """Table 4: rounds that FedSPU plays with early stopping."""
    rows, limits = [], set()
    for dataset, title in DATASETS.items():
        found = _of_method(_of(results, dataset, with_stopping=True), "fedspu")
        played = by_alpha(found, lambda r: r.summary["rounds_played"])
        saved = saved_rounds(found)
        for alpha in ALPHAS:
            if alpha not in played:
                continue
            at_most = max(r.rounds for r in found if r.alpha == alpha)
            if saved[alpha] is None:
                limits.add(at_most)
            rows.append(
                (
                    f"{title}, alpha {alpha:g}",
                    f"{played[alpha]:.0f} of {at_most}",
                    f"{TABLE_4[dataset][alpha]} of {ROUNDS}",
                    _shown(saved[alpha], lambda share: f"{share:.0f} %"),
                    f"{100 * (1 - TABLE_4[dataset][alpha] / ROUNDS):.0f} %",
                )
            )
    cut = [
        f"Where nothing is said to be saved, clients still played at the limit of "
        f"{limit} rounds: it is at most {100 * (1 - limit / ROUNDS):.0f} % of {ROUNDS}."
        for limit in sorted(limits)
    ]
    return PaperTable(
        "Table 4: rounds of FedSPU with early stopping",
        ("", "rounds, ours", "rounds, paper", "saved, ours", "saved, paper"),
        tuple(rows),
        (
            what_cut,
            f"Saved: the share of the paper's {ROUNDS} rounds that is not played.",
            *cut,
            *NOTES["table4"],
        ),
    )


def saved_rounds(results: Sequence[Result]) -> dict[float, float | None]:
    """Alpha -> percent of the paper's rounds that were not played; None if unknown."""
    shares = by_alpha(
        results, lambda r: 100 * (1 - r.summary["rounds_played"] / ROUNDS)
    )
    cut = {r.alpha for r in results if is_cut(r)}
    return {alpha: None if alpha in cut else share for alpha, share in shares.items()}


def is_cut(result: Result) -> bool:
    """Whether a run was still going on at a limit that is lower than the paper's."""
    return result.rounds < ROUNDS and result.summary["rounds_played"] >= result.rounds


def _of(
    results: Iterable[Result], dataset: Dataset, with_stopping: bool
) -> list[Result]:
    return [
        r for r in results if (r.dataset, r.with_stopping) == (dataset, with_stopping)
    ]


def _of_method(results: Iterable[Result], method: str) -> list[Result]:
    return [r for r in results if r.method == method]


def _mean(results: Sequence[Result], value: Callable[[Result], float]) -> float | None:
    return mean(by_alpha(results, value).values()) if results else None


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return NONE if value is None else show(value)
