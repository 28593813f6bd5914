"""The paper's memory figure: its formula, and what a step really holds."""

from collections.abc import Callable
from functools import partial
from statistics import mean

import torch
import torch.nn.functional as F
from torch import nn

from fedspu import models
from fedspu.neurons.calls import undisturbed
from fedspu.neurons.choose import choose_random
from fedspu.neurons.mapping import map_neurons
from fedspu.neurons.table import Neurons
from fedspu.partial.context import partial_training
from fedspu.partial.weight import Mode, Saves
from fedspu.profile.paper import paper_bytes
from fedspu.profile.peak_memory import step_bytes
from fedspu.random_streams import stream
from fedspu.reproduce.printed import DATASETS, MEMORY, NOTES
from fedspu.reproduce.tables import PaperTable

BATCHES = {"emnist": 16, "cifar10": 128, "speech": 16}
CLASSES = {"emnist": 62, "cifar10": 10, "speech": 35}

WAYS: dict[str, tuple[Mode, Saves]] = {
    "exact": ("exact", "fast"),
    "exact, lean": ("exact", "lean"),
    "truncated": ("truncated", "fast"),
}


def memory_table() -> PaperTable:
    """What FedSPU saves against training the whole model, for each p.

    The formula with a batch of one, as the paper must have used it; and the peak of a
    training step with the paper's batch size, measured.
    """
    rows = []
    nets = {name: _Net(name) for name in DATASETS}
    for p, printed in MEMORY.items():
        formula = mean(net.saved_by_formula(p) for net in nets.values())
        measured = {
            way: mean(net.saved(p, *how) for net in nets.values())
            for way, how in WAYS.items()
        }
        rows.append(
            (
                f"{p:g}",
                f"{printed} %",
                _percent(formula),
                *(_percent(share) for share in measured.values()),
            )
        )
    return PaperTable(
        "Memory saved against training the whole model, mean of the three networks",
        ("p", "paper", "its formula", *(f"peak, {way}" for way in WAYS)),
        tuple(rows),
        (
            "Its formula: weights, gradients of active entries, activations of active "
            "neurons, with a batch of one. Peak: the most that a step of training "
            "holds, measured, with the paper's batch sizes (16, 128, 16).",
            *NOTES["memory"],
        ),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


class _Net:
    """One of the paper's networks, with a batch of made-up examples."""

    def __init__(self, name: str) -> None:
        build: Callable[[], nn.Module] = partial(models.build, name, CLASSES[name])
        with undisturbed():
            self.build, model = build, build()
            shape: tuple[int, ...] = model.input_shape  # type: ignore[assignment]  # ours
            self.x = torch.randn(BATCHES[name], *shape)
            self.y = torch.arange(BATCHES[name]) % CLASSES[name]
            self.neurons: Neurons = map_neurons(model, self.x[:2])

    def saved_by_formula(self, p: float) -> float:
        """The share that the paper's formula saves."""

        def held(share: float) -> int:
            active = choose_random(self.neurons, share, stream(0, "neurons"))
            return paper_bytes(self.build(), self.neurons, active, self.x[:1])

        return 1 - held(p) / held(1.0)

    def saved(self, p: float, mode: Mode, saves: Saves) -> float:
        """The share of a dense step's peak that is saved."""
        with undisturbed():
            dense = self.build().train()
            whole = step_bytes(dense, dense.parameters(), self.x, self.y).peak
            model = self.build().train()
            active = choose_random(self.neurons, p, stream(0, "neurons"))
            with partial_training(
                model, self.neurons, active, mode, saves=saves
            ) as trainable:
                part = step_bytes(
                    model, trainable, self.x, self.y, F.cross_entropy
                ).peak
        return 1 - part / whole
