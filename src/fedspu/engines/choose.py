"""Which engine plays a run, and whether RAM and disk suffice."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from fedspu.data.examples import DividedData
from fedspu.engines.crew import window
from fedspu.engines.local import LocalEngine
from fedspu.engines.machine import (
    find_device,
    memory_here,
    memory_needed,
    num_cores,
)
from fedspu.engines.workers import WorkersEngine, can_fork
from fedspu.errors import SettingsError, how_to_install
from fedspu.federation.client_memory import Shelf
from fedspu.federation.engine import Engine
from fedspu.federation.plan import Plan
from fedspu.settings import Settings
from fedspu.units import size


@contextmanager
def engine_for(plan: Plan, examples: DividedData, shelf: Shelf) -> Iterator[Engine]:
    """The engine that the settings ask for."""
    engine = _make_engine(plan, examples, shelf)
    try:
        yield engine
    finally:
        engine.close()


def _make_engine(plan: Plan, examples: DividedData, shelf: Shelf) -> Engine:
    if plan.settings.engine == "ray":
        return _ray_engine(plan, examples, shelf)
    number = num_workers(plan.settings)
    _remark_on_workers(plan.settings)
    if plan.settings.engine == "flower":
        from fedspu.engines.flower.simulation import FlowerSimulation

        return FlowerSimulation(plan, examples, shelf, number)
    if number > 1:
        try:
            return WorkersEngine(plan, examples, shelf, number)
        except OSError as error:  # no memory to share, or no more processes
            warnings.warn(
                f"workers = {number}: falling back to one process, because no more "
                f"can be started ({error})",
                stacklevel=4,
            )
    device = find_device(plan.settings.device)
    return LocalEngine(plan, examples, shelf, device)


def _ray_engine(plan: Plan, examples: DividedData, shelf: Shelf) -> Engine:
    # Ray reads these when it is imported: it reports nothing to its makers, and a
    # cluster of our own can be reached from this machine alone.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if plan.settings.ray_address is None:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    from fedspu.engines.ray.engine import RayEngine

    return RayEngine(plan, examples, shelf)


def check_engine(settings: Settings) -> None:
    """Refuse an engine that is not installed, or cannot use the device."""
    engine, device = settings.engine, settings.device
    for module, extra in NEEDED[engine].items():
        if find_spec(module) is None:
            raise SettingsError(
                f"engine = {engine!r} needs {module}, which is not installed; install "
                f"it with: {how_to_install(extra)}"
            )
    if engine != "here" and find_device(device).type != "cpu":
        raise SettingsError(
            f"device = {device!r}: with engine = {engine!r} clients are on CPUs; leave "
            "it out"
        )


NEEDED = {
    "here": {},
    "ray": {"ray": "ray"},
    "flower": {"flwr": "flower", "ray": "ray"},  # Flower simulates on Ray
}
"""The modules that each engine needs, and the extras they come with."""


def num_workers(settings: Settings) -> int:
    """How many processes play clients."""
    if _why_alone(settings):
        return 1
    return min(settings.workers or num_cores(), settings.clients.per_round)


def _why_alone(settings: Settings) -> str:
    """Why one process has to play all clients; empty if several can."""
    if not can_fork():
        return "this system cannot fork"
    device = find_device(settings.device)
    return f"clients are on {device}" if device.type != "cpu" else ""


def _remark_on_workers(settings: Settings) -> None:
    asked, reason = settings.workers or 1, _why_alone(settings)
    if reason and asked > 1:
        warnings.warn(
            f"workers = {asked}: falling back to one process, because {reason}",
            stacklevel=4,
        )
    elif asked > num_cores():
        warnings.warn(
            f"workers = {asked}: more than the {num_cores()} cores here; that will "
            "not be faster",
            stacklevel=4,
        )


def check_space(plan: Plan) -> None:
    """Warn before a run begins if RAM or disk will not suffice."""
    settings, number = plan.settings, num_workers(plan.settings)
    reached = min(plan.num_clients, settings.rounds * settings.clients.per_round)
    if plan.finishes:
        reached = plan.num_clients
    needed = memory_needed(
        model=sum(tensor.nbytes for tensor in plan.initial.values()),
        num_kept=reached if plan.method.keeps_own or plan.finishes else 0,
        per_round=settings.clients.per_round,
        num_workers=number,
        cache=1e6 * settings.store.cache,
        waiting=min(settings.clients.per_round, window(number)),
    )
    here = memory_here(settings.out)
    if needed.disk > here.disk:
        warnings.warn(
            f"the models of {reached} clients need up to {size(needed.disk)} of disk, "
            f"but only {size(here.disk)} are free at {settings.out}; choose another "
            "--out",
            stacklevel=3,
        )
    if needed.ram > here.ram:
        warnings.warn(
            f"about {size(needed.ram)} of RAM are needed besides data and training "
            f"steps, but only {size(here.ram)} are free; lower --workers or "
            "store.cache",
            stacklevel=3,
        )
