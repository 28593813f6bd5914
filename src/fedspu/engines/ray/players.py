"""The actor: a process of the cluster that plays clients, with one thread."""

import socket
from dataclasses import dataclass, field
from typing import Any

import ray
import torch

from fedspu.engines.crew import portable
from fedspu.engines.machine import (
    FreedMemory,
    forget_peak,
    peak_rss_bytes,
    warm_up,
)
from fedspu.engines.ray.arrays import (
    Bytes,
    PackedPacket,
    memory_as_array,
    memory_from_array,
    packed,
    unpacked,
)
from fedspu.engines.ray.nodes import cause, check_kernels, check_versions
from fedspu.engines.ray.shared_folder import Probe
from fedspu.errors import FedSPUError
from fedspu.federation.client import Client
from fedspu.federation.client_memory import Name, Shelf
from fedspu.federation.engine import Missing
from fedspu.federation.messages import unpack_state
from fedspu.neurons.table import State
from fedspu.training.epochs import make_optimizer


@dataclass(frozen=True)
class What:
    """What a request asks for, known without reading it."""

    client: int
    last: int
    round: int
    is_train: bool


@dataclass(frozen=True)
class Begun:
    """What an actor says when it has begun, or why it cannot."""

    answer: str = ""  # to the probe
    error: bytes | None = None


@dataclass(frozen=True)
class Done:
    """What came of a turn."""

    up: PackedPacket | Missing
    memory: Bytes | None = None  # what the client keeps now, if the shelf is not seen
    held: list[Name] = field(default_factory=list)  # what is in RAM
    peak: int = 0
    error: bytes | None = None  # raised there, to be raised here


class Player:
    """Plays clients; one actor is one process with one thread."""

    def begin(self, placed: list[Any], probe: Probe | None) -> Begun:
        """Take the plan and the examples; say whether the shelf's folder is seen."""
        try:
            torch.set_num_threads(1)
            forget_peak()
            plan, examples, versions = ray.get(placed)
            check_versions(versions)
            answer = probe.answer() if probe else ""
            folder = probe.path.parent if probe and answer else None
            self.shelf = Shelf(folder)
            self.shelf.cache = 1e6 * plan.settings.store.cache
            cpu = torch.device("cpu")
            divided = examples.divided()
            check_kernels(plan, divided)
            self.client = Client(plan, divided, self.shelf, cpu)
            self.freed = FreedMemory()
            self.num_shown = 0
            self.broadcast: State = {}
            warm_up(plan)
            # The first optimizer loads seconds' worth of modules, in any method.
            make_optimizer([torch.zeros(1, requires_grad=True)], plan.settings.train)
        except Exception as error:  # whatever it is, the main process raises it
            return Begun(error=_as_reason(error))
        return Begun(answer)

    def is_alive(self) -> None:
        """Nothing: that it answers is enough."""

    def turn(
        self,
        what: What,
        down: PackedPacket,
        memory: Bytes | None,
        broadcast: tuple[int, Any],
    ) -> Done:
        """Play a client's turn; ``memory`` is what it keeps, if that is not here."""
        try:
            self.freed.give_back()
            if memory is not None:
                kept = memory_from_array(memory)
                self.shelf.put(what.client, what.last, kept)
            found = self.client.respond(unpacked(down), self._state(*broadcast))
            if isinstance(found, Missing):
                return Done(found, None, self._held(), peak_rss_bytes())
            new = self._new_memory(what) if what.is_train else None
            return Done(packed(found.up), new, self._held(), peak_rss_bytes())
        except Exception as error:  # whatever it is, the main process raises it
            return Done(Missing("it raised"), None, self._held(), error=portable(error))

    def _state(self, number: int, shown: Any) -> State | None:
        """What was sent to all; read once, however many clients need it."""
        if shown is None:
            return None
        if number != self.num_shown:
            values = ray.get(shown).tobytes()
            self.broadcast = unpack_state(self.client.plan, values)
            self.num_shown = number
        return self.broadcast

    def _new_memory(self, what: What) -> Bytes | None:
        """What a client keeps after its turn, unless it is in the shelf's folder."""
        if self.shelf.folder is not None:
            return None
        for client, t in self.shelf.names():
            if client == what.client and t != what.round:
                self.shelf.drop(client, t)  # the main process has it
        return memory_as_array(self.shelf, what.client, what.round)

    def _held(self) -> list[Name]:
        return [] if self.shelf.folder is not None else self.shelf.names()


def _as_reason(error: Exception) -> bytes:
    """Why an actor cannot begin, as an error to be raised elsewhere."""
    if isinstance(error, FedSPUError):
        return portable(error)
    return portable(
        FedSPUError(
            f"a Ray worker on {socket.gethostname()} cannot begin "
            f"({cause(error)}); install the same code on all nodes of the cluster"
        )
    )
