"""The paper's own formula for the memory of a training step."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fedspu.neurons.calls import Operations, call
from fedspu.neurons.slim import slim_model
from fedspu.neurons.table import Active, Neurons


def paper_bytes(model: nn.Module, neurons: Neurons, active: Active, x: Any) -> int:
    """The paper's memory footprint ("Memory footprint", Figure 5), for a batch ``x``.

    "The accumulated size of weights, gradients, and activations stored in the model":
    all weights, the gradients of the active entries, and the outputs of the operations
    of active neurons. It is not a measurement: exact gradients need more activations
    than these. A batch of one example gives the paper's percentages.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what cannot be sliced counts in full
        slim = slim_model(model, neurons, active)
    weights = sum(p.nbytes for p in model.parameters())
    gradients = sum(p.nbytes for p in slim.parameters() if p.requires_grad)
    activations = _Outputs()
    with torch.no_grad(), activations:
        call(slim, x)
    return weights + gradients + activations.num_bytes


class _Outputs(Operations):
    """Adds up the results of all operations, except views and changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) and out else out
        is_new = all(result.alias_info is None for result in func._schema.returns)
        if is_new and isinstance(first, Tensor) and first.is_floating_point():
            self.num_bytes += first.nbytes
        return out
