"""Play a whole federated run on this machine: what ``fedspu run`` calls."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import finalize

import torch
from torch import nn

from fedspu import models
from fedspu.data import Dataset, from_arrays, load
from fedspu.engines.local import LocalEngine
from fedspu.engines.machine import forget_peak, peak_rss_bytes, room_here, room_needed
from fedspu.engines.workers import WorkersEngine, can_fork, window
from fedspu.errors import SettingsError
from fedspu.federation.client import Memory, Which, ready_model
from fedspu.federation.folder import (
    Checkpoint,
    RunFolder,
    read_checkpoint,
    read_global,
    read_index,
    read_lines,
    read_personal,
)
from fedspu.federation.memory import Memories, Shelf
from fedspu.federation.plan import Build, Plan, build_model, make_plan
from fedspu.federation.record import Clock, record_round, summarise
from fedspu.federation.rounds import Accuracies, RoundReport, play
from fedspu.federation.server import Federation
from fedspu.federation.workbench import Workspace
from fedspu.methods import choose_method
from fedspu.neurons.blocks import load_state
from fedspu.settings import DataSettings, Settings, flatten, make_settings, read_toml
from fedspu.units import size

Watch = Callable[[Plan, RoundReport], None]
"""Called after every round, once it is saved."""


@dataclass(frozen=True)
class Run:
    """A finished run."""

    plan: Plan
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    times: list[dict[str, Any]]
    last: Checkpoint

    def personal_model(self, client: int) -> nn.Module:
        """The model this client would use now, ready, in eval mode."""
        return self._model(client, "personal")

    def global_model(self, client: int = 0) -> nn.Module:
        """The server's model, ready, in eval mode.

        As ``client`` would judge it: in heterofl norm statistics are a client's own.
        """
        return self._model(client, "global")

    def _model(self, client: int, which: Which) -> nn.Module:
        _check_client(client, self.plan.num_clients)
        memory = self.last.memories.get(client)
        return _ready(self.plan, self.last.federation, client, memory, which)


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
    _foresee(plan)
    begin = Federation(0, plan.initial)
    cache = 1e6 * plan.settings.store.cache
    if plan.settings.out is None:
        shelf = Shelf(None)
        if _num_workers(plan) > 1:
            # Workers share what clients keep; it goes with the run.
            room = TemporaryDirectory(prefix="fedspu-")
            shelf = Shelf(Path(room.name), cache)
            finalize(shelf, room.cleanup)
        start = Checkpoint(begin, Accuracies(), Memories(shelf))
        return _play(plan, start, None, watch)
    folder = RunFolder.create(
        plan.settings.out,
        plan.settings.to_toml(),
        plan.initial,
        _fingerprint(plan.data),
        cache,
    )
    try:
        memories = Memories(folder.shelf, is_saved=True)
        return _play(plan, Checkpoint(begin, Accuracies(), memories), folder, watch)
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
    workers: int | None = None,
) -> Run:
    """Go on with an interrupted run, to the same bits as one never interrupted.

    With another number of ``workers``, if given: that changes nothing but the time.
    """
    path = Path(run_dir)
    folder = RunFolder.open(path)
    try:
        settings = {**read_toml(path / "settings.toml"), "out": str(path)}
        if workers is not None:
            settings["workers"] = workers
        plan = lay_out(settings, model, data)
        folder.shelf.cache = 1e6 * plan.settings.store.cache
        start = read_checkpoint(path, folder.shelf)
        folder.check_same(plan.initial, _fingerprint(plan.data))
        return _play(plan, start, folder, watch)
    finally:
        folder.close()


def load_personal(
    run_dir: Path | str,
    client: int,
    build: Build | None = None,
    data: tuple[Any, Any] | None = None,
) -> nn.Module:
    """The model that a client of a saved run would use now, ready, in eval mode.

    ``build`` makes the model; it can be left out for one that fedspu can find by name.
    ``data`` are the arrays of a run that was given some; needed by methods whose models
    are slices of the full one, or take a client's examples to be ready.
    """
    path = Path(run_dir)
    memory, global_state = read_personal(path, client), read_global(path)
    given = read_toml(path / "settings.toml")
    settings = make_settings(given)
    _check_client(client, settings.clients.number)
    method = choose_method(settings.method)
    is_made_ready = method.settle or method.adapts(settings.method)
    if method.is_slim or method.remodel or is_made_ready:
        plan = lay_out(given, build, data)
        federation = Federation(read_index(path)["round"], global_state)
        return _ready(plan, federation, client, memory, "personal")
    if build is None:
        dataset = _dataset(dict(flatten(given)), data)
        build = partial(models.build, settings.model, dataset.num_classes)
    own = memory.own
    state = own.state if own and method.judges_own else global_state
    with torch.random.fork_rng():
        model = build_model(build)
    load_state(model, state)
    return model.eval()


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


FROM_MEMORY = "arrays"
"""The name of data that was given as arrays."""


def _dataset(flat: Mapping[str, Any], data: tuple[Any, Any] | None) -> Dataset:
    if data is not None:
        return from_arrays(*data)
    folder = flat.get("data.dir")
    name = str(flat.get("data.name", DataSettings().name))
    if name == FROM_MEMORY:
        raise SettingsError(
            f"data.name = {name!r}: expected arrays:FILE.npz; a run that was given "
            "arrays in Python takes them again as data=(x, y)"
        )
    return load(name, Path(folder) if folder else None)


def _play(
    plan: Plan, start: Checkpoint, folder: RunFolder | None, watch: Watch | None
) -> Run:
    path = folder.path if folder else None
    rounds = read_lines(path, "rounds.jsonl") if path else []
    times = read_lines(path, "times.jsonl") if path else []
    forget_peak()
    federation, accuracies, memories = (
        start.federation,
        start.accuracies,
        start.memories,
    )
    saying = folder.saying_what_is_saved() if folder else nullcontext()
    with one_thread(), saying, _engine(plan, memories) as engine:
        clock = Clock(engine.num_workers)
        for report in play(plan, engine, federation, accuracies):
            federation, accuracies = report.federation, report.accuracies
            lines = record_round(plan, report, clock.round(report))
            rounds += lines["rounds.jsonl"]
            times += lines["times.jsonl"]
            if folder:
                changed = {k: memories.entries[k] for k in report.answers}
                folder.save(federation, accuracies, changed, lines)
            if watch:
                watch(plan, report)
    peak = max(peak_rss_bytes(), engine.peak)
    summary = summarise(
        plan, federation, accuracies, rounds, times, engine.num_workers, peak
    )
    if folder:
        folder.finish(summary)
    last = Checkpoint(federation, accuracies, memories)
    return Run(plan, summary, rounds, times, last)


@contextmanager
def _engine(plan: Plan, memories: Memories) -> Iterator[LocalEngine | WorkersEngine]:
    """The engine that the settings ask for."""
    number = _num_workers(plan)
    _remark_on_workers(plan)
    engine: LocalEngine | WorkersEngine | None = None
    if number > 1:
        try:
            engine = WorkersEngine(plan, memories, number)
        except OSError as error:  # no memory to share, or no more processes
            warnings.warn(
                f"workers = {number}: one process, as no other can start ({error})",
                stacklevel=3,
            )
    engine = engine or LocalEngine(plan, memories)
    try:
        yield engine
    finally:
        engine.close()


def _num_workers(plan: Plan) -> int:
    """How many processes play clients."""
    if _why_alone(plan):
        return 1
    return min(plan.settings.workers or num_cores(), plan.settings.clients.per_round)


def _why_alone(plan: Plan) -> str:
    """Why one process has to play all clients; nothing if it has not."""
    if not can_fork():
        return "this system cannot fork"
    return f"clients are on {plan.device}" if plan.device.type != "cpu" else ""


def _remark_on_workers(plan: Plan) -> None:
    asked, reason = plan.settings.workers or 1, _why_alone(plan)
    if reason and asked > 1:
        warnings.warn(f"workers = {asked}: one process, as {reason}", stacklevel=4)
    elif asked > num_cores():
        warnings.warn(
            f"workers = {asked}: more than the {num_cores()} cores here; that is not "
            "quicker",
            stacklevel=4,
        )


def _foresee(plan: Plan) -> None:
    """Say before a run begins that RAM or disk will be short."""
    settings, number = plan.settings, _num_workers(plan)
    reached = min(plan.num_clients, settings.rounds * settings.clients.per_round)
    needed = room_needed(
        model=sum(tensor.nbytes for tensor in plan.initial.values()),
        num_kept=reached if plan.method.keeps_own else 0,
        per_round=settings.clients.per_round,
        num_workers=number,
        cache=1e6 * settings.store.cache,
        waiting=min(settings.clients.per_round, window(number)),
    )
    here = room_here(settings.out)
    if needed.disk > here.disk:
        warnings.warn(
            f"up to {size(needed.disk)} of disk for the models of {reached} clients, "
            f"and {size(here.disk)} are free at {settings.out}; choose another --out",
            stacklevel=3,
        )
    if needed.ram > here.ram:
        warnings.warn(
            f"about {size(needed.ram)} of RAM beside data and training steps, and "
            f"{size(here.ram)} are free; lower --workers or store.cache",
            stacklevel=3,
        )


def num_cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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


def _ready(
    plan: Plan,
    federation: Federation,
    client: int,
    memory: Memory | None,
    which: Which,
) -> nn.Module:
    with one_thread():
        bench = ready_model(
            plan,
            Workspace(plan),
            federation.round,
            client,
            memory,
            federation.global_state,
            which,
        )
    return bench.model.eval()
