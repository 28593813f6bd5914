"""MLflow: a run on the server that MLFLOW_TRACKING_URI names, or in a local folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow

LONGEST = 500
"""Characters of a parameter; MLflow refuses longer ones."""


class _MLflow:
    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.run: Any = mlflow.start_run(run_name=folder.name)
        mlflow.log_params({n: str(v)[:LONGEST] for n, v in settings.items()})

    def log(self, t: int, values: Mapping[str, float]) -> None:
        mlflow.log_metrics(dict(values), step=t)

    def close(self, summary: Mapping[str, float]) -> None:
        mlflow.log_metrics({f"summary_{n}": v for n, v in summary.items()})
        mlflow.end_run()


begin = _MLflow
