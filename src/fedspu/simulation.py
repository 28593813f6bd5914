"""Play a whole federated run on this machine: what ``fedspu run`` calls."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from fedspu import models
from fedspu.core.neurons import load_state
from fedspu.core.types import State
from fedspu.data import Dataset, from_arrays, load
from fedspu.engines.local import LocalEngine
from fedspu.errors import SettingsError
from fedspu.federation.plan import Build, Plan, build_model, make_plan
from fedspu.federation.run import Accuracies, RoundReport, play
from fedspu.federation.server import Federation
from fedspu.federation.store import (
    Checkpoint,
    RunFolder,
    read_checkpoint,
    read_global,
    read_lines,
    read_personal,
)
from fedspu.methods import find_method
from fedspu.reports.record import record_round, summarise
from fedspu.settings import DataSettings, Settings, flatten, make_settings, read_toml

Watch = Callable[[Plan, RoundReport], None]
"""Called after every round, once it is saved."""


@dataclass(frozen=True)
class Run:
    """A finished run."""

    plan: Plan
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    last: Checkpoint

    def personal_model(self, client: int) -> nn.Module:
        """The model this client would use now, ready, in eval mode."""
        _check_client(client, self.plan.num_clients)
        memory = self.last.memories.get(client)
        own = (memory and memory.own) or self.plan.initial
        state = self.plan.method.judge(self.last.federation.global_state, own)
        return _ready(self.plan.build, state)

    def global_model(self) -> nn.Module:
        """The server's model, ready, in eval mode."""
        return _ready(self.plan.build, self.last.federation.global_state)


def simulate(
    settings: Settings | Mapping[str, Any],
    *,
    model: Build | None = None,
    data: tuple[Any, Any] | None = None,
    watch: Watch | None = None,
) -> Run:
    """Play one federated run from the beginning.

    ``settings`` may be a mapping of (dotted or nested) names to values. ``model``, a
    function that builds it, and ``data``, arrays or tensors (x, y), go before what the
    settings name. A run folder is written if the settings say where (``out``).
    """
    plan = lay_out(settings, model, data)
    start = Checkpoint(Federation(0, plan.initial), Accuracies(), {})
    if plan.settings.out is None:
        return _play(plan, start, None, watch)
    folder = RunFolder.create(
        plan.settings.out,
        plan.settings.to_toml(),
        plan.initial,
        _fingerprint(plan.data),
    )
    try:
        return _play(plan, start, folder, watch)
    except (Exception, KeyboardInterrupt):
        if folder.round == 0:  # nothing was computed, so nothing is left
            folder.remove()
        raise
    finally:
        folder.close()


def resume(
    run_dir: Path | str,
    *,
    model: Build | None = None,
    data: tuple[Any, Any] | None = None,
    watch: Watch | None = None,
) -> Run:
    """Go on with an interrupted run, to the same bits as one never interrupted."""
    path = Path(run_dir)
    folder = RunFolder.open(path)
    try:
        start = read_checkpoint(path)
        settings = {**read_toml(path / "settings.toml"), "out": str(path)}
        plan = lay_out(settings, model, data)
        folder.check_same(plan.initial, _fingerprint(plan.data))
        return _play(plan, start, folder, watch)
    finally:
        folder.close()


def load_personal(
    run_dir: Path | str, client: int, build: Build | None = None
) -> nn.Module:
    """The model that a client of a saved run would use now, ready, in eval mode.

    ``build`` makes the model; it can be left out for one that fedspu can find by name.
    """
    path = Path(run_dir)
    own, global_state = read_personal(path, client), read_global(path)
    given = read_toml(path / "settings.toml")
    _check_client(client, int(given["clients"]["number"]))
    judge = find_method(given["method"]["name"]).judge
    if build is None:
        name, settings = given["model"], make_settings(given)
        data = load(settings.data.name, settings.data.dir)
        build = partial(models.build, name, data.num_classes)
    return _ready(build, judge(global_state, own))


def lay_out(
    settings: Settings | Mapping[str, Any],
    model: Build | None = None,
    data: tuple[Any, Any] | None = None,
) -> Plan:
    """The plan of a run: data loaded, divided and checked, model built and mapped."""
    given = settings if isinstance(settings, Mapping) else settings.model_dump()
    flat = dict(flatten(given))
    dataset = _dataset(flat, data)
    if data is not None:
        flat["data.name"] = dataset.name
    if model is not None:
        flat["model"] = f"{model.__module__}:{getattr(model, '__qualname__', model)}"
    chosen = make_settings(flat, dataset.defaults)
    build = model or partial(models.build, chosen.model, dataset.num_classes)
    return make_plan(chosen, dataset, build)


def _dataset(flat: Mapping[str, Any], data: tuple[Any, Any] | None) -> Dataset:
    if data is not None:
        return from_arrays(*data)
    folder = flat.get("data.dir")
    name = str(flat.get("data.name", DataSettings().name))
    return load(name, Path(folder) if folder else None)


def _play(
    plan: Plan, start: Checkpoint, folder: RunFolder | None, watch: Watch | None
) -> Run:
    path = folder.path if folder else None
    rounds = read_lines(path, "rounds.jsonl") if path else []
    times = read_lines(path, "times.jsonl") if path else []
    engine = LocalEngine(plan, start.memories)
    federation, accuracies = start.federation, start.accuracies
    with one_thread():
        began = perf_counter()
        for report in play(plan, engine, federation, accuracies):
            federation, accuracies = report.federation, report.accuracies
            ended = perf_counter()
            lines = record_round(plan, report, ended - began)
            began = ended
            rounds += lines["rounds.jsonl"]
            times += lines["times.jsonl"]
            if folder:
                changed = {client: engine.memories[client] for client in report.answers}
                folder.save(federation, accuracies, changed, lines)
            if watch:
                watch(plan, report)
    summary = summarise(plan, federation, accuracies, rounds, times)
    if folder:
        folder.finish(summary)
    last = Checkpoint(federation, accuracies, engine.memories)
    return Run(plan, summary, rounds, last)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for each client turn: results must not depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fingerprint(data: Dataset) -> str:
    """A few letters that tell data from other data: by its labels and shape."""
    labels = sha256(data.y.numpy().tobytes()).hexdigest()[:16]
    return f"{tuple(data.x.shape)} {data.x.dtype} {labels}"


def _check_client(client: int, number: int) -> None:
    if not 0 <= client < number:
        raise SettingsError(f"client = {client}: expected 0 to {number - 1}")


def _ready(build: Build, state: State) -> nn.Module:
    with torch.random.fork_rng():
        model = build_model(build)
    load_state(model, state)
    return model.eval()
