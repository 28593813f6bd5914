"""The runs of docs/reproduction.md: play what is missing, and keep their summaries."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, get_args

from fedspu.reproduce.experiments import results_in, settings_of
from fedspu.reproduce.printed import ALPHAS, METHODS, Dataset
from fedspu.reproduce.tables import Result
from fedspu.sweeps.compare import compare

RESULTS = Path(__file__).parents[2] / "results"
TIMES = RESULTS / "times.json"

Folders = dict[str, tuple[Dataset, bool]]
"""Each folder's data set, and whether its runs stop early."""

FOLDERS: Folders = {
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
    """Some runs of a page."""

    folder: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    alphas: tuple[float, ...] = ALPHAS
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
    Part("cifar10-es", ("fedspu",), (1, 2)),
    Part("speech23", ("fedspu",), (1, 2), rivals=1),
    Part("femnist", ("fedspu",), (1, 2), rivals=1),
    Part("cifar10", ("feddrop", "fedavg", "small", "ditto", "fedper")),
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
    *("finish_bytes_down", "finish_train_cpu_seconds"),
)
"""What is kept of each summary."""


def play(
    folder: Path,
    data: Path,
    parts: Sequence[Part] = PARTS,
    folders: Folders = FOLDERS,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Play what ``results/`` does not have, part by part; ``changes`` are settings."""
    for part in parts:
        dataset, with_stopping = folders[part.folder]
        known = read(folders)
        rivals = best_rivals(known, dataset)[: part.rivals]
        have = {
            (r.method, r.alpha, r.seed)
            for r in known
            if (r.dataset, r.with_stopping) == (dataset, with_stopping)
        }
        wanted: dict[tuple[int, tuple[float, ...]], list[str]] = {}
        for seed in part.seeds:
            for method in (*part.methods, *rivals):
                alphas = tuple(a for a in part.alphas if (method, a, seed) not in have)
                if alphas:
                    wanted.setdefault((seed, alphas), []).append(method)
        settings = paper_settings(dataset, data) | {"early_stopping.on": with_stopping}
        settings |= changes or {}
        for (seed, missing), methods in wanted.items():
            compare(
                methods,
                settings,
                out=folder / part.folder,
                seeds=[seed],
                vary={"data.alpha": missing},
            )
            collect(folder, folders)


def measure_times(folder: Path, data: Path) -> None:
    """Play a few rounds of the six methods in turn, for their CPU times."""
    found = []
    for dataset in get_args(Dataset):
        settings = paper_settings(dataset, data) | {"rounds": 20, "workers": 1}
        out = folder / f"times-{dataset}"
        compare(
            SIX, settings, out=out, seeds=[0], vary={"data.alpha": [0.5]}, parallel=1
        )
        found += results_in(out, dataset, with_stopping=False)
    _write(TIMES, found)


def best_rivals(results: Sequence[Result], dataset: Dataset) -> list[str]:
    """The paper's rivals, by their mean accuracy over alphas, best first."""
    scores: dict[str, list[float]] = {}
    for r in results:
        same = (r.dataset, r.with_stopping, r.seed) == (dataset, False, 0)
        if same and r.method in METHODS and r.method != "fedspu":
            scores.setdefault(r.method, []).append(r.summary["personal_accuracy"])
    return sorted(scores, key=lambda m: -mean(scores[m]))


def collect(folder: Path, folders: Folders = FOLDERS) -> None:
    """Keep the summaries of all finished runs, beside those that are kept already."""
    RESULTS.mkdir(exist_ok=True)
    for name, (dataset, with_stopping) in folders.items():
        if not (folder / name / "sweep.json").exists():
            continue
        kept = {_key(result): result for result in _read(RESULTS / f"{name}.json")}
        for result in results_in(folder / name, dataset, with_stopping):
            kept[_key(result)] = result
        _write(RESULTS / f"{name}.json", [kept[key] for key in sorted(kept)])


def _write(file: Path, results: Sequence[Result]) -> None:
    lines = []
    for result in results:
        summary = {k: result.summary[k] for k in KEPT if k in result.summary}
        if "dataset" in summary:  # without the folder that the file was in
            summary["dataset"] = Path(summary["dataset"]).name
        lines.append(json.dumps(asdict(replace(result, summary=summary))))
    text = ",\n".join(lines)
    file.write_text(f"[\n{text}\n]\n", encoding="utf-8")


def paper_settings(dataset: Dataset, data: Path) -> dict[str, Any]:
    """The paper's settings, for models that are judged once, at the end."""
    file = FILES.get(dataset)
    return {
        **settings_of(dataset, file and f"arrays:{(data / file).absolute()}"),
        "data.dir": data.absolute(),
        "rounds": ROUNDS[dataset],
        # Only the last judgement is kept; those on the way would cost a tenth of a run,
        # and half of one with fine-tuning.
        "judge.every": ROUNDS[dataset],
    }


def _key(result: Result) -> tuple[str, float, int]:
    return result.method, result.alpha, result.seed


def _read(file: Path) -> list[Result]:
    if not file.exists():
        return []
    return [Result(**line) for line in json.loads(file.read_text(encoding="utf-8"))]


def read(folders: Folders = FOLDERS) -> list[Result]:
    """All results that are kept, but for those that are only about time."""
    return [r for name in folders for r in _read(RESULTS / f"{name}.json")]


def read_times() -> list[Result]:
    """The results for CPU times."""
    return _read(TIMES)
