"""The page docs/reproduction.md: play its runs, keep their summaries, write its tables.

    python -m benchmarks.reproduction play FOLDER DATA    # what results/ lacks
    python -m benchmarks.reproduction collect FOLDER      # finished runs, into results/
    python -m benchmarks.reproduction page

``FOLDER`` gets one folder for each series; ``play`` resumes what was interrupted there,
and ``collect`` may run beside it. ``DATA`` has CIFAR-10 as its authors distribute it,
``femnist.npz`` and ``speech23.npz``.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, get_args

from fedspu.reports.intervals import half_interval
from fedspu.reproduce.experiments import results_in, settings_of
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
from fedspu.sweeps.compare import compare

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

SIX = ("fedspu", "fjord", "hermes", "fedmp", "prunefl", "fedselect")
ANCHORS = ("local", "fedavg@finetune=5")


@dataclass(frozen=True)
class Part:
    """Some runs of the page: all alphas, and these seeds."""

    folder: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    rivals: int = 0
    """So many of the best rivals, by what is known so far, are played besides."""


PARTS = (
    Part("cifar10", (*SIX, *ANCHORS)),
    Part("cifar10-es", SIX),
    Part("speech23", (*SIX, *ANCHORS)),
    Part("speech23-es", SIX),
    Part("femnist", (*SIX, *ANCHORS)),
    Part("femnist-es", SIX),
    Part("cifar10", ("fedspu", *ANCHORS), (1, 2), rivals=2),
    Part("cifar10", ("feddrop", "fedavg", "small", "ditto", "fedper")),
    Part("cifar10-es", ("fedspu",), (1, 2)),
    Part("speech23", ("fedspu",), (1, 2), rivals=1),
    Part("femnist", ("fedspu",), (1, 2), rivals=1),
)
"""In the order in which they are played: what says most comes first."""

ROUNDS = {"cifar10": 500, "emnist": 200, "speech": 200}
FILES = {"emnist": "femnist.npz", "speech": "speech23.npz"}

KEPT = (
    *("method", "label", "dataset", "alpha", "seed", "split", "early_stopping"),
    *("rounds_played", "stopped_clients", "personal_accuracy", "global_accuracy"),
    *("personal_val_accuracy", "personal_accuracy_by_capacity", "worst_tenth_accuracy"),
    *("participating_accuracy", "participating_clients", "bytes_initial"),
    *("bytes_down", "bytes_up", "index_bytes", "train_seconds", "train_cpu_seconds"),
    *("missing_turns", "refused_turns", "unjudged_turns", "kernels"),
)
"""What is kept of each summary."""


def play(folder: Path, data: Path) -> None:
    """Play what ``results/`` does not have, part by part."""
    for part in PARTS:
        dataset, with_stopping = FOLDERS[part.folder]
        known = read()
        rivals = best_rivals(known, dataset)[: part.rivals]
        have = {
            (r.method, r.alpha, r.seed)
            for r in known
            if (r.dataset, r.with_stopping) == (dataset, with_stopping)
        }
        wanted: dict[tuple[int, tuple[float, ...]], list[str]] = {}
        for seed in part.seeds:
            for method in (*part.methods, *rivals):
                alphas = tuple(a for a in ALPHAS if (method, a, seed) not in have)
                if alphas:
                    wanted.setdefault((seed, alphas), []).append(method)
        file = FILES.get(dataset)
        settings = {
            **settings_of(dataset, file and f"arrays:{(data / file).absolute()}"),
            "data.dir": data.absolute(),
            "rounds": ROUNDS[dataset],
            "early_stopping.on": with_stopping,
        }
        for (seed, missing), methods in wanted.items():
            compare(
                methods,
                settings,
                out=folder / part.folder,
                seeds=[seed],
                vary={"data.alpha": missing},
            )
            collect(folder)


def best_rivals(results: Sequence[Result], dataset: Dataset) -> list[str]:
    """The paper's rivals, by their mean accuracy over alphas, best first."""
    scores: dict[str, list[float]] = {}
    for r in results:
        same = (r.dataset, r.with_stopping, r.seed) == (dataset, False, 0)
        if same and r.method in METHODS and r.method != "fedspu":
            scores.setdefault(r.method, []).append(r.summary["personal_accuracy"])
    return sorted(scores, key=lambda m: -mean(scores[m]))


def collect(folder: Path) -> None:
    """Keep the summaries of all finished runs, beside those that are kept already."""
    RESULTS.mkdir(exist_ok=True)
    for name, (dataset, with_stopping) in FOLDERS.items():
        if not (folder / name / "sweep.json").exists():
            continue
        kept = {_key(result): result for result in _read(RESULTS / f"{name}.json")}
        for result in results_in(folder / name, dataset, with_stopping):
            summary = {k: result.summary[k] for k in KEPT if k in result.summary}
            kept[_key(result)] = replace(result, summary=summary)
        lines = [json.dumps(asdict(kept[key])) for key in sorted(kept)]
        text = ",\n".join(lines)
        (RESULTS / f"{name}.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")


def _key(result: Result) -> tuple[str, float, int]:
    return result.method, result.alpha, result.seed


def _read(file: Path) -> list[Result]:
    if not file.exists():
        return []
    return [Result(**line) for line in json.loads(file.read_text(encoding="utf-8"))]


def read() -> list[Result]:
    """All results that are kept."""
    return [r for file in sorted(RESULTS.glob("*.json")) for r in _read(file)]


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
    if sys.argv[1:2] == ["play"] and len(sys.argv) == 4:
        play(Path(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1:2] == ["collect"] and len(sys.argv) == 3:
        collect(Path(sys.argv[2]))
    elif sys.argv[1:] == ["page"]:
        PAGE.write_text(page(read()), encoding="utf-8")
    else:
        sys.exit(__doc__)
