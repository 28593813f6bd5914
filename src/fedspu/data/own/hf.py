"""A data set that Hugging Face ``datasets`` saved with ``save_to_disk``.

It is read by that library: the extra ``hf``. All its splits are joined, since every
client makes its own. One column is the label and one the input: an image, or an array
of bytes, of whole numbers (tokens) or of floats, with the same shape in every row;
tokens may be rows of unequal lengths, which are filled up. Without a label, a task may
make targets from the input. A column ``client``, if there is one, says who each row is
from.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedspu.data import bounds
from fedspu.data.cache import Arrays, cache_place, cached
from fedspu.data.dataset import NO_TARGETS, Dataset
from fedspu.data.files import read, reason, shown
from fedspu.data.formats import image
from fedspu.data.own.arrays import MADE_PADDING, PADDING, padded
from fedspu.errors import DataError, FedSPUError, how_to_install

RECIPE = "hf, 2"
"""To be changed whenever ``_decode`` gives other arrays: caches depend on it."""

LABELS = ("label", "labels", "y")
INPUTS = ("image", "img", "x", "input_ids", "pixel_values")
"""The columns to choose if several fit, in order of preference."""

WANTED = "expected a folder that save_to_disk of Hugging Face datasets wrote"


def load(folder: Path) -> Dataset:
    """The rows of a saved data set; FOLDER@64x48 stretches its images to that size."""
    folder, size = image.part_size(folder)
    if not any((folder / n).is_file() for n in ("state.json", "dataset_dict.json")):
        raise DataError(f"{shown(folder)} holds no saved data set; {WANTED}")
    found = sorted(folder.rglob("*"))
    for file in found:
        if not file.is_file() and not file.is_dir():
            raise DataError(
                f"{shown(file)} is a broken link, or not an ordinary file; {WANTED}; "
                "remove it"
            )
    files = [file for file in found if file.is_file()]
    recipe = f"{RECIPE}, {image.RECIPE}, {size}"
    arrays = cached("hf", recipe, files, lambda: _decoded(folder, size))
    return replace(
        _dataset(folder, arrays),
        sources=tuple(files),
        cache=cache_place("hf", recipe, files),
    )


def _decoded(folder: Path, size: image.Size | None) -> Arrays:
    try:
        return _decode(folder, size)
    except FedSPUError:
        raise
    except Exception as error:  # damage, which the library tells in many ways
        raise DataError(
            f"{shown(folder)} cannot be read ({reason(error)}); {WANTED}; save it again"
        ) from None


def _decode(folder: Path, size: image.Size | None) -> Arrays:
    library = _library()
    table = _open(library, folder)
    if table.data.nbytes > bounds.half_of_memory():
        raise DataError(
            f"{shown(folder)} holds {table.data.nbytes:,} bytes; expected at most "
            f"{bounds.half_of_memory():,}, half of this machine's memory"
        )
    column = _choose(table, folder, INPUTS, _is_input, "image or array")
    arrays: Arrays = {}
    label = None
    has_label = any(_is_label(name, table.features[name]) for name in table.features)
    if has_label or not _leaf(table.features[column]).startswith("int"):  # not tokens
        label = _choose(table, folder, LABELS, _is_label, "label")
        arrays["y"] = _numbers(_rows(table, label), table, label, folder)
    if isinstance(table.features[column], library.Image):
        arrays["x"] = _images(library, table, column, folder, size)
    elif size is None:
        rows = _rows(table, column)
        padding = MADE_PADDING if label is None else PADDING
        even = padded(rows, padding, shown(folder), column)
        if even is not rows:
            arrays["padding"] = np.array(padding)
        arrays["x"] = _numbers(even, table, column, folder)
    else:
        raise DataError(
            f"{shown(folder)}: column {column} holds no images; a size after the "
            "folder is only for images; leave it out"
        )
    if label is not None and hasattr(table.features[label], "names"):
        arrays["classes"] = np.array(table.features[label].names)
    if "client" in table.features:
        arrays["owners"] = np.unique(table["client"][:], return_inverse=True)[1]
    return arrays


def _dataset(folder: Path, arrays: Arrays) -> Dataset:
    x = torch.from_numpy(arrays["x"])
    y = torch.from_numpy(arrays["y"]) if "y" in arrays else NO_TARGETS
    classes = tuple(arrays["classes"].tolist()) if "classes" in arrays else ()
    owners = torch.from_numpy(arrays["owners"]) if "owners" in arrays else None
    return Dataset(
        name=shown(folder),
        x=x.unsqueeze(1) if x.dtype == torch.uint8 and x.ndim == 3 else x,
        y=y,
        num_classes=len(classes),
        classes=classes,
        owners=owners,
        padding=int(arrays["padding"]) if "padding" in arrays else None,
    )


def _open(library: ModuleType, folder: Path) -> Any:
    saved = library.load_from_disk(str(folder))
    if isinstance(saved, library.DatasetDict):
        saved = library.concatenate_datasets([saved[name] for name in sorted(saved)])
    return saved


def _choose(
    table: Any, folder: Path, preferred: Sequence[str], fits: Any, what: str
) -> str:
    """The one column that fits, or the most preferred of several."""
    fitting = [name for name in table.features if fits(name, table.features[name])]
    chosen = [name for name in preferred if name in fitting][:1] or fitting
    if len(chosen) != 1:
        found = ", ".join(f"{name} ({kind})" for name, kind in table.features.items())
        raise DataError(
            f"{shown(folder)} holds {found}; expected one {what} column; rename or "
            f"remove columns, so that one is called {preferred[0]}, and save it again"
        )
    return chosen[0]


def _is_label(name: str, feature: Any) -> bool:
    return type(feature).__name__ == "ClassLabel" or (
        name in LABELS and _leaf(feature).startswith(("int", "uint", "float"))
    )


def _is_input(name: str, feature: Any) -> bool:
    kind = type(feature).__name__
    is_number = _leaf(feature).startswith(("int", "uint", "float"))
    return kind == "Image" or (is_number and kind not in ("Value", "ClassLabel"))


def _leaf(feature: Any) -> str:
    """What the innermost lists of a column hold."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    return str(getattr(feature, "dtype", ""))


def _images(
    library: ModuleType,
    table: Any,
    column: str,
    folder: Path,
    size: image.Size | None,
) -> image.Pixels:
    images, names = [], []
    undecoded = table.select_columns([column])
    undecoded = undecoded.cast_column(column, library.Image(decode=False))
    for position, row in enumerate(undecoded):
        names.append(f"{folder}: {column}[{position}]")
        file = row[column]
        if file is None:
            raise DataError(
                f"{shown(names[-1])} is empty; expected an image; remove the row"
            )
        content = file["bytes"] or read(Path(file["path"]), bounds.IMAGE_FILE)
        images.append(image.decode(content, names[-1], size))
    return image.stack(images, names)


def _rows(table: Any, column: str) -> list[Any]:
    return list(table.select_columns([column]).with_format("numpy")[:][column])


def _numbers(rows: Any, table: Any, column: str, folder: Path) -> NDArray[Any]:
    """The rows of a column as bytes, as int64 or as float32."""
    name = f"{shown(folder)}: {column}"
    for position, row in enumerate(rows):
        if np.shape(row) != np.shape(rows[0]):
            raise DataError(
                f"{name}[0] has shape {np.shape(rows[0])}, {column}[{position}] has "
                f"{np.shape(row)}; expected one shape; pad or cut them, and save again"
            )
    values = np.asarray(rows)
    held = _leaf(table.features[column])
    if held.startswith("float"):
        return values.astype(np.float32)
    if not np.issubdtype(values.dtype, np.integer):  # missing ones make floats
        raise DataError(f"{name} has missing values; fill them, and save it again")
    return values.astype(np.uint8 if held == "uint8" else np.int64)


def _library() -> ModuleType:
    try:
        import datasets
    except ImportError:
        raise DataError(
            "reading a saved Hugging Face data set needs their datasets library; "
            f"install it with: {how_to_install('hf')}"
        ) from None
    return datasets  # type: ignore[no-any-return]  # it ships no type hints
