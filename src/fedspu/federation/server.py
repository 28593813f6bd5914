"""The server's part of a round: choose clients, build requests, take the next step."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from fedspu.errors import TrainingError
from fedspu.federation.messages import JudgeRequest, TrainReply, TrainRequest
from fedspu.federation.plan import Plan
from fedspu.methods.method import Offer, Which, answered
from fedspu.neurons.average import Update
from fedspu.neurons.blocks import extract, is_finite
from fedspu.neurons.table import Active, State
from fedspu.random_streams import stream
from fedspu.settings import ServerSettings, Settings


@dataclass(frozen=True)
class Federation:
    """All that the server carries from round to round."""

    round: int
    global_state: State
    stopped: frozenset[int] = frozenset()
    # The round in which each client last took part.
    last: Mapping[int, int] = field(default_factory=dict)
    # The neurons each returned last, in methods whose clients choose them.
    kept: Mapping[int, Active] = field(default_factory=dict)
    # The memory of the method and of the server's optimizer.
    extra: State = field(default_factory=dict)
    # How many training examples each client has, as it first said.
    num_examples: Mapping[int, int] = field(default_factory=dict)


# Who takes part, and what is sent -----------------------------------------------------


def choose_clients(federation: Federation, plan: Plan, t: int) -> list[int]:
    """A random subset of the clients that have not stopped (Alg. 1 and 2, line 4).

    It is all of them if at most ``clients.per_round`` are left.
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
    # Its number is i plus how many clients with a lower number have stopped.
    below = bisect_left(range(len(stopped)), i + 1, key=lambda j: stopped[j] - j)
    return i + below


class TrainRequests(Mapping[int, TrainRequest]):
    """A round's requests, each made when it is asked for: payloads take memory."""

    def __init__(self, federation: Federation, plan: Plan, t: int) -> None:
        self.federation, self.plan, self.t = federation, plan, t
        self._clients = choose_clients(federation, plan, t)
        self._offers: dict[int, Offer | None] = {}  # to clients not yet heard of

    def offer(self, client: int) -> Offer | None:
        """What the method offers one client (Algorithms 1 and 2, line 6)."""
        method, federation = self.plan.method, self.federation
        if method.offer is None:
            return None
        kept = federation.kept.get(client)
        now = self.plan.client_round(self.t, client, kept, federation.extra)
        return answered(method, "offer", method.offer(now), Offer)

    def __getitem__(self, client: int) -> TrainRequest:
        """The request to one client (line 7)."""
        plan, federation = self.plan, self.federation
        offer = self.offer(client)
        where = plan.travelling(offer.active) if offer else {}
        is_new = client not in federation.last
        self._offers[client] = offer
        return TrainRequest(
            round=self.t,
            client=client,
            last=federation.last.get(client, 0),
            offer=offer,
            payload=extract(federation.global_state, where),
            initial=plan.initial if is_new and plan.sends_initial else None,
        )

    def asked(self, client: int) -> TrainRequest:
        """What one client was asked, without the values; may be called once."""
        if client in self._offers:
            offer = self._offers.pop(client)
        else:
            offer = self.offer(client)
        last = self.federation.last.get(client, 0)
        return TrainRequest(self.t, client, last, offer, payload={}, initial=None)

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


def judge_requests(
    federation: Federation, clients: list[int], which: Which
) -> dict[int, JudgeRequest]:
    """Ask these clients to judge the model each would use now, or the server's."""
    return {
        client: JudgeRequest(
            federation.round, client, federation.last.get(client, 0), which
        )
        for client in clients
    }


# What comes back ----------------------------------------------------------------------


def update_of(plan: Plan, reply: TrainReply) -> Update | None:
    """What a reply adds to the average; None if nothing is exchanged."""
    if reply.active is None:
        return None
    where = plan.travelling(reply.active)
    return Update(where, reply.payload, reply.num_examples)


def next_federation(
    plan: Plan, before: Federation, combined: State, replies: Mapping[int, TrainReply]
) -> Federation:
    """The server's state after a round, from what the replies combine to.

    Replies come in client order, never in arrival order (Algorithm 2, lines 17 to 22).
    """
    t = before.round + 1
    method, extra = plan.method, before.extra
    state, extra = take_server_step(
        plan.settings.server,
        before.global_state,
        combined,
        extra,
        plan.neurons.statistics,
    )
    _check_finite(t, state, plan.settings)
    if method.server is not None:
        found = answered(method, "server", method.server(extra, replies), dict)
        extra = {**extra, **found}
    chosen = {}
    if method.is_choice:
        chosen = {k: r.active for k, r in replies.items() if r.active is not None}
    return Federation(
        round=t,
        global_state=state,
        stopped=before.stopped | {k for k, r in replies.items() if r.has_stopped},
        last={**before.last, **dict.fromkeys(replies, t)},
        kept={**before.kept, **chosen},
        extra=extra,
        num_examples={
            **before.num_examples,
            **{k: r.num_examples for k, r in replies.items()},
        },
    )


def _check_finite(t: int, state: State, settings: Settings) -> None:
    """Refuse a server's model that has overflowed, before it is saved or sent."""
    for name, tensor in state.items():
        if not is_finite(tensor):
            lower = [f"train.lr (it is {settings.train.lr})"]
            if settings.server.optimizer != "none":
                lower.insert(0, f"server.lr (it is {settings.server.lr})")
            if settings.guard.noise:
                lower.insert(0, f"guard.clip (it is {settings.guard.clip})")
                lower.insert(0, f"guard.noise (it is {settings.guard.noise})")
            raise TrainingError(
                f"round {t}: the server's {name} is no longer finite; lower "
                f"{' or '.join(lower)}"
            )


# The server's optimizer ---------------------------------------------------------------

MEAN, SQUARE = "server momentum:", "server square:"
"""Prefixes of names in the server's memory: the running means of its steps."""


def take_server_step(
    settings: ServerSettings,
    state: State,
    combined: State,
    extra: State,
    statistics: frozenset[str],
) -> tuple[State, State]:
    """The next global state and the server's memory, by FedAvgM or FedAdam.

    Reddi et al., "Adaptive Federated Optimization", ICLR 2021: the step from ``state``
    to ``combined``, the average of the replies, is used as a gradient. An entry that no
    client moved keeps its value and its means; norm statistics are averaged as usual.
    """
    if settings.optimizer == "none":
        return combined, extra
    after, memory = dict(combined), dict(extra)
    for name, before in state.items():
        if not before.is_floating_point() or name in statistics:
            continue
        step = combined[name].double() - before.double()
        is_moved = step != 0
        mean = memory.get(f"{MEAN}{name}", torch.zeros_like(step))
        square = memory.get(f"{SQUARE}{name}", torch.zeros_like(step))
        if settings.optimizer == "momentum":
            new_mean = settings.momentum * mean + step
            move = settings.lr * new_mean
        else:
            new_mean = settings.momentum * mean + (1 - settings.momentum) * step
            new_square = settings.beta2 * square + (1 - settings.beta2) * step.square()
            move = settings.lr * new_mean / (new_square.sqrt() + settings.epsilon)
            memory[f"{SQUARE}{name}"] = torch.where(is_moved, new_square, square)
        memory[f"{MEAN}{name}"] = torch.where(is_moved, new_mean, mean)
        moved = (before.double() + move).to(before.dtype)
        after[name] = torch.where(is_moved, moved, before)
    return after, memory
