import io

import pytest
import torch
from rich.console import Console

from fedspu import map_neurons
from fedspu.reports.neurons import active_counts, neuron_tables
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
