"""Client-level differential privacy: a noisy sum of clipped updates.

docs/security.md has the whole argument. In short: all of a client's update, zero
outside its blocks, has at most the norm ``clip``, so without one client the sum differs
by at most ``clip``. Noise is added to every entry that any client of the round was
offered. What the sum is divided by depends only on the server's offers, never on
replies.
"""

from collections import Counter

import torch
from torch import Tensor

from fedspu.federation.checks import VARIANCE
from fedspu.federation.guards.steps import length, step
from fedspu.federation.plan import Plan
from fedspu.federation.server import Federation, TrainRequests, choose_clients
from fedspu.neurons.average import Update
from fedspu.neurons.blocks import mesh
from fedspu.neurons.table import State
from fedspu.random_streams import stream


class NoisySum:
    """The sum of a round's clipped updates, with noise, by how many were offered each.

    A client that is missing or refused adds nothing, and counts as if it had replied.
    """

    def __init__(self, requests: TrainRequests, clip: float, noise: float) -> None:
        self.requests, self.clip, self.noise = requests, clip, noise
        self.state = requests.federation.global_state
        self.total = {name: _zeros(values) for name, values in self.state.items()}

    def add(self, update: Update) -> None:
        """Add what one client trained, scaled down to the limit; counts are unused."""
        own = length(self.state, update, list(update.where))
        factor = self.clip / own if own > self.clip else 1.0
        for name, where in update.where.items():
            total = self.total[name]
            moved = step(self.state, update, name).cpu()
            total[mesh(total, where)] += factor * moved

    def offered(self) -> dict[str, Tensor]:
        """How many clients of the round were offered each entry."""
        number = {name: _zeros(values) for name, values in self.state.items()}
        for client in self.requests:
            offer = self.requests.offer(client)
            where = self.requests.plan.travelling(offer.active) if offer else {}
            for name, axes in where.items():
                number[name][mesh(number[name], axes)] += 1
        return number

    def result(self) -> State:
        """The next state; an entry that no client was offered keeps its value."""
        plan = self.requests.plan
        seed = plan.settings.seed if plan.noise_seed is None else plan.noise_seed
        rng = stream(seed, "privacy noise", self.requests.t)
        after: State = {}
        for name, number in self.offered().items():
            before = self.state[name]
            if not bool((number > 0).any()):
                after[name] = before.clone()
                continue
            drawn = torch.from_numpy(rng.standard_normal(tuple(number.shape)))
            noisy = self.total[name] + self.noise * self.clip * drawn
            moved = before.cpu().double() + noisy / number.clamp(min=1)
            if VARIANCE in name:
                moved = moved.clamp(min=0)
            moved = torch.where(number > 0, moved, before.cpu().double())
            after[name] = moved.to(before)
        return after


def most_turns(plan: Plan, rounds: int) -> int:
    """How many of these rounds that client took part in which took part most often."""
    nobody_stopped = Federation(0, {})
    turns = Counter(
        client
        for t in range(1, rounds + 1)
        for client in choose_clients(nobody_stopped, plan, t)
    )
    return max(turns.values(), default=0)


def _zeros(values: Tensor) -> Tensor:
    return torch.zeros(values.shape, dtype=torch.float64)
