"""Clients in this process, one after the other."""

from collections.abc import Iterable, Mapping
from time import perf_counter

import torch

from fedspu.core.evaluation import Score
from fedspu.core.streams import torch_stream
from fedspu.core.training import make_optimizer
from fedspu.core.types import State
from fedspu.federation.client import Memory, judge, take_turn
from fedspu.federation.messages import (
    Request,
    pack_reply,
    pack_request,
    unpack_reply,
    unpack_request,
)
from fedspu.federation.plan import Plan
from fedspu.federation.run import Answer, Cost


class LocalEngine:
    """Plays all clients itself; every message crosses as bytes all the same."""

    def __init__(
        self, plan: Plan, memories: Mapping[int, Memory] | None = None
    ) -> None:
        self.plan = plan
        with torch_stream(plan.settings.seed, "workspace"):  # its values do not matter
            self.model = plan.build().to(plan.device)
        self.memories = dict(memories or {})
        # Torch loads a second's worth of modules with the first optimizer; not on the
        # clock of the first client.
        make_optimizer([torch.zeros(1, requires_grad=True)], plan.recipe).zero_grad()

    def exchange(self, requests: Mapping[int, Request]) -> dict[int, Answer]:
        """Play each client's turn; memories change only when all have succeeded."""
        answers, memories = {}, {}
        for client, request in sorted(requests.items()):
            answers[client], memories[client] = self._turn(client, request)
        self.memories.update(memories)
        return answers

    def _turn(self, client: int, request: Request) -> tuple[Answer, Memory]:
        down = pack_request(self.plan, request)
        received = unpack_request(self.plan, down)

        start = perf_counter()
        memory = self.memories.get(client)
        reply, memory = take_turn(self.plan, self.model, received, memory)
        seconds = perf_counter() - start

        up = pack_reply(self.plan, reply, received.offer)
        cost = Cost(
            bytes_initial=len(down.initial),
            bytes_down=len(down.values),
            bytes_up=len(up.values),
            index_bytes=down.index_bytes + up.index_bytes,
            train_seconds=seconds,
        )
        return Answer(unpack_reply(self.plan, up, client, request.offer), cost), memory

    def judge(self, clients: Iterable[int], state: State | None) -> dict[int, Score]:
        """Score ``state``, or each client's own model, on the clients' test parts."""
        return {
            client: judge(
                self.plan,
                self.model,
                client,
                self._own(client) if state is None else state,
            )
            for client in clients
        }

    def _own(self, client: int) -> State:
        memory = self.memories.get(client)
        return self.plan.initial if memory is None or memory.own is None else memory.own
