"""What a round on devices costs, through real SuperNodes on this machine.

    python -m benchmarks.devices --devices 2,10 --sizes small,large
    python -m benchmarks.devices --same

Devices reach the server through a proxy that counts bytes. A round has ten clients at
most, one epoch on 20 examples each. Everything is by TLS and keys, as in a deployment.
Flower's own share is what a round takes besides the devices' work and ours. Its
SuperNodes look for messages every three seconds, and start a process for each, which
imports PyTorch; on the server's side we look twice a second.

``--same``: instead, three methods on three devices must give the same bits as one
process.
"""

import argparse
import asyncio
import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import nn

from fedspu.deploy.processes import free_port
from fedspu.federation.storage.saved_run import SavedRun
from fedspu.prepare import Prepared, prepare
from fedspu.runs import simulate
from tests.flower.deployment import Deployment, deployed

SIZES = {"small": (128,), "large": (2900, 2900)}
"""The widths of an MLP of 0.1 and 11 million parameters."""

EXAMPLES = 30


class Proxy:
    """Hands on bytes between devices and the server, and counts them."""

    def __init__(self, port: int) -> None:
        self.port, self.server = port, 0
        self.up = self.down = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        serving = asyncio.start_server(self._join, "127.0.0.1", self.port)
        self._loop.run_until_complete(serving)
        self._loop.run_forever()

    async def _join(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        there = await asyncio.open_connection("127.0.0.1", self.server)
        await asyncio.gather(
            self._hand_on(reader, there[1], "up"),
            self._hand_on(there[0], writer, "down"),
            return_exceptions=True,
        )

    async def _hand_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
    ) -> None:
        with suppress(ConnectionError):  # one side has ended
            while part := await reader.read(2**16):
                setattr(self, way, getattr(self, way) + len(part))
                writer.write(part)
                await writer.drain()
        writer.close()


def small() -> nn.Module:
    """An MLP of 0.1 million parameters."""
    return _mlp("small")


def large() -> nn.Module:
    """An MLP of 11 million parameters."""
    return _mlp("large")


def _mlp(size: str) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    before = 784
    for width in SIZES[size]:
        layers += [nn.Linear(before, width), nn.ReLU()]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, 10))


def prepared(folder: Path, size: str, number: int, rounds: int) -> Prepared:
    """A run of so many clients on random images."""
    rng = np.random.default_rng(0)
    file = folder / "images.npz"
    x = rng.normal(size=(EXAMPLES * number, 1, 28, 28)).astype(np.float32)
    np.savez(file, x=x, y=np.arange(len(x)) % 10)
    return prepare(
        {
            "model": f"benchmarks.devices:{size}",
            "data.name": f"arrays:{file}",
            "data.partition": "iid",
            "rounds": rounds,
            "clients.number": number,
            "clients.per_round": min(number, 10),
            # Not 1: w0 and the first values would be equal, and then sent once.
            "clients.capacities": (0.5, 0.9),
            "train.epochs": 1,
            "train.batch_size": 10,
            "train.lr": 0.01,
            "judge.every": rounds,
            "judge.clients": min(number, 10),
        }
    )


def measure(size: str, number: int, rounds: int) -> dict[str, Any]:
    """Seconds and bytes of a run on so many devices."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        ready = prepared(folder, size, number, rounds)
        proxy = Proxy(free_port())
        began = time.monotonic()
        with deployed(folder / "lab", ready, proxy) as found:
            found.wait_online(1800)
            started = time.monotonic() - began
            idle = _idle(proxy, 30.0)
            before = proxy.down + proxy.up
            since = time.monotonic()
            ended = found.play(3600)
            seconds = time.monotonic() - since
            sent = proxy.down + proxy.up - before
            judged = sum(w.nbytes for w in ready.plan.initial.values())
            return {
                "size": size,
                "devices": number,
                "status": ended.status,
                "start": started,
                "run": seconds,
                "idle bytes a device and second": idle / number,
                "counted": sent,
                "of it idle, if as before": round(idle * seconds),
                "of it the judged model": judged * min(number, 10),
                **_of_rounds(found),
            }


def _idle(proxy: Proxy, seconds: float) -> float:
    """Bytes that all devices together exchange in a second without any run."""
    before = proxy.down + proxy.up
    time.sleep(seconds)
    return (proxy.down + proxy.up - before) / seconds


def _of_rounds(found: Deployment) -> dict[str, Any]:
    saved = SavedRun(found.server.run)
    times, lines = saved.lines("times.jsonl"), saved.lines("rounds.jsonl")
    inner = times[1:-1] or times  # the first round and the last judge more
    names = ("bytes_initial", "bytes_down", "bytes_up", "index_bytes")
    reported = sum(line[name] for line in lines for name in names)
    return {
        "round": median(line["wall_seconds"] for line in inner),
        "longest turn": median(line["critical_seconds"] for line in inner),
        "server": median(line["server"] for line in inner),
        "train exchange": median(line["clients"] for line in inner),
        "judge exchange": median(line["judging"] for line in inner),
        "reported": reported,
    }


def same() -> None:
    """Three methods on real devices: are their bits those of one process?"""
    for method in ("fedspu", "feddrop", "ditto"):
        given: dict[str, Any] = {
            "method.name": method,
            "data.alpha": 1.0,
            "rounds": 3,
            "clients.number": 3,
            "clients.per_round": 2,
            "clients.capacities": (0.2, 0.6, 1.0),
            "early_stopping.on": True,
            "train.epochs": 1,
        }
        with TemporaryDirectory() as place:
            folder = Path(place)
            alone = simulate({**given, "out": folder / "alone"})
            with deployed(folder / "lab", prepare(given)) as found:
                found.wait_online()
                found.play()
            run = found.server.run
            state = SavedRun(run).checkpoint().federation.global_state
            last = alone.last.federation
            checks = {
                "global model": all(
                    state[name].equal(w) for name, w in last.global_state.items()
                ),
                "personal models": all(
                    found.personal_file(k, t).read_bytes()
                    == (
                        folder / f"alone/personal/client-{k}-round-{t}.safetensors"
                    ).read_bytes()
                    for k, t in last.last.items()
                ),
                "records": all(
                    (run / name).read_bytes() == (folder / "alone" / name).read_bytes()
                    for name in ("rounds.jsonl", "clients.jsonl")
                ),
            }
            print(method, checks, flush=True)


def main() -> None:
    """All cells, one line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="2,10")
    parser.add_argument("--sizes", default="small,large")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--same", action="store_true")
    given = parser.parse_args()
    if given.same:
        same()
        return
    for number in map(int, given.devices.split(",")):
        for size in given.sizes.split(","):
            print(json.dumps(measure(size, number, given.rounds)), flush=True)


if __name__ == "__main__":
    main()
