"""A small Ray cluster for tests, and methods whose turns go wrong on it.

Actors are other processes, so what is patched here is not patched there: a fault
travels inside the method, whose functions are found by name.
"""

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedspu.engines.ray.shared_folder import Probe
from fedspu.methods import make_method
from fedspu.methods.method import Method, Trained, Turn
from fedspu.settings import MethodSettings
from fedspu.training.epochs import LocalTraining

ROOT = Path(__file__).parents[2]

# Ray reads these when it is imported: no reports, and nothing but this machine.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


@contextmanager
def small_cluster(num_cpus: int) -> Iterator[Any]:
    """A cluster of raylets on this machine, to which this process is connected."""
    places = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        import ray
        from ray.cluster_utils import Cluster

        given = {"num_cpus": num_cpus, "include_dashboard": False}
        cluster: Any = Cluster(initialize_head=True, head_node_args=given)
        ray.init(
            address=cluster.address, log_to_driver=False, logging_level=logging.CRITICAL
        )
    try:
        yield cluster
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.shutdown()
            cluster.shutdown()


def hide_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no actor see the shelf's folder, as on another machine."""
    ask = Probe.ask

    def elsewhere(shelf: Any) -> Probe | None:
        probe = ask(shelf)
        if probe is None:
            return None
        probe.remove()
        return replace(probe, path=Path("/nowhere") / probe.path.name)

    monkeypatch.setattr(Probe, "ask", staticmethod(elsewhere))


# Turns that go wrong ------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Something that happens in one turn, the first so many times."""

    happens: Callable[[], None]
    round: int
    client: int
    times: int
    count: Path

    def __call__(self, train: Any, turn: Turn, local: LocalTraining) -> Trained:
        if (turn.now.round, turn.now.client) == (self.round, self.client):
            so_far = len(self.count.read_text()) if self.count.exists() else 0
            if so_far < self.times:
                self.count.write_text("x" * (so_far + 1))
                self.happens()
        trained: Trained = train(turn, local)
        return trained


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(3600)


def wrong_kind(turn: Turn, local: LocalTraining) -> Any:
    return "no Trained"


def with_fault(name: str, *faults: Any) -> Method:
    """A method in whose turns faults may happen."""
    method = make_method(MethodSettings(name=name))
    for fault in faults:
        method = replace(method, train=partial(fault, method.train))
    return method


@dataclass(frozen=True)
class HangsOnNode:
    """The first turn on one node never ends; a file says that it has begun."""

    node: str
    round: int
    begun: Path

    def __call__(self, train: Any, turn: Turn, local: LocalTraining) -> Trained:
        import ray

        is_there = ray.get_runtime_context().get_node_id() == self.node
        if is_there and turn.now.round >= self.round and not self.begun.exists():
            self.begun.touch()
            hang()
        trained: Trained = train(turn, local)
        return trained
