"""Rules against hostile clients: all updates of a round in, safer ones out.

A rule changes or leaves out updates; the method then combines them as usual. So rules
work with every method, with partial payloads, and with the server's optimizer. They are
computed in float64, in client order.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import ceil

import torch
from torch import Tensor

from fedspu.federation.checks import VARIANCE
from fedspu.federation.guards.steps import (
    distances,
    length,
    moved_alike,
    scaled,
)
from fedspu.neurons.average import Accumulator, Update
from fedspu.neurons.choose import as_fraction
from fedspu.neurons.table import State
from fedspu.settings import GuardSettings


@dataclass(frozen=True)
class Cohort:
    """The updates of one round, and the server's state before it."""

    state: State
    updates: list[Update]
    kinds: tuple[tuple[str, ...], ...]  # learned tensors; norm statistics


Rule = Callable[[Cohort], list[Update]]


def find_rule(settings: GuardSettings) -> Rule:
    """The rule that the settings name."""
    share = as_fraction(settings.share)
    rules: dict[str, Rule] = {
        "clip": clip,
        "trimmed-mean": partial(trimmed_mean, share),
        "median": median,
        "krum": partial(krum, share),
    }
    return rules[settings.rule]


class Ruled:
    """Collects a round's updates, applies a rule, and lets the method combine the rest.

    It keeps all updates of the round until the end, so it needs memory for them.
    """

    def __init__(
        self, rule: Rule, state: State, statistics: frozenset[str], inner: Accumulator
    ) -> None:
        self.rule, self.state, self.inner = rule, state, inner
        learned = tuple(name for name in state if name not in statistics)
        self.kinds = (learned, tuple(name for name in state if name in statistics))
        self.updates: list[Update] = []

    def add(self, update: Update) -> None:
        """Keep what one client trained until all have replied."""
        # A count is only what a client says, so all weigh the same.
        payload = {
            name: values.clamp(min=0) if VARIANCE in name else values
            for name, values in update.payload.items()
        }
        self.updates.append(replace(update, payload=payload, num_examples=1))

    def result(self) -> State:
        """What the method makes of the updates that are left."""
        cohort = Cohort(self.state, self.updates, self.kinds)
        for update in self.rule(cohort) if self.updates else []:
            self.inner.add(update)
        return self.inner.result()


# The rules ----------------------------------------------------------------------------


def clip(cohort: Cohort) -> list[Update]:
    """Scale down every update that is longer than the median one.

    Learned tensors and norm statistics are measured apart, as their scales differ. The
    lower of two middle lengths counts. Lengths are not divided by the size of a block:
    clients that train fewer neurons move each of them farther, so their updates are
    about as long.
    """
    updates = cohort.updates
    for names in cohort.kinds:
        lengths = [length(cohort.state, update, names) for update in updates]
        limit = sorted(lengths)[(len(lengths) - 1) // 2]
        updates = [
            scaled(cohort.state, update, names, limit / own if own > limit else 1.0)
            for update, own in zip(updates, lengths, strict=True)
        ]
    return updates


def trimmed_mean(share: Fraction, cohort: Cohort) -> list[Update]:
    """Clip; then of each entry, leave out the largest and the smallest steps.

    Of n clients that trained it, share x n, rounded up, are left out on either side, as
    long as one is left: of 3 the middle one counts; of 1 or 2, none is left out.
    """
    return _agreed(cohort, partial(_mean_within, share))


def median(cohort: Cohort) -> list[Update]:
    """Clip; then take the median step of each entry over those who trained it."""
    return _agreed(cohort, partial(_mean_within, Fraction(1, 2)))


def krum(share: Fraction, cohort: Cohort) -> list[Update]:
    """Clip; then leave out the clients whose updates are least like the others.

    Multi-Krum (Blanchard et al., NeurIPS 2017): of n clients, f = share x n, rounded
    up, are left out: those that are farthest, on average, from their n - f - 2 nearest
    others. ``distances`` says how far two are apart when they trained different parts.
    Two clients or fewer are all kept, as neither is more like the others.
    """
    updates = cohort.updates
    num_out = ceil(share * len(updates))
    if len(updates) < 3:
        return clip(cohort)
    apart = sum(distances(cohort.state, updates, names) for names in cohort.kinds)
    assert isinstance(apart, Tensor)
    apart.fill_diagonal_(torch.inf)
    num_near = max(1, len(updates) - num_out - 2)
    far = apart.sort(dim=1).values[:, :num_near].mean(dim=1)
    kept = far.argsort(stable=True)[: len(updates) - num_out].sort().values.tolist()
    clipped = clip(cohort)
    return [clipped[i] for i in kept]


def _agreed(cohort: Cohort, middle: Callable[[Tensor, Tensor], Tensor]) -> list[Update]:
    return moved_alike(cohort.state, clip(cohort), middle)


def _mean_within(share: Fraction, steps: Tensor, trained: Tensor) -> Tensor:
    """The mean of each entry without its outermost steps; 0 where nobody trained."""
    number = trained.sum(dim=0)
    num_out = torch.tensor(
        [min(ceil(share * n), max(0, n - 1) // 2) for n in range(len(steps) + 1)]
    )[number]
    in_order = steps.masked_fill(~trained, torch.inf).sort(dim=0).values
    place = torch.arange(len(steps))[:, None]
    is_within = (place >= num_out) & (place < number - num_out)
    total = in_order.masked_fill(~is_within, 0.0).sum(dim=0)
    return total / is_within.sum(dim=0).clamp(min=1)
