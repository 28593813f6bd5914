"""Gates and RMS norms with one compiled backward pass, beside PyTorch's own."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedspu
from fedspu.compiled.library import find
from fedspu.partial.chain.native.models import Kernels


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    """These tests are about the compiled code, so it must be there."""
    assert find().library is not None, find().how


class RmsNorm(nn.Module):
    """An RMS norm, written as models of Hugging Face do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Rows of about the same size."""
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


class Block(nn.Module):
    """A gated layer with a norm, as in Llama."""

    def __init__(self, act: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.act = act
        self.first, self.norm = nn.Linear(8, 48), RmsNorm(48)
        self.gate = nn.Linear(48, 77, bias=False)
        self.up = nn.Linear(48, 77, bias=False)
        self.down, self.head = nn.Linear(77, 48, bias=False), nn.Linear(48, 5)
        self.seen: Tensor | None = None
        self.looks = False

    def forward(self, x: Tensor) -> Tensor:
        """Scores of sequences (n, tokens, 8)."""
        h = self.first(x)
        normed = self.norm(h)
        act = self.act(self.gate(normed))
        if self.looks:
            act.retain_grad()
            self.seen = act
        out = self.down(act * self.up(normed))
        scores: Tensor = self.head((h + out).mean(1))
        return scores


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 40, 8, generator=generator)
    return x, torch.randint(5, (16,), generator=generator)


def nodes(tensor: Tensor) -> Iterator[str]:
    """The names of all operations that a backward pass runs through."""
    waiting: list[Any] = [tensor.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node.name()
            waiting += [before for before, _ in node.next_functions]


def trained(
    model: nn.Module, kernels: Kernels, p: float = 0.4
) -> tuple[list[Tensor], set[str], Tensor]:
    """The leaves' gradients, the operations in the graph, and the loss."""
    x, y = batch()
    dtype = next(model.parameters()).dtype
    model = copy.deepcopy(model)
    neurons = fedspu.map_neurons(model, x[:2].to(dtype))
    active = fedspu.choose_random(neurons, p, fedspu.stream(0, "neurons"))
    with fedspu.partial_training(model, neurons, active, kernels=kernels) as leaves:
        loss = F.cross_entropy(model(x.to(dtype)), y)
        names = set(nodes(loss))
        loss.backward()
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        assert len(grads) == len(leaves)
    return grads, names, loss.detach()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are taken however small the layer."""
    monkeypatch.setattr("fedspu.partial.costs.MIN_PRODUCTS", 0)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("act", [F.silu, F.gelu, gelu_tanh])
def test_gradients_are_as_close_to_float64_as_those_of_pytorch(
    act: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model = Block(act)
    ours, names, loss = trained(model, "auto")
    plain, others, same = trained(model, "torch")
    exact, _, _ = trained(copy.deepcopy(model).double(), "torch")
    assert {"_GateBackward", "_RmsNormBackward"} <= names
    assert not {"_GateBackward", "_RmsNormBackward"} & others
    assert torch.equal(loss, same)  # the forward pass is the same
    for a, b, c in zip(ours, plain, exact, strict=True):
        most = c.abs().max()
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + 2e-6 * most


@pytest.mark.usefixtures("always")
def test_a_gradient_that_someone_looks_at_is_there() -> None:
    torch.manual_seed(0)
    model = Block()
    x, y = batch()
    neurons = fedspu.map_neurons(model, x[:2])
    model.looks = True
    active = fedspu.choose_random(neurons, 0.4, fedspu.stream(0, "neurons"))
    with fedspu.partial_training(model, neurons, active):
        loss = F.cross_entropy(model(x), y)
        assert "_GateBackward" not in set(nodes(loss))
        loss.backward()
        assert model.seen is not None
        assert model.seen.grad is not None


@pytest.mark.usefixtures("always")
def test_a_gate_changed_in_place_is_an_error_as_in_pytorch() -> None:
    torch.manual_seed(0)

    class Changed(Block):
        def forward(self, x: Tensor) -> Tensor:
            gate = self.gate(self.norm(self.first(x)))
            y = self.act(gate) * self.up(self.norm(self.first(x)))
            gate.zero_()
            scores: Tensor = self.head(self.down(y).mean(1))
            return scores

    x, y = batch()
    neurons = fedspu.map_neurons(Block(), x[:2])
    active = fedspu.choose_random(neurons, 0.4, fedspu.stream(0, "neurons"))
    changed = Changed()
    with fedspu.partial_training(changed, neurons, active):
        loss = F.cross_entropy(changed(x), y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.usefixtures("always")
def test_in_a_checkpoint_pytorch_runs_everything() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checked(Block):
        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return scores

    torch.manual_seed(0)
    plain = Block()
    checked = Checked()
    checked.load_state_dict(plain.state_dict())
    x, y = batch()
    neurons = fedspu.map_neurons(plain, x[:2])
    active = fedspu.choose_random(neurons, 0.4, fedspu.stream(0, "neurons"))
    found = []
    for model in (plain, checked):
        with fedspu.partial_training(model, neurons, active) as leaves:
            F.cross_entropy(model(x), y).backward()
            found.append([leaf.grad for leaf in leaves])
    for a, b in zip(*found, strict=True):
        assert a is not None
        assert torch.allclose(a, b, atol=1e-6)
