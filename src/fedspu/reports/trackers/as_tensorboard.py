"""TensorBoard: event files in ``tensorboard/`` of the run folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class _TensorBoard:
    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.writer: Any = SummaryWriter(str(folder / "tensorboard"))
        rows = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
        self.writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}")

    def log(self, t: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"round/{name}", value, t)
        self.writer.flush()

    def close(self, summary: Mapping[str, float]) -> None:
        for name, value in summary.items():
            self.writer.add_scalar(f"summary/{name}", value)
        self.writer.close()


begin = _TensorBoard
