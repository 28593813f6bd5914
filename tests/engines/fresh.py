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
from fedspu.federation.messages import (
    Packet,
    Request,
    pack_request,
    pack_state,
    unpack_reply,
    unpack_state,
)
from fedspu.federation.plan import Plan
from fedspu.federation.rounds import Answer, Cost, Facts
from fedspu.neurons.table import State


class FreshEngine:
    """The server's side; each client has a folder of its own."""

    facts = Facts()

    def __init__(self, plan: Plan, examples: DividedData, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        for client in range(plan.num_clients):
            (folder / f"{client}/shelf").mkdir(parents=True)
            (folder / f"{client}/plan").write_bytes(pickle.dumps(plan))
            own = {name: examples.part(client, name) for name in PARTS}
            torch.save(own, folder / f"{client}/examples")

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer]]:
        state = b"" if broadcast is None else pack_state(self.plan, broadcast)
        asked = {k: pack_request(self.plan, request) for k, request in requests.items()}
        running = {k: self._begin(k) for k in asked}
        for client, down in asked.items():
            text, _ = running[client].communicate(written(down, state))
            up, _ = read(text)
            reply = unpack_reply(self.plan, requests[client], up)
            yield client, Answer(reply, Cost.of(down, up))

    def _begin(self, client: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", __name__, str(self.folder / str(client))]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PLACES}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)

    def close(self) -> None:
        pass


class OwnExamples(dict[str, tuple[Tensor, Tensor]]):
    """The parts of one client's examples; there are no others."""

    def part(self, client: int, name: str) -> tuple[Tensor, Tensor]:
        return self[name]


PARTS = ("train", "val", "test")
PLACES = os.pathsep.join(str(Path(__file__).parents[2] / name) for name in (".", "src"))


def written(packet: Packet, *more: bytes) -> str:
    """The bytes of a message as a line each."""
    parts = (packet.header, packet.positions, packet.values, packet.initial, *more)
    return "\n".join(part.hex() for part in parts)


def read(text: str) -> tuple[Packet, bytes]:
    """The message again, and what else came."""
    parts = [bytes.fromhex(line) for line in text.split("\n")]
    header, positions, values, initial, *more = parts
    return Packet(header, positions, values, initial), b"".join(more)


def main(folder: Path) -> None:
    """The client's side: one message in, one out."""
    torch.set_num_threads(1)
    plan: Plan = pickle.loads((folder / "plan").read_bytes())
    examples = OwnExamples(torch.load(folder / "examples"))
    client = Client(plan, examples, Shelf(folder / "shelf"), torch.device("cpu"))
    down, state = read(sys.stdin.read())
    broadcast = unpack_state(plan, state) if state else None
    sys.stdout.write(written(client.answer(down, broadcast)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
