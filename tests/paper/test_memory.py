"""Figure 5: the memory footprint, by the paper's own formula."""

import pytest
import torch

from fedspu import choose_random, map_neurons, stream
from fedspu.models.paper import CIFARNet, EMNISTNet, SpeechNet
from fedspu.profile.paper import paper_bytes

PRINTED = {0.2: 54, 0.4: 44, 0.6: 31, 0.8: 18}
"""Mean reduction over the three networks against full training, in percent."""


def test_the_printed_reductions_come_out_with_a_batch_of_one() -> None:
    reductions: dict[float, list[float]] = {p: [] for p in PRINTED}
    for build in (EMNISTNet, CIFARNet, SpeechNet):
        model, x = build(), torch.zeros(2, *build.input_shape)
        neurons = map_neurons(model, x)
        full = paper_bytes(model, neurons, neurons.everything(), x[:1])
        for p, listed in reductions.items():
            active = choose_random(neurons, p, stream(0, "neurons"))
            part = paper_bytes(model, neurons, active, x[:1])
            listed.append(100 * (1 - part / full))
    means = {p: sum(listed) / 3 for p, listed in reductions.items()}
    assert means == pytest.approx(PRINTED, abs=2)
    assert means[0.2] == pytest.approx(55.9, abs=0.1)
