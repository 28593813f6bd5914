"""The page docs/beyond.md: weak devices beside devices without limits.

    python -m benchmarks.beyond play FOLDER DATA    # what results/ lacks
    python -m benchmarks.beyond collect FOLDER      # finished runs, into results/
    python -m benchmarks.beyond page

``FOLDER`` and ``DATA`` are as in ``benchmarks.reproduction``. Every run has the paper's
settings, but 200 rounds. Where ``benchmarks.reproduction`` plays as many, its runs of
FedSPU as published are used.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

from benchmarks import guided
from benchmarks.reproduction.playing import Folders, Part, collect, play, read
from fedspu.reports.intervals import half_interval
from fedspu.reproduce.printed import ALPHAS, DATASETS, Dataset
from fedspu.reproduce.report import markdown
from fedspu.reproduce.tables import PaperTable, Result

OURS, PAPER = "fedspu-plus", "fedspu"
FREE = ("fedavg@finish=10", "fedavg@finish=10@server.average=ema")
"""Devices without limits: all train and send everything, and finish in full."""


FOLDERS: Folders = {
    "beyond-speech23": ("speech", False),
    "beyond-cifar10": ("cifar10", False),
    "beyond-femnist": ("emnist", False),
}
ROUNDS = 200


def parts(methods: tuple[str, ...], seeds: tuple[int, ...]) -> list[Part]:
    """Runs on every data set, but for those that the reproduction plays as well."""
    return [
        Part(name, tuple(m for m in methods if m != PAPER or data == "cifar10"), seeds)
        for name, (data, _) in FOLDERS.items()
    ]


PARTS = (
    *parts((OURS, PAPER, FREE[0]), (0,)),
    *parts((OURS, PAPER, FREE[0]), (1, 2)),
    *parts(FREE[1:], (0, 1, 2)),
)
"""In the order in which they are played: what says most comes first."""

PAGE = Path(__file__).parents[1] / "docs/beyond.md"
MARK = "<!-- Below this line: made by `python -m benchmarks.beyond page`. -->"


def scores(
    results: Iterable[Result], dataset: Dataset, alpha: float, method: str
) -> dict[int, float]:
    """Personal accuracy by seed, in percent."""
    return {
        r.seed: 100 * r.summary["personal_accuracy"]
        for r in results
        if (r.dataset, r.alpha, r.method) == (dataset, alpha, method)
    }


def shown(values: Sequence[float], sign: str = "") -> str:
    """A mean and its 95 % interval over seeds."""
    if not values:
        return "-"
    half = half_interval(values)
    return f"{mean(values):{sign}.1f}" + ("" if half is None else f" ± {half:.1f}")


def score_table(results: Sequence[Result], dataset: Dataset) -> PaperTable:
    """How well each method does."""
    rows = []
    for method in dict.fromkeys(r.method for r in results if r.dataset == dataset):
        found = [scores(results, dataset, alpha, method) for alpha in ALPHAS]
        seeds = " / ".join(str(len(by_seed)) for by_seed in found)
        cells = (shown(list(by_seed.values())) for by_seed in found)
        rows.append((f"`{method}`", *cells, seeds))
    return PaperTable(
        f"{DATASETS[dataset]}: personal accuracy in %",
        ("", *(f"alpha {alpha:g}" for alpha in ALPHAS), "seeds"),
        tuple(rows),
        (f"{ROUNDS} rounds. ± is the 95 % interval over seeds.",),
    )


def gap_table(results: Sequence[Result]) -> PaperTable:
    """How far fedspu-plus is from the others, on the same clients, seed by seed."""
    rows = []
    others = (PAPER, *FREE)
    for dataset, title in DATASETS.items():
        for alpha in ALPHAS:
            ours = scores(results, dataset, alpha, OURS)
            cells = []
            for other in others:
                theirs = scores(results, dataset, alpha, other)
                both = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
                cells.append(shown(both, "+"))
            if any(cell != "-" for cell in cells):
                rows.append((f"{title} (alpha = {alpha:g})", *cells))
    return PaperTable(
        "fedspu-plus less others, in points of personal accuracy",
        ("", *(f"`{other}`" for other in others)),
        tuple(rows),
        ("Differences are taken seed by seed. One seed has no interval.",),
    )


def cost_table(results: Sequence[Result]) -> PaperTable:
    """What a device pays: bytes each way, and training, by method."""
    rows = []
    for dataset, title in DATASETS.items():
        for method in dict.fromkeys(r.method for r in results if r.dataset == dataset):
            found = [
                r.summary for r in results if (r.dataset, r.method) == (dataset, method)
            ]
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


def guided_table(results: Sequence[Result]) -> PaperTable:
    """Other choices of the neurons to train, beside a random one."""
    found = [r for r in results if r.method == OURS and r.dataset == "cifar10"]
    found += read(guided.FOLDERS)
    rows = []
    for method in dict.fromkeys(r.method for r in found):
        cells = [
            shown([r.summary[score] * 100 for r in found if _is(r, method, alpha)])
            for alpha in guided.ALPHAS
            for score in ("personal_accuracy", "global_accuracy")
        ]
        name = method.rpartition(":")[2]
        rows.append(("`random`" if method == OURS else f"`{name}`", *cells))
    heads = [
        f"{whose}, alpha {alpha:g}"
        for alpha in guided.ALPHAS
        for whose in ("personal", "server's")
    ]
    return PaperTable(
        "Which neurons to train: accuracy in %",
        ("", *heads),
        tuple(rows),
        (f"CIFAR-10, {ROUNDS} rounds, seed 0; all else as in fedspu-plus.",),
    )


def _is(result: Result, method: str, alpha: float) -> bool:
    return (result.method, result.alpha, result.seed) == (method, alpha, 0)


def known() -> list[Result]:
    """What has been played, here and in the reproduction."""
    published = [
        r
        for r in read()
        if (r.method, r.rounds, r.with_stopping) == (PAPER, ROUNDS, False)
    ]
    return [*read(FOLDERS), *published]


def page(results: Sequence[Result]) -> str:
    """The whole page."""
    tables = [gap_table(results)]
    tables += [score_table(results, dataset) for dataset in DATASETS]
    tables += [guided_table(results), cost_table(results)]
    head = PAGE.read_text(encoding="utf-8").partition(MARK)[0].rstrip()
    made = [markdown(table) for table in tables if table.rows]
    return "\n".join([head, "", MARK, "", *made])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["play", folder, data]:
            changes = {"rounds": ROUNDS}
            play(Path(folder), Path(data), PARTS, FOLDERS, changes)
        case ["collect", folder]:
            collect(Path(folder), FOLDERS)
        case ["page"]:
            PAGE.write_text(page(known()), encoding="utf-8")
        case _:
            sys.exit(__doc__)
