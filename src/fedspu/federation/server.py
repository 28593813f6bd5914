"""The server's part of a round: choose clients, build requests, absorb replies."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter

from fedspu.federation.messages import Reply, Request
from fedspu.federation.plan import Plan
from fedspu.neurons.average import Update, average
from fedspu.neurons.blocks import extract
from fedspu.neurons.table import Active, State
from fedspu.streams import stream


@dataclass(frozen=True)
class Federation:
    """All that the server carries from round to round."""

    round: int
    global_state: State
    stopped: frozenset[int] = frozenset()
    met: frozenset[int] = frozenset()  # clients that have taken part
    # What each kept last, in methods whose clients choose.
    kept: Mapping[int, Active] = field(default_factory=dict)


def choose_clients(federation: Federation, plan: Plan, t: int) -> list[int]:
    """A random subset of the clients that go on (Algorithms 1 and 2, line 4).

    If fewer than ``clients.per_round`` are left, all of them.
    """
    stopped = sorted(federation.stopped)
    num_left = plan.num_clients - len(stopped)
    number = plan.settings.clients.per_round
    if num_left <= number:
        return [k for k in range(plan.num_clients) if k not in federation.stopped]
    rng = stream(plan.settings.seed, "cohort", t)
    chosen = rng.choice(num_left, number, replace=False)
    return sorted(_nth_left(stopped, int(i)) for i in chosen)


def _nth_left(stopped: list[int], i: int) -> int:
    """The i-th of the clients that have not stopped, without a list of them."""
    # Before it there are i clients that go on, and those stopped of a lower number.
    below = bisect_left(range(len(stopped)), i + 1, key=lambda j: stopped[j] - j)
    return i + below


def build_request(federation: Federation, plan: Plan, t: int, client: int) -> Request:
    """What the method offers one client (Algorithms 1 and 2, lines 6 and 7)."""
    kept = federation.kept.get(client)
    offer = plan.method.offer(plan.situation(t, client, kept))
    where = plan.travelling(offer.active) if offer else {}
    # A slim model has nothing of w0 but what stays with the client.
    needs_initial = plan.method.keeps_own and (not plan.method.is_slim or plan.stays)
    is_new = client not in federation.met
    return Request(
        round=t,
        client=client,
        offer=offer,
        payload=extract(federation.global_state, where),
        initial=plan.initial if is_new and needs_initial else None,
    )


class Requests(Mapping[int, Request]):
    """A round's requests, each made when it is asked for: payloads take room."""

    def __init__(self, federation: Federation, plan: Plan, t: int) -> None:
        began = perf_counter()
        self._clients = choose_clients(federation, plan, t)
        self._all = (federation, plan, t)
        self.seconds = perf_counter() - began

    def __getitem__(self, client: int) -> Request:
        began = perf_counter()
        request = build_request(*self._all, client)
        self.seconds += perf_counter() - began
        return request

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


def absorb(
    federation: Federation, plan: Plan, replies: Iterable[tuple[int, Reply]]
) -> Federation:
    """Average what was trained, and take leave of those who stopped.

    Replies come in client order, never arrival order (Algorithm 2, lines 17 to 22);
    each is let go of once it is added.
    """
    weighs = plan.method.weighs_examples
    stopped: set[int] = set()
    met: set[int] = set()
    chosen: dict[int, Active] = {}

    def updates() -> Iterator[Update]:
        for client, reply in replies:
            met.add(client)
            if reply.has_stopped:
                stopped.add(client)
            if reply.active is not None:
                if plan.method.score is not None:
                    chosen[client] = reply.active
                yield Update(
                    plan.travelling(reply.active),
                    reply.payload,
                    reply.num_examples if weighs else 1,
                )

    averaged = average(federation.global_state, updates())
    return Federation(
        round=federation.round + 1,
        global_state=averaged,
        stopped=federation.stopped | stopped,
        met=federation.met | met,
        kept={**federation.kept, **chosen},
    )
