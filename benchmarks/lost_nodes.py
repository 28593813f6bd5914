"""Nodes of a Ray cluster are killed again and again; the result must not change.

    python benchmarks/lost_nodes.py [--rounds 20] [--every 3] [--turn 0.4]

The cluster has three nodes on this machine with one CPU each. Every few rounds, in the
middle of a turn, one of the two that are not the head is killed; after that round a new
one is added. No node sees the folder of clients' memories, as on other machines. The
same run is then played in this process, and every bit of both is compared. Turns take
at least ``--turn`` seconds, so that there are some to be lost.
"""

import argparse
import logging
import os
import sys
import threading
import warnings
from dataclasses import replace
from functools import partial
from time import perf_counter, sleep
from typing import Any

# Ray reads these when it is imported: no reports, and nothing but this machine.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
warnings.simplefilter("ignore", FutureWarning)  # Ray's own, about its own future

import numpy as np  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from torch import nn  # noqa: E402

import fedspu  # noqa: E402
from fedspu.engines.ray.cluster import hush  # noqa: E402
from fedspu.engines.ray.shared_folder import Probe  # noqa: E402
from fedspu.methods import make_method  # noqa: E402
from fedspu.methods.method import Method  # noqa: E402
from fedspu.settings import MethodSettings  # noqa: E402

CLIENTS, CLASSES = 24, 4


def main() -> None:
    """Play on the cluster and here, and print what was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--turn", type=float, default=0.4)
    given = parser.parse_args()
    setattr(Probe, "ask", staticmethod(lambda shelf: None))  # noqa: B010

    cluster: Any = Cluster(initialize_head=True, head_node_args=NODE)
    ray.init(cluster.address, log_to_driver=False, logging_level=logging.CRITICAL)
    hush()
    killer = Killer(cluster, given.every, given.rounds, given.turn / 2)
    began = perf_counter()
    found = play("ray", given.rounds, given.turn, killer)
    seconds = perf_counter() - began
    killer.join()
    ray.shutdown()
    cluster.shutdown()

    wanted = play("here", given.rounds, 0.0, None)
    retried = sum(len(line["retried_clients"]) for line in found.times)
    missing = sum(len(line["missing_clients"]) for line in found.rounds)
    print(f"rounds             {given.rounds} in {seconds:.0f} s")
    print(f"nodes lost         {killer.num_lost}")
    print(f"clients retried    {retried}")
    print(f"clients missing    {missing}")
    is_same = same_bits(found, wanted)
    print(f"same bits as here  {'yes' if is_same else 'NO'}")
    sys.exit(0 if is_same else 1)


NODE = {"num_cpus": 1, "include_dashboard": False}


class Killer:
    """Kills the oldest node but the head after every few rounds, and adds another."""

    def __init__(self, cluster: Any, every: int, rounds: int, delay: float) -> None:
        self.cluster, self.every, self.rounds = cluster, every, rounds
        self.delay, self.num_lost = delay, 0
        self.nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]  # oldest first
        self._thread: threading.Thread | None = None

    def __call__(self, plan: Any, played: Any) -> None:
        """Called after each round."""
        t = played.federation.round
        print(f"round {t}", file=sys.stderr)
        self.join()
        while len(self.nodes) < 2:  # Ray can add nodes in the main thread alone
            self.nodes.append(self.cluster.add_node(num_cpus=1))
        if t % self.every == 0 and t < self.rounds:
            self._thread = threading.Thread(target=self._kill)
            self._thread.start()

    def join(self) -> None:
        """Wait until the node that is being killed is dead."""
        if self._thread is not None:
            self._thread.join()

    def _kill(self) -> None:
        sleep(self.delay)
        self.cluster.remove_node(self.nodes.pop(0), allow_graceful=False)
        self.num_lost += 1


def play(engine: str, rounds: int, turn: float, watch: Any) -> fedspu.Run:
    """One run; each turn takes at least ``turn`` seconds."""
    rng = np.random.default_rng(0)
    y = np.arange(40 * CLIENTS) % CLASSES
    x = rng.normal(size=(len(y), 1, 8, 8)).astype(np.float32) + y[:, None, None, None]
    settings: dict[str, Any] = {
        "engine": engine,
        "rounds": rounds,
        "clients.number": CLIENTS,
        "clients.per_round": 12,
        "train.epochs": 1,
        "judge.every": rounds,
    }
    return fedspu.simulate(
        settings, model=build, data=(x, y), method=slow_method(turn), watch=watch
    )


def build() -> nn.Module:
    """A small MLP."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES)
    )


def slow_method(turn: float) -> Method:
    """Ditto, which keeps a second model for each client, with slow turns."""
    method = make_method(MethodSettings(name="ditto"))
    return replace(method, train=partial(slowly, method.train, turn))


def slowly(train: Any, seconds: float, turn: Any, local: Any) -> Any:
    """Train after a while."""
    sleep(seconds)
    return train(turn, local)


def same_bits(found: fedspu.Run, wanted: fedspu.Run) -> bool:
    """Whether two runs have the same records and models."""
    pairs = [(found.last.federation.global_state, wanted.last.federation.global_state)]
    for client in range(CLIENTS):
        models = (run.personal_model(client) for run in (found, wanted))
        a, b = (model.state_dict() for model in models)
        pairs.append((a, b))
    return found.rounds == wanted.rounds and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in pairs
    )


if __name__ == "__main__":
    main()
