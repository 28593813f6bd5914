"""An actor as the engine sees it: start it, know about it, end it."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from fedspu.engines.crew import Job
from fedspu.engines.ray.players import Player
from fedspu.engines.ray.shared_folder import Probe
from fedspu.federation.client_memory import Name, Shelf


@dataclass
class Place:
    """An actor, and what is known about it."""

    actor: Any
    coming: Any  # a reference to its sign of life; None once it can do jobs
    probe: Probe | None = None
    is_new: bool = True  # it has not begun yet
    sees_folder: bool = False
    held: frozenset[Name] = frozenset()  # memories in its RAM, if it sees no folder
    job: Job | None = None
    result: Any = None  # a reference to what comes of the job
    peak: int = 0  # bytes of memory, as last reported


def hire(placed: list[Any], shelf: Shelf) -> Place:
    """A new actor, wherever there is room; it begins with what is placed."""
    # With one CPU, Ray sets OMP_NUM_THREADS to 1 as well.
    kind: Any = ray.remote(num_cpus=1, max_restarts=0)
    actor = kind(Player).remote()
    probe = Probe.ask(shelf)
    return Place(actor, actor.begin.remote(placed, probe), probe)


def end(place: Place) -> None:
    """Kill an actor, whatever it is doing."""
    if place.probe is not None:
        place.probe.remove()
    with suppress(RayError, RuntimeError):  # it, or the cluster, is gone already
        ray.kill(place.actor)
