"""The page docs/reproduction.md, from the summaries in results/."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import get_args

from benchmarks.reproduction.playing import ANCHORS, read_times
from fedspu.reports.intervals import half_interval
from fedspu.reproduce.claims import claims_table, gap_to, gaps_to_best
from fedspu.reproduce.memory import memory_table
from fedspu.reproduce.printed import ALPHAS, DATASETS, METHODS, Dataset
from fedspu.reproduce.report import markdown
from fedspu.reproduce.tables import (
    PaperTable,
    Result,
    accuracy_table,
    cost_table,
    rounds_table,
)

PAGE = Path(__file__).parents[2] / "docs/reproduction.md"


def alpha_table(results: Sequence[Result], dataset: Dataset, es: bool) -> PaperTable:
    """Every method and alpha of one data set."""
    chosen = [r for r in results if (r.dataset, r.with_stopping) == (dataset, es)]
    methods = list(dict.fromkeys([*METHODS, *(r.method for r in chosen)]))
    rows = []
    for method in methods:
        of_method = [r for r in chosen if r.method == method]
        if not of_method:
            continue
        cells = [_score([r for r in of_method if r.alpha == a]) for a in ALPHAS]
        seeds = max(len([r for r in of_method if r.alpha == a]) for a in ALPHAS)
        worst = mean(100 * r.summary["worst_tenth_accuracy"] for r in of_method)
        rows.append((method, *cells, f"{worst:.1f}", str(seeds)))
    how = "with" if es else "without"
    rounds = max((r.rounds for r in chosen), default=0)
    return PaperTable(
        f"{DATASETS[dataset]}, personal accuracy in %, {how} early stopping",
        ("", "alpha 0.1", "alpha 0.5", "alpha 1", "worst tenth", "seeds"),
        tuple(rows),
        (f"At most {rounds} rounds. ± is the 95 % interval over seeds.",),
    )


def _score(results: Sequence[Result]) -> str:
    values = [100 * r.summary["personal_accuracy"] for r in results]
    if not values:
        return "-"
    half = half_interval(values)
    return f"{mean(values):.1f}" + ("" if half is None else f" ± {half:.1f}")


def gap_table(results: Sequence[Result], es: bool) -> PaperTable:
    """How far FedSPU is above the best rival and the anchors, case by case."""
    rows = []
    for gap in gaps_to_best(results, es):
        case = (gap.dataset, gap.alpha, es)
        beside = [gap_to(results, *case, other) for other in ANCHORS]
        rows.append(
            (
                f"{DATASETS[gap.dataset]} (alpha = {gap.alpha:g})",
                gap.other,
                str(gap),
                *("-" if other is None else str(other) for other in beside),
            )
        )
    how = "with" if es else "without"
    return PaperTable(
        f"FedSPU less others, in points of personal accuracy, {how} early stopping",
        ("", "best rival", "FedSPU less it", *(f"less {name}" for name in ANCHORS)),
        tuple(rows),
        (
            "`local` trains alone; `fedavg@finetune=5` trains and sends whole models, "
            "and every client trains five more epochs before it uses one. The paper "
            "has neither.",
        ),
    )


def complete(results: Sequence[Result]) -> list[Result]:
    """The results of methods that were played with every alpha, for means over them."""
    alphas: dict[tuple[str, str, bool], set[float]] = {}
    for r in results:
        alphas.setdefault((r.dataset, r.method, r.with_stopping), set()).add(r.alpha)
    return [
        r
        for r in results
        if alphas[r.dataset, r.method, r.with_stopping] == set(ALPHAS)
    ]


def page(results: Sequence[Result]) -> str:
    """The whole page."""
    cut = (
        "CIFAR-10 is the paper's data; EMNIST is `femnist` and Google Speech is "
        "`speech23`, with 200 rounds: accuracies there are not to be compared with the "
        "paper's."
    )
    whole, timed = complete(results), read_times()
    tables = [
        claims_table(results, cut, timed),
        gap_table(results, False),
        gap_table(results, True),
        accuracy_table("table1", whole, cut),
        accuracy_table("table2", whole, cut),
        cost_table(whole, cut, timed),
        rounds_table(results, cut),
        memory_table(),
    ]
    for dataset in get_args(Dataset):
        for es in (False, True):
            if any((r.dataset, r.with_stopping) == (dataset, es) for r in results):
                tables.append(alpha_table(results, dataset, es))
    head = PAGE.read_text(encoding="utf-8").partition(MARK)[0].rstrip()
    shown = [markdown(table) for table in tables if table.rows]
    return "\n".join([head, "", MARK, "", *shown])


MARK = "<!-- Below this line: made by `python -m benchmarks.reproduction page`. -->"
