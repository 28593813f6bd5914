"""A device of a simulation that Flower began: ``flwr run`` without any devices.

Its node has nothing but a number. Data and capacity follow from the run's settings, as
in ``fedspu run``, and its memory is in Flower's own state.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from flwr.app import ConfigRecord, Context
from safetensors.torch import load, save

from fedspu.data.dataset import Dataset
from fedspu.data.examples import DividedData, divide
from fedspu.engines.flower.wire import Seat
from fedspu.errors import SettingsError
from fedspu.federation.client import Examples
from fedspu.federation.client_memory import Name, Shelf, pack_memory, unpack_memory
from fedspu.federation.plan import Plan, capacities_of
from fedspu.flower.config import NodeSettings
from fedspu.flower.device import Device
from fedspu.methods.method import Memory
from fedspu.prepare import choose, dataset_for
from fedspu.settings import Settings
from fedspu.tasks.task import Task

PARTITION = "partition-id"
"""What only nodes of a simulation have in their node config."""

MEMORY = "fedspu memory"


class SimulatedDevice(Device):
    """One node of a simulation."""

    def __init__(self, given: Mapping[str, Any], context: Context) -> None:
        number = int(context.node_config[PARTITION])
        self._context, self._flat = context, tuple(sorted(given.items()))
        settings, _, _ = choose(given, None, None, None, None)
        if number >= settings.clients.number:
            raise SettingsError(
                f"this is node {number} of the simulation, and clients.number is "
                f"{settings.clients.number}; give num-supernodes the same number"
            )
        node = NodeSettings(
            name=f"node-{number:08}",
            capacity=float(capacities_of(settings)[number]),
            data=settings.data.name,
        )
        super().__init__(given, node)
        self._given = dict(given)

    def _data(self, task: Task) -> Dataset:
        return _divided(self._flat).data

    def _examples(self, plan: Plan, seat: Seat, data: Dataset) -> Examples:
        return _divided(self._flat)

    def _plan(
        self, seat: Seat, settings: Settings, method: Any, task: Task, data: Dataset
    ) -> Plan:
        key = seat.model_dump_json()
        if key not in _PLANS:
            _PLANS.clear()
            _PLANS[key] = super()._plan(seat, settings, method, task, data)
        return _PLANS[key]

    def _shelf(self, seat: Seat) -> Shelf:
        return ContextShelf(self._context)


_PLANS: dict[str, Plan] = {}
"""The last plan: a process of a simulation has many messages."""


@cache
def _divided(flat: tuple[tuple[str, Any], ...]) -> DividedData:
    settings, _, task = choose(dict(flat), None, None, None, None)
    return divide(settings, dataset_for(settings, None, task), task)


class ContextShelf(Shelf):
    """Memories in the state that Flower keeps for a node."""

    def __init__(self, context: Context) -> None:
        super().__init__(None)
        self._state = context.state

    def put(self, client: int, t: int, memory: Memory) -> None:
        """Keep what a client has after round t."""
        if MEMORY not in self._state:
            self._state[MEMORY] = ConfigRecord()
        self._state.config_records[MEMORY][f"{client} {t}"] = save(pack_memory(memory))

    def get(self, client: int, t: int) -> Memory:
        """What a client had after round t; empty for t = 0, before its first turn."""
        if t == 0:
            return Memory()
        content = self._state.config_records[MEMORY][f"{client} {t}"]
        assert isinstance(content, bytes)
        return unpack_memory(load(content))

    def drop(self, client: int, t: int) -> None:
        """Forget a memory that is no longer needed."""
        del self._state.config_records[MEMORY][f"{client} {t}"]

    def names(self) -> list[Name]:
        """The client and round of every memory here."""
        if MEMORY not in self._state:
            return []
        found = (name.split() for name in self._state.config_records[MEMORY])
        return [(int(client), int(t)) for client, t in found]
