"""Write a ready model as a file for inference, once it has been checked."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

from torch import Tensor, nn

from fedspu.engines.machine import one_thread
from fedspu.errors import StorageError
from fedspu.exports import (
    FORMATS,
    as_onnx,
    as_safetensors,
    as_torch_export,
    check_request,
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
"""What has ``write`` and ``load`` for each of ``FORMATS``."""


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
