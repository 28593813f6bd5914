"""Logit adjustment: clients learn what classes look like, not how frequent they are.

While a client trains, the logarithm of each class's share among its own examples is
added to the class's score. So the model need not learn these shares, in which clients
differ, and the server's model is nobody's mean of them. A client that uses the model
adds its own shares to the bias of the output layer, for good.

Menon et al., "Long-tail learning via logit adjustment", ICLR 2021; for federated
learning in another form Zhang et al., "Federated learning with label distribution skew
via logits calibration", ICML 2022.
"""

from collections.abc import Callable

from torch import Tensor, nn

from fedspu.neurons.output_layer import output_layer
from fedspu.neurons.table import State
from fedspu.tasks.task import Loss

Offsets = Callable[[int], Tensor]
"""What is added to the scores, for a number of classes."""


def adjusted(loss: Loss, offsets: Offsets) -> Loss:
    """The loss of scores to which the offsets are added first."""

    def of_adjusted(
        output: Tensor, target: Tensor, /, *, reduction: str = "mean"
    ) -> Tensor:
        added = offsets(output.shape[1]).to(output)
        return loss(output + added, target, reduction=reduction)

    return of_adjusted


def with_offsets(
    state: State, offsets: Offsets | None, model: nn.Module, x: Tensor
) -> State:
    """The state with the offsets in the output layer's bias.

    It is the same state if there are no offsets, or no such bias: the model's output
    must be that of a linear layer, as some examples ``x`` show.
    """
    path = None if offsets is None else output_layer(model, x)
    bias = f"{path}.bias".lstrip(".")
    if offsets is None or path is None or bias not in state:
        return state
    return {**state, bias: state[bias] + offsets(len(state[bias])).to(state[bias])}
