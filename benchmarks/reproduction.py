"""The page docs/reproduction.md, from the summaries in results/.

    python -m benchmarks.reproduction collect FOLDER    # of the comparisons, see below
    python -m benchmarks.reproduction page

``FOLDER`` has one folder for each series, as made by the commands in the page.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any, get_args

from fedspu.reports.intervals import half_interval
from fedspu.reproduce.experiments import results_in
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

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results", ROOT / "docs/reproduction.md"

FOLDERS: dict[str, tuple[Dataset, bool]] = {
    "cifar10": ("cifar10", False),
    "cifar10-es": ("cifar10", True),
    "femnist": ("emnist", False),
    "femnist-es": ("emnist", True),
    "speech23": ("speech", False),
    "speech23-es": ("speech", True),
}

KEPT = (
    *("method", "label", "dataset", "alpha", "seed", "split", "early_stopping"),
    *("rounds_played", "stopped_clients", "personal_accuracy", "global_accuracy"),
    *("personal_val_accuracy", "personal_accuracy_by_capacity", "worst_tenth_accuracy"),
    *("participating_accuracy", "participating_clients", "bytes_initial"),
    *("bytes_down", "bytes_up", "index_bytes", "train_seconds", "train_cpu_seconds"),
    *("missing_turns", "refused_turns", "unjudged_turns"),
)
"""What is kept of each summary."""


def collect(folder: Path) -> None:
    """Keep the summaries of all finished runs."""
    for name, (dataset, with_stopping) in FOLDERS.items():
        if not (folder / name / "sweep.json").exists():
            continue
        listed = []
        for result in results_in(folder / name, dataset, with_stopping):
            found = asdict(result)
            summary = result.summary
            found["summary"] = {key: summary[key] for key in KEPT if key in summary}
            listed.append(found)
        text = ",\n".join(json.dumps(one) for one in listed)
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")


def read() -> list[Result]:
    """All results that are kept."""
    found = []
    for file in sorted(RESULTS.glob("*.json")):
        for line in json.loads(file.read_text(encoding="utf-8")):
            found.append(Result(**line))
    return found


# The page -----------------------------------------------------------------------------


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


def gaps(results: Sequence[Result]) -> Iterator[tuple[Dataset, float, str, float]]:
    """How far FedSPU is above the best rival, for each data set and alpha."""
    for dataset in get_args(Dataset):
        for alpha in ALPHAS:
            scores: dict[str, list[float]] = {}
            for r in results:
                same = (r.dataset, r.alpha, r.with_stopping, r.seed)
                if same == (dataset, alpha, False, 0) and r.method in METHODS:
                    value = 100 * r.summary["personal_accuracy"]
                    scores.setdefault(r.method, []).append(value)
            if len(scores) < len(METHODS):
                continue
            means = {m: mean(v) for m, v in scores.items()}
            rival = max((m for m in means if m != "fedspu"), key=lambda m: means[m])
            yield dataset, alpha, rival, means["fedspu"] - means[rival]


def page(results: Sequence[Result]) -> str:
    """The whole page."""
    cut = (
        "CIFAR-10 is the paper's data; EMNIST is `femnist` and Google Speech is "
        "`speech23`, with 200 rounds: there, only the order of methods may be compared."
    )
    tables = [
        accuracy_table("table1", results, cut),
        accuracy_table("table2", results, cut),
        cost_table(results, cut),
        rounds_table(results, cut),
        memory_table(),
    ]
    for dataset in get_args(Dataset):
        for es in (False, True):
            if any((r.dataset, r.with_stopping) == (dataset, es) for r in results):
                tables.append(alpha_table(results, dataset, es))
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    head, _, _ = text.partition(MARK)
    listed: list[Any] = [head.rstrip(), "", MARK, ""]
    listed += [f"{line}" for line in _gap_lines(results)]
    return "\n".join([*listed, "", *map(markdown, tables)])


MARK = "<!-- Below this line: made by `python -m benchmarks.reproduction page`. -->"


def _gap_lines(results: Sequence[Result]) -> Iterator[str]:
    found = list(gaps(results))
    yield "| data | alpha | best rival | FedSPU above it (one seed) |"
    yield "|---|---|---|---|"
    for dataset, alpha, rival, gap in found:
        yield f"| {DATASETS[dataset]} | {alpha:g} | {rival} | {gap:+.1f} |"
    if found:
        yield ""
        yield f"On average {mean(gap for *_, gap in found):+.2f} (the paper: +4.45)."


if __name__ == "__main__":
    if sys.argv[1:2] == ["collect"]:
        collect(Path(sys.argv[2]))
    elif sys.argv[1:] == ["page"]:
        PAGE.write_text(page(read()), encoding="utf-8")
    else:
        sys.exit(__doc__)
