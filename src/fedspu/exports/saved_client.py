"""Export the model of a client of a saved run: what ``fedspu export`` calls."""

import json
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedspu.data import FROM_MEMORY
from fedspu.data.dataset import Dataset
from fedspu.data.own.pairs import Data
from fedspu.errors import DataError, SettingsError
from fedspu.exports import check_format, check_request, default_file
from fedspu.exports.facts import Facts
from fedspu.exports.write import Exportable, Exported, write_export
from fedspu.federation.plan import Build, Plan
from fedspu.federation.storage.saved_run import SavedRun
from fedspu.methods.method import Method
from fedspu.neurons.slim import slim_model
from fedspu.neurons.table import Active
from fedspu.prepare import fingerprint
from fedspu.random_streams import torch_stream
from fedspu.runs import SavedClient, open_client
from fedspu.settings_text import flatten
from fedspu.tasks.task import Task, dtype_of


def export(
    run_dir: Path | str,
    client: int,
    format: str = "safetensors",
    out: Path | str | None = None,
    *,
    build: Build | None = None,
    data: Data | None = None,
    method: Method | None = None,
    task: Task | None = None,
    trust: bool = False,
    force: bool = False,
) -> Exported:
    """Write a client's personal model as a file for inference, checked beforehand.

    ``format`` is safetensors, onnx or torch-export. ``out`` is the file; by default it
    is named by run and client, in the working folder. Whatever was given to
    ``simulate`` in Python must be given again, the model as ``build``. Code that the
    run's settings name is imported only with ``trust``. With ``force``, a file that
    exists is replaced.
    """
    check_format(format)
    run_dir = Path(run_dir)
    out = default_file(run_dir, client, format) if out is None else Path(out)
    check_request(format, out, force)
    if data is None:
        _refuse_data_in_memory(run_dir, client, format)
    found = open_client(
        run_dir, client, build, data, method=method, task=task, trust=trust
    )
    return write_export(exportable(found, data), format, out, force=force)


def _refuse_data_in_memory(run_dir: Path, client: int, format: str) -> None:
    if dict(flatten(SavedRun(run_dir).index.settings)).get("data.name") == FROM_MEMORY:
        raise SettingsError(
            f"{run_dir}: this run was given its data in Python, and a file is checked "
            "on real examples; export it in Python too: fedspu.export("
            f"{str(run_dir)!r}, {client}, {format!r}, data=(x, y)), with build= if the "
            "model was given too"
        )


def exportable(found: SavedClient, data: Data | None) -> Exportable:
    """The client's ready model, its own test examples, and what the model is."""
    plan, client = found.plan, found.client
    examples = found.divided(data)
    if fingerprint(examples.data) != found.saved.index.data:
        raise DataError(
            f"{found.saved.path} was played with other data (targets or shapes differ "
            f"from {examples.data.name}); give it the same data"
        )
    if plan.method.judged_by == "own" and not found.took_part:
        warnings.warn(
            f"client {client} has not taken part in any round so far: its model is w0, "
            "which has learned nothing",
            stacklevel=3,
        )
    model, data_ = found.model(examples), examples.data
    part = examples.part(client, "test")
    t = found.federation.rounds_played
    return described(plan, client, t, found.kept(), model, data_, part)


def described(
    plan: Plan,
    client: int,
    t: int,
    kept: Active | None,
    model: nn.Module,
    data: Dataset,
    part: tuple[Tensor, Tensor],
) -> Exportable:
    """A client's model after round t, with all that a file of it should say.

    ``kept`` are the neurons that a slim model has, ``part`` the client's test examples.
    """
    x, y = part

    def new_model() -> nn.Module:
        with torch_stream(plan.settings.seed, "workspace"):  # its values do not matter
            made = plan.build()
        return made if kept is None else slim_model(made, plan.neurons, kept)

    facts = {**_facts_of_run(plan, client, t, kept), **_facts_of_data(data, x)}
    return Exportable(model, new_model, plan.task, x, y, facts)


def _facts_of_run(plan: Plan, client: int, t: int, kept: Active | None) -> Facts:
    facts: dict[str, Any] = {
        "fedspu": version("fedspu"),
        "model": plan.settings.model,
        "task": plan.task.name,
        "method": plan.method.name,
        "client": client,
        "capacity": f"{float(plan.capacity(client)):g}",
        "seed": plan.settings.seed,
        "round": t,
    }
    if plan.method.remodel is not None:
        facts["remodelled"] = plan.method.name
    if kept is not None:
        listed = {name: indices.tolist() for name, indices in kept.items()}
        facts["kept"] = json.dumps(listed)
    return {name: str(value) for name, value in facts.items()}


def _facts_of_data(data: Dataset, x: torch.Tensor) -> Facts:
    """What a user of the file must know to prepare inputs and to read outputs."""
    facts = {
        "num_outputs": str(data.num_outputs),
        "input_shape": ",".join(map(str, x.shape[1:])),
        "input_dtype": dtype_of(x),
    }
    if data.x.dtype == torch.uint8:
        facts["input_scaling"] = "(byte / 255 - mean) / deviation, for each channel"
        facts["input_mean"] = json.dumps(data.scaling.mean)
        facts["input_deviation"] = json.dumps(data.scaling.deviation)
    if data.classes:
        facts["classes"] = json.dumps(data.classes)
    return facts
