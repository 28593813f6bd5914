"""The page docs/beyond.md: weak devices beside devices without limits.

    python -m benchmarks.beyond tune FOLDER DATA    # a learning rate for each method
    python -m benchmarks.beyond play FOLDER DATA    # what results/ lacks
    python -m benchmarks.beyond fresh FOLDER DATA   # the same with other seeds
    python -m benchmarks.beyond collect FOLDER      # finished runs, into results/
    python -m benchmarks.beyond page

``FOLDER`` and ``DATA`` are as in ``benchmarks.reproduction``. Every run has the paper's
settings, but 200 rounds and a learning rate that was picked for its method by ``tune``:
from the same rates for each, on validation examples and with a seed of its own. The
paper's learning rates for EMNIST and Speech are far too low for 200 rounds.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import guided
from benchmarks.reproduction.playing import (
    RESULTS,
    Folders,
    Part,
    collect,
    paper_settings,
    play,
    read,
)
from fedspu.reports.intervals import half_interval
from fedspu.reproduce.experiments import results_in
from fedspu.reproduce.printed import ALPHAS, DATASETS, Dataset
from fedspu.reproduce.report import markdown
from fedspu.reproduce.tables import PaperTable, Result
from fedspu.sweeps.compare import compare

OURS, PAPER = "fedspu-plus", "fedspu"
PLAIN = "fedspu-plus@train.adjust_logits=false"
"""As fedspu-plus was before it adjusted logits."""

FREE = (
    "fedavg@finish=10",
    "fedavg@finish_last=40@server.average=ema@train.adjust_logits=true",
)
"""Devices without limits: all train and send everything. They finish in full, or have
all else that fedspu-plus has."""

TUNED = (OURS, FREE[0], PAPER, PLAIN)
"""The methods whose learning rate is picked."""

FOLDERS: Folders = {
    "beyond-speech23": ("speech", False),
    "beyond-cifar10": ("cifar10", False),
    "beyond-femnist": ("emnist", False),
}
ROUNDS = 200

RATES: dict[Dataset, tuple[float, ...]] = {
    "speech": (0.005, 0.015, 0.05, 0.15),
    "cifar10": (0.03, 0.1, 0.3),
    "emnist": (0.002, 0.006, 0.02, 0.06),
}
"""The learning rates to pick from; on CIFAR-10 around the paper's, else above it. Where
the highest is picked, one more is added."""

PICKS = RESULTS / "beyond-picks.json"
TUNING: dict[str, Any] = {"seeds": [3], "vary": {"data.alpha": [0.5]}}
TUNING_ROUNDS = 100

PAGE = Path(__file__).parents[1] / "docs/beyond.md"
MARK = "<!-- Below this line: made by `python -m benchmarks.beyond page`. -->"


# Playing ------------------------------------------------------------------------------


def tune(folder: Path, data: Path) -> None:
    """Find out how well each method does with each rate, on validation examples."""
    found = tried()
    for name, (dataset, _) in FOLDERS.items():
        scores = found.setdefault(dataset, {})
        methods = [
            labelled
            for method in TUNED
            for rate in RATES[dataset]
            if (labelled := with_rate(method, rate)) not in scores
        ]
        if not methods:
            continue
        out = folder / f"tune-{name}"
        settings = paper_settings(dataset, data) | {"rounds": TUNING_ROUNDS}
        compare(methods, settings, out=out, **TUNING)
        for r in results_in(out, dataset, with_stopping=False):
            scores[r.method] = round(r.summary["personal_val_accuracy"], 6)
        PICKS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def tried() -> dict[Dataset, dict[str, float]]:
    """For each data set that was tuned, the score of every method with its rate."""
    if not PICKS.exists():
        return {}
    found: dict[Dataset, dict[str, float]]
    found = json.loads(PICKS.read_text(encoding="utf-8"))
    return found


def with_rate(method: str, rate: float) -> str:
    """The method with a learning rate of its own."""
    return f"{method}@train.lr={rate:g}"


def picked(dataset: Dataset, method: str) -> str:
    """The method with the rate that was best on validation examples.

    FedAvg that is finished in another way plays the same rounds, and has the same rate.
    """
    scores = tried().get(dataset, {})
    if not scores:
        sys.exit(f"no learning rate was picked for {dataset}; begin with `tune`")
    tuned = FREE[0] if method in FREE else method
    rates = {rate: scores.get(with_rate(tuned, rate), 0.0) for rate in RATES[dataset]}
    return with_rate(method, max(rates, key=rates.__getitem__))


def parts(methods: Sequence[str], seeds: tuple[int, ...]) -> list[Part]:
    """These methods on every data set, each with the rate that was picked for it."""
    return [
        Part(name, tuple(picked(data, method) for method in methods), seeds)
        for name, (data, _) in FOLDERS.items()
    ]


def all_parts() -> list[Part]:
    """In the order in which they are played: what says most comes first."""
    return [
        *parts((OURS, FREE[0], PAPER), (0,)),
        *parts((OURS, FREE[0], PAPER), (1, 2)),
        *parts((*FREE[1:], PLAIN), (0, 1, 2)),
    ]


FRESH_FOLDERS: Folders = {
    "fresh-speech23": ("speech", False),
    "fresh-cifar10": ("cifar10", False),
}
FRESH_SEEDS = (4,)
"""Seeds that nobody had looked at while fedspu-plus was made."""


def fresh_parts() -> list[Part]:
    """The two that are compared most, with fresh seeds."""
    return [
        Part(name, tuple(picked(data, method) for method in (OURS, FREE[0])), (seed,))
        for seed in FRESH_SEEDS
        for name, (data, _) in FRESH_FOLDERS.items()
    ]


# The page -----------------------------------------------------------------------------


def is_method(result: Result, method: str) -> bool:
    """Whether a result is of this method, at the rate that was picked for it."""
    is_tuned = result.dataset in tried()
    return is_tuned and result.method == picked(result.dataset, method)


def scores(
    results: Iterable[Result], dataset: Dataset, alpha: float, method: str
) -> dict[int, float]:
    """Personal accuracy by seed, in percent."""
    return {
        r.seed: 100 * r.summary["personal_accuracy"]
        for r in results
        if (r.dataset, r.alpha) == (dataset, alpha) and is_method(r, method)
    }


def shown(values: Sequence[float], sign: str = "") -> str:
    """A mean and its 95 % interval over seeds."""
    if not values:
        return "-"
    half = half_interval(values)
    return f"{mean(values):{sign}z.1f}" + ("" if half is None else f" ± {half:.1f}")


def score_table(results: Sequence[Result], dataset: Dataset) -> PaperTable:
    """How well each method does."""
    rows = []
    for method in (OURS, PLAIN, *FREE, PAPER) if dataset in tried() else ():
        found = [scores(results, dataset, alpha, method) for alpha in ALPHAS]
        if not any(found):
            continue
        seeds = " / ".join(str(len(by_seed)) for by_seed in found)
        cells = (shown(list(by_seed.values())) for by_seed in found)
        rate = picked(dataset, method).rpartition("=")[2]
        rows.append((f"`{method}`", *cells, rate, seeds))
    return PaperTable(
        f"{DATASETS[dataset]}: personal accuracy in %",
        ("", *(f"alpha {alpha:g}" for alpha in ALPHAS), "rate", "seeds"),
        tuple(rows),
        (f"{ROUNDS} rounds. ± is the 95 % interval over seeds.",),
    )


def gap_table(results: Sequence[Result]) -> PaperTable:
    """How far fedspu-plus is from the others, on the same clients, seed by seed."""
    known = (PAPER, *FREE, PLAIN)
    others = [m for m in known if any(is_method(r, m) for r in results)]
    rows: list[tuple[str, ...]] = []
    everything: dict[str, list[float]] = {other: [] for other in others}

    def add(title: str, found: Mapping[str, Sequence[float]]) -> None:
        if any(found.values()):
            rows.append((title, *(shown(found[other], "+") for other in others)))

    for dataset, title in DATASETS.items():
        together: dict[str, list[float]] = {other: [] for other in others}
        for alpha in ALPHAS:
            ours = scores(results, dataset, alpha, OURS)
            found = {}
            for other in others:
                theirs = scores(results, dataset, alpha, other)
                found[other] = [ours[n] - theirs[n] for n in ours if n in theirs]
                together[other] += found[other]
            add(f"{title} (alpha = {alpha:g})", found)
        add(f"{title} (all three)", together)
        for other in others:
            everything[other] += together[other]
    add("All", everything)
    return PaperTable(
        "fedspu-plus less others, in points of personal accuracy",
        ("", *(f"`{other}`" for other in others)),
        tuple(rows),
        (
            "Differences are taken seed by seed, each with clients of its own; ± is "
            "the 95 % interval of their mean. One alone has no interval.",
        ),
    )


def fresh_table() -> PaperTable:
    """How far fedspu-plus is from FedAvg without limits, with fresh seeds."""
    results, rows = read(FRESH_FOLDERS), []
    for dataset, title in DATASETS.items():
        cells, together = [], list[float]()
        for alpha in ALPHAS:
            ours = scores(results, dataset, alpha, OURS)
            theirs = scores(results, dataset, alpha, FREE[0])
            found = [ours[n] - theirs[n] for n in ours if n in theirs]
            cells.append(shown(found, "+"))
            together += found
        if together:
            rows.append((title, *cells, shown(together, "+")))
    seeds = ", ".join(map(str, FRESH_SEEDS))
    return PaperTable(
        f"{OURS} less `{FREE[0]}`, with seeds that nobody had seen",
        ("", *(f"alpha {alpha:g}" for alpha in ALPHAS), "all three"),
        tuple(rows),
        (f"Seed {seeds}; in no other table. Rates and rounds are as above.",),
    )


def cost_table(results: Sequence[Result]) -> PaperTable:
    """What a device pays: bytes each way, and training, by method."""
    rows = []
    for dataset, title in DATASETS.items():
        for method in (OURS, *FREE, PAPER):
            found = [
                r.summary
                for r in results
                if r.dataset == dataset and is_method(r, method)
            ]
            if not found:
                continue
            turns = 10 * ROUNDS
            down, up = (
                mean(s[f"bytes_{way}"] for s in found) / turns / 1000
                for way in ("down", "up")
            )
            last = mean(s.get("finish_bytes_down", 0) for s in found) / 100_000
            rows.append(
                (title, f"`{method}`", f"{down:.0f}", f"{up:.0f}", f"{last:.0f}")
            )
    return PaperTable(
        "Kilobytes for a client",
        ("", "", "down, in a turn", "up, in a turn", "down, at the end"),
        tuple(rows),
        (),
    )


def guided_table() -> PaperTable:
    """Other choices of the neurons to train, beside a random one."""
    found = read(guided.FOLDERS)
    rows = []
    for method in dict.fromkeys(r.method for r in found):
        cells = [
            shown([r.summary[score] * 100 for r in found if _is(r, method, alpha)])
            for alpha in guided.ALPHAS
            for score in ("personal_accuracy", "global_accuracy")
        ]
        name = "random" if method == guided.RANDOM else method.rpartition(":")[2]
        rows.append((f"`{name}`", *cells))
    heads = [
        f"{whose}, alpha {alpha:g}"
        for alpha in guided.ALPHAS
        for whose in ("personal", "server's")
    ]
    return PaperTable(
        "Which neurons to train: accuracy in %",
        ("", *heads),
        tuple(rows),
        (
            f"CIFAR-10, {ROUNDS} rounds, seed 0; all else as in {OURS} at first, but "
            "that clients keep the mean of their three best last models.",
        ),
    )


def _is(result: Result, method: str, alpha: float) -> bool:
    return (result.method, result.alpha, result.seed) == (method, alpha, 0)


def picks_table() -> PaperTable:
    """How well each method does with each learning rate, on validation examples."""
    rows = []
    for dataset, scores in tried().items():
        for method in TUNED:
            cells = [
                f"{100 * scores[label]:.1f} ({rate:g})"
                for rate in RATES[dataset]
                if (label := with_rate(method, rate)) in scores
            ]
            rows.append((DATASETS[dataset], f"`{method}`", ", ".join(cells)))
    return PaperTable(
        "Picking a learning rate: personal accuracy in % on validation examples",
        ("", "", "accuracy (rate)"),
        tuple(rows),
        (
            f"{TUNING_ROUNDS} rounds, alpha 0.5, seed 3, which is in no other table. "
            "The best of each row is played.",
        ),
    )


def page(results: Sequence[Result]) -> str:
    """The whole page."""
    tables = [gap_table(results), fresh_table()]
    tables += [score_table(results, dataset) for dataset in DATASETS]
    tables += [guided_table(), cost_table(results), picks_table()]
    head = PAGE.read_text(encoding="utf-8").partition(MARK)[0].rstrip()
    made = [markdown(table) for table in tables if table.rows]
    return "\n".join([head, "", MARK, "", *made])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["tune", folder, data]:
            tune(Path(folder), Path(data))
        case ["play", folder, data]:
            changes = {"rounds": ROUNDS}
            play(Path(folder), Path(data), all_parts(), FOLDERS, changes)
        case ["fresh", folder, data]:
            changes = {"rounds": ROUNDS}
            play(Path(folder), Path(data), fresh_parts(), FRESH_FOLDERS, changes)
        case ["collect", folder]:
            collect(Path(folder), FOLDERS)
        case ["page"]:
            PAGE.write_text(page(read(FOLDERS)), encoding="utf-8")
        case _:
            sys.exit(__doc__)
