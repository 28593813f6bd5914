"""Clients in this process, one after the other."""

from collections.abc import Iterable, Iterator, Mapping

from fedspu.engines.turns import play_turn, warm_up
from fedspu.federation.client import Which, judge
from fedspu.federation.memory import Memories
from fedspu.federation.messages import Request, pack_request, unpack_reply
from fedspu.federation.plan import Plan
from fedspu.federation.rounds import Answer
from fedspu.federation.server import Federation
from fedspu.federation.workbench import Workspace
from fedspu.training import Score


class LocalEngine:
    """Plays all clients itself; every message crosses as bytes all the same."""

    num_workers = 1
    peak = 0  # memory of processes besides this one

    def __init__(self, plan: Plan, memories: Memories | None = None) -> None:
        self.plan = plan
        self.workspace = Workspace(plan)
        self.memories = Memories() if memories is None else memories
        warm_up(plan)

    def exchange(self, requests: Mapping[int, Request]) -> Iterator[tuple[int, Answer]]:
        """Play each client's turn; memories change only when all have succeeded."""
        changed = {}
        for client in sorted(requests):
            request = requests[client]
            down = pack_request(self.plan, request)
            entry = self.memories.entries.get(client)
            turn = play_turn(
                self.plan, self.workspace, self.memories.shelf, down, entry
            )
            reply = unpack_reply(self.plan, turn.up, client, request.offer)
            changed[client] = turn.entry
            yield client, Answer(reply, turn.cost(down))
        self.memories.update(changed)

    def judge(
        self, clients: Iterable[int], federation: Federation, which: Which
    ) -> dict[int, Score]:
        """Score each client's personal model, or the global one, on its test part."""
        return {
            client: judge(
                self.plan,
                self.workspace,
                federation.round,
                client,
                self.memories.get(client),
                federation.global_state,
                which,
            )
            for client in clients
        }

    def close(self) -> None:
        """Nothing to end."""
