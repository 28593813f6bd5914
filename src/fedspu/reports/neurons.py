"""A model's neuron table for people: its groups, and what is active at each p."""

from collections.abc import Sequence
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn

from fedspu import models
from fedspu.core.active import choose_ordered
from fedspu.core.neurons import Neurons
from fedspu.data import load
from fedspu.errors import SettingsError
from fedspu.reports.tables import percent, rich_table, size


def model_and_example(
    name: str, shape: str | None, data: str | None
) -> tuple[nn.Module, Tensor]:
    """A model by name, and two examples for it: of a data set, of a shape, its own."""
    if data is not None:
        dataset = load(data)
        return models.build(name, dataset.num_classes), dataset.x[:2]
    maker = models.find(name)
    if shape is not None:
        try:
            sizes = [int(part) for part in shape.split(",")]
            example = torch.zeros(2, *sizes)
        except (ValueError, RuntimeError):
            raise SettingsError(
                f"--input {shape}: expected sizes separated by commas, like 3,32,32"
            ) from None
    elif hasattr(maker, "input_shape"):
        example = torch.zeros(2, *maker.input_shape)
    else:
        raise SettingsError(
            f"model = {name!r}: give the shape of one example, like --input 3,32,32, "
            "or a data set, like --data arrays:FILE.npz"
        )
    return models.build(name), example


def active_counts(neurons: Neurons, shares: Sequence[float]) -> list[dict[str, Any]]:
    """How many entries are active, and so travel, at each p."""
    total = neurons.num_entries()
    counts = []
    for p in shares:
        active = neurons.num_entries(choose_ordered(neurons, p))
        counts.append({"p": p, "entries": active, "share": active / total})
    return counts


def neuron_tables(neurons: Neurons, counts: Sequence[dict[str, Any]]) -> list[Any]:
    """What ``fedspu neurons`` prints."""
    groups = Table(box=box.SIMPLE, pad_edge=False)
    for title in ("group", "neurons", "kind", "slim", "lies along"):
        groups.add_column(title, justify="right" if title == "neurons" else "left")
    for group in neurons.groups:
        groups.add_row(*group.in_words())
    rows = [
        {
            "p": f"{count['p']:g}",
            "active entries": f"{count['entries']:,}",
            "of all": percent(count["share"]),
            "as float32": size(4 * count["entries"]),
        }
        for count in counts
    ]
    return [groups, *neurons.remarks(), rich_table(rows)]
