import io

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from fedspu import map_neurons
from fedspu.reports.neurons import active_counts, explained, neuron_tables
from tests.oracles.federation import ConvNet


def test_active_entries_are_counted_at_each_p() -> None:
    neurons = map_neurons(ConvNet(), torch.zeros(2, 1, 4, 4))
    half, whole = active_counts(neurons, [0.5, 1.0])
    # 2 of 4 and 3 of 6: 18+2 conv1, 8 bn1, 54+3 conv2, 12 bn2, 36+3 fc.
    assert half["entries"] == 136
    assert whole["entries"] == 377
    assert half["share"] == pytest.approx(136 / 377)


def test_the_tables_show_groups_axes_and_counts() -> None:
    neurons = map_neurons(ConvNet(), torch.zeros(2, 1, 4, 4))
    console = Console(file=io.StringIO(), width=300)
    for part in neuron_tables(neurons, active_counts(neurons, [1.0])):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for word in ("conv1", "conv2", "permutable", "fc.weight[1] x4", "377", "1.51 kB"):
        assert word in text


class InOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc3(self.fc2(self.fc1(x).cumsum(-1)).relu())
        return logits


@pytest.mark.filterwarnings("ignore::fedspu.NeuronWarning")
def test_what_is_always_active_is_explained_with_what_can_be_done() -> None:
    lines = explained(map_neurons(InOrder(), torch.randn(2, 6)))
    [held] = [line for line in lines if "fc1.weight" in line]
    assert "because their order matters to the operation cumsum" in held
    assert "fedspu.register" in held
    [output] = [line for line in lines if "fc3.weight" in line]
    assert "What you can do" not in output
    assert any("unused.weight" in line and "give an example" in line for line in lines)
    assert not any(line.startswith("permutable:") for line in lines)
    assert any(line.startswith("aligned:") for line in lines)
