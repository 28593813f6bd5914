"""Clients in this process, one after the other."""

from collections.abc import Iterator, Mapping

import torch

from fedspu.engines.machine import FreedMemory, warm_up
from fedspu.federation.client import Client, Examples
from fedspu.federation.client_memory import Shelf
from fedspu.federation.engine import Answer, Facts, Missing
from fedspu.federation.messages import Request, pack_request
from fedspu.federation.plan import Plan
from fedspu.neurons.table import State


class LocalEngine:
    """Plays all clients itself; messages are still packed and read as bytes."""

    facts = Facts()

    def __init__(
        self,
        plan: Plan,
        examples: Examples,
        shelf: Shelf | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.plan, self.shelf = plan, shelf or Shelf(None)
        self.client = Client(plan, examples, self.shelf, device or torch.device("cpu"))
        self._freed = FreedMemory()
        warm_up(plan)

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        """Play each client's turn, in client order."""
        for client in sorted(requests):
            down = pack_request(self.plan, requests[client])
            yield client, self.client.respond(down, broadcast)
            self._freed.give_back()

    def close(self) -> None:
        """Nothing to close."""
