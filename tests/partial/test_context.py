import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedspu
from fedspu import Active, Blocks, Neurons, state_of
from fedspu.errors import ModelError
from fedspu.neurons.blocks import take
from fedspu.partial.spans import Layout
from fedspu.partial.weight import Mode
from tests.oracles.models import (
    Fn,
    loss_of,
    mapped,
    mask_of,
    quietly_mapped,
    random_active,
    random_input,
    random_model,
    run,
    seeded,
    shaken,
)
from tests.oracles.tables import same_bits
from tests.oracles.zoo import ZOO, ZOO_BY_NAME, Entry, chain, noise

# Neurons keep their places here, so that leaves can be compared with blocks and outputs
# bit by bit; the other layout is compared by what comes out of it.
partial_training = functools.partial(fedspu.partial_training, layout="index")


@pytest.fixture(
    autouse=True, params=["kernels", "plain", "lean"], ids=str, scope="module"
)
def by_every_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """All weighted operations by our kernels, all by the plain ones, all saving."""
    with pytest.MonkeyPatch.context() as patch:
        smallest = 10**18 if request.param == "plain" else 0
        patch.setattr("fedspu.partial.costs.MIN_PRODUCTS", smallest)
        patch.setattr("fedspu.partial.costs.MOST_OF_ALL", 1.0)
        if request.param == "lean":
            own: Any = vars(fedspu.partial_training)["__wrapped__"]
            lean = tuple("lean" if d == "fast" else d for d in own.__defaults__)
            patch.setattr(own, "__defaults__", lean)
        yield


State = dict[str, Any]
MODES: tuple[Mode, ...] = ("exact", "truncated")


def learnable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that train, in the order in which they are handed out."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def mlp() -> nn.Module:
    with seeded(0):
        return chain(
            fc1=nn.Linear(6, 8),
            relu1=nn.ReLU(),
            fc2=nn.Linear(8, 7),
            relu2=nn.ReLU(),
            fc3=nn.Linear(7, 3),
        ).double()


X = noise(4, 6).double()
Y = torch.tensor([0, 1, 2, 0])
HALF: Active = {"fc1": torch.tensor([0, 2, 3, 7]), "fc2": torch.tensor([1, 4, 6])}


def table() -> Neurons:
    return quietly_mapped(mlp(), X)


# Masked dense training, the plain way -------------------------------------------------
#
# Full autograd. Gradient, weight decay and so all of the optimizer's state are zero
# outside the blocks; the formulas are those of the optimizers' papers.


@dataclass(frozen=True)
class Rule:
    """One optimizer: as torch has it, and as a formula for one tensor."""

    make: Callable[[list[Tensor]], torch.optim.Optimizer]
    step: Callable[[Tensor, Tensor, Tensor, State], None]


def sgd(lr: float, momentum: float = 0.0, decay: float = 0.0) -> Rule:
    def step(w: Tensor, grad: Tensor, mask: Tensor, state: State) -> None:
        g = (grad + decay * w) * mask
        state["buffer"] = momentum * state.get("buffer", 0) + g
        w -= lr * state["buffer"]

    return Rule(
        lambda ws: torch.optim.SGD(ws, lr=lr, momentum=momentum, weight_decay=decay),
        step,
    )


def adam(lr: float, decay: float, decoupled: bool) -> Rule:
    beta1, beta2, eps = 0.9, 0.99, 1e-4  # rounding stays rounding
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam

    def step(w: Tensor, grad: Tensor, mask: Tensor, state: State) -> None:
        g = grad * mask
        if decoupled:
            w -= lr * decay * w * mask
        else:
            g = g + decay * w * mask
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
        v = state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
        w -= lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)

    return Rule(
        lambda ws: kind(ws, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay),
        step,
    )


RULES = {
    "sgd": sgd(0.02),
    "momentum": sgd(0.01, momentum=0.9, decay=0.1),
    "adam": adam(0.005, decay=0.1, decoupled=False),
    "adamw": adam(0.005, decay=0.1, decoupled=True),
}


def masked_dense(
    model: nn.Module, blocks: Blocks, rule: Rule, example: Any, steps: int
) -> list[dict[str, Tensor]]:
    """The model's state after the first and after the last step."""
    weights = learnable(model)
    masks = {n: mask_of(tuple(w.shape), blocks[n]).to(w) for n, w in weights.items()}
    memory: dict[str, State] = {name: {} for name in weights}
    history = []
    for t in range(steps):
        model.zero_grad()
        loss_of(model, example, seed=t).backward()
        with torch.no_grad():
            for name, w in weights.items():
                if w.grad is not None:  # on a branch not taken there is none
                    rule.step(w, w.grad, masks[name], memory[name])
        if t in (0, steps - 1):
            history.append(state_of(model))
    return [history[0], history[-1]]


def partial(
    model: nn.Module,
    neurons: Neurons,
    active: Active,
    rule: Rule,
    example: Any,
    steps: int,
    layout: Layout = "auto",
) -> list[dict[str, Tensor]]:
    """The same for what is tested: the first is read inside, the last afterwards."""
    history = []
    with fedspu.partial_training(model, neurons, active, layout=layout) as trainable:
        optimizer = rule.make(trainable)
        for t in range(steps):
            optimizer.zero_grad()
            loss_of(model, example, seed=t).backward()
            optimizer.step()
            if t == 0:
                history.append(state_of(model))
    return [*history, state_of(model)]


def greatest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[n].double() - other[n].double()).abs().max()) for n in one)


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
@pytest.mark.parametrize("layout", ["auto", "index"])
@pytest.mark.parametrize(
    ("rule", "p"), [("sgd", 0.3), ("momentum", 0.6), ("adam", 0.8), ("adamw", 0.2)]
)
def test_one_and_ten_steps_equal_masked_dense_training(
    entry: Entry, rule: str, p: float, layout: Layout
) -> None:
    neurons, x = mapped(entry.name), random_input(entry)
    active = random_active(neurons, p)
    model = random_model(entry)
    dense = masked_dense(
        copy.deepcopy(model), neurons.blocks(active), RULES[rule], x, steps=10
    )
    ours = partial(model, neurons, active, RULES[rule], x, steps=10, layout=layout)
    assert greatest_difference(ours[0], dense[0]) < 1e-10
    assert greatest_difference(ours[1], dense[1]) < 1e-10  # norm statistics included


def as_float(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.float() if x.is_floating_point() else x
    if isinstance(x, dict):
        return {key: as_float(value) for key, value in x.items()}
    return tuple(as_float(value) for value in x)


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
def test_no_learnable_entry_outside_the_blocks_moves_by_a_bit(entry: Entry) -> None:
    neurons = mapped(entry.name)
    active = random_active(neurons, 0.4, seed=1)
    blocks = neurons.blocks(active)
    model = random_model(entry).float()  # where rounding would show
    x = as_float(random_input(entry))
    before = state_of(model)
    partial(model, neurons, active, RULES["adamw"], x, steps=3)
    after = state_of(model)
    for name in learnable(model):
        outside = ~mask_of(neurons.shapes[name], blocks[name])
        assert same_bits(after[name][outside], before[name][outside]), name


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
def test_every_active_entry_that_has_a_gradient_moves(entry: Entry) -> None:
    neurons, x = mapped(entry.name), random_input(entry)
    active = random_active(neurons, 0.4, seed=2)
    model = random_model(entry)
    dense = copy.deepcopy(model)
    loss_of(dense, x).backward()
    before = state_of(model)
    partial(model, neurons, active, RULES["sgd"], x, steps=1)
    after = state_of(model)
    for name, own in learnable(dense).items():
        if own.grad is not None:
            felt = mask_of(neurons.shapes[name], neurons.blocks(active)[name])
            felt &= own.grad.abs() > 1e-9
            assert (after[name] != before[name])[felt].all(), name


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
@pytest.mark.parametrize("is_training", [True, False])
def test_the_forward_pass_is_the_model_s_own(entry: Entry, is_training: bool) -> None:
    neurons, x = mapped(entry.name), random_input(entry)
    model = random_model(entry).train(is_training)
    own = copy.deepcopy(model)
    with seeded(1):
        expected = run(own, x)
    for p in (0.2, 0.5, 1):
        for mode in MODES:
            inside, active = copy.deepcopy(model), random_active(neurons, p)
            with partial_training(inside, neurons, active, mode), seeded(1):
                output = run(inside, x)
            assert torch.allclose(output, expected, rtol=0, atol=1e-12), (p, mode)
            has_attention = entry.name in ("transformer", "vit")  # rounds otherwise
            assert mode == "truncated" or has_attention or torch.equal(output, expected)


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
def test_the_leaves_hold_the_active_entries_and_no_more(entry: Entry) -> None:
    neurons = mapped(entry.name)
    active = random_active(neurons, 0.3)
    model = random_model(entry)
    blocks = neurons.blocks(active)
    expected = {
        name: take(w.detach(), blocks[name]) for name, w in learnable(model).items()
    }
    statistics = sum(
        int(mask_of(neurons.shapes[name], blocks[name]).sum())
        for name in neurons.statistics
    )
    with partial_training(model, neurons, active) as trainable:
        for leaf, block in zip(trainable, expected.values(), strict=True):
            assert torch.equal(leaf.detach(), block)
            assert leaf.is_leaf
            assert leaf.requires_grad
        count = sum(leaf.numel() for leaf in trainable)
    assert count + statistics == neurons.num_entries(active)


def test_norm_statistics_of_frozen_channels_follow_the_data() -> None:
    entry = ZOO_BY_NAME["vgg"]
    neurons, model = mapped("vgg"), random_model(entry)
    before = state_of(model)
    partial(model, neurons, random_active(neurons, 0.2), RULES["sgd"],
            random_input(entry), steps=1)  # fmt: skip
    assert (state_of(model)["bn1.running_mean"] != before["bn1.running_mean"]).all()


@pytest.mark.parametrize(
    "name", ["vgg", "resnet_basic", "densenet", "unet", "prelu_instancenorm"]
)
def test_without_norm_momentum_no_entry_at_all_moves_outside_the_blocks(
    name: str,
) -> None:
    entry, neurons = ZOO_BY_NAME[name], mapped(name)
    active = random_active(neurons, 0.4)
    model = random_model(entry)
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase):
            layer.momentum = 0.0
    before = state_of(model)
    partial(model, neurons, active, RULES["adamw"], random_input(entry), steps=3)
    after = state_of(model)
    for tensor, where in neurons.blocks(active).items():
        outside = ~mask_of(neurons.shapes[tensor], where)
        assert same_bits(after[tensor][outside], before[tensor][outside]), tensor


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=4),
    st.integers(1, 100),
    st.sampled_from(["none", "batch", "layer"]),
    st.sampled_from(sorted(RULES)),
    st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_random_networks_train_as_masked_dense_ones(
    widths: list[int], percent: int, norm: str, rule: str, seed: int
) -> None:
    norms = {"none": nn.Identity, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
    layers: list[nn.Module] = []
    for before, after in zip([5, *widths], [*widths, 3], strict=True):
        layers += [nn.Linear(before, after), norms[norm](after), nn.Tanh()]
    with seeded(seed):
        model = shaken(nn.Sequential(*layers[:-2]))
    x = noise(6, 5).double()
    neurons = quietly_mapped(model, x)
    active = random_active(neurons, percent / 100, seed)
    dense = masked_dense(
        copy.deepcopy(model), neurons.blocks(active), RULES[rule], x, steps=3
    )
    ours = partial(model, neurons, active, RULES[rule], x, steps=3)
    assert greatest_difference(ours[1], dense[1]) < 1e-10


# Other ways to train ------------------------------------------------------------------


def dense_gradient(
    model: nn.Module, loss: Callable[[nn.Module], Tensor]
) -> list[Tensor]:
    model = copy.deepcopy(model)
    weights = list(learnable(model).values())
    return list(torch.autograd.grad(loss(model), weights))


def in_blocks(values: list[Tensor], blocks: Blocks, names: list[str]) -> list[Tensor]:
    return [take(v, blocks[n]) for v, n in zip(values, names, strict=True)]


def grads(trainable: list[Tensor]) -> list[Tensor]:
    found = [leaf.grad for leaf in trainable]
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


def assert_close(ours: list[Tensor], theirs: list[Tensor], atol: float = 1e-12) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=atol)


def cross_entropy(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X), Y)


def test_gradients_accumulate_over_batches() -> None:
    model, neurons = mlp(), table()
    expected = dense_gradient(
        model, lambda m: F.cross_entropy(m(X), Y) + F.cross_entropy(m(X[:2]), Y[:2])
    )
    with partial_training(model, neurons, HALF) as trainable:
        F.cross_entropy(model(X), Y).backward()
        F.cross_entropy(model(X[:2]), Y[:2]).backward()
        ours = grads(trainable)
    assert_close(
        ours, in_blocks(expected, neurons.blocks(HALF), list(learnable(model)))
    )


def test_two_forward_passes_may_share_one_backward_pass() -> None:
    def twice(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(X), Y) + F.cross_entropy(model(X[:2]), Y[:2])

    model, neurons = mlp(), table()
    expected = dense_gradient(model, twice)
    with partial_training(model, neurons, HALF) as trainable:
        twice(model).backward()
        ours = grads(trainable)
    assert_close(
        ours, in_blocks(expected, neurons.blocks(HALF), list(learnable(model)))
    )


def test_clipping_the_trainable_list_clips_by_the_norm_of_the_blocks() -> None:
    model, neurons = mlp(), table()
    expected = in_blocks(
        dense_gradient(model, cross_entropy),
        neurons.blocks(HALF),
        list(learnable(model)),
    )
    norm = torch.cat([grad.flatten() for grad in expected]).norm()
    with partial_training(model, neurons, HALF) as trainable:
        cross_entropy(model).backward()
        found = nn.utils.clip_grad_norm_(trainable, 0.01)
        ours = grads(trainable)
    assert found.item() == pytest.approx(norm.item(), rel=1e-12)
    assert_close(ours, [grad * 0.01 / (norm + 1e-6) for grad in expected])


def test_a_penalty_on_the_parameters_acts_on_the_active_entries() -> None:
    def penalised(model: nn.Module) -> Tensor:
        return cross_entropy(model) + sum(p.square().sum() for p in model.parameters())

    model, neurons = mlp(), table()
    expected = dense_gradient(model, penalised)
    with partial_training(model, neurons, HALF) as trainable:
        loss = penalised(model)
        loss.backward()
        ours = grads(trainable)
    assert_close(
        ours, in_blocks(expected, neurons.blocks(HALF), list(learnable(model)))
    )


def test_a_proximal_term_by_name_pulls_towards_the_start() -> None:
    model, neurons = mlp(), table()
    start = state_of(model)
    with partial_training(model, neurons, HALF) as trainable:
        with torch.no_grad():
            for leaf in trainable:
                leaf.add_(1)
        term = sum((p - start[n]).square().sum() for n, p in model.named_parameters())
        assert isinstance(term, Tensor)
        term.backward()
        count = sum(leaf.numel() for leaf in trainable)
        assert term.item() == pytest.approx(count)
        for leaf in grads(trainable):
            assert torch.allclose(leaf, torch.full_like(leaf, 2.0))


def minimised(leaves: list[Tensor], loss: Callable[[], Tensor]) -> None:
    lbfgs = torch.optim.LBFGS(leaves, max_iter=8, line_search_fn="strong_wolfe")

    def closure() -> float:
        lbfgs.zero_grad()
        value = loss()
        value.backward()
        return value.item()

    lbfgs.step(closure)


def test_an_optimizer_that_tries_steps_sees_each_of_them() -> None:
    model, neurons = mlp(), table()
    blocks, twin = neurons.blocks(HALF), mlp()
    leaves = [
        take(w.detach(), blocks[name]).requires_grad_()
        for name, w in learnable(twin).items()
    ]

    def twin_loss() -> Tensor:
        filled = {}
        for leaf, (name, w) in zip(leaves, learnable(twin).items(), strict=True):
            mask = mask_of(neurons.shapes[name], blocks[name])
            filled[name] = w.detach().masked_scatter(mask, leaf)
        return F.cross_entropy(torch.func.functional_call(twin, filled, (X,)), Y)

    minimised(leaves, twin_loss)
    with partial_training(model, neurons, HALF) as trainable:
        minimised(trainable, lambda: cross_entropy(model))
        assert_close([leaf.detach() for leaf in trainable], leaves, atol=1e-8)
    assert cross_entropy(model).item() == pytest.approx(twin_loss().item(), rel=1e-9)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("how", ["fused", "foreach"])
def test_fused_and_foreach_optimizers_train_the_same(kind: str, how: str) -> None:
    # A fused kernel writes to the leaves without their version counter knowing.
    results = []
    for given_how in ({}, {how: True}):
        model, neurons = mlp(), table()
        with partial_training(model, neurons, HALF) as trainable:
            optimizer = getattr(torch.optim, kind)(trainable, lr=0.05, **given_how)
            for _ in range(5):
                optimizer.zero_grad()
                cross_entropy(model).backward()
                optimizer.step()
        results.append(state_of(model))
    assert greatest_difference(*results) < 1e-12


@pytest.mark.parametrize("kind", ["RMSprop", "Adagrad", "NAdam", "Adamax"])
def test_any_other_optimizer_leaves_frozen_entries_alone(kind: str) -> None:
    model, neurons = mlp(), table()
    before, blocks = state_of(model), neurons.blocks(HALF)
    with partial_training(model, neurons, HALF) as trainable:
        optimizer = getattr(torch.optim, kind)(trainable, lr=0.05, weight_decay=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            cross_entropy(model).backward()
            optimizer.step()
    for name, values in state_of(model).items():
        inside = mask_of(neurons.shapes[name], blocks[name])
        assert same_bits(values[~inside], before[name][~inside])
        assert (values != before[name])[inside].any()


def test_gradients_may_be_taken_without_backward() -> None:
    model, neurons = mlp(), table()
    expected = dense_gradient(model, cross_entropy)
    with partial_training(model, neurons, HALF) as trainable:
        ours = list(torch.autograd.grad(cross_entropy(model), trainable))
    assert_close(
        ours, in_blocks(expected, neurons.blocks(HALF), list(learnable(model)))
    )


def test_checkpointed_activations_give_the_same_gradient() -> None:
    from torch.utils.checkpoint import checkpoint

    model, neurons = mlp(), table()
    expected = dense_gradient(model, cross_entropy)
    with partial_training(model, neurons, HALF) as trainable:
        output = checkpoint(model, X, use_reentrant=False)
        F.cross_entropy(output, Y).backward()
        ours = grads(trainable)
    assert_close(
        ours, in_blocks(expected, neurons.blocks(HALF), list(learnable(model)))
    )


@pytest.mark.parametrize("layout", ["auto", "index"])
def test_a_gradient_of_a_gradient_is_exact_or_refused(layout: Layout) -> None:
    def penalty(model: nn.Module) -> Tensor:
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(cross_entropy_at(model, x), x, create_graph=True)
        return slope.square().sum()

    model, neurons = mlp(), table()
    weights = list(learnable(model).values())[:-1]  # a last bias has none
    expected = torch.autograd.grad(penalty(model), weights)
    names = list(learnable(model))[:-1]
    with fedspu.partial_training(model, neurons, HALF, layout=layout) as trainable:
        try:
            ours = torch.autograd.grad(penalty(model), trainable[:-1])
        except RuntimeError:
            return
        ours = tuple(grad.clone() for grad in ours)
    assert_close(list(ours), in_blocks(list(expected), neurons.blocks(HALF), names))


def cross_entropy_at(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), Y)


@pytest.mark.parametrize("layout", ["auto", "index"])
@pytest.mark.parametrize("active", [[0, 2, 3], [0, 1], [5], [1, 2, 3, 4]])
def test_a_depthwise_layer_on_the_input_may_have_any_of_its_outputs_active(
    active: list[int], layout: Layout
) -> None:
    # Two outputs are made of each colour, and colours are no neurons.
    with seeded(0):
        model = chain(
            conv=nn.Conv2d(3, 6, 3, groups=3),
            tanh=nn.Tanh(),
            flatten=nn.Flatten(),
            fc=nn.Linear(6 * 9, 3),
        ).double()
    x = noise(4, 3, 5, 5).double()
    neurons = quietly_mapped(model, x)
    chosen = {"conv": torch.tensor(active)}
    expected = dense_gradient(model, lambda m: cross_entropy_at(m, x))
    names = list(learnable(model))
    with fedspu.partial_training(model, neurons, chosen, layout=layout) as trainable:
        cross_entropy_at(model, x).backward()
        ours = grads(trainable)
    assert_close(ours, in_blocks(expected, neurons.blocks(chosen), names))


# The default layout, in which neurons may change places inside ------------------------


def test_a_proximal_term_by_name_is_right_in_any_layout() -> None:
    model, neurons = mlp(), table()
    start = state_of(model)
    with fedspu.partial_training(model, neurons, HALF) as trainable:
        moved(trainable)
        terms = [(p - start[n]).square().sum() for n, p in model.named_parameters()]
        count = sum(leaf.numel() for leaf in trainable)
        assert torch.stack(terms).sum().item() == pytest.approx(count)


@pytest.mark.parametrize("load", [nn.Module.load_state_dict, fedspu.load_state])
def test_a_state_loaded_inside_is_loaded_or_refused(load: Callable[..., Any]) -> None:
    model, neurons = mlp(), table()
    other = {name: values + 1 for name, values in state_of(model).items()}
    with fedspu.partial_training(model, neurons, HALF):
        try:
            load(model, other)
        except ModelError:
            return
    after = state_of(model)
    assert all(torch.equal(after[name], values) for name, values in other.items())


def test_a_hook_registered_inside_is_called() -> None:
    model, neurons = mlp(), table()
    called = []
    with fedspu.partial_training(model, neurons, HALF):
        model.get_submodule("fc1").register_forward_hook(
            lambda *args: called.append("fc1")
        )
        model(X)
    assert called == ["fc1"]


def test_an_exception_inside_leaves_every_neuron_in_its_place() -> None:
    model, neurons = mlp(), table()
    before, blocks = state_of(model), neurons.blocks(HALF)
    with pytest.raises(KeyError):
        fail_inside(model, neurons, layout="auto")
    after = state_of(model)
    for name in before:
        step = mask_of(neurons.shapes[name], blocks[name]).double()
        assert torch.equal(after[name], before[name] + step)


def test_the_state_inside_is_in_the_model_s_own_order() -> None:
    model, neurons = mlp(), table()
    before, blocks = state_of(model), neurons.blocks(HALF)
    with fedspu.partial_training(model, neurons, HALF) as trainable:
        moved(trainable)
        inside = {name: values.clone() for name, values in model.state_dict().items()}
        ours = state_of(model)
    for name, values in inside.items():
        step = mask_of(neurons.shapes[name], blocks[name]).double()
        assert torch.equal(values, before[name] + step)
        assert torch.equal(ours[name], values)


# The model inside and afterwards ------------------------------------------------------


def moved(trainable: list[Tensor]) -> None:
    with torch.no_grad():
        for leaf in trainable:
            leaf.add_(1)


def test_with_all_neurons_active_the_model_s_own_parameters_train() -> None:
    model, neurons = mlp(), table()
    own = list(model.parameters())
    with partial_training(model, neurons, neurons.everything()) as trainable:
        assert all(a is b for a, b in zip(trainable, own, strict=True))
        assert all(a is b for a, b in zip(model.parameters(), own, strict=True))


def test_fully_active_tensors_are_the_model_s_own() -> None:
    model, neurons = mlp(), table()
    own = model.get_parameter("fc3.bias")
    with partial_training(model, neurons, HALF) as trainable:
        assert trainable[-1] is own


def test_the_model_has_its_own_parameters_back_afterwards() -> None:
    model, neurons = mlp(), table()
    own = dict(model.named_parameters())
    with partial_training(model, neurons, HALF) as trainable:
        moved(trainable)
    back = dict(model.named_parameters())
    assert back.keys() == own.keys()
    assert all(back[name] is own[name] for name in own)
    assert all(type(p) is nn.Parameter and p.requires_grad for p in back.values())


def fail_inside(model: nn.Module, neurons: Neurons, layout: Layout = "index") -> None:
    with fedspu.partial_training(model, neurons, HALF, layout=layout) as trainable:
        moved(trainable)
        raise KeyError


def test_an_exception_inside_leaves_the_model_whole() -> None:
    model, neurons = mlp(), table()
    own, before = dict(model.named_parameters()), state_of(model)
    with pytest.raises(KeyError):
        fail_inside(model, neurons)
    assert all(model.get_parameter(name) is own[name] for name in own)
    after, blocks = state_of(model), neurons.blocks(HALF)
    for name in before:
        step = mask_of(neurons.shapes[name], blocks[name]).double()
        assert torch.equal(after[name], before[name] + step)
    with partial_training(model, neurons, HALF):  # and it can be entered again
        pass


def test_the_state_inside_has_full_shapes_and_current_values() -> None:
    model, neurons = mlp(), table()
    before, blocks = state_of(model), neurons.blocks(HALF)
    with partial_training(model, neurons, HALF) as trainable:
        moved(trainable)
        inside = {name: values.clone() for name, values in model.state_dict().items()}
        ours = state_of(model)
    for name, values in inside.items():
        step = mask_of(neurons.shapes[name], blocks[name]).double()
        assert torch.equal(values, before[name] + step)
        assert torch.equal(ours[name], values)
        assert type(values) is Tensor


def test_the_model_can_be_judged_inside() -> None:
    entry = ZOO_BY_NAME["vgg"]
    neurons, model = mapped("vgg"), random_model(entry)
    x = random_input(entry)
    with partial_training(model, neurons, random_active(neurons, 0.5)) as trainable:
        optimizer = RULES["sgd"].make(trainable)
        loss_of(model, x).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            inside = run(model, x)
        model.train()
        optimizer.zero_grad()
        loss_of(model, x).backward()
        assert all(leaf.grad is not None for leaf in trainable)
    # The second forward pass in train mode moved the running statistics only.
    twin = random_model(entry)
    with partial_training(twin, neurons, random_active(neurons, 0.5)) as trainable:
        optimizer = RULES["sgd"].make(trainable)
        loss_of(twin, x).backward()
        optimizer.step()
    with torch.no_grad():
        assert torch.equal(run(twin.eval(), x), inside)


@pytest.mark.parametrize("mode", ["exact", "truncated"])
def test_an_eval_pass_without_gradients_is_the_model_s_own_in_a_transformer(
    mode: Any,
) -> None:
    # In eval mode torch takes a fused path through the encoder layers.
    entry = ZOO_BY_NAME["transformer"]
    neurons, model = mapped("transformer"), random_model(entry).eval()
    with torch.no_grad():
        expected = run(copy.deepcopy(model), entry.example())
        with partial_training(model, neurons, random_active(neurons, 0.5), mode):
            inside = run(model, entry.example())
    assert torch.allclose(inside, expected, rtol=0, atol=1e-12)


def test_parts_that_do_not_learn_stay_as_they_are() -> None:
    entry = ZOO_BY_NAME["frozen_part"]
    neurons, model = mapped("frozen_part"), random_model(entry)
    frozen = model.get_parameter("conv2.weight")
    before, count = frozen.clone(), len(learnable(model))
    with partial_training(model, neurons, random_active(neurons, 0.5)) as trainable:
        assert len(trainable) == count == 6
        assert model.get_parameter("conv2.weight") is frozen
        loss_of(model, random_input(entry)).backward()
        RULES["adamw"].make(trainable).step()
    assert torch.equal(frozen, before)
    assert frozen.grad is None
    assert not frozen.requires_grad


def test_a_shared_weight_trains_once() -> None:
    entry = ZOO_BY_NAME["tied_embedding"]
    neurons, model = mapped("tied_embedding"), random_model(entry)
    with partial_training(model, neurons, random_active(neurons, 0.5)) as trainable:
        assert len(trainable) == 6
        moved(trainable)
        weight = model.state_dict()["embedding.weight"]
        assert torch.equal(model.state_dict()["decoder.weight"], weight)
    assert model.get_submodule("decoder").weight is model.get_parameter(
        "embedding.weight"
    )


def test_gradients_the_model_had_before_are_still_there() -> None:
    model, neurons = mlp(), table()
    cross_entropy(model).backward()
    had = {name: p.grad for name, p in model.named_parameters()}
    with partial_training(model, neurons, HALF) as trainable:
        partial_leaves = trainable[:-1]  # the last bias is the model's own
        assert all(leaf.grad is None for leaf in partial_leaves)
    assert all(p.grad is had[name] for name, p in model.named_parameters())


def test_two_models_may_train_at_once() -> None:
    one, other, neurons = mlp(), mlp(), table()
    whole = copy.deepcopy(one)
    with (
        partial_training(one, neurons, HALF) as ones,
        partial_training(other, neurons, HALF, "truncated") as others,
    ):
        moved(ones)
        assert torch.equal(other(X), whole(X))
        moved(others)
    assert torch.equal(one(X), other(X))


def test_a_model_in_partial_training_is_refused() -> None:
    model, neurons = mlp(), table()
    own = dict(model.named_parameters())
    with partial_training(model, neurons, HALF):
        with (
            pytest.raises(
                ModelError, match=r"fc1\.weight is already in partial training"
            ),
            partial_training(model, neurons, HALF),
        ):
            pass
        model(X)
    assert all(model.get_parameter(name) is own[name] for name in own)


def test_the_table_of_another_model_is_refused() -> None:
    other = chain(fc1=nn.Linear(6, 9), relu1=nn.ReLU(), fc2=nn.Linear(9, 7))
    neurons = quietly_mapped(other, noise(2, 6))
    with (
        pytest.raises(ModelError, match=r"another model: fc1.weight is \(9, 6\) in"),
        partial_training(mlp(), neurons, neurons.everything()),
    ):
        pass


def test_a_table_with_tensors_the_model_lacks_is_refused() -> None:
    with (
        pytest.raises(ModelError, match="no such tensor in the model"),
        partial_training(nn.Linear(6, 3), table(), HALF),
    ):
        pass


def test_an_unknown_mode_is_refused() -> None:
    with (
        pytest.raises(ModelError, match="'truncate': expected exact or truncated"),
        partial_training(mlp(), table(), HALF, "truncate"),  # type: ignore[arg-type]  # on purpose
    ):
        pass


def test_active_neurons_of_another_table_are_refused() -> None:
    with (
        pytest.raises(ModelError, match="fc2 is in only one of the two"),
        partial_training(mlp(), table(), {"fc1": torch.tensor([0])}),
    ):
        pass


# The truncated gradient, by its definition --------------------------------------------
#
# A weighted layer passes gradient only from active outputs to active inputs: values at
# frozen places are detached before and after each of them.

Places = Tensor | None


def cut(x: Tensor, dim: int, places: Places) -> Tensor:
    """The same values; no gradient flows at positions that are not listed."""
    if places is None:
        return x
    shape = [1] * x.dim()
    shape[dim] = -1
    is_active = torch.zeros(x.shape[dim], dtype=torch.bool)
    is_active[places] = True
    return torch.where(is_active.view(shape), x, x.detach())


CHANNELS = {
    # Where a layer's weight does not list its channels one by one: a tensor and an
    # axis that do, for its inputs and its outputs.
    "grouped_conv": {"conv2": (("bn1.weight", 0), ("conv2.bias", 0))},
    "depthwise_multiplier": {"conv2": (("conv1.bias", 0), ("conv2.bias", 0))},
    "mobilenet": {
        "block1.depthwise": (("block1.bn1.weight", 0), ("block1.bn2.weight", 0)),
        "block2.depthwise": (("block2.bn1.weight", 0), ("block2.bn2.weight", 0)),
    },
    "frozen_part": {"conv2": (("conv1.bias", 0), ("bn.weight", 0))},
    "frozen_depthwise": {"conv2": (("conv1.bias", 0), ("conv3.weight", 1))},
    "grouped_up": {"up": (("conv.bias", 0), ("up.bias", 0))},
    "depthwise_up": {"up": (("conv.bias", 0), ("up.bias", 0))},
}


@contextmanager
def truncated_by_definition(
    model: nn.Module, blocks: Blocks, channels: dict[str, Any]
) -> Iterator[None]:
    """The model with a cut on both sides of each weighted layer."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    handles = []
    for path, layer in model.named_modules():
        if isinstance(layer, nn.MultiheadAttention):
            layer.forward = MethodType(attend, layer)  # type: ignore[method-assign]  # this copy only
            layer.cuts = blocks_of(layer, path, blocks)  # type: ignore[assignment]  # as above
            continue
        if not isinstance(layer, nn.Linear | nn.modules.conv._ConvNd):
            continue
        if path in channels:
            (tensor, dim), (out, out_dim) = channels[path]
            ins, outs = blocks[tensor][dim], blocks[out][out_dim]
        else:
            first, second = blocks[names[id(layer.weight)]][:2]
            is_transposed = getattr(layer, "transposed", False)
            ins, outs = (first, second) if is_transposed else (second, first)
        dim = -1 if isinstance(layer, nn.Linear) else 1
        handles.append(layer.register_forward_pre_hook(before(dim, ins)))
        handles.append(layer.register_forward_hook(after(dim, outs)))
    yield
    for handle in handles:
        handle.remove()


def before(dim: int, ins: Places) -> Any:
    return lambda layer, args: (cut(args[0], dim, ins), *args[1:])


def after(dim: int, outs: Places) -> Any:
    return lambda layer, args, output: cut(output, dim, outs)


def blocks_of(layer: nn.Module, path: str, blocks: Blocks) -> dict[str, Any]:
    return {
        name.removeprefix(f"{path}.".lstrip(".")): where
        for name, where in blocks.items()
        if name.startswith(path)
    }


def attend(
    self: Any, query: Tensor, key: Tensor, value: Tensor, **given: Any
) -> tuple[Tensor, None]:
    """Self-attention from its definition, (batch, tokens, features)."""
    rows, columns = self.cuts["in_proj_weight"]
    out_rows, out_columns = self.cuts["out_proj.weight"]
    x = cut(query, -1, columns)
    qkv = cut(F.linear(x, self.in_proj_weight, self.in_proj_bias), -1, rows)
    heads = qkv.unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
    q, k, v = heads
    weights = torch.softmax(q @ k.transpose(-2, -1) / self.head_dim**0.5, -1)
    mixed = cut((weights @ v).transpose(1, 2).flatten(2), -1, out_columns)
    out = F.linear(mixed, self.out_proj.weight, self.out_proj.bias)
    return cut(out, -1, out_rows), None


def grouped_up() -> nn.Module:
    return chain(
        conv=nn.Conv2d(3, 8, 3),
        up=nn.ConvTranspose2d(8, 6, 2, groups=2),
        norm=nn.GroupNorm(1, 6),
        relu=nn.ReLU(),
        out=nn.Conv2d(6, 3, 1),
    )


def depthwise_up() -> nn.Module:
    return chain(
        conv=nn.Conv2d(3, 5, 3),
        up=nn.ConvTranspose2d(5, 10, 2, groups=5),
        norm=nn.GroupNorm(1, 10),
        relu=nn.ReLU(),
        out=nn.Conv2d(10, 3, 1),
    )


def mixed_frozen() -> nn.Module:
    """A layer that does not learn, between norms that mix the channels."""
    model = chain(
        fc1=nn.Linear(6, 8),
        norm1=nn.LayerNorm(8),
        fc2=nn.Linear(8, 7),
        norm2=nn.LayerNorm(7),
        fc3=nn.Linear(7, 3),
    )
    model.get_submodule("fc2").requires_grad_(False)
    return model


OWN = {"grouped_up": grouped_up, "depthwise_up": depthwise_up}

TRUNCATED = [
    "cifar_cnn", "vgg", "resnet_basic", "resnet_bottleneck", "mobilenet", "densenet",
    "unet", "audio_cnn", "grouped_conv", "depthwise_multiplier", "squeeze_excite",
    "prelu_instancenorm", "groupnorm", "frozen_part", "frozen_depthwise",
    "mlp_layernorm", "shared_linear", "tied_embedding", "transformer", "vit",
    "two_inputs", "dict_input", "glu", *OWN,
]  # fmt: skip


def truncated_gradients(
    model: nn.Module,
    neurons: Neurons,
    active: Active,
    loss: Callable[[nn.Module], Tensor],
) -> list[Tensor]:
    model = copy.deepcopy(model)
    with partial_training(model, neurons, active, "truncated") as trainable:
        loss(model).backward()
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in trainable]


def defined_gradients(
    model: nn.Module,
    blocks: Blocks,
    channels: dict[str, Any],
    loss: Callable[[nn.Module], Tensor],
) -> list[Tensor]:
    model = copy.deepcopy(model)
    with truncated_by_definition(model, blocks, channels):
        loss(model).backward()
    return [
        take(torch.zeros_like(w) if w.grad is None else w.grad, blocks[name])
        for name, w in learnable(model).items()
    ]


@pytest.mark.parametrize("name", TRUNCATED)
@pytest.mark.parametrize("p", [0.3, 0.7])
def test_the_truncated_gradient_equals_its_definition(name: str, p: float) -> None:
    if name in OWN:
        with seeded(0):
            model = shaken(OWN[name]())
        x: Any = noise(2, 3, 8, 8).double()
        neurons = quietly_mapped(model, x)
    else:
        entry = ZOO_BY_NAME[name]
        neurons, model, x = mapped(name), random_model(entry), random_input(entry)
    active = random_active(neurons, p)
    ours = truncated_gradients(model, neurons, active, lambda m: loss_of(m, x))
    defined = defined_gradients(
        model, neurons.blocks(active), CHANNELS.get(name, {}), lambda m: loss_of(m, x)
    )
    assert_close(ours, defined, atol=1e-12)


def test_the_truncated_gradient_stops_at_layers_that_do_not_learn() -> None:
    with seeded(0):
        model = shaken(mixed_frozen())
    neurons = quietly_mapped(model, X)
    active = random_active(neurons, 0.5)
    channels = {"fc2": (("norm1.weight", 0), ("norm2.weight", 0))}
    ours = truncated_gradients(model, neurons, active, cross_entropy)
    defined = defined_gradients(model, neurons.blocks(active), channels, cross_entropy)
    assert_close(ours, defined, atol=1e-12)


def test_the_truncated_gradient_is_another_than_the_exact_one() -> None:
    entry = ZOO_BY_NAME["cifar_cnn"]
    neurons, model, x = mapped("cifar_cnn"), random_model(entry), random_input(entry)
    active = random_active(neurons, 0.5)
    truncated = truncated_gradients(model, neurons, active, lambda m: loss_of(m, x))
    loss_of(model, x).backward()
    exact = model.get_parameter("conv1.weight").grad
    assert exact is not None
    exact = take(exact, neurons.blocks(active)["conv1.weight"])
    assert (truncated[0] - exact).abs().max() > 1e-3 * exact.abs().max()


def test_the_truncated_gradient_of_the_last_layer_is_exact() -> None:
    model, neurons = mlp(), table()
    expected = dense_gradient(model, cross_entropy)
    ours = truncated_gradients(model, neurons, HALF, cross_entropy)
    blocks, names = neurons.blocks(HALF), list(learnable(model))
    assert_close(ours[-2:], in_blocks(expected, blocks, names)[-2:])


def test_with_all_neurons_active_the_truncated_gradient_is_exact() -> None:
    model, neurons = mlp(), table()
    expected = dense_gradient(model, cross_entropy)
    ours = truncated_gradients(model, neurons, neurons.everything(), cross_entropy)
    assert_close(ours, expected)


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
def test_truncated_training_moves_no_entry_outside_the_blocks(entry: Entry) -> None:
    neurons, model = mapped(entry.name), random_model(entry)
    active = random_active(neurons, 0.4)
    before, blocks = state_of(model), neurons.blocks(active)
    with partial_training(model, neurons, active, "truncated") as trainable:
        optimizer = RULES["adamw"].make(trainable)
        for t in range(2):
            optimizer.zero_grad()
            loss_of(model, random_input(entry), seed=t).backward()
            optimizer.step()
    after = state_of(model)
    for name in learnable(model):
        outside = ~mask_of(neurons.shapes[name], blocks[name])
        assert same_bits(after[name][outside], before[name][outside]), name


@pytest.mark.parametrize("batched", [True, False])
def test_the_truncated_gradient_is_cut_in_unbatched_inputs_too(batched: bool) -> None:
    model = chain(conv1=nn.Conv2d(3, 6, 3), tanh=nn.Tanh(), conv2=nn.Conv2d(6, 4, 3))
    model = model.double()
    x = noise(1, 3, 8, 8).double()
    neurons = quietly_mapped(model, x)
    active = {"conv1": torch.tensor([1, 2, 5])}

    def loss(model: nn.Module) -> Tensor:
        return model(x if batched else x[0]).square().sum()  # type: ignore[no-any-return]  # a tensor

    ours = truncated_gradients(model, neurons, active, loss)
    exact = in_blocks(
        dense_gradient(model, loss), neurons.blocks(active), list(learnable(model))
    )
    # One hidden layer, and nothing that mixes channels: the two are the same.
    assert_close(ours, exact, atol=1e-10)


def test_a_layer_called_by_keyword_is_cut_as_well() -> None:
    def call(self: Any, x: Tensor) -> Tensor:
        h = F.linear(input=x, weight=self.fc1.weight, bias=self.fc1.bias)
        h = F.layer_norm(h, (8,))
        h = F.linear(h, bias=self.fc2.bias, weight=self.fc2.weight)
        return self.fc3(F.layer_norm(h, (7,)))  # type: ignore[no-any-return]  # a tensor

    def plain(self: Any, x: Tensor) -> Tensor:
        h = F.layer_norm(self.fc1(x), (8,))
        return self.fc3(F.layer_norm(self.fc2(h), (7,)))  # type: ignore[no-any-return]  # a tensor

    layers = {"fc1": nn.Linear(6, 8), "fc2": nn.Linear(8, 7), "fc3": nn.Linear(7, 3)}
    neurons = table()
    one, other = Fn(call, **layers).double(), Fn(plain, **layers).double()
    assert_close(
        truncated_gradients(one, neurons, HALF, cross_entropy),
        truncated_gradients(other, neurons, HALF, cross_entropy),
    )
