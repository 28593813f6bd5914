"""The server's part of a round: choose clients, build requests, absorb replies."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedspu.core.averaging import average
from fedspu.core.blocks import extract
from fedspu.core.streams import stream
from fedspu.core.types import State, Update
from fedspu.federation.messages import Reply, Request
from fedspu.federation.plan import Plan


@dataclass(frozen=True)
class Federation:
    """All that the server carries from round to round."""

    round: int
    global_state: State
    stopped: frozenset[int] = frozenset()
    met: frozenset[int] = frozenset()  # clients that have taken part


def choose_clients(federation: Federation, plan: Plan, t: int) -> list[int]:
    """A random subset of the clients that go on (Algorithms 1 and 2, line 4).

    If fewer than ``clients.per_round`` are left, all of them.
    """
    left = [k for k in range(plan.num_clients) if k not in federation.stopped]
    number = plan.settings.clients.per_round
    if len(left) <= number:
        return left
    rng = stream(plan.settings.seed, "cohort", t)
    return sorted(left[i] for i in rng.choice(len(left), number, replace=False))


def build_request(federation: Federation, plan: Plan, t: int, client: int) -> Request:
    """What the method offers one client (Algorithms 1 and 2, lines 6 and 7)."""
    offer = plan.method.offer(plan.situation(t, client))
    where = plan.travelling(offer.active) if offer else {}
    is_new = client not in federation.met
    return Request(
        round=t,
        client=client,
        offer=offer,
        payload=extract(federation.global_state, where),
        initial=plan.initial if is_new and plan.method.keeps_own else None,
    )


def absorb(
    federation: Federation, plan: Plan, replies: Mapping[int, Reply]
) -> Federation:
    """Average what was trained, and take leave of those who stopped.

    In client order, never arrival order (Algorithm 2, lines 17 to 22).
    """
    updates = [
        Update(plan.travelling(reply.active), reply.payload, reply.num_examples)
        for _, reply in sorted(replies.items())
        if reply.active is not None
    ]
    return Federation(
        round=federation.round + 1,
        global_state=average(federation.global_state, updates),
        stopped=federation.stopped
        | {client for client, reply in replies.items() if reply.has_stopped},
        met=federation.met | frozenset(replies),
    )
