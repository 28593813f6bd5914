"""What a data set holds, as numbers and as a table."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from fedspu.data import Source
from fedspu.data.dataset import Dataset
from fedspu.data.files import compare
from fedspu.tasks.classification import classification
from fedspu.tasks.task import IGNORED, Task, dtype_of
from fedspu.units import size

CHUNK = 512  # examples at a time: as floats, all of them may not fit into memory


def describe(
    dataset: Dataset, source: Source, task: Task = classification
) -> dict[str, Any]:
    """Counts, shape, mean and deviation of a data set, and where it came from.

    For the mean and deviation, bytes are divided by 255, and not scaled further.
    """
    mean, deviation = _moments(dataset.x)
    return {
        "name": dataset.name,
        "task": task.name,
        "examples": len(dataset.y),
        "official_examples": source.num_examples,
        **_describe_targets(dataset, task),
        "shape": list(dataset.x.shape[1:]),
        "kind": str(dataset.x.dtype).removeprefix("torch."),
        "mean": mean,
        "deviation": deviation,
        "scaling": {
            "mean": list(dataset.scaling.mean),
            "deviation": list(dataset.scaling.deviation),
        },
        "owners": None if dataset.owners is None else len(dataset.owners.unique()),
        "sources": [str(file) for file in dataset.sources],
        "official": compare_sources(dataset.sources, source),
        "cache": None if dataset.cache is None else str(dataset.cache),
        "cache_bytes": _size_of(dataset.cache),
        "notes": list(dataset.notes),
    }


def _describe_targets(dataset: Dataset, task: Task) -> dict[str, Any]:
    """What is to be learned: its form, and the classes or the range it has."""
    y, number = dataset.y, dataset.num_outputs
    is_single = y.dim() == 1
    by_class = _by_class(dataset) if task.has_classes else None
    return {
        "classes": number if task.has_classes else None,
        "outputs": number,
        "target_shape": list(y.shape[1:]),
        "target_kind": dtype_of(y),
        "scored_targets": task.count(y),
        "target_range": _range(y) if y.is_floating_point() else None,
        "examples_by_class": by_class if is_single else None,
        "targets_by_class": None if is_single else by_class,
    }


def _by_class(dataset: Dataset) -> dict[str, int]:
    names = dataset.classes or tuple(map(str, range(dataset.num_outputs)))
    scored = dataset.y[dataset.y != IGNORED]
    counts = torch.bincount(scored, minlength=dataset.num_outputs).tolist()
    return dict(zip(names, counts, strict=True))


def _range(y: Tensor) -> dict[str, float]:
    values = y.double()
    return {"min": float(y.min()), "mean": float(values.mean()), "max": float(y.max())}


def compare_sources(files: tuple[Path, ...], source: Source) -> str:
    """Whether these are exactly the published files, in words."""
    downloads = {download.name: download for download in source.downloads}
    if not files or not all(file.name in downloads for file in files):
        return "not compared: these are not the published files themselves"
    for file in files:
        problem = compare(file, downloads[file.name])
        if problem:
            return f"no: {file.name} has {problem}"
    if not all(downloads[file.name].checksum for file in files):
        return "not verified: the size is right, but no checksum is known"
    return "yes: checksum verified"


def class_table(found: dict[str, Any]) -> Table:
    """How many examples each class has, or how many targets."""
    what = "examples" if found["examples_by_class"] else "targets"
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("class")
    table.add_column(what, justify="right")
    for name, count in found[f"{what}_by_class"].items():
        table.add_row(name.replace("[", "\\["), f"{count:,}")
    return table


def facts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What ``describe`` found, in words, as pairs of title and text."""
    examples, official = found["examples"], found["official_examples"]
    differs = official is not None and examples != official
    yield (
        "examples",
        f"{examples:,}" + (f" (official: {official:,})" if differs else ""),
    )
    yield from _target_facts(found)
    yield "shape", f"{' x '.join(map(str, found['shape']))}, {found['kind']}"
    if found["mean"]:
        yield "mean", _numbers(found["mean"])
        yield "deviation", _numbers(found["deviation"])
    if found["kind"] == "uint8":
        mean, deviation = found["scaling"]["mean"], found["scaling"]["deviation"]
        scaled = f"(x / 255 - {_numbers(mean)}) / {_numbers(deviation)}"
        is_plain = set(mean) == {0.0} and set(deviation) == {1.0}
        yield "a model takes", "x / 255" if is_plain else scaled
    if found["owners"] is not None:
        yield "owners", f"{found['owners']:,}"
    sources = found["sources"]
    if sources:
        more = f" and {len(sources) - 1:,} more" if len(sources) > 1 else ""
        yield "from", f"{sources[0]}{more}"
        yield "official files", found["official"]
    if found["cache"]:
        yield "decoded in", f"{found['cache']} ({size(found['cache_bytes'])})"
    for note in found["notes"]:
        yield "note", note


def _target_facts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What is to be learned, in words."""
    if found["classes"]:
        yield "classes", f"{found['classes']}"
    else:
        yield "outputs", f"{found['outputs']}"
    if found["target_shape"] or not found["classes"]:
        each = " x ".join(map(str, found["target_shape"])) or "one number"
        yield "targets", f"{each}, {found['target_kind']}"
    if found["scored_targets"] != found["examples"]:
        yield "scored targets", f"{found['scored_targets']:,}"
    if found["target_range"]:
        low, mean, high = found["target_range"].values()
        yield "target range", f"{low:.4g} to {high:.4g}, mean {mean:.4g}"


def _moments(x: Tensor) -> tuple[list[float], list[float]]:
    """Mean and deviation of each channel; two empty lists for tokens."""
    if x.dtype == torch.int64:
        return [], []
    total = squares = torch.zeros(1, dtype=torch.float64)
    has_channels = x.dim() > 2
    for part in x.split(CHUNK):
        values = part.double() / (255 if x.dtype == torch.uint8 else 1)
        # (channels, everything else), or everything in one row
        rows = values.transpose(0, 1).flatten(1) if has_channels else values.view(1, -1)
        total = total + rows.sum(1)
        squares = squares + rows.square().sum(1)
    count = x.numel() / len(total)
    mean = total / count
    deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
    return mean.tolist(), deviation.tolist()


def _size_of(folder: Path | None) -> int | None:
    if folder is None:
        return None
    return sum(file.stat().st_size for file in folder.iterdir())


def _numbers(values: list[float]) -> str:
    shown = ", ".join(f"{value:.4g}" for value in values)
    return f"({shown})" if len(values) > 1 else shown
