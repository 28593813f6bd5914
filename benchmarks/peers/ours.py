"""The same rounds played by fedspu.

    python benchmarks/peers/ours.py --work WORK.npz --rounds 10 --net cifar10

A round is what ``fedspu run`` plays, and as it plays it: messages cross as bytes, and a
client's examples are scaled when its turn comes. No peer judges models, so neither does
this; ``--judge`` does, as a run would. With ``fedavg`` all clients train the full
model, as the peers' do; with ``fedspu`` each trains its share of the neurons.
"""

import argparse
from dataclasses import replace
from time import perf_counter
from typing import Any

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

from fedspu.engines.local import LocalEngine
from fedspu.federation.run import Accuracies, play, play_round
from fedspu.federation.server import Federation, choose_clients
from fedspu.simulation import one_thread


def main() -> None:
    """Play the rounds."""
    options = parser(__doc__)
    options.add_argument("--method", choices=("fedavg", "fedspu"), default="fedavg")
    options.add_argument("--judge", action="store_true", help="judge models as well")
    given = options.parse_args()
    work = load_by(given)
    plan = plan_for(work, given)
    engine = make_engine(plan, given)
    warm_up(work)
    counter = StepCounter()

    seconds: list[float] = []
    with one_thread():
        threads = torch.get_num_threads()
        federation = Federation(0, plan.initial)
        startup = seconds_of_process()
        began = perf_counter()
        if given.judge:
            for told in play(plan, engine, federation, Accuracies()):
                now = perf_counter()
                federation = told.federation
                seconds.append(now - began)
                began = now
        else:
            for _ in work.cohorts:
                federation, _ = play_round(federation, plan, engine)
                now = perf_counter()
                seconds.append(now - began)
                began = now
    report(
        *("ours", given, work, startup, seconds, counter.steps),
        final=federation.global_state,
        packages=("fedspu",),
        method=given.method,
        threads=threads,
    )


def plan_for(work: Work, given: argparse.Namespace) -> Any:
    """The plan whose clients, rounds and first weights are those of the work."""
    plan = plan_of(
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
        for split, share in zip(plan.splits, work.shares, strict=True)
    ]
    return replace(plan, splits=tuple(splits), initial=work.initial)


def make_engine(plan: Any, given: argparse.Namespace) -> LocalEngine:
    """What carries requests to clients: the place for more workers than one."""
    return LocalEngine(plan)


if __name__ == "__main__":
    main()
