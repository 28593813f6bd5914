"""Federated averaging by Flower's simulation on Ray, in the same rounds.

    python benchmarks/peers/flower.py --work WORK.npz --rounds 10 --net cifar10

Its ``FedAvg`` strategy and message API; a client does what a client of bare.py does.
One actor for each core, one PyTorch thread for each actor, no dashboard, nothing
evaluated. Before the first round every node is asked for its number, until all actors
have answered, and so have imported PyTorch and read the work: start-up. An actor keeps
the work, the clients' tensors and one model from message to message. Only
``configure_train`` is overridden, to be told whom to choose, and ``aggregate_train``,
for the clock. Ray listens on loopback alone.
"""

import os

# Before Flower and Ray are imported.
os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # On Linux too: without a cluster Ray listens on loopback alone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "OMP_NUM_THREADS": "1",
}

import logging
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from time import perf_counter, sleep

import flower_client
import torch
from common import load_by, parser, report, seconds_of_process
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


class ToldFedAvg(FedAvg):
    """Federated averaging among the clients it is told, by the clock."""

    def __init__(
        self, nodes: dict[int, int], cohorts: tuple[tuple[int, ...], ...]
    ) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.nodes, self.cohorts = nodes, cohorts
        self.seconds: list[float] = []
        self.steps = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round, as in Flower's own, but for who gets them."""
        self.began = perf_counter()
        config["server-round"] = server_round
        record = RecordDict(
            {self.arrayrecord_key: arrays, self.configrecord_key: config}
        )
        chosen = [self.nodes[client] for client in self.cohorts[server_round - 1]]
        return self._construct_messages(record, chosen, MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The average, once all have answered."""
        listed = list(replies)
        result = super().aggregate_train(server_round, listed)
        self.seconds.append(perf_counter() - self.began)
        wrong = [reply.error for reply in listed if reply.has_error()]
        if wrong or len(listed) != len(self.cohorts[server_round - 1]):
            raise RuntimeError(f"round {server_round}: {len(listed)} replies, {wrong}")
        self.steps += sum(int(r.content["metrics"]["steps"]) for r in listed)
        return result


def main() -> None:
    """Play the rounds."""
    options = parser(__doc__)
    options.add_argument("--actors", type=int, default=os.cpu_count())
    options.add_argument("--batches", choices=("loader", "whole"), default="loader")
    given = options.parse_args()
    work = load_by(given)
    task = ConfigRecord(
        {
            "work": os.path.abspath(given.work),
            "net": given.net,
            "rounds": given.rounds,
            "steps": given.steps,
            "batches": given.batches,
        }
    )
    result = {}
    server = ServerApp()

    @server.main()
    def play(grid: Grid, context: Context) -> None:
        nodes = _find_nodes(grid, work.num_clients, given.actors, task)
        strategy = ToldFedAvg(nodes, work.cohorts)
        initial = ArrayRecord(work.model().state_dict())
        startup = seconds_of_process()
        played = strategy.start(
            grid, initial, num_rounds=given.rounds, train_config=task
        )
        result.update(
            startup=startup,
            seconds=strategy.seconds,
            steps=strategy.steps,
            final=played.arrays.to_torch_state_dict(),
        )

    logging.getLogger("flwr").setLevel(logging.WARNING)
    with redirect_stdout(sys.stderr):
        run_simulation(
            server_app=server,
            client_app=flower_client.app,
            num_supernodes=work.num_clients,
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {
                    "num_cpus": given.actors,
                    "include_dashboard": False,
                    "_node_ip_address": "127.0.0.1",
                    "log_to_driver": False,
                },
            },
        )
    if len(result.get("seconds", ())) != given.rounds:
        raise SystemExit("the simulation failed; Flower says why above")
    report(
        *("flower", given, work, result["startup"], result["seconds"]),
        steps=result["steps"],
        final=result["final"],
        packages=("flwr", "ray"),
        threads=1,
        actors=given.actors,
        batches=given.batches,
    )


def _find_nodes(
    grid: Grid, number: int, actors: int, task: ConfigRecord
) -> dict[int, int]:
    """Client -> node id, which Flower draws anew for each run."""
    while len(ids := list(grid.get_node_ids())) < number:
        sleep(0.1)
    nodes: dict[int, int] = {}
    processes: set[int] = set()
    while len(processes) < actors:
        asked = [
            Message(
                content=RecordDict({"config": task}),
                message_type=MessageType.QUERY,
                dst_node_id=node,
            )
            for node in ids
        ]
        for reply in grid.send_and_receive(asked):
            if reply.has_error():
                raise RuntimeError(reply.error)
            who = reply.content["who"]
            nodes[int(who["client"])] = reply.metadata.src_node_id
            processes.add(int(who["process"]))
    return nodes


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
