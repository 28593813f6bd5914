"""A client's model as one file for inference; one file here for each format."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fedspu.errors import SettingsError, how_to_install
from fedspu.settings_text import nearest


@dataclass(frozen=True)
class Format:
    """The ending of a format's files, what can run them, and libraries it needs."""

    suffix: str
    runs_on: str
    needs: tuple[str, ...] = ()


FORMATS = {
    "safetensors": Format(".safetensors", "PyTorch, with the model's code"),
    "onnx": Format(
        ".onnx",
        "ONNX Runtime and others, without PyTorch",
        ("onnx", "onnxscript", "onnxruntime"),
    ),
    "torch-export": Format(".pt2", "PyTorch, without the model's code"),
}
"""The formats by name; this list needs no PyTorch."""


def check_format(name: str) -> None:
    """Refuse a format that does not exist."""
    if name not in FORMATS:
        raise SettingsError(
            f"--format {name}: expected one of {', '.join(FORMATS)}"
            f"{nearest(name, list(FORMATS))}"
        )


def default_file(run_dir: Path, client: int, format: str) -> Path:
    """A name in the working folder, by run and client."""
    name = f"{run_dir.resolve().name}-client-{client}"
    return Path(f"{name}{FORMATS[format].suffix}")


def check_request(format: str, out: Path, force: bool) -> None:
    """Refuse a format or a place that cannot be used, before anything is loaded."""
    check_format(format)
    _check_installed(format)
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


def _check_installed(format: str) -> None:
    for library in FORMATS[format].needs:
        if find_spec(library) is None:
            raise SettingsError(
                f"--format {format} needs {library}, which is not installed; install "
                f"it with: {how_to_install(format)}"
            )
