import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu import map_neurons
from fedspu.neurons.choose import choose_ordered
from fedspu.profile.paper import paper_bytes


class Net(nn.Module):
    """8 hidden neurons; views and changes in place are no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.first(x.flatten(1)))
        scores: Tensor = self.second(F.relu(x))
        return scores


@pytest.mark.parametrize("batch", [1, 5])
def test_weights_and_what_belongs_to_active_neurons(batch: int) -> None:
    model, x = Net(), torch.ones(2, 2, 3)
    neurons = map_neurons(model, x)
    # All weights; at p = .5 the gradients of 4 neurons and all outputs, and twice 4
    # outputs and 3 scores for each example.
    weights, gradients = 6 * 8 + 8 + 8 * 3 + 3, 6 * 4 + 4 + 4 * 3 + 3
    found = paper_bytes(
        model, neurons, choose_ordered(neurons, 0.5), torch.ones(batch, 2, 3)
    )
    assert found == 4 * (weights + gradients + batch * (4 + 4 + 3))
