"""Models that are reused to train and to judge; their old values do not matter."""

from dataclasses import dataclass

import torch
from torch import nn

from fedspu.federation.plan import Plan
from fedspu.methods.method import ModelState
from fedspu.neurons.blocks import load_state, named_tensors
from fedspu.neurons.layers import kind_of
from fedspu.neurons.slim import slim_model, slim_neurons
from fedspu.neurons.table import Active, Neurons
from fedspu.random_streams import torch_stream

MAX_SLIM = 16
"""At most this many slim models are kept; most methods need one per capacity."""


@dataclass(frozen=True)
class Placed:
    """A model on the workbench, with its own table."""

    model: nn.Module
    neurons: Neurons


class Workbench:
    """The full model, and slim ones by their sizes, each built once."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        with torch_stream(plan.settings.seed, "workspace"):  # its values do not matter
            self.full = Placed(plan.build().to(device), plan.neurons)
        self._slim: dict[tuple[int, ...], Placed] = {}
        self._is_by_size = self._slim_by_size()

    def place(self, model: ModelState) -> Placed:
        """A model with these values, full or slim."""
        placed = self.full if model.active is None else self._find(model.active)
        load_state(placed.model, model.state)
        return placed

    def _find(self, active: Active) -> Placed:
        sizes = tuple(len(active[group.name]) for group in self.plan.neurons.groups)
        if not self._is_by_size:
            self._slim.clear()
        if sizes not in self._slim:
            if len(self._slim) == MAX_SLIM:  # in fedselect sizes grow with the rounds
                self._slim.pop(next(iter(self._slim)))
            self._slim[sizes] = Placed(
                slim_model(self.full.model, self.plan.neurons, active),
                slim_neurons(self.plan.neurons, active),
            )
        return self._slim[sizes]

    def _slim_by_size(self) -> bool:
        """Whether slim models of equal sizes differ only in their state."""
        in_state = {name for name, _ in named_tensors(self.full.model)}
        return all(
            kind_of(layer).is_slim_by_size for layer in self.full.model.modules()
        ) and all(
            axis.tensor in in_state and not group.padded
            for group in self.plan.neurons.groups
            for axis in group.axes
        )
