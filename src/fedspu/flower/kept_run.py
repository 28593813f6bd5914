"""What a device keeps of a run, and how it is used there without any server."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fedspu.data import load as load_data
from fedspu.data.dataset import Dataset
from fedspu.data.examples import strata
from fedspu.data.splits import Split, split
from fedspu.engines.flower.wire import Seat, Strict
from fedspu.errors import StorageError
from fedspu.federation.client_memory import Shelf
from fedspu.federation.plan import Plan, first_line
from fedspu.federation.plan_file import restore_plan
from fedspu.files import Mark, read_file
from fedspu.flower.config import NodeSettings
from fedspu.imports import is_place
from fedspu.methods.method import Memory
from fedspu.neurons.choose import as_fraction
from fedspu.neurons.slim import slim_state
from fedspu.prepare import choose
from fedspu.random_streams import stream
from fedspu.settings_text import MOST_BYTES, flatten, parse_toml

SETTINGS, PLAN, INITIAL = "settings.toml", "plan.json", "initial.safetensors"
DONE, PERSONAL, LOCK = "done.json", "personal", ".lock"


@dataclass(frozen=True)
class OwnData:
    """The examples of one client; there are no others here."""

    data: Dataset
    parts: Split

    def part(self, client: int, name: str) -> tuple[Tensor, Tensor]:
        """The device's own ``train``, ``val`` or ``test`` examples."""
        return self.data.take(torch.from_numpy(getattr(self.parts, name)))


def own_data(plan: Plan, client: int, data: Dataset) -> OwnData:
    """A device's examples, divided into its three parts."""
    labels = strata(data, plan.task)
    rng = stream(plan.settings.seed, "split", client=client)
    kind = plan.settings.data.split
    return OwnData(data, split(np.arange(len(labels)), labels, kind, rng))


class Done(Strict):
    """What is written last: who the device was at first, and what trains its model.

    ``files`` has a mark of every other file of the run, but not of its models.
    """

    seat: Seat
    kernels: Literal["auto", "native", "torch"]
    files: dict[str, Mark] = Field(default_factory=dict)  # older ones have none


def read_run(folder: Path) -> tuple[str, dict[str, Tensor], Done]:
    """What a device has kept of a run: the plan's text, w0, and who it is."""
    try:
        done = Done.model_validate_json(read_file(folder / DONE))
        content = {name: read_file(folder / name) for name in (PLAN, INITIAL)}
        for name, found in content.items():
            if done.files.get(name, Mark.of(found)) != Mark.of(found):
                raise ValueError(f"{name} is not what was written")
        return content[PLAN].decode(), load(content[INITIAL]), done
    except (ValueError, SafetensorError) as error:  # also of pydantic and of decode
        raise StorageError(
            f"{folder} is damaged ({first_line(error)}); remove {DONE} in it, and it "
            "is made anew"
        ) from None


class KeptRun:
    """A run as a device has kept it, for use on the device without any server."""

    def __init__(self, folder: Path, node: NodeSettings) -> None:
        self.folder, self.node = folder, node
        self._text, self._initial, self._done = read_run(folder)
        seat = self._done.seat
        self.client, self.num_outputs = seat.client, seat.num_outputs
        given = parse_toml(self._settings(), str(folder / SETTINGS))
        self._given = {**dict(flatten(given)), "data.name": node.data}
        self._shelf = Shelf(folder / PERSONAL)
        rounds = [t for client, t in self._shelf.names() if client == self.client]
        if not rounds:
            raise StorageError(f"{folder}: there is no model of this device here")
        self.round = max(rounds)

    def _settings(self) -> bytes:
        """The run's settings.toml; refuses one that was edited since."""
        content = read_file(self.folder / SETTINGS, MOST_BYTES)
        mark = self._done.files.get(SETTINGS)
        if mark is not None and mark != Mark.of(content):
            raise StorageError(
                f"{self.folder / SETTINGS} was edited or damaged since the run began; "
                "undo that"
            )
        return content

    @property
    def names_code(self) -> list[str]:
        """The settings that name code outside of fedspu."""
        names = ("model", "method.name", "task")
        places = (str(self._given.get(name)) for name in names)
        return [place for place in places if is_place(place)]

    def plan(self) -> Plan:
        """The run's plan, with kernels that can be used anywhere."""
        given = {**self._given, "train.kernels": "auto"}
        settings, method, task = choose(given, None, None, None, None)
        text, initial = self._text, self._initial
        plan = restore_plan(self.folder, text, settings, method, task, None, initial)
        return replace(plan, capacities=capacities(self._done.seat))

    def memory(self, plan: Plan) -> Memory:
        """What the device kept last; refuses a model that is not one of this plan."""
        memory, own = self._shelf.get(self.client, self.round), plan.initial
        if memory.own is not None and memory.own.active is not None:
            own = slim_state(own, plan.neurons, memory.own.active)
        forms = {name: (t.shape, t.dtype) for name, t in own.items()}
        kept = memory.own.state if memory.own is not None else {}
        if forms != {name: (t.shape, t.dtype) for name, t in kept.items()}:
            file = self._shelf.path(self.client, self.round)
            raise StorageError(f"{file}: is not a whole model of this run")
        return memory

    def examples(self, plan: Plan) -> OwnData:
        """The device's own examples, divided as in the run."""
        data = load_data(self.node.data, None, plan.task)
        return own_data(plan, self.client, data)


def capacities(seat: Seat) -> tuple[Any, ...]:
    """Every client's p: the device's own, and the others' in no order."""
    own = as_fraction(seat.capacity)
    others = [p for p in map(as_fraction, seat.capacities) if p != own]
    number = seat.num_clients - 1
    filled = [*others, *[own] * number][:number]
    return (*filled[: seat.client], own, *filled[seat.client :])
