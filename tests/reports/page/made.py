"""A report's facts, made by hand: small numbers, chosen names."""

from typing import Any

import numpy as np

from fedspu.data.partition import LabelCounts
from fedspu.reports.comparison.statistics import RunOfMethod, make_case
from fedspu.reports.page.facts import CaseFacts, Labels, PageFacts, PlayedRun

CAPACITIES = (0.2, 0.6, 1.0)


def a_run(
    method: str,
    seed: int,
    score: float,
    *,
    rounds: int = 4,
    clients: int = 6,
    stops: dict[int, int] | None = None,
    is_share: bool = True,
    num_bytes: int = 1_000_000,
) -> PlayedRun:
    """A run that rises to ``score``; ``stops``: client -> the round it stopped in."""
    stops = stops or {}
    levels = [score * (t + 1) / rounds for t in range(rounds)]
    p = [CAPACITIES[k % len(CAPACITIES)] for k in range(clients)]
    return PlayedRun(
        path=f"runs/x/{method}-seed-{seed}",
        method=method,
        seed=seed,
        settings={"train.lr": 0.1, "train.epochs": 2, "engine": "here", "seed": seed},
        summary={
            "metric": "accuracy",
            "is_share": is_share,
            "higher_is_better": is_share,
            "dataset": "made",
            "seed": seed,
            "rounds_played": rounds,
            "personal_accuracy": score,
            "personal_val_accuracy": score,
            "personal_accuracy_by_capacity": {str(c): score for c in CAPACITIES},
            "worst_tenth_accuracy": score / 2,
            "global_accuracy": score - 0.01,
            "bytes_down": num_bytes // 2,
            "bytes_up": num_bytes // 2,
            "train_cpu_seconds": 2.0 * rounds,
            "wall_seconds": 9.0,
            "kernels": "native",
            "environment": {"python": "3.11.7", "cores": 2},
        },
        rounds=[
            {
                "round": t + 1,
                "personal_accuracy": levels[t],
                "bytes_down": num_bytes // 2 // rounds,
                "bytes_up": num_bytes // 2 // rounds,
            }
            for t in range(rounds)
        ],
        turns=[
            {
                "round": t + 1,
                "client": k,
                "capacity": p[k],
                "num_examples": 50,
                "has_stopped": stops.get(k) == t + 1,
            }
            for t in range(rounds)
            for k in range(clients)
            if t + 1 <= stops.get(k, rounds)
        ],
        times=[
            {
                "round": t + 1,
                "train_cpu_seconds": 2.0,
                "turn_cpu_seconds": {str(k): p[k] for k in range(clients)},
            }
            for t in range(rounds)
        ],
        clients=[
            {
                "client": k,
                "capacity": p[k],
                "accuracy": score * (1 - k / 100),
                "has_stopped": k in stops,
            }
            for k in range(clients)
        ],
    )


def a_case(runs: list[PlayedRun], labels: Labels | str = "", **case: Any) -> CaseFacts:
    """The runs of one case."""
    of_methods = [
        RunOfMethod(r.method, r.summary, {"0.2": 1000, "1.0": 4000}, False, {})
        for r in runs
    ]
    settings = case or {"data.alpha": 0.5}
    return CaseFacts(
        make_case(settings, of_methods), tuple(runs), labels or some_labels()
    )


def some_labels(clients: int = 6, classes: int = 3) -> Labels:
    """Client k has k examples more of class k than of others."""
    counts = np.ones((clients, classes), dtype=np.int64)
    for k in range(clients):
        counts[k, k % classes] += 10 * k
    return Labels(LabelCounts(counts), tuple("abcdefghij"[:classes]), 0)


def a_page(*cases: CaseFacts) -> PageFacts:
    return PageFacts(cases, (), ())


def two_methods(**more: Any) -> PageFacts:
    """Two methods with two seeds each, clearly apart."""
    scores = {"ours": (0.91, 0.93), "theirs": (0.71, 0.73)}
    return a_page(
        a_case(
            [
                a_run(method, seed, score, **more)
                for method, listed in scores.items()
                for seed, score in enumerate(listed)
            ]
        )
    )
