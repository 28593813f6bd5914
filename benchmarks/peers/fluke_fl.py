"""Federated averaging by fluke, on the same clients in the same rounds.

    python benchmarks/peers/fluke_fl.py --work WORK.npz --rounds 10 --net cifar10

Its ``CentralizedFL`` with its own clients, server, channel and ``FastDataLoader``, all
in memory; nothing is evaluated. The server is told whom to choose by overriding
``get_eligible_clients``; all else is fluke's. One process, and PyTorch uses all cores
unless ``--threads`` says otherwise. (The file is not called fluke.py, as it would then
import itself.)
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from time import perf_counter
from typing import Any

import torch
import torchvision_names  # noqa: F401  # fluke could not be imported without
from common import StepCounter, load_by, parser, report, seconds_of_process, warm_up
from fluke import DDict, FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.evaluation import ClassificationEval
from fluke.server import Server
from fluke.utils import FederationObserver


class ToldServer(Server):
    """The server, told who takes part."""

    cohorts: Iterator[Sequence[int]]

    def get_eligible_clients(self, eligible_perc: float) -> Sequence[Client]:
        """The clients of the next round."""
        return [self.clients[k] for k in next(self.cohorts)]


class Clock(FederationObserver):
    """Notes how long rounds take, evaluation (of which there is none) included."""

    def __init__(self) -> None:
        self.startup = 0.0
        self.seconds: list[float] = []

    def start_round(self, round: int, global_model: Any) -> None:
        """A round begins."""
        self.startup = self.startup or seconds_of_process()
        self.began = perf_counter()

    def end_round(self, round: int) -> None:
        """A round has ended."""
        self.seconds.append(perf_counter() - self.began)


def main() -> None:
    """Play the rounds."""
    options = parser(__doc__)
    options.add_argument("--threads", type=int, help="all cores if not given")
    given = options.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    work = load_by(given)
    env = FlukeENV()
    env.set_seed(0)
    env.set_device("cpu")
    env.set_inmemory(True)
    env.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    env.set_evaluator(ClassificationEval(eval_every=1, n_classes=work.net.classes))

    optimizer = OptimizerConfigurator(
        optimizer_cfg=DDict(name="SGD", lr=work.net.lr),
        scheduler_cfg=DDict(name="StepLR", step_size=1, gamma=1),
    )
    present = set(work.participants)
    clients = []
    for k in range(work.num_clients):
        x, y = work.examples(k)
        # Who never takes part is there, but needs no examples.
        x, y = (x, y) if k in present else (x[:2], y[:2])
        loader = FastDataLoader(
            *(x, y),
            num_labels=work.net.classes,
            batch_size=work.net.batch_size,
            shuffle=True,
        )
        loss = torch.nn.CrossEntropyLoss()
        clients.append(
            Client(k, loader, None, optimizer, loss, local_epochs=work.epochs)
        )
    server = ToldServer(work.model(), None, clients, weighted=True)
    server.cohorts = iter(work.cohorts)
    algorithm = CentralizedFL(
        n_clients=work.num_clients,
        data_splitter=None,
        hyper_params=DDict(),
        clients=clients,
        server=server,
    )
    warm_up(work)
    clock, counter = Clock(), StepCounter()
    algorithm.set_callbacks([clock])
    share = len(work.cohorts[0]) / work.num_clients
    with redirect_stdout(sys.stderr):  # its progress bars
        algorithm.run(n_rounds=given.rounds, eligible_perc=share)
    report(
        *("fluke", given, work, clock.startup, clock.seconds, counter.steps),
        final=server.model.state_dict(),
        packages=("fluke-fl",),
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
