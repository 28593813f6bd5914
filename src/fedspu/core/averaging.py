"""Average each entry over the clients that trained it (paper, step 4 and Figure 3)."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedspu.core.blocks import mesh, take
from fedspu.core.types import State, Update
from fedspu.errors import ModelError


def average(state: Mapping[str, Tensor], updates: Iterable[Update]) -> State:
    """Average each entry over the clients that trained it, by their examples.

    An entry that no client trained keeps its value in ``state``. Computed as
    ``state + sum n_i (payload_i - state) / sum n_i`` in float64, in the order given, so
    payloads equal to ``state`` give ``state`` back bit for bit.
    """
    moved: dict[str, Tensor] = {}
    weight: dict[str, Tensor] = {}
    for update in updates:
        if update.num_examples < 1:
            raise ModelError(
                f"an update trained on {update.num_examples} examples has no weight"
            )
        for name, where in update.where.items():
            base = state[name]
            if name not in moved:
                moved[name] = torch.zeros_like(base, dtype=torch.float64)
                weight[name] = torch.zeros_like(base, dtype=torch.float64)
            step = update.payload[name].double() - take(base, where).double()
            index = mesh(base, where)
            moved[name][index] += update.num_examples * step
            weight[name][index] += update.num_examples
    averaged = {name: tensor.clone() for name, tensor in state.items()}
    for name, total in weight.items():
        mean = moved[name] / total.clamp(min=1)
        changed = (state[name].double() + mean).to(state[name].dtype)
        # An entry that nobody moved keeps its bits: -0.0 + 0.0 would be 0.0.
        averaged[name] = torch.where(mean == 0, state[name], changed)
    return averaged
