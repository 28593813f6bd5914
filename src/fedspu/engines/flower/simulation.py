"""A run on this machine, simulated by Flower: each client is one of its nodes.

Flower plays nodes in processes of Ray. They read the plan and the examples once from a
file; what clients keep is on the run's shelf, as with our own workers.
"""

import logging
import pickle
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedspu.data.examples import DividedData
from fedspu.engines.crew import window
from fedspu.engines.flower.engine import FlowerEngine
from fedspu.engines.flower.wire import Refusal, pack, refuse, unpack
from fedspu.engines.machine import FreedMemory, warm_up
from fedspu.errors import FedSPUError, MethodError, ModelError
from fedspu.federation.client import Client
from fedspu.federation.client_memory import Shelf, ShelfError
from fedspu.federation.engine import Answer, Facts, Missing
from fedspu.federation.messages import Request, unpack_state
from fedspu.federation.plan import Plan
from fedspu.neurons.table import State

BEGIN = 120.0
"""Seconds that the simulation may take to begin."""

POLL = 0.005
"""Seconds between two looks for replies, which are in this process."""


class FlowerSimulation:
    """Plays clients in a Flower simulation, with the same bits as in one process."""

    def __init__(
        self, plan: Plan, examples: DividedData, shelf: Shelf, num_workers: int
    ) -> None:
        warm_up(plan)
        self.facts = Facts(num_workers)
        self._folder = Path(mkdtemp(prefix="fedspu-flower-"))
        self._grid: Grid | None = None
        self._problem: BaseException | None = None
        self._has_begun, self._is_over = threading.Event(), threading.Event()
        file = self._folder / "plan"
        self._thread = threading.Thread(
            target=self._run, args=(file, plan.num_clients, num_workers), daemon=True
        )
        try:
            _dump(file, plan, examples, shelf)
            self._thread.start()
            self._engine = self._begin(plan, num_workers)
        except BaseException:
            self.close()
            raise

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        """Send each request to its client's node; answers come as they arrive."""
        return self._engine.exchange(requests, broadcast)

    def close(self) -> None:
        """End the simulation."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _begin(self, plan: Plan, num_workers: int) -> FlowerEngine:
        self._has_begun.wait(BEGIN)
        if self._problem is not None or self._grid is None:
            raise FedSPUError(
                f"Flower's simulation did not begin ({self._problem or 'no answer'})"
            )
        nodes = sorted(self._nodes(plan.num_clients))
        return FlowerEngine(
            plan,
            self._grid,
            lambda client: nodes[client],
            facts=self.facts,
            window=window(num_workers),
            poll=POLL,
            is_trusted=True,
            is_alive=self._check,
        )

    def _nodes(self, number: int) -> list[int]:
        """The nodes of the simulation, once all are there."""
        assert self._grid is not None
        nodes: list[int] = []
        while len(nodes) < number and not self._is_over.wait(POLL):
            nodes = list(self._grid.get_node_ids())
            self._check()
        return nodes

    def _check(self) -> None:
        if self._problem is not None:
            raise FedSPUError(f"Flower's simulation has ended ({self._problem})")

    def _run(self, file: Path, num_clients: int, num_workers: int) -> None:
        """Let Flower simulate clients until the engine is closed; in a thread."""
        from flwr.simulation import run_simulation

        def main(grid: Grid, context: Context) -> None:
            self._grid = grid
            self._has_begun.set()
            self._is_over.wait()

        server, client, play = ServerApp(), ClientApp(), Player(file)
        server.main()(main)
        client.train()(play)
        client.evaluate()(play)
        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        try:
            run_simulation(
                server_app=server,
                client_app=client,
                num_supernodes=num_clients,
                backend_config={
                    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                    "init_args": {
                        # A cluster of its own, whatever else runs on this machine.
                        "address": "local",
                        "_node_ip_address": "127.0.0.1",
                        "num_cpus": num_workers,
                        "logging_level": "error",
                        "log_to_driver": False,
                    },
                },
            )
        except BaseException as error:  # told where the engine is used
            self._problem = error.__cause__ or error  # Flower's own has no reason
        finally:
            self._has_begun.set()


def _dump(file: Path, plan: Plan, examples: DividedData, shelf: Shelf) -> None:
    """Write what players need; also models that are made by a function of a script."""
    from ray import cloudpickle

    try:
        content: bytes = cloudpickle.dumps(  # type: ignore[no-untyped-call]
            (plan, examples, shelf.folder, shelf.cache)
        )
    except Exception as error:
        raise FedSPUError(
            f"engine = 'flower': the model or method cannot be sent to other processes "
            f"({error}); define it in a module"
        ) from None
    file.write_bytes(content)


# In a process of the simulation -------------------------------------------------------


@dataclass(frozen=True)
class Player:
    """Answers messages with what is in a file."""

    file: Path

    def __call__(self, message: Message, context: Context) -> Message:
        """The reply to a message."""
        client = _client(self.file)
        _FREED.give_back()
        found = unpack(message.content)
        if isinstance(found, Refusal):
            raise ModelError("a request says that it is refused")
        state = None
        if found.state is not None:
            state = unpack_state(client.plan, found.state)
        try:
            answer = client.respond(found.packet, state)
        except (ShelfError, MethodError) as error:
            return Message(refuse(str(error), is_fatal=True), reply_to=message)
        if isinstance(answer, Missing):
            said = refuse(answer.reason, has_failed=answer.has_failed)
            return Message(said, reply_to=message)
        return Message(pack(answer.up), reply_to=message)


_FREED = FreedMemory()


@cache
def _client(file: Path) -> Client:
    torch.set_num_threads(1)
    plan, examples, folder, cached = pickle.loads(file.read_bytes())
    warm_up(plan)
    return Client(plan, examples, Shelf(folder, cached), torch.device("cpu"))
