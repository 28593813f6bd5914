"""What runs of several seeds say about methods: means, intervals, differences."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedspu.reports.intervals import half_interval, mean

Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and half the width of its 95 % interval.

    ``half`` is None for a single seed: one value says nothing about its spread.
    """

    mean: float
    half: float | None
    num: int

    @staticmethod
    def of(values: Iterable[float | None]) -> "Estimate | None":
        """From one value for each seed; None if there is none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return Estimate(mean(known), half_interval(known), len(known))


@dataclass(frozen=True)
class Gap:
    """How far a method is from the best one, seed by seed, on the same clients."""

    estimate: Estimate

    @property
    def is_clear(self) -> bool | None:
        """Whether the 95 % interval leaves out 0; None if there is no interval."""
        half = self.estimate.half
        return None if half is None else abs(self.estimate.mean) > half


@dataclass(frozen=True)
class Row:
    """One method in one case."""

    method: str
    seeds: tuple[int, ...]
    rounds: Estimate  # played
    personal: Estimate
    personal_val: Estimate | None
    global_: Estimate | None
    worst_tenth: Estimate | None
    by_capacity: dict[str, Estimate]
    gap: Gap | None  # None for the best
    num_bytes: Estimate  # both ways
    cpu_seconds: Estimate
    step_bytes: dict[str, int]  # capacity -> the peak of a training step
    chooses: bool  # whether it first trains the whole model, to choose its neurons
    tuned: dict[str, Any]
    # What last models cost besides (method.finish): bytes, and CPU seconds.
    finish_bytes: Estimate | None = None
    finish_cpu_seconds: Estimate | None = None


@dataclass(frozen=True)
class Case:
    """All methods on the same clients: same data, same division, same capacities."""

    settings: dict[str, Any]  # the values that vary between cases
    dataset: str
    metric: str
    is_share: bool
    higher_is_better: bool
    kernels: frozenset[str]  # what trained small networks: native, torch
    rows: tuple[Row, ...]

    @property
    def best(self) -> Row:
        """The row without a gap."""
        return next(row for row in self.rows if row.gap is None)

    @property
    def num_seeds(self) -> int:
        """The fewest seeds of any method."""
        return min(len(row.seeds) for row in self.rows)

    @property
    def most_seeds(self) -> int:
        """The most seeds of any method."""
        return max(len(row.seeds) for row in self.rows)


@dataclass(frozen=True)
class RunOfMethod:
    """A finished run, and what a table calls its method."""

    method: str
    summary: Summary
    step_bytes: dict[str, int]
    chooses: bool
    tuned: dict[str, Any]


def make_case(settings: dict[str, Any], runs: Sequence[RunOfMethod]) -> Case:
    """The methods of one case; runs of equal seeds have the same clients."""
    first = runs[0].summary
    by_method: dict[str, list[RunOfMethod]] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(run)
    name = f"personal_{first['metric']}"
    seeds = [{run.summary["seed"] for run in listed} for listed in by_method.values()]
    common = set.intersection(*seeds) or set.union(*seeds)
    means = {
        # By seeds that all have, if there are any: others may be luckier ones.
        method: mean(
            [run.summary[name] for run in listed if run.summary["seed"] in common]
        )
        for method, listed in by_method.items()
    }
    choose = max if first["higher_is_better"] else min
    best = choose(means, key=lambda method: means[method])
    return Case(
        settings=settings,
        dataset=str(first["dataset"]).rpartition("/")[2],  # of a file, its name
        metric=first["metric"],
        is_share=first["is_share"],
        higher_is_better=first["higher_is_better"],
        kernels=frozenset(str(run.summary.get("kernels")) for run in runs),
        rows=tuple(
            _row(method, listed, None if method == best else by_method[best])
            for method, listed in by_method.items()
        ),
    )


def _row(
    method: str, runs: Sequence[RunOfMethod], best: Sequence[RunOfMethod] | None
) -> Row:
    summaries = [run.summary for run in runs]
    metric = summaries[0]["metric"]

    def estimate(name: str) -> Estimate | None:
        return Estimate.of(summary[name] for summary in summaries)

    by_capacity = [summary[f"personal_{metric}_by_capacity"] for summary in summaries]
    return Row(
        method=method,
        seeds=tuple(summary["seed"] for summary in summaries),
        rounds=_known(estimate("rounds_played")),
        personal=_known(estimate(f"personal_{metric}")),
        personal_val=estimate(f"personal_val_{metric}"),
        global_=estimate(f"global_{metric}"),
        worst_tenth=estimate(f"worst_tenth_{metric}"),
        by_capacity={
            p: _known(Estimate.of(found.get(p) for found in by_capacity))
            for p in by_capacity[0]
        },
        gap=None if best is None else _gap(runs, best),
        num_bytes=_known(
            Estimate.of(s["bytes_down"] + s["bytes_up"] for s in summaries)
        ),
        cpu_seconds=_known(estimate("train_cpu_seconds")),
        step_bytes=runs[0].step_bytes,
        chooses=runs[0].chooses,
        tuned=runs[0].tuned,
        finish_bytes=Estimate.of(s.get("finish_bytes_down") for s in summaries),
        finish_cpu_seconds=Estimate.of(
            s.get("finish_train_cpu_seconds") for s in summaries
        ),
    )


def _gap(runs: Sequence[RunOfMethod], best: Sequence[RunOfMethod]) -> Gap:
    """Runs of one seed share clients and splits, so differences vary less."""
    name = f"personal_{runs[0].summary['metric']}"
    theirs = {run.summary["seed"]: run.summary[name] for run in best}
    pairs = [
        run.summary[name] - theirs[run.summary["seed"]]
        for run in runs
        if run.summary["seed"] in theirs
    ]
    if pairs:
        return Gap(_known(Estimate.of(pairs)))
    ours = mean([run.summary[name] for run in runs])
    return Gap(Estimate(ours - mean(list(theirs.values())), None, 0))


def _known(found: Estimate | None) -> Estimate:
    if found is None:
        raise ValueError("a summary lacks a number that every run has")
    return found
