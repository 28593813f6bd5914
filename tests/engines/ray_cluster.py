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
# Ray's processes are as important as the tests that wait for them.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # its own spelling


@contextmanager
def small_cluster() -> Iterator[Any]:
    """A head with one CPU on this machine, to which this process is connected."""
    places = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        import ray
        from ray.cluster_utils import Cluster

        given = {"num_cpus": 1, "include_dashboard": False}
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


def add_node(cluster: Any) -> Any:
    """A new node with one CPU, on this machine too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        return cluster.add_node(num_cpus=1)


def wait_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no run begin before all its actors have."""
    from fedspu.engines.ray.engine import RayEngine

    begin = RayEngine.__init__

    def begin_all(engine: Any, *given: Any) -> None:
        begin(engine, *given)
        wait_until(lambda: len(engine.ready()) == engine.num_workers)

    monkeypatch.setattr(RayEngine, "__init__", begin_all)


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
    """Not for ever: if no deadline ends it, the test fails and does not hang too."""
    time.sleep(40)


def wrong_kind(train: Any, turn: Turn, local: LocalTraining) -> Any:
    return "no Trained"


def with_fault(name: str, *faults: Any) -> Method:
    """A method in whose turns faults may happen; the last comes first."""
    method = make_method(MethodSettings(name=name))
    for fault in faults:
        method = replace(method, train=partial(fault, method.train))
    return method


@dataclass(frozen=True)
class AllDie:
    """In one turn, all actors die at once, when the others have nothing to do.

    ``others`` is how many turns of the round have to end before.
    """

    round: int
    client: int
    others: int
    folder: Path

    def __call__(self, train: Any, turn: Turn, local: LocalTraining) -> Trained:
        if turn.now.round != self.round or (self.folder / "dead").exists():
            return self._train(train, turn, local)
        if turn.now.client != self.client:
            trained = self._train(train, turn, local)
            (self.folder / f"{turn.now.client}.pid").write_text(str(os.getpid()))
            return trained
        wait_until(lambda: len(list(self.folder.glob("*.pid"))) == self.others)
        time.sleep(1.0)  # until the last answer has arrived
        (self.folder / "dead").touch()
        for pid in {int(path.read_text()) for path in self.folder.glob("*.pid")}:
            os.kill(pid, signal.SIGKILL)
        die()
        return self._train(train, turn, local)

    def _train(self, train: Any, turn: Turn, local: LocalTraining) -> Trained:
        trained: Trained = train(turn, local)
        return trained


@dataclass(frozen=True)
class HangsOnNode:
    """The first turn on one node never ends; a file says that it has begun.

    Turns on other nodes wait for that, so it does begin.
    """

    node: str
    round: int
    begun: Path

    def __call__(self, train: Any, turn: Turn, local: LocalTraining) -> Trained:
        import ray

        if turn.now.round >= self.round and not self.begun.exists():
            if ray.get_runtime_context().get_node_id() == self.node:
                self.begun.touch()
                hang()
            wait_until(self.begun.exists)
        trained: Trained = train(turn, local)
        return trained


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for something, even on a busy machine, but not for ever."""
    until = time.monotonic() + 180
    while not is_so():
        if time.monotonic() > until:
            raise TimeoutError(f"waited in vain for {is_so}")
        time.sleep(0.05)
