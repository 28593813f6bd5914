"""A real deployment on this machine: a SuperLink with TLS and keys, and SuperNodes.

Every process is started and ended by its own pid, as by hand.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fedspu.deploy import control, making
from fedspu.deploy.layout import Device
from fedspu.deploy.processes import free_port
from fedspu.prepare import Prepared
from tests.engines.fresh import environment


class Deployment:
    """The run ``ready`` on devices: each has the examples of its client, and no others.

    Devices are named so that they get their clients' numbers. ``port`` is where devices
    look for the server, if it is not the server's own.
    """

    def __init__(self, root: Path, ready: Prepared, port: int | None = None) -> None:
        settings = ready.plan.settings
        self.names = [f"device-{k:04}" for k in range(ready.plan.num_clients)]
        capacities = dict(
            zip(self.names, map(float, ready.plan.capacities), strict=True)
        )
        self.server = making.make(root, settings, capacities, port=free_port())
        self.devices = [Device.read(root / "devices" / name) for name in self.names]
        for client, device in enumerate(self.devices):
            own = ready.examples.splits._all[0][client]
            x, y = ready.examples.data.take(torch.from_numpy(np.asarray(own)))
            np.savez(device.root / "own.npz", x=x.numpy(), y=y.numpy())
            _change(device.root / "device.toml", {device.data: "arrays:own.npz"})
            if port is not None:
                there = f":{port}"
                _change(device.root / "device.toml", {f":{self.server.port}": there})
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *more: str) -> None:
        """Start the server, or the device of this name."""
        words = ("server", self.server.root)
        if name != "server":
            words = ("device", self.server.root / "devices" / name)
        command = [
            sys.executable,
            "-m",
            "fedspu.cli",
            "deploy",
            *map(str, words),
            *more,
        ]
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
            )

    def stop(self, name: str) -> None:
        """End a process as a service manager does."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        process.wait(60)

    def log(self, name: str) -> Path:
        return self.server.root / f"{name}.log"

    def said(self, name: str) -> str:
        return self.log(name).read_text("utf-8", "replace")

    def wait(self, what: Callable[[], Any], seconds: float, why: str) -> None:
        """Wait until something is true."""
        until = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < until, f"{why}:\n{self.said('server')[-3000:]}"
            time.sleep(0.2)

    def wait_online(self, seconds: float = 300.0) -> None:
        """Wait until all devices are connected."""

        def are_online() -> bool:
            return all("connected; waiting" in self.said(name) for name in self.names)

        self.wait(are_online, seconds, "devices are not connected")

    def play(self, seconds: float = 600.0) -> control.Run:
        """Start the run, and wait until it has ended."""
        control.start_run(self.server)
        return self.wait_ended(seconds)

    def wait_ended(self, seconds: float = 600.0) -> control.Run:
        """Wait until the last run has ended."""
        summary = self.server.run / "summary.json"
        self.wait(summary.exists, seconds, "the run has not ended")
        while (run := control.runs(self.server)[-1]).is_going:
            time.sleep(1.0)
        return run

    def personal_file(self, client: int, t: int) -> Path:
        """Where a device keeps its model of a round."""
        name = f"client-{client}-round-{t}.safetensors"
        (found,) = self.devices[client].models.glob(f"*/personal/{name}")
        return found


class ToServer(Protocol):
    """Something between devices and the server, which must be told its port."""

    port: int
    server: int


@contextmanager
def deployed(
    root: Path, ready: Prepared, proxy: ToServer | None = None
) -> Iterator[Deployment]:
    """A deployment whose processes all run; devices reach it through a ``proxy``."""
    found = Deployment(root, ready, proxy.port if proxy else None)
    if proxy:
        proxy.server = found.server.port
    before = dict(os.environ)
    os.environ.update(environment())  # `flwr run` imports the apps
    try:
        found.start("server")
        found.wait(lambda: "ready: listening" in found.said("server"), 120, "no server")
        for name in found.names:
            found.start(name)
        yield found
    finally:
        for name in reversed(list(found.processes)):
            found.stop(name)
        os.environ.clear()
        os.environ.update(before)


def _change(file: Path, changes: Mapping[str, str]) -> None:
    text = file.read_text()
    for old, new in changes.items():
        assert old in text, (old, text)
        text = text.replace(old, new)
    file.write_text(text)
