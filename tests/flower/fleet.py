"""Devices for tests: each has its own file of examples and its own folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedspu.federation.plan import Plan
from fedspu.federation.rounds import Round
from fedspu.flower.client_app import app
from fedspu.flower.config import split
from fedspu.flower.server import Server
from fedspu.prepare import Prepared, prepare
from fedspu.settings_text import flatten
from tests.flower.grid import Nodes

SETTINGS: dict[str, Any] = {
    "data.name": "digits",
    "data.alpha": 1.0,
    "rounds": 3,
    "clients.number": 3,
    "clients.per_round": 2,
    "clients.capacities": (0.2, 0.6, 1.0),
    "early_stopping.on": True,
    "train.epochs": 1,
    "train.kernels": "torch",
}
NAMES = ("attic", "hall", "kitchen")


SCALE, WIDTH = 1.0, 24
"""Of the frozen layer; a test may change them for one device."""


def with_a_frozen_base() -> nn.Module:
    """A network for digits whose first layer does not train."""
    base = nn.Linear(64, WIDTH).requires_grad_(False)
    base.weight *= SCALE
    top = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 10))
    return nn.Sequential(nn.Flatten(), base, nn.ReLU(), top)


def complete(given: dict[str, Any]) -> Prepared:
    """A run on one machine with these settings."""
    return prepare({**SETTINGS, **given})


def run_config(ready: Prepared, **deploy: Any) -> dict[str, Any]:
    """The run config of the same run on devices: plain values, all given."""
    flat = dict(flatten(ready.plan.settings.model_dump(mode="json", exclude_none=True)))
    for name in ("clients.number", "clients.capacities", "out", "workers"):
        flat.pop(name, None)
    plain = {n: ",".join(v) if isinstance(v, list) else v for n, v in flat.items()}
    own = {"devices": 3, "wait": 5.0, "outputs": 10, **deploy}
    return {**plain, **{f"deploy.{name}": v for name, v in own.items()}}


@dataclass
class House:
    """Some devices, and the server that they reach."""

    folder: Path
    given: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.ready = complete(self.given)
        self.config = run_config(self.ready, out=str(self.folder / "run"))
        self.grid = Nodes(self.config)
        self.nodes: dict[str, int] = {}
        self.seen: list[Round] = []

    def share(self, client: int) -> tuple[Any, Any]:
        """The examples that this client has in the run on one machine."""
        own = self.ready.examples.splits._all[0][client]
        return self.ready.examples.data.take(torch.from_numpy(np.asarray(own)))

    def node_config(self, client: int) -> dict[str, Any]:
        x, y = self.share(client)
        file = self.folder / f"{NAMES[client]}.npz"
        np.savez(file, x=x.numpy(), y=y.numpy())
        return {
            "name": NAMES[client],
            "capacity": float(self.ready.plan.capacity(client)),
            "data": f"arrays:{file}",
            "folder": str(self.folder / NAMES[client]),
        }

    def start(self, *clients: int, **changes: Any) -> None:
        """Start devices."""
        for client in clients:
            config = {**self.node_config(client), **changes}
            self.nodes[NAMES[client]] = self.grid.add(config, app)

    def stop(self, client: int) -> None:
        """Cut a device off."""
        del self.grid.answers[self.nodes.pop(NAMES[client])]

    def serve(
        self,
        watch: Callable[[Plan, Round], None] | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Server:
        """Play the run, or the rest of it."""

        def seen(plan: Plan, played: Round) -> None:
            self.seen.append(played)
            if watch:
                watch(plan, played)

        given, deploy = split({**self.config, **(changes or {})})
        server = Server(self.grid, given, deploy, poll=0.001, watch=seen)
        server.run()
        return server

    def memory(self, client: int, t: int) -> bytes:
        """The file of what a device kept after a round."""
        (found,) = (self.folder / NAMES[client]).glob(
            f"*/personal/client-{client}-round-{t}.safetensors"
        )
        return found.read_bytes()
