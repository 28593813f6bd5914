"""Write a ready model as a file for inference, once it has been checked."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

from torch import Tensor, nn

from fedspu.engines.machine import one_thread
from fedspu.errors import SettingsError, StorageError
from fedspu.exports import (
    FORMATS,
    as_onnx,
    as_safetensors,
    as_torch_export,
    check_format,
)
from fedspu.exports.compare import Checked, compare
from fedspu.exports.facts import Facts
from fedspu.files import sync_folder, write_whole
from fedspu.tasks.task import Task

WRITERS: dict[str, ModuleType] = {
    "safetensors": as_safetensors,
    "onnx": as_onnx,
    "torch-export": as_torch_export,
}
"""What has ``check_installed``, ``write`` and ``load`` for each of ``FORMATS``."""


@dataclass(frozen=True)
class Exportable:
    """A ready model in eval mode, with real examples to check its file on.

    ``new_model`` makes a model of the same form with other values. ``facts`` say what
    the model is; every format keeps them.
    """

    model: nn.Module
    new_model: Callable[[], nn.Module]
    task: Task
    x: Tensor
    y: Tensor
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True)
class Exported:
    """A file that was written, and how it was checked."""

    file: Path
    format: str
    num_bytes: int
    facts: Facts
    checked: Checked


def check_request(format: str, out: Path, force: bool) -> None:
    """Refuse a format or a place that cannot be used, before anything is loaded."""
    check_format(format)
    WRITERS[format].check_installed()
    for name, other in FORMATS.items():
        if name != format and out.suffix == other.suffix:
            raise SettingsError(
                f"--out {out}: {other.suffix} is the ending of --format {name}, but "
                f"the format is {format}; change one of the two"
            )
    if out.is_dir():
        raise SettingsError(f"--out {out}: is a folder; expected a file's name")
    if not out.parent.is_dir():
        raise SettingsError(
            f"--out {out}: there is no folder {out.parent}; make it first"
        )
    if (out.exists() or out.is_symlink()) and not force:
        raise SettingsError(
            f"--out {out}: exists already; choose another name, or add --force (in "
            "Python: force=True) to replace it"
        )


def write_export(
    source: Exportable, format: str, out: Path, *, force: bool = False
) -> Exported:
    """Write a model as one file, whole or not at all, once it is checked.

    The file is made in a temporary place, loaded by its own runtime and compared with
    the model on all of the examples.
    """
    check_request(format, out, force)
    writer, suffix = WRITERS[format], FORMATS[format].suffix
    try:
        with TemporaryDirectory(prefix="fedspu-") as folder, one_thread():
            file = Path(folder) / f"model{suffix}"
            facts = writer.write(source.model, source.x, source.facts, file)
            checked = compare(
                source.model,
                writer.load(file, source.new_model),
                source.task,
                source.x,
                source.y,
                exact=format == "safetensors",
            )
            content = file.read_bytes()
        write_whole(out, content, durable=True)
        sync_folder(out.parent)
    except OSError as error:
        raise StorageError(f"{out}: cannot be written ({error.strerror})") from None
    if checked.changed_predictions:
        warnings.warn(
            f"{checked.changed_predictions} of {checked.num_examples} predictions "
            "differ: two classes have almost the same score there",
            stacklevel=2,
        )
    return Exported(out, format, len(content), facts, checked)
