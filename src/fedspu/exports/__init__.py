"""A client's model as one file for inference; one file here for each format."""

from dataclasses import dataclass

from fedspu.errors import SettingsError
from fedspu.settings_text import nearest


@dataclass(frozen=True)
class Format:
    """The ending of a format's files, and what can run them."""

    suffix: str
    runs_on: str


FORMATS = {
    "safetensors": Format(".safetensors", "PyTorch, with the model's code"),
    "onnx": Format(".onnx", "ONNX Runtime and others, without PyTorch"),
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
