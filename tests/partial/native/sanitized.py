"""Random networks under sanitizers; run by test_sanitizers.py in a process of its own.

python -m tests.partial.native.sanitized LIBRARY
"""

import sys
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from fedspu.compiled import clamps, library, rows
from fedspu.neurons.average import Average, Update
from fedspu.partial import clamped_norms, patterns
from fedspu.partial.chain.native import calls, models, network
from fedspu.partial.norms import NormPart
from tests.partial.native.nets import (
    CLASSES,
    chains,
    examples,
    has_one_value,
    native_gradients,
    parts,
)


@settings(
    max_examples=60,
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(
    chains(), st.integers(1, 40), st.sampled_from([0.2, 0.5, 1.0]), st.integers(0, 9)
)
def everything(
    drawn: tuple[nn.Module, tuple[int, int, int]], number: int, p: float, seed: int
) -> None:
    """Forward, backward, an epoch, judging."""
    model, shape = drawn
    x, y = examples(shape, number, seed)
    assume(not has_one_value(model, x))
    spans = parts(model, p, seed)
    native_gradients(model, spans, x, torch.randn(number, CLASSES))
    sgd = calls.Sgd(0.1, momentum=0.9, decay=0.01, clip=1.0)
    training = models.make_training(model, spans, x, y, sgd, is_truncated=False)
    assert training is not None
    training.epoch(iter([torch.arange(number)]), 5)
    judge = models.make_judge(model.eval(), shape)
    assert judge is not None
    judge(x)
    norm(number, seed)
    many_rows(number, seed)
    pointwise(number, seed)


def pointwise(number: int, seed: int) -> None:
    """Clamps, gates and RMS norms of any size."""
    x, other = torch.randn(2, number, seed + 1)
    clamp = clamps.clamped(x, 0.0, 1.0, is_in_place=False)
    assert clamp is not None
    clamps.clamped_back(clamp[1], other, torch.contiguous_format)
    a, b = x.clone().requires_grad_(), other.clone().requires_grad_()
    for kind in range(3):
        patterns._Gate.apply(a, b, x * other, kind).sum().backward()  # type: ignore[no-untyped-call]  # torch has no hints here
    leaf = torch.ones(seed + 1, requires_grad=True)
    scale = x.square().mean(1, keepdim=True).rsqrt()
    rest = leaf.detach(), scale, x * scale, None
    patterns._RmsNorm.apply(a, leaf, *rest).sum().backward()  # type: ignore[no-untyped-call]  # as above


def norm(number: int, seed: int) -> None:
    """A batch norm of maps by itself, forward and backward."""
    height, channels = 1 + seed, 2 + 7 * seed
    x = torch.randn(number + 1, channels, height, 3)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    weight, bias = torch.ones(channels), torch.zeros(channels)
    running = torch.zeros(channels), torch.ones(channels)
    y = clamped_norms.ClampedNorm.apply(  # type: ignore[no-untyped-call]
        *(x, weight, bias, weight, bias, running, (0.1, 1e-5), clamped_norms.RELU),
        NormPart(None, None),
    )
    y.sum().backward()


def many_rows(number: int, seed: int) -> None:
    """Examples made of bytes, and an average."""
    shape = (number, 1 + seed, 7)
    found = rows.scaled_rows(
        torch.zeros(shape, dtype=torch.uint8), torch.arange(number), (0.5,), (0.5,)
    )
    assert found is not None
    mean = Average({"a": torch.zeros(shape), "b": torch.zeros(number)})
    last = torch.tensor([number - 1])
    where = {"a": (last, torch.tensor([0, seed]), None), "b": (last,)}
    mean.add(Update(where, {"a": torch.ones(1, 2, 7), "b": torch.ones(1)}, 3))


if __name__ == "__main__":
    found = library.Found(library._opened(Path(sys.argv[1])), "with sanitizers")
    for module in (network, models, clamped_norms, patterns):
        vars(module)["find"] = lambda: found
    for module in (rows, clamps):
        vars(module)["loaded"] = lambda: found.library
    everything()
    sys.stdout.write("fine")
