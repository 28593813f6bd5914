"""Weights & Biases: a run of the project ``fedspu``, or of WANDB_PROJECT."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb


class _Wandb:
    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedspu"),
            name=folder.name,
            dir=str(folder),
            config=dict(settings),
        )

    def log(self, t: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=t)

    def close(self, summary: Mapping[str, float]) -> None:
        self.run.summary.update(dict(summary))
        self.run.finish()


begin = _Wandb
