"""Models to train and to judge in: what was in them before does not matter."""

from dataclasses import dataclass

from torch import nn

from fedspu.federation.plan import Plan
from fedspu.methods.method import Held
from fedspu.neurons.blocks import load_state, named_tensors
from fedspu.neurons.slim import slim_model, slim_neurons
from fedspu.neurons.table import Active, Neurons
from fedspu.streams import torch_stream

MAX_SLIM = 16
"""Slim models in a workspace; there are as many sizes as there are capacities."""


@dataclass(frozen=True)
class Bench:
    """A model on the workbench, with its own table."""

    model: nn.Module
    neurons: Neurons


class Workspace:
    """The full model, and slim ones by their sizes, each built once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        with torch_stream(plan.settings.seed, "workspace"):  # its values do not matter
            self.full = Bench(plan.build().to(plan.device), plan.neurons)
        self._slim: dict[tuple[int, ...], Bench] = {}
        self._is_by_size = self._slim_by_size()

    def place(self, held: Held) -> Bench:
        """A model with these values, full or slim."""
        bench = self.full if held.active is None else self._bench(held.active)
        load_state(bench.model, held.state)
        return bench

    def _bench(self, active: Active) -> Bench:
        sizes = tuple(len(active[group.name]) for group in self.plan.neurons.groups)
        if not self._is_by_size:
            self._slim.clear()
        if sizes not in self._slim:
            if len(self._slim) == MAX_SLIM:  # in fedselect sizes grow with the rounds
                self._slim.pop(next(iter(self._slim)))
            self._slim[sizes] = Bench(
                slim_model(self.full.model, self.plan.neurons, active),
                slim_neurons(self.plan.neurons, active),
            )
        return self._slim[sizes]

    def _slim_by_size(self) -> bool:
        """Whether slim models of equal sizes differ in nothing but their state."""
        in_state = {name for name, _ in named_tensors(self.full.model)}
        return not any(
            isinstance(layer, nn.MultiheadAttention)  # it knows which heads it has
            for layer in self.full.model.modules()
        ) and all(
            axis.tensor in in_state
            for group in self.plan.neurons.groups
            for axis in group.axes
        )
