"""The same rounds played by fedspu.

    python benchmarks/peers/ours.py --work WORK.npz --rounds 10 --net cifar10

A round is what ``fedspu run`` plays, and as it plays it: messages cross as bytes, and a
client's examples are scaled when its turn comes. No peer judges models, so neither does
this; ``--judge`` does, as a run would. With ``fedavg`` all clients train the full
model, as the peers' do; with ``fedspu`` each trains its share of the neurons.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from common import (
    StepCounter,
    Work,
    load_by,
    parser,
    plan_of,
    report,
    seconds_of_process,
    warm_up,
)

from fedspu.data.splits import Split, Splits
from fedspu.engines.local import LocalEngine
from fedspu.engines.machine import num_cores, one_thread
from fedspu.engines.workers import WorkersEngine
from fedspu.federation.client_memory import Shelf
from fedspu.federation.engine import Engine
from fedspu.federation.rounds import Scores, play, play_round
from fedspu.federation.server import Federation, choose_clients


def main() -> None:
    """Play the rounds."""
    options = parser(__doc__)
    options.add_argument("--method", choices=("fedavg", "fedspu"), default="fedavg")
    options.add_argument("--judge", action="store_true", help="judge models as well")
    options.add_argument("--workers", type=int, default=num_cores())
    engines = ("here", "flower", "ray")
    options.add_argument("--engine", choices=engines, default="here")
    given = options.parse_args()
    work = load_by(given)
    plan, examples = plan_for(work, given)
    room = TemporaryDirectory()
    engine = make_engine(plan, examples, given, Path(room.name))
    warm_up(work)
    counter = StepCounter()

    seconds: list[float] = []
    with one_thread():
        threads = torch.get_num_threads()
        federation = Federation(0, plan.initial)
        startup = seconds_of_process()
        began = perf_counter()
        if given.judge:
            for told in play(plan, engine, federation, Scores()):
                now = perf_counter()
                federation = told.federation
                seconds.append(now - began)
                began = now
        else:
            for _ in work.cohorts:
                federation = play_round(federation, plan, engine).federation
                now = perf_counter()
                seconds.append(now - began)
                began = now
    engine.close()
    room.cleanup()
    workers = engine.facts.num_workers
    steps = counter.steps if workers == 1 else None  # workers count apart
    report(
        *("ours", given, work, startup, seconds, steps),
        final=federation.global_state,
        packages=("fedspu",),
        method=given.method,
        threads=threads,
        workers=workers,
        engine=given.engine,
    )


def plan_for(work: Work, given: argparse.Namespace) -> tuple[Any, Any]:
    """The plan whose clients, rounds and first weights are those of the work."""
    plan, examples = plan_of(
        given.net,
        work.pixels,
        work.labels,
        {
            "seed": work.seed,
            "rounds": given.rounds,
            "method": given.method,
            "clients": work.num_clients,
            "per_round": len(work.cohorts[0]),
            "epochs": work.epochs,
        },
    )
    start = Federation(0, plan.initial)
    cohorts = [choose_clients(start, plan, t) for t in range(1, 1 + given.rounds)]
    if cohorts != list(map(list, work.cohorts)):
        raise SystemExit(f"{given.work}: other cohorts than ours; make it anew")
    splits = [
        replace(split, train=share)
        for split, share in zip(examples.splits, work.shares, strict=True)
    ]
    examples = replace(examples, splits=Given(splits))
    return replace(plan, initial=work.initial), examples


class Given(Splits):
    """Splits as the work has them."""

    def __init__(self, splits: list[Split]) -> None:
        self._splits = splits
        self.sizes = np.array([len(split.train) for split in splits])

    def __getitem__(self, client: Any) -> Any:
        return self._splits[client]


def make_engine(
    plan: Any, examples: Any, given: argparse.Namespace, room: Path
) -> Engine:
    """What carries requests to clients."""
    shelf = Shelf(room, cache=200e6)
    if given.engine == "flower":
        from fedspu.engines.flower.simulation import FlowerSimulation

        return FlowerSimulation(plan, examples, shelf, given.workers)
    if given.engine == "ray":
        from fedspu.engines.ray.engine import RayEngine

        return RayEngine(plan, examples, shelf)
    if given.workers == 1:
        return LocalEngine(plan, examples, shelf)
    return WorkersEngine(plan, examples, shelf, given.workers)


if __name__ == "__main__":
    main()
