"""An engine that plays every client in a python process of its own, begun anew.

Such a process holds the pickled plan, its client's own examples and its own shelf; all
that goes in and out of it are bytes. Between two exchanges there is no process at all.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedspu.data.examples import DividedData
from fedspu.federation.client import Client
from fedspu.federation.client_memory import Shelf
from fedspu.federation.engine import Answer, Facts, Missing
from fedspu.federation.messages import (
    Request,
    pack_request,
    pack_state,
    unpack_state,
)
from fedspu.federation.plan import Plan
from fedspu.neurons.table import State


class FreshEngine:
    """The server's side; each client has a folder of its own."""

    facts = Facts()

    def __init__(self, plan: Plan, examples: DividedData, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        for client in range(plan.num_clients):
            (folder / f"{client}/shelf").mkdir(parents=True)
            (folder / f"{client}/plan").write_bytes(pickle.dumps(plan))
            own = {n: examples.part(client, n) for n in ("train", "val", "test")}
            torch.save(own, folder / f"{client}/examples")

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        state = b"" if broadcast is None else bytes(pack_state(self.plan, broadcast))
        asked = {k: pack_request(self.plan, request) for k, request in requests.items()}
        running = {client: self._begin(client) for client in asked}
        for client, down in asked.items():
            said, _ = running[client].communicate(pickle.dumps((down, state)))
            yield client, pickle.loads(said)

    def _begin(self, client: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", __name__, str(self.folder / str(client))]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment())

    def close(self) -> None:
        pass


def environment() -> dict[str, str]:
    """The environment of a process that can import fedspu and its tests."""
    places = (Path(__file__).parents[2] / name for name in (".", "src"))
    path = os.pathsep.join(map(str, places))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


class OwnExamples(dict[str, tuple[Tensor, Tensor]]):
    """The parts of one client's examples; there are no others."""

    def part(self, client: int, name: str) -> tuple[Tensor, Tensor]:
        return self[name]


def main(folder: Path) -> None:
    """The client's side: one message in, one out."""
    torch.set_num_threads(1)
    plan: Plan = pickle.loads((folder / "plan").read_bytes())
    examples = OwnExamples(torch.load(folder / "examples"))
    client = Client(plan, examples, Shelf(folder / "shelf"), torch.device("cpu"))
    down, state = pickle.load(sys.stdin.buffer)
    answer = client.respond(down, unpack_state(plan, state) if state else None)
    sys.stdout.buffer.write(pickle.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
