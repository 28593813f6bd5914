"""The server's part of a round: choose clients, build requests, take the next step."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from fedspu.errors import TrainingError
from fedspu.federation.messages import JudgeRequest, TrainReply, TrainRequest
from fedspu.federation.plan import Plan
from fedspu.methods.method import Offer, Which, answered, offer_to
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
    # Whether clients have made their last models, if they do (method.finish).
    is_finished: bool = False

    @property
    def rounds_played(self) -> int:
        """How many rounds were played, without the one for last models."""
        return self.round - self.is_finished

    @property
    def shown_state(self) -> State:
        """The server's model as it is judged, handed out and finished from."""
        means = {
            name.removeprefix(EMA): values
            for name, values in self.extra.items()
            if name.startswith(EMA)
        }
        return {**self.global_state, **means}


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
    """A round's requests, each made when it is asked for: payloads take memory.

    ``is_finish``: the last of all, to every client, with the whole of the server's
    model.
    """

    def __init__(
        self, federation: Federation, plan: Plan, t: int, is_finish: bool = False
    ) -> None:
        self.federation, self.plan, self.t = federation, plan, t
        self.is_finish = is_finish
        self._state = federation.shown_state if is_finish else federation.global_state
        self._offers: dict[int, Offer | None] = {}  # to clients not yet heard of
        self._whole: Offer | None = None
        if is_finish:
            self._clients = list(range(plan.num_clients))
            self._whole = Offer(plan.neurons.everything())
        else:
            self._clients = choose_clients(federation, plan, t)

    def offer(self, client: int) -> Offer | None:
        """What the method offers one client (Algorithms 1 and 2, line 6)."""
        method, federation = self.plan.method, self.federation
        if method.offer is None or self._whole is not None:
            return self._whole
        kept = federation.kept.get(client)
        now = self.plan.client_round(self.t, client, kept, federation.extra)
        return offer_to(method, now)

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
            payload=extract(self._state, where),
            initial=plan.initial if is_new and plan.sends_initial else None,
            is_finish=self.is_finish,
        )

    def asked(self, client: int) -> TrainRequest:
        """What one client was asked, without the values; may be called once."""
        if client in self._offers:
            offer = self._offers.pop(client)
        else:
            offer = self.offer(client)
        last = self.federation.last.get(client, 0)
        return TrainRequest(self.t, client, last, offer, {}, None, self.is_finish)

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
    if plan.settings.server.average == "ema":
        extra = _with_mean(extra, state, plan.settings.server.decay)
    if method.server is not None:
        found = answered(method, "server", method.server(extra, replies), dict)
        extra = {**extra, **found}
    chosen = {}
    if method.is_choice:
        chosen = {k: r.active for k, r in replies.items() if r.active is not None}
    return replace(
        _with_turns(before, replies),
        global_state=state,
        stopped=before.stopped | {k for k, r in replies.items() if r.has_stopped},
        kept={**before.kept, **chosen},
        extra=extra,
    )


def finished_federation(
    before: Federation, replies: Mapping[int, TrainReply]
) -> Federation:
    """The server's state once clients have made their last models."""
    return replace(_with_turns(before, replies), is_finished=True)


def _with_turns(before: Federation, replies: Mapping[int, TrainReply]) -> Federation:
    """One round later: who took part in it, and with how many examples."""
    t = before.round + 1
    counts = {client: reply.num_examples for client, reply in replies.items()}
    return replace(
        before,
        round=t,
        last={**before.last, **dict.fromkeys(replies, t)},
        num_examples={**before.num_examples, **counts},
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

MEAN, SQUARE, EMA = "server momentum:", "server square:", "server mean:"
"""Prefixes of names in the server's memory: running means of its steps, of its model.
"""


def _with_mean(extra: State, state: State, decay: float) -> State:
    """The server's memory with the running mean of its model moved by one round."""
    means = {}
    for name, values in state.items():
        if values.is_floating_point():
            before = extra.get(f"{EMA}{name}", values).double()
            mean = decay * before + (1 - decay) * values.double()
            means[f"{EMA}{name}"] = mean.to(values.dtype)
    return {**extra, **means}


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
