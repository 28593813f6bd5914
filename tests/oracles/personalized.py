"""The personalization methods as one would write them down from paper, slowly.

As in ``methods.py``: nothing here calls the code it is there to check.
"""

from collections.abc import Callable
from statistics import pstdev

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedspu import State, stream
from tests.oracles.federation import slow_batches
from tests.oracles.methods import (
    FedAvg,
    Mode,
    Turn,
    gradients_of,
    is_norm,
    is_statistic,
    leaves_of,
    num_bytes,
)


def clone(w: State) -> State:
    return {name: values.clone() for name, values in w.items()}


class Personal(FedAvg):
    """Everyone at full size, with a model of its own."""

    judges_own = True

    def first_contact(self, k: int) -> int:
        return num_bytes(self.w0)

    def judged(self, t: int, k: int) -> State:
        return self.own[k][1] if k in self.own else self.w0

    def mine(self, k: int) -> State:
        return clone(self.own[k][1] if k in self.own else self.w0)

    def option(self, name: str, default: float) -> float:
        return float(self.settings.method.options.get(name, default))

    def loss(self, w: State, leaves: State, x: Tensor, y: Tensor) -> Tensor:
        """Each example's loss; running statistics in ``w`` follow."""
        out = self.net.forward({**w, **leaves}, x, Mode("train"))
        return F.cross_entropy(out, y, reduction="none")


class FedBN(Personal):
    """Li et al.: norms stay."""

    def travels(self, name: str) -> bool:
        return not is_norm(name)


class FedPer(Personal):
    """Arivazhagan et al.: the last layer stays; in all nets here it is fc or 5."""

    def travels(self, name: str) -> bool:
        return name.split(".")[0] not in ("fc", "5")


class FedRep(FedPer):
    """Collins et al.: the head trains, then the rest for an epoch."""

    def epochs(self, t: int, k: int, w: State) -> float:
        rng = stream(self.seed, "batches", t, k)
        given = max(1, self.settings.train.epochs - 1)
        self.phase(w, k, rng, int(self.option("head_epochs", given)), is_head=True)
        return self.phase(w, k, rng, 1, is_head=False)

    def phase(
        self, w: State, k: int, rng: np.random.Generator, epochs: int, is_head: bool
    ) -> float:
        descent = self.descent()
        losses: list[float] = []
        for x, y in self.batches(k, rng, epochs):
            leaves = leaves_of(w)
            each = self.loss(w, leaves, x, y)
            gradients = gradients_of(each.mean(), leaves)
            trained = {n: g for n, g in gradients.items() if self.travels(n) != is_head}
            descent.step(w, trained)
            losses += each.tolist()
        return sum(losses) / len(losses)


class Beside(Personal):
    """What is returned and what is kept are two models."""

    def both(self, t: int, k: int, w: State) -> tuple[State, float]:
        """Train the returned model in place; the kept one, and the loss reported."""
        raise NotImplementedError

    def turn(self, t: int, k: int) -> Turn:
        whole = self.net.whole
        w = self.net.cut(self.global_state, whole)
        down, initial = num_bytes(w), 0 if k in self.own else self.first_contact(k)
        mine, train_loss = self.both(t, k, w)
        val_loss, _ = self.scores(mine, k, "val")
        self.own[k] = (whole, mine)
        return Turn(whole, w, train_loss, val_loss, initial, down, num_bytes(w))


class Ditto(Beside):
    """Li et al.: a personal model, drawn to the global one."""

    def both(self, t: int, k: int, w: State) -> tuple[State, float]:
        came, mine, pull = clone(w), self.mine(k), self.option("pull", 1.0)
        self.epochs(t, k, w)
        descent = self.descent()
        losses: list[float] = []
        rng = stream(self.seed, "personal", t, k)
        for x, y in self.batches(k, rng, self.settings.train.epochs):
            leaves = leaves_of(mine)
            each = self.loss(mine, leaves, x, y)
            distance: Tensor | float = 0.0
            for name, leaf in leaves.items():
                distance = distance + (leaf - came[name]).square().sum()
            value = each.mean() + 0.5 * pull * distance
            descent.step(mine, gradients_of(value, leaves))
            losses += each.tolist()
        return mine, sum(losses) / len(losses)


class APFL(Beside):
    """Deng et al.: a mix of a client's own weights and the global ones."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]  # as above
        self.weights: dict[int, State] = {}
        self.shares: dict[int, float] = {}

    def both(self, t: int, k: int, w: State) -> tuple[State, float]:
        v = {n: x.clone() for n, x in self.w0.items() if not is_statistic(n)}
        v = clone(self.weights.get(k, v))
        share = self.shares.get(k, self.option("mix", 0.5))
        statistics = {n: x for n, x in self.mine(k).items() if is_statistic(n)}
        of_w, of_v = self.descent(), self.descent()
        losses: list[float] = []
        rng = stream(self.seed, "batches", t, k)
        for i, (x, y) in enumerate(self.batches(k, rng, self.settings.train.epochs)):
            # The gradients of f at w and at the mix, both before any step.
            mixed = {n: share * v[n] + (1 - share) * w[n] for n in v}
            leaves = leaves_of(mixed)
            each = self.loss(statistics, leaves, x, y)
            at_mix = gradients_of(each.mean(), leaves)
            losses += each.tolist()
            leaves = leaves_of(w)
            at_w = gradients_of(self.loss(w, leaves, x, y).mean(), leaves)
            slope = sum(float(((v[n] - w[n]) * at_mix[n]).sum()) for n in v)
            of_w.step(w, at_w)
            of_v.step(v, {n: share * g for n, g in at_mix.items()})
            if i == 0 and self.settings.method.options.get("adaptive", True):
                lr = self.settings.train.lr
                share = float(np.clip(share - lr * slope, 0, 1))
        self.weights[k], self.shares[k] = v, share
        mixed = {n: share * v[n] + (1 - share) * w[n] for n in v}
        return {**mixed, **statistics}, sum(losses) / len(losses)


class FedALA(Personal):
    """Zhang et al.: begin from a learned mix of the global model and one's own."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]  # as above
        self.mix: dict[int, State] = {}

    def is_mixed(self, name: str) -> bool:
        return name.split(".")[0] in ("fc", "5")

    def epochs(self, t: int, k: int, w: State) -> float:
        if k in self.own:
            self.learn_mix(t, k, w)
        return super().epochs(t, k, w)

    def learn_mix(self, t: int, k: int, w: State) -> None:
        came = {n: v.clone() for n, v in w.items() if self.is_mixed(n)}
        mine = {n: v for n, v in self.own[k][1].items() if self.is_mixed(n)}
        is_first = k not in self.mix
        if is_first:
            self.mix[k] = {n: torch.ones_like(v) for n, v in mine.items()}
        mix = self.mix[k]

        def put(into: State) -> None:
            for n in mix:
                into[n] = mine[n] + mix[n] * (came[n] - mine[n])

        x, y = self.part(k, "train")
        number = min(len(x), max(2, round(self.option("share", 0.8) * len(x))))
        share = stream(self.seed, "mixing share", t, k).permutation(len(x))[:number]
        x, y = x[share], y[share]
        rng = stream(self.seed, "mixing", t, k)
        tried = clone(w)  # its statistics follow, and are thrown away
        losses: list[float] = []
        while True:
            seen: list[float] = []
            for batch in slow_batches(len(x), self.settings.train.batch_size, rng):
                put(tried)
                leaves = leaves_of(tried)
                each = self.loss(tried, leaves, x[batch], y[batch])
                seen += each.tolist()
                gradients = gradients_of(each.mean(), leaves)
                for n in mix:
                    slope = gradients[n] * (came[n] - mine[n])
                    step = mix[n] - self.option("mix_lr", 1.0) * slope
                    mix[n] = step.clamp(0, 1)
            losses.append(sum(seen) / len(seen))
            is_settled = len(losses) > 10 and pstdev(losses[-10:]) < 0.1
            if not is_first or is_settled or len(losses) == 30:
                break
        put(w)


SLOW: dict[str, Callable[..., FedAvg]] = {
    "fedbn": FedBN,
    "fedper": FedPer,
    "fedrep": FedRep,
    "ditto": Ditto,
    "apfl": APFL,
    "fedala": FedALA,
}
