"""Which client has which classes, as ``fedspu data show`` prints it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table
from rich.text import Text

from fedspu.data.dataset import Dataset
from fedspu.data.examples import allot, strata
from fedspu.data.partition import LabelCounts, count_labels
from fedspu.resolve import resolve
from fedspu.settings import Settings
from fedspu.tasks.task import Task

SHADES = ((0.75, "█"), (0.5, "▓"), (0.25, "▒"), (0.05, "░"), (0.0, "·"))
"""Each shade, with the smallest share of a client's examples that it stands for."""

LEGEND = "share of a client's examples:  · some  ░ 5 %  ▒ 25 %  ▓ 50 %  █ 75 % or more"

MAX_ROWS = 30
MAX_CELL, MAX_NAMED_CELL = 6, 16
MIN_BAR, MAX_BAR = 5, 24
MAX_NAMES = 40


def settings_for(given: Mapping[str, Any]) -> Settings:
    """Settings for dividing data; those that only a run uses get arbitrary values."""
    unread = {"model": "mlp", "clients.per_round": 1, "clients.capacities": [1.0]}
    return resolve({**unread, **given})


def classes_in_words(task: Task, number: int) -> str:
    """What examples are divided by: `` of 10 classes``; nothing if by nothing."""
    if task.strata is None:
        return ""
    return f" of {number} {'classes' if task.has_classes else 'bins'}"


def count(
    settings: Settings, data: Dataset, task: Task
) -> tuple[LabelCounts, tuple[str, ...]]:
    """How many examples of each class each client has, and what classes are called."""
    labels = strata(data, task)
    num_classes = data.num_outputs if task.has_classes else int(labels.max()) + 1
    names = tuple(data.classes) if task.has_classes else ()
    return count_labels(allot(settings, data, task), labels, num_classes), names


def title(settings: Settings, data: Dataset, classes: str) -> str:
    """What is divided, among how many clients, and how."""
    kind = settings.data.partition
    how = {"shards": f", {settings.data.shards} each", "iid": "", "natural": ""}
    return (
        f"{data.name}: {len(data.y):,} examples{classes}, "
        f"{settings.clients.number:,} clients; "
        f"{kind}{how.get(kind, f', alpha {settings.data.alpha:g}')}, "
        f"seed {settings.seed}"
    )


@dataclass(frozen=True)
class Columns:
    """How wide the parts of a line are, and how many classes share a cell."""

    client: int
    cell: int
    per_cell: int
    size: int
    bar: int

    @property
    def shade(self) -> int:
        """How wide a shade is: wide cells end with a gap."""
        return max(1, self.cell - 1)


def fit_columns(found: LabelCounts, width: int, longest: int = 0) -> Columns:
    """The widest cells that fit; if classes are too many, several share a cell.

    ``longest``: letters of the longest name of a class, for which cells may be wider.
    """
    num_clients, num_classes = found.counts.shape
    client = max(len("client"), len(str(num_clients - 1)))
    size = max(len("examples"), len(f"{found.sizes.max():,}"))
    room = max(1, width - client - size - 4)
    per_cell = ceil(num_classes / room)
    num_cells = ceil(num_classes / per_cell)
    most = max(MAX_CELL, min(longest + 1, MAX_NAMED_CELL))
    cell = max(1, min(most, (room - MIN_BAR - 1) // num_cells))
    bar = min(MAX_BAR, room - cell * num_cells - 1)
    return Columns(client, cell, per_cell, size, bar if bar >= MIN_BAR else 0)


def picture(found: LabelCounts, names: Sequence[str], width: int) -> list[Text]:
    """A line for each client (or a sample of them), a shade for each of its classes."""
    num_clients, num_classes = found.counts.shape
    columns = fit_columns(found, width, max(map(len, names), default=0))
    shown = sample(num_clients, MAX_ROWS)
    head = _heading(names, num_classes, columns) if found.has_classes else ""
    lines = [
        Text(
            f"{'client':>{columns.client}}  {head}  {'examples':>{columns.size}}", "dim"
        )
    ]
    lines += [_line(found, client, columns) for client in shown]

    notes = [LEGEND] if found.has_classes else []
    is_headed = head in ("", _cells(names, columns))
    if names and not is_headed and num_classes <= MAX_NAMES:
        notes.append(", ".join(f"{c} {name}" for c, name in enumerate(names)))
    if len(shown) < num_clients:
        notes.append(f"{len(shown)} of {num_clients:,} clients, evenly spaced")
    if columns.per_cell > 1:
        notes.append(f"{columns.per_cell} neighbouring classes in one column")
    return [*lines, *(Text(note, "dim") for note in notes)]


def _line(found: LabelCounts, client: int, columns: Columns) -> Text:
    """One client: its number, a shade for each cell, its size as number and bar."""
    size = int(found.sizes[client])
    firsts = np.arange(0, found.counts.shape[1], columns.per_cell)
    parts = np.add.reduceat(found.counts[client], firsts) / max(size, 1)
    shades = [columns.shade * _shade(part) for part in parts.tolist()]
    line = Text(f"{client:>{columns.client}}  ")
    if found.has_classes:
        line.append(_cells(shades, columns), "cyan")
    line.append(f"  {size:>{columns.size},}")
    if columns.bar:
        share = size / int(found.sizes.max())
        line.append(f" {_bar(share, columns.bar)}", "green")
    return line


def _cells(contents: Sequence[str], columns: Columns) -> str:
    return "".join(f"{content:<{columns.cell}}" for content in contents)


def sample(number: int, most: int) -> list[int]:
    """All of 0, 1, …, or ``most`` of them, evenly spaced, if there are more."""
    if number <= most:
        return list(range(number))
    return [int(i) for i in np.linspace(0, number - 1, most).round()]


def _shade(share: float) -> str:
    if share == 0:
        return " "
    return next(shade for least, shade in SHADES if share >= least)


def _heading(names: Sequence[str], num_classes: int, columns: Columns) -> str:
    """Class names if they fit into their cells, else class numbers, else a ruler."""
    numbers = [str(number) for number in range(num_classes)]
    for heads in (names, numbers):
        is_narrow = all(len(head) <= columns.shade for head in heads)
        if heads and is_narrow and columns.per_cell == 1:
            return _cells(heads, columns)
    # A ruler: the number of the class in every tenth cell.
    ticks = numbers[:: 10 * columns.per_cell]
    ruler = "".join(f"{tick:<{10 * columns.cell}}" for tick in ticks)
    width = columns.cell * ceil(num_classes / columns.per_cell)
    return f"{ruler:<{width}}"[:width]


def _bar(share: float, width: int) -> str:
    eighths = max(1, round(8 * width * share))
    whole, rest = divmod(eighths, 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[rest].strip()


def label_table(found: LabelCounts) -> Table:
    """The spread of sizes, numbers of classes and entropies over the clients."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("per client")
    for title in ("min", "10 %", "median", "90 %", "max"):
        table.add_column(title, justify="right")
    table.add_row("examples", *_spread(found.sizes, ",.0f"))
    if found.has_classes:
        table.add_row("classes", *_spread(found.num_classes, ",.0f"))
        table.add_row("entropy, bits", *_spread(found.entropies, ".2f"))
    return table


def _spread(values: NDArray[Any], form: str) -> list[str]:
    # Always a value that some client has, never one in between.
    found = np.quantile(values, (0, 0.1, 0.5, 0.9, 1), method="nearest")
    return [format(float(value), form) for value in found]


def label_lines(found: LabelCounts) -> list[str]:
    """What is printed below the table; nothing without classes."""
    if not found.has_classes:
        return []
    num_clients = len(found.sizes)
    return [
        f"Clients with one class: {found.num_single:,} of {num_clients:,}",
        f"Entropy if every client had the whole mix: {found.whole_entropy:.2f} bits",
    ]


def as_json(found: LabelCounts) -> dict[str, Any]:
    """All counts and entropies, client by client, for scripts."""
    return {
        "examples": int(found.sizes.sum()),
        "entropy_bits": found.whole_entropy,
        "clients_with_one_class": found.num_single,
        "clients": [
            {
                "client": client,
                "examples": int(found.sizes[client]),
                "classes": int(found.num_classes[client]),
                "entropy_bits": float(found.entropies[client]),
                "by_class": found.counts[client].tolist(),
            }
            for client in range(len(found.sizes))
        ],
    }
