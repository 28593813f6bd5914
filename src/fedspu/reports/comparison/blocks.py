"""A comparison as blocks of text that fit 80 columns, for a terminal and a file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedspu.reports.comparison.statistics import Case, Estimate, Gap, Row
from fedspu.units import digits, duration, size, titled

SAME = "≈"
"""After a gap that is not clear."""


@dataclass(frozen=True)
class Block:
    """A table of text: its columns' titles, and a row for each method."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def value(estimate: Estimate | None, is_share: bool, sign: str = "") -> str:
    """A mean and its interval, shares as percentages without their sign."""
    if estimate is None:
        return "-"
    if is_share:
        half = "" if estimate.half is None else f" ± {100 * estimate.half:.1f}"
        return f"{100 * estimate.mean:{sign}.1f}{half}"
    half = "" if estimate.half is None else f" ± {digits(estimate.half, 2)}"
    return (
        f"{'+' if sign and estimate.mean >= 0 else ''}{digits(estimate.mean, 4)}{half}"
    )


def gap(found: Gap | None, is_share: bool) -> str:
    """How far a method is from the best."""
    if found is None:
        return "best"
    mark = f" {SAME}" if found.is_clear is False else ""
    return f"{value(found.estimate, is_share, '+')}{mark}"


def heading(case: Case) -> str:
    """What a case is, in a line."""
    varying = ", ".join(
        f"{'alpha' if name == 'data.alpha' else name} {_plain(v)}"
        for name, v in case.settings.items()
        if name != "data.name"
    )
    seeds = f"{case.most_seeds} seed{'s' * (case.most_seeds > 1)}"
    if case.num_seeds < case.most_seeds:
        seeds = f"{case.num_seeds} to {seeds}"
    return (
        f"{case.dataset}, {varying}, {seeds}" if varying else f"{case.dataset}, {seeds}"
    )


def _plain(found: Any) -> str:
    if isinstance(found, list | tuple):
        return ",".join(map(_plain, found))
    return f"{found:g}" if isinstance(found, float) else str(found)


def blocks(case: Case) -> Iterator[Block]:
    """How well methods do; the same by capacity; what they cost."""
    share, metric = case.is_share, titled(case.metric)
    unit = f"{metric}, %" if share else metric
    lower = "" if case.higher_is_better else "\n(lower is better)"
    yield _block(
        case,
        {
            f"personal\n{unit}{lower}": lambda row: value(row.personal, share),
            "against\nthe best": lambda row: gap(row.gap, share),
            "worst\ntenth": lambda row: value(row.worst_tenth, share),
            "global\nmodel": lambda row: value(row.global_, share),
        },
    )
    capacities = list(case.rows[0].by_capacity)
    if 1 < len(capacities) <= MOST_CAPACITIES:
        columns = {
            f"{'personal ' + unit if i == 0 else ''}\np = {p}": _by_capacity(p, share)
            for i, p in enumerate(capacities)
        }
        yield _block(case, columns)
    yield _block(
        case,
        {
            "rounds": lambda row: _rounds(row.rounds),
            "exchanged": lambda row: size(row.num_bytes.mean),
            "CPU time of\ntraining": lambda row: duration(row.cpu_seconds.mean),
            "memory of a step\nat lowest / highest p": _memory,
        },
    )
    if any(row.tuned for row in case.rows):
        names = list(dict.fromkeys(name for row in case.rows for name in row.tuned))
        picked = {f"picked\n{name}": _picked(name) for name in names}
        yield _block(case, picked)


MOST_CAPACITIES = 8
"""More than these do not fit 80 columns; the JSON file has them."""


def _block(case: Case, columns: dict[str, Callable[[Row], str]]) -> Block:
    return Block(
        ("\nmethod", *columns),
        tuple(
            (row.method, *(show(row) for show in columns.values())) for row in case.rows
        ),
    )


def _by_capacity(p: str, is_share: bool) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        found = row.by_capacity.get(p)
        if found is None:
            return "-"
        return f"{100 * found.mean:.1f}" if is_share else digits(found.mean, 4)

    return show


def _picked(name: str) -> Callable[[Row], str]:
    return lambda row: _plain(row.tuned.get(name, "-"))


def _rounds(found: Estimate) -> str:
    half = f" ± {found.half:.0f}" if found.half else ""
    return f"{found.mean:.0f}{half}"


def _memory(row: Row) -> str:
    if not row.step_bytes:
        return "-"
    listed = [row.step_bytes[p] for p in sorted(row.step_bytes, key=float)]
    mark = " *" if row.chooses else ""
    return f"{' / '.join(map(size, dict.fromkeys((listed[0], listed[-1]))))}{mark}"


def notes(cases: Sequence[Case]) -> list[str]:
    """What the numbers mean, in lines to put under the tables."""
    found = []
    rows = [row for case in cases for row in case.rows]
    if any(len(row.seeds) > 1 for row in rows):
        found.append(
            "± is the 95 % interval of the mean over seeds (Student's t). Differences "
            "are taken seed by seed, on the same clients."
        )
    if any(len(row.seeds) == 1 for row in rows):
        found.append(
            "One seed gives no interval: it cannot tell methods apart from chance."
        )
    found += _few_seeds(cases)
    if any(row.gap and row.gap.is_clear is False for row in rows):
        found.append(
            f"{SAME}: not distinguishable from the best; the interval of the "
            "difference includes 0."
        )
    if any(len(case.kernels) > 1 for case in cases):
        found.append(
            "Some runs used compiled kernels and others PyTorch: their times and last "
            "digits differ; see train.kernels."
        )
    found.append(
        "Worst tenth: the mean over the tenth of clients that fare worst. CPU time is "
        "that of clients' turns."
    )
    if any(row.step_bytes for row in rows):
        found.append(
            "Memory is the most that one training step holds on a device, as `fedspu "
            "profile` measures it."
        )
    found += _last_models(rows)
    found += _little_saved(rows)
    if any(row.chooses and row.step_bytes for row in rows):
        found.append(
            "*: before that, a client trains the whole model once, to choose its "
            "neurons, and needs the memory of p = 1."
        )
    return found


def _few_seeds(cases: Sequence[Case]) -> Iterator[str]:
    """Says which methods have fewer seeds than others beside them."""
    for case in cases:
        few = [
            f"{row.method} ({len(row.seeds)})"
            for row in case.rows
            if len(row.seeds) < case.most_seeds
        ]
        if few:
            yield (
                f"{heading(case)}: not all methods have {case.most_seeds} seeds: "
                f"{', '.join(few)}. The best is chosen by the seeds that all have, and "
                "differences are of seeds that both have."
            )


def _last_models(rows: Sequence[Row]) -> Iterator[str]:
    """What last models cost, for each method that makes any: no column has it."""
    for row in {row.method: row for row in rows}.values():
        if row.finish_bytes and row.finish_cpu_seconds:
            yield (
                f"Besides, the last models of {row.method}: "
                f"{size(row.finish_bytes.mean)} sent to all clients together, and "
                f"{duration(row.finish_cpu_seconds.mean)} of CPU time."
            )


def _little_saved(rows: Sequence[Row]) -> Iterator[str]:
    """Says so if freezing saves the weakest devices little memory."""
    for row in rows:
        if len(set(row.step_bytes.values())) < 2:
            continue  # everyone trains the same
        weakest, *_, strongest = sorted(row.step_bytes, key=float)
        share = row.step_bytes[weakest] / row.step_bytes[strongest]
        if share > LITTLE:
            yield (
                f"Freezing saves little memory with this model: at p = {weakest}, a "
                f"step of {row.method} takes {share:.0%} of what it takes at p = "
                f"{strongest}. `fedspu profile` shows each p, and what --set "
                "train.saves=lean would save."
            )
        return


LITTLE = 0.85
"""From this share on, a step of the weakest clients needs hardly less memory."""


# Forms --------------------------------------------------------------------------------


def terminal(cases: Sequence[Case]) -> Group:
    """All cases for a terminal."""
    parts: list[Any] = []
    for case in cases:
        parts.append(Text(heading(case), style="bold"))
        for block in blocks(case):
            table = Table(
                box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1)
            )
            names = [_in_lines(row[0]) for row in block.rows]
            widest = max(len(line) for name in names for line in name.split("\n"))
            for i, title in enumerate(block.titles):
                table.add_column(
                    escape(title),
                    justify="right" if i else "left",
                    overflow="fold",
                    # Half of a name would be another name.
                    no_wrap=i == 0 and widest <= WIDEST_NAME,
                )
            for name, row in zip(names, block.rows, strict=True):
                table.add_row(*map(escape, (name, *row[1:])))
            parts += [table, Text()]
    return Group(*parts, *(Text(note, style="dim") for note in notes(cases)))


LONG_NAME, WIDEST_NAME = 24, 32


def _in_lines(method: str) -> str:
    """A long name of a method with each of its options on a line of its own."""
    return method if len(method) <= LONG_NAME else method.replace("@", "\n  @")


def plain(cases: Sequence[Case], width: int = 80) -> str:
    """All cases as plain text."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(terminal(cases))
    lines = (line.rstrip() for line in captured.get().splitlines())
    return "\n".join(lines) + "\n"


def markdown(cases: Sequence[Case]) -> str:
    """All cases as Markdown."""
    lines = []
    for case in cases:
        lines += [f"## {heading(case)}", ""]
        for block in blocks(case):
            titles = [title.replace("\n", " ").strip() for title in block.titles]
            rules = ["---", *["---:"] * (len(titles) - 1)]
            lines += [
                f"| {' | '.join(_cell(text) for text in cells)} |"
                for cells in (titles, rules, *block.rows)
            ]
            lines.append("")
    lines += [f"{note}\n" for note in notes(cases)]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text that cannot end a cell of a Markdown table, or be taken for emphasis."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*")
