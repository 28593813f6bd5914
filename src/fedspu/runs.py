"""Play a whole federated run on this machine: what ``fedspu run`` calls."""

import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Never

import torch
from torch import nn

from fedspu.data.examples import DividedData, divide
from fedspu.data.own.pairs import Data
from fedspu.engines.choose import check_space, engine_for, num_workers
from fedspu.engines.machine import (
    forget_peak,
    one_thread,
    peak_rss_bytes,
)
from fedspu.errors import DataError, SettingsError, StorageError
from fedspu.federation.client import Client, Examples, judged_model
from fedspu.federation.client_memory import Shelf
from fedspu.federation.engine import Facts
from fedspu.federation.plan import Build, Plan
from fedspu.federation.plan_file import (
    check_fits,
    describe_plan,
    read_settings,
    restore_plan,
)
from fedspu.federation.record import Clock, record_round, summarise, what_was_lost
from fedspu.federation.rounds import Round, Scores, drop_old_memories, play
from fedspu.federation.server import Federation
from fedspu.federation.storage.run_folder import RunFolder
from fedspu.federation.storage.saved_index import SETTINGS
from fedspu.federation.storage.saved_run import Checkpoint, SavedRun, last_whole
from fedspu.federation.storage.temporary import temporary_shelf
from fedspu.methods.method import Memory, Method, Which
from fedspu.neurons.table import Active, State
from fedspu.prepare import Prepared, choose, dataset_for, fingerprint, prepare
from fedspu.settings import Settings, known_fields
from fedspu.settings_text import flatten
from fedspu.tasks.task import Task

Watch = Callable[[Plan, Round], None]
"""Called after every round, once it is saved."""


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run."""

    plan: Plan
    examples: DividedData
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    times: list[dict[str, Any]]
    last: Checkpoint
    shelf: Shelf

    def __repr__(self) -> str:
        """A few words: what ran, and how well it did."""
        metric = self.plan.task.metric
        score = metric.show(self.summary[f"personal_{metric.name}"])
        return (
            f"Run({self.summary['label']} on {self.summary['dataset']}, "
            f"round {self.summary['rounds_played']}: personal {metric.title} {score})"
        )

    def personal_model(self, client: int) -> nn.Module:
        """The model this client would use now, ready, in eval mode."""
        return self._model(client, "personal")

    def global_model(self, client: int = 0) -> nn.Module:
        """The server's model, ready, in eval mode.

        As ``client`` would judge it: in heterofl norm statistics are a client's own.
        """
        return self._model(client, "global")

    def memory(self, client: int) -> Memory:
        """What a client keeps."""
        return self.shelf.get(client, self.last.federation.last.get(client, 0))

    def _model(self, client: int, which: Which) -> nn.Module:
        check_client(client, self.plan)
        federation = self.last.federation
        return ready_model(
            self.plan,
            self.examples,
            federation.round,
            client,
            self.memory(client),
            federation.shown_state,
            which,
        )


def simulate(
    settings: Settings | Mapping[str, Any] | None = None,
    *,
    model: Build | None = None,
    data: Data | None = None,
    method: Method | None = None,
    task: Task | None = None,
    watch: Watch | None = None,
    **misplaced: Never,
) -> Run:
    """Play one federated run from the beginning.

    ``settings`` may be a mapping of (dotted or nested) names to values. ``model`` (a
    function that builds it), ``data`` (arrays or tensors x, y), ``method`` and ``task``
    replace what the settings name. A run folder is written only if the settings say
    where (``out``).
    """
    if misplaced:
        raise SettingsError(
            f"simulate has no argument {next(iter(misplaced))}; settings go into a "
            "mapping, the first argument, as in simulate({'rounds': 20})"
        )
    prepared = prepare(settings or {}, model=model, data=data, method=method, task=task)
    plan = prepared.plan
    check_space(plan)
    begin = Checkpoint(Federation(0, plan.initial), Scores())
    cache = 1e6 * plan.settings.store.cache
    if plan.settings.out is None:
        return _play(prepared, begin, _shelf_in_memory(plan, cache), None, watch)
    folder = RunFolder.create(
        plan.settings.out,
        plan.settings.to_toml(),
        describe_plan(plan, prepared.sample),
        plan.initial,
        fingerprint(prepared.examples.data),
        cache,
        plan.settings.store.durable,
    )
    try:
        return _play(prepared, begin, folder.shelf, folder, watch)
    except (Exception, KeyboardInterrupt):
        if folder.round == 0:  # no round is saved, so leave no folder
            folder.remove()
        raise
    finally:
        folder.close()


def resume(
    run_dir: Path | str,
    *,
    model: Build | None = None,
    data: Data | None = None,
    method: Method | None = None,
    task: Task | None = None,
    watch: Watch | None = None,
    workers: int | None = None,
    engine: str | None = None,
    ray_address: str | None = None,
    rounds: int | None = None,
    trust: bool | Collection[str] = False,
) -> Run:
    """Resume an interrupted run; it ends with the same bits as one never interrupted.

    Whatever was given to ``simulate`` in Python must be given again. Another number of
    ``workers``, another ``engine`` or ``ray_address`` change only the time.
    ``rounds``: play more rounds than were asked for at first. Code that the run's
    settings name is imported only with ``trust``: True, or the names that may be
    imported, as in package.module:name.
    """
    path = Path(run_dir)
    folder = RunFolder.open(path)
    try:
        saved = folder.saved
        if saved.is_on_devices:
            raise StorageError(
                f"{path} is a run on devices; start it there again, and it goes on"
            )
        given = {
            "model": model,
            "method.name": method,
            "task": task,
            "data.name": data,
        }
        settings = _settings_of(saved, given, trust, "rounds" if rounds else "")
        settings["out"] = str(path)
        elsewhere = {"workers": workers, "engine": engine, "ray_address": ray_address}
        settings |= {name: v for name, v in elsewhere.items() if v is not None}
        if settings.get("engine") != "ray" and ray_address is None:
            settings.pop("ray_address", None)  # of the cluster it was begun on
        if rounds is not None:
            settings["rounds"] = _more(rounds, saved.index.settings)
            _refuse_if_clients_finished(saved)
        prepared = prepare(settings, model=model, data=data, method=method, task=task)
        plan = prepared.plan
        folder.shelf.cache = 1e6 * plan.settings.store.cache
        folder.durable = plan.settings.store.durable
        folder.check_same(plan.initial, fingerprint(prepared.examples.data))
        start = saved.checkpoint()
        check_fits(path, plan, start)
        if rounds is not None:
            folder.extend(plan.settings.to_toml())
        return _play(prepared, start, folder.shelf, folder, watch)
    finally:
        folder.close()


def load_personal(
    run_dir: Path | str,
    client: int,
    build: Build | None = None,
    data: Data | None = None,
    *,
    method: Method | None = None,
    task: Task | None = None,
    trust: bool = False,
) -> nn.Module:
    """The model that a client of a saved run would use now, ready, in eval mode.

    ``build`` makes the model; leave it out if fedspu can find the model by its name.
    ``data`` are the arrays that the run was given, if any; they are only needed for
    methods that use a client's examples to make its model ready. A ``method`` or
    ``task`` that was given to ``simulate`` in Python must be given again. Code that the
    run's settings name is imported only with ``trust``.
    """
    found = open_client(
        run_dir, client, build, data, method=method, task=task, trust=trust
    )
    needs_examples = found.plan.method.ready is not None
    return found.model(found.divided(data) if needs_examples else NoExamples())


def load_global(
    run_dir: Path | str,
    build: Build | None = None,
    data: Data | None = None,
    *,
    client: int = 0,
    method: Method | None = None,
    task: Task | None = None,
    trust: bool = False,
) -> nn.Module:
    """The server's model of a saved run, ready, in eval mode.

    As ``client`` would judge it: in heterofl norm statistics are a client's own, and
    ``data`` is needed for them. All other arguments are those of ``load_personal``.
    """
    which: Which = "global"
    found = open_client(
        run_dir, client, build, data, which, method=method, task=task, trust=trust
    )
    if not found.plan.has_global:
        raise SettingsError(
            f"{run_dir} has no server's model: clients of {found.plan.method.name} "
            "keep all or some of what they learn; use load_personal"
        )
    needs_examples = found.plan.method.ready is not None
    examples = found.divided(data) if needs_examples else NoExamples()
    return found.model(examples, which)


@dataclass(frozen=True, repr=False)
class SavedClient:
    """A client of a saved run: what its model is made from."""

    saved: SavedRun
    plan: Plan
    federation: Federation
    client: int
    memory: Memory

    @property
    def took_part(self) -> bool:
        """Whether it has trained; if not, its model is still w0 or the server's."""
        return self.client in self.federation.last

    def divided(self, data: Data | None) -> DividedData:
        """All clients' examples; ``data`` are the arrays the run was given, if any."""
        settings, task = self.plan.settings, self.plan.task
        return divide(settings, dataset_for(settings, data, task), task)

    def model(self, examples: Examples, which: Which = "personal") -> nn.Module:
        """The model that the client would use now, or the server's, in eval mode."""
        return ready_model(
            self.plan,
            examples,
            self.federation.round,
            self.client,
            self.memory,
            self.federation.shown_state,
            which,
        )

    def kept(self) -> Active | None:
        """The neurons that its model has; None if it has all."""
        now = self.plan.client_round(self.federation.round, self.client)
        state = self.federation.shown_state
        return judged_model(self.plan, now, self.memory, state, "personal").active


def open_client(
    run_dir: Path | str,
    client: int,
    build: Build | None = None,
    data: Data | None = None,
    which: Which = "personal",
    *,
    method: Method | None = None,
    task: Task | None = None,
    trust: bool = False,
) -> SavedClient:
    """A client of a saved run, checked; the arguments are those of load_personal."""
    if not isinstance(client, int) or isinstance(client, bool):
        raise SettingsError(f"client = {client!r}: expected a whole number")

    def read(saved: SavedRun) -> tuple[SavedRun, str, State, Checkpoint, Memory]:
        text, initial = saved.plan_text(), saved.initial()
        memory = saved.memory(client) if which == "personal" else Memory()
        return saved, text, initial, saved.checkpoint(), memory

    saved, text, initial, last, memory = last_whole(Path(run_dir), read)
    given = {
        "model": build,
        "method.name": method,
        "task": task,
        "data.name": data,
    }
    found = dict(flatten(_settings_of(saved, given, trust)))
    found["train.kernels"] = "auto"  # its models can be used anywhere
    settings, method, task = choose(found, build, data, method, task)
    plan = restore_plan(saved.path, text, settings, method, task, build, initial)
    check_client(client, plan)
    check_fits(saved.path, plan, last)
    return SavedClient(saved, plan, last.federation, client, memory)


def _settings_of(
    saved: SavedRun,
    given: Mapping[str, Any],
    trust: bool | Collection[str],
    but: str = "",
) -> dict[str, Any]:
    """The settings of a saved run; refuses edited ones, ``but`` this one.

    ``given`` is what was given in Python, by the setting that names it.
    """
    found = read_settings(saved, but)
    if found is None:
        warnings.warn(
            f"{saved.path / SETTINGS} is missing; using a copy of it", stacklevel=3
        )
        found = {**saved.index.settings}
    for name, place in saved.names_code.items():
        is_trusted = trust if isinstance(trust, bool) else place in trust
        if given[name] is None and not is_trusted:
            raise SettingsError(
                f"{saved.path} names code of its own ({name} = {place!r}), which would "
                "be run; if you trust it, add --trust (in Python: trust=True)"
            )
    # A setting that is newer than the run is as it was then, whatever its method or
    # data set suggests today.
    known = {name: entry.default for name, entry in known_fields()}
    defaults = {n: v for n, v in known.items() if isinstance(v, str | int | float)}
    return {**defaults, **dict(flatten(found))}


def _more(rounds: int, settings: Mapping[str, Any]) -> int:
    """At least as many rounds as a run has; warns if it changes the rounds to come."""
    before = settings.get("rounds")
    if not isinstance(before, int):
        raise StorageError(f"the run's rounds are {before!r}; expected a number")
    if not isinstance(rounds, int) or rounds < before:
        raise SettingsError(
            f"--rounds {rounds}: expected a whole number, and no fewer than the run's "
            f"{before}"
        )
    if rounds == before:
        return rounds
    flat = dict(flatten(settings))
    if flat.get("train.schedule") == "cosine" and "train.schedule_rounds" not in flat:
        warnings.warn(
            f"the learning rate falls until the last round, which is now {rounds}: "
            "this is not the run that would have begun with so many rounds",
            stacklevel=3,
        )
    return rounds


def _refuse_if_clients_finished(saved: SavedRun) -> None:
    if saved.index.are_clients_finished:
        raise SettingsError(
            f"{saved.path}: its clients have made their last models (method.finish), "
            "so no more rounds can be played; play a new run with more"
        )


# Playing ------------------------------------------------------------------------------


def _shelf_in_memory(plan: Plan, cache: float) -> Shelf:
    """A shelf for a run without a folder; in RAM, or on disk if processes share it."""
    if plan.settings.engine == "here" and num_workers(plan.settings) == 1:
        return Shelf(None)
    return temporary_shelf(cache)


def _play(
    prepared: Prepared,
    start: Checkpoint,
    shelf: Shelf,
    folder: RunFolder | None,
    watch: Watch | None,
) -> Run:
    plan, examples = prepared.plan, prepared.examples
    saved = folder.saved if folder else None
    rounds = saved.lines("rounds.jsonl") if saved else []
    times = saved.lines("times.jsonl") if saved else []
    forget_peak()
    federation, scores = start.federation, start.scores
    name = examples.data.name
    try:
        summarise(plan, name, federation, scores, rounds, times, Facts())
    except (KeyError, TypeError, AttributeError) as error:  # only a forger's records
        raise StorageError(f"the run's records are damaged ({error!r})") from None
    saying = folder.saying_what_is_saved() if folder else nullcontext()
    with one_thread(), saying, engine_for(plan, examples, shelf) as engine:
        clock = Clock(engine.facts.num_workers)
        trained = folder.prepare_save if folder else None
        for played in play(plan, engine, federation, scores, trained):
            lines = record_round(plan, played, clock.round(played))
            rounds += lines["rounds.jsonl"]
            times += lines["times.jsonl"]
            if folder:
                folder.save(played, lines)
            else:
                drop_old_memories(shelf, federation, played)
            federation, scores = played.federation, played.scores
            if watch:
                watch(plan, played)
        facts = engine.facts
    facts = replace(facts, peak_bytes=max(peak_rss_bytes(), facts.peak_bytes))
    summary = summarise(plan, name, federation, scores, rounds, times, facts)
    for loss in what_was_lost(summary, rounds):
        warnings.warn(loss, stacklevel=3)
    if folder:
        folder.finish(summary)
    last = Checkpoint(federation, scores)
    return Run(plan, examples, summary, rounds, times, last, shelf)


# Models -------------------------------------------------------------------------------


class NoExamples:
    """No examples: for models that are ready without any."""

    def part(self, client: int, name: str) -> Any:
        """Always refuses."""
        raise DataError(f"the {name} examples of client {client} were not loaded")


def ready_model(
    plan: Plan,
    examples: Examples,
    t: int,
    client: int,
    memory: Memory,
    global_state: State,
    which: Which,
) -> nn.Module:
    """The client's model after round t, or the server's, ready and in eval mode."""
    with one_thread():
        player = Client(plan, examples, Shelf(None), torch.device("cpu"))
        placed = player.ready_model(t, client, memory, global_state, which)
    return placed.model.eval()


def check_client(client: int, plan: Plan) -> None:
    """Refuse a client that does not exist."""
    if not isinstance(client, Integral):
        raise SettingsError(f"client = {client!r}: expected a whole number")
    if not 0 <= client < plan.num_clients:
        raise SettingsError(f"client = {client}: expected 0 to {plan.num_clients - 1}")
