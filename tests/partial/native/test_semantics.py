"""Models that a careless reader would take for other ones: both paths agree on all."""

import copy
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedspu
from fedspu.partial.chain.native.models import make_judge, why_not
from tests.partial.native.nets import distance


class Net(nn.Module):
    """A forward pass written as a function of this module."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **layers: Any) -> None:
        super().__init__()
        self.run = run
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.fc, self.fc2 = nn.Linear(144, 5), nn.Linear(144, 5)
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def identity(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.fc((m.b(torch.relu(m.same(y))) + y).flatten(1))  # type: ignore[no-any-return]


def flattened_twice(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.fc(torch.relu(y.flatten(1))) + m.fc2(y.flatten(1))  # type: ignore[no-any-return]


def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.fc((m.b(m.relu(y)) + y).flatten(1))  # type: ignore[no-any-return]


def added_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    z = y
    z += m.b(torch.relu(m.c(x)))
    return m.fc((z + y).flatten(1))  # type: ignore[no-any-return]


def changes_its_input(m: Any, x: Tensor) -> Tensor:
    return m.fc(m.a(F.relu(x, inplace=True)).flatten(1))  # type: ignore[no-any-return]


def linear_beside_padded(m: Any, x: Tensor) -> Tensor:
    y = torch.relu(m.a(x))
    return m.fc(y.flatten(1)) + m.fc2(m.b(y).flatten(1))  # type: ignore[no-any-return]


def unused(m: Any, x: Tensor) -> Tensor:
    y = torch.relu(m.a(x))
    m.b(y)
    return m.fc(y.flatten(1))  # type: ignore[no-any-return]


def without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = torch.relu(m.a(x))
    return m.fc(y.flatten(1))  # type: ignore[no-any-return]


def two_means(m: Any, x: Tensor) -> Tensor:
    return torch.relu(m.a(x)).mean(-1).mean(-1)


def maps_and_features(m: Any, x: Tensor) -> Tensor:
    y = F.adaptive_avg_pool2d(m.a(x), 1)
    return y + torch.relu(y.flatten(1))


def by_chance(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    if float(torch.rand(())) < 0.5:
        y = torch.relu(y)
    return m.fc(y.flatten(1))  # type: ignore[no-any-return]


NETS: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Any]]] = {
    "identity": (identity, {"same": nn.Identity()}),
    "no dropout": (identity, {"same": nn.Dropout(0.0)}),
    "flattened twice": (flattened_twice, {}),
    "in place": (in_place, {"relu": nn.ReLU(inplace=True)}),
    "added in place": (added_in_place, {"c": nn.Conv2d(2, 4, 3, padding=1)}),
    "changes its input": (changes_its_input, {}),
    "linear beside padded": (linear_beside_padded, {}),
    "unused": (unused, {}),
    "without gradient": (without_gradient, {}),
    "two means": (two_means, {}),
    "maps and features": (maps_and_features, {}),
    "by chance": (by_chance, {}),
}


def built(name: str) -> Net:
    torch.manual_seed(0)
    run, layers = NETS[name]
    return Net(run, **layers)


def images() -> Tensor:
    return torch.randn(20, 2, 6, 6, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", NETS)
def test_training_is_pytorchs(name: str) -> None:
    mine, theirs = built(name), built(name)
    neurons = fedspu.Neurons(
        (), {n: tuple(p.shape) for n, p in mine.named_parameters()}
    )
    given, same = ((images(), images()) for _ in range(2))
    with fedspu.partial_training(mine, neurons, {}) as trainable:
        torch.manual_seed(1)
        outs = [mine(x) for x in given]
        sum(out.square().mean() for out in outs).backward()
        found = [t.grad for t in trainable]
    torch.manual_seed(1)
    wanted = [theirs(x) for x in same]
    sum(out.square().mean() for out in wanted).backward()
    assert all(map(torch.equal, given, same))  # both changed, or neither
    for out, right in zip(outs, wanted, strict=True):
        assert out.shape == right.shape
        assert distance(out.detach(), right.detach().double()) < 1e-4
    for grad, parameter in zip(found, theirs.parameters(), strict=True):
        assert (grad is None) == (parameter.grad is None)
        if grad is not None and parameter.grad is not None:
            assert distance(grad, parameter.grad.double(), 0.01) < 1e-4


@pytest.mark.parametrize("name", NETS)
def test_judging_is_pytorchs(name: str) -> None:
    model = built(name).eval()
    with torch.no_grad():
        judge, x = make_judge(model, (2, 6, 6)), images()
        if judge is not None:
            assert distance(judge(x), model(images()).double()) < 1e-4


def pre_activation(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.fc((m.b(torch.relu(m.drop(y))) + y).flatten(1))  # type: ignore[no-any-return]


def always_drops(m: Any, x: Tensor) -> Tensor:
    return m.fc(F.dropout(m.a(x), 0.5).flatten(1))  # type: ignore[no-any-return]


def test_a_dropout_that_rests_hides_no_reader() -> None:
    model = Net(pre_activation, drop=nn.Dropout(0.2)).eval()
    judge = make_judge(model, (2, 6, 6))
    assert judge is not None
    with torch.no_grad():
        assert distance(judge(images()), model(images()).double()) < 1e-4


def test_what_depends_on_chance_or_on_the_batch_is_not_judged_natively() -> None:
    assert make_judge(Net(always_drops).eval(), (2, 6, 6)) is None
    norm = nn.BatchNorm2d(2, track_running_stats=False)
    assert make_judge(nn.Sequential(norm, nn.ReLU()).eval(), (2, 6, 6)) is None


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.share = nn.Linear(8, 200), 0.1

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.fc(x), self.share, self.training)


def test_a_number_that_changes_is_seen() -> None:
    model, x = Dropping().train(), torch.ones(50, 8)
    neurons = fedspu.map_neurons(model, x[:2])
    for share in (0.1, 0.6):
        model.share = share
        with fedspu.partial_training(model, neurons, neurons.everything()):
            dropped = float((model(x) == 0).float().mean())
        assert dropped == pytest.approx(share, abs=0.05)


def test_weights_of_another_size_than_the_layer_says() -> None:
    model = nn.Sequential(nn.Conv2d(2, 40, 3), nn.ReLU(), nn.Flatten())
    conv: Any = model[0]
    conv.weight = nn.Parameter(conv.weight[:3].detach().clone())
    conv.bias = nn.Parameter(conv.bias[:3].detach().clone())
    reason = why_not(model, (2, 6, 6))
    assert reason is not None
    assert "a weight of shape (3, 2, 3, 3)" in reason


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_another_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    model = built("linear beside padded")
    model.run = lambda m, x: m.fc(torch.relu(m.a(x)).flatten(1))
    x = images()
    wanted = copy.deepcopy(model)(x).detach()
    neurons = fedspu.Neurons(
        (), {n: tuple(p.shape) for n, p in model.named_parameters()}
    )
    torch.set_default_dtype(dtype)
    try:
        with fedspu.partial_training(model, neurons, neurons.everything()) as trainable:
            out = model(x)
            out.sum().backward()
        assert out.dtype == torch.float32
        assert all(t.grad.isfinite().all() for t in trainable if t.grad is not None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert distance(out.detach(), wanted.double()) < 1e-5


def test_a_second_backward_pass_beside_a_norm_in_eval_mode() -> None:
    layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5))
    model = nn.Sequential(*layers).train()
    model[1].eval()
    neurons = fedspu.map_neurons(copy.deepcopy(model), images()[:2])
    with fedspu.partial_training(model, neurons, neurons.everything()) as trainable:
        loss = model(images()).square().mean()
        loss.backward(retain_graph=True)
        once = [t.grad.clone() for t in trainable if t.grad is not None]
        loss.backward()
        twice = [t.grad for t in trainable if t.grad is not None]
    for one, two in zip(once, twice, strict=True):
        assert torch.allclose(two, 2 * one, rtol=1e-4, atol=1e-6)


def test_two_threads_may_judge_one_model() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5)
    )
    model.eval()
    batches = [torch.randn(300, 2, 6, 6) for _ in range(2)]
    with torch.no_grad():
        wanted = [model(x).double() for x in batches]
    far: list[float] = []

    def judge(i: int) -> None:
        for _ in range(20):
            run = make_judge(model, (2, 6, 6))
            assert run is not None
            far.append(distance(run(batches[i]), wanted[i]))

    threads = [Thread(target=judge, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(far) == 40
    assert max(far) < 1e-4


def test_a_group_norm_of_single_values_is_refused_as_by_pytorch() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 6), nn.GroupNorm(4, 4), nn.Flatten())
    neurons = fedspu.Neurons(
        (), {n: tuple(p.shape) for n, p in model.named_parameters()}
    )
    with pytest.raises(ValueError, match="more than 1 value") as theirs:
        model(images()[:1])
    with (
        fedspu.partial_training(model, neurons, {}),
        pytest.raises(ValueError, match="more than 1 value") as mine,
    ):
        model(images()[:1])
    assert str(mine.value) == str(theirs.value)


def test_statistics_of_maps_whose_first_value_is_far_off() -> None:
    x = 0.1 * torch.randn(64, 1, 32, 32)
    x[0, 0, 0, 0] = 100
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Flatten())
    nn.init.ones_(model[0].weight)  # type: ignore[arg-type]
    slow = copy.deepcopy(model).double()
    neurons = fedspu.Neurons(
        (), {n: tuple(p.shape) for n, p in model.named_parameters()}
    )
    with fedspu.partial_training(model, neurons, {}):
        model[:2](x)
        out = model(x)
    slow[:2](x.double())
    assert distance(out.detach(), slow(x.double()).detach()) < 1e-5


def test_nan_is_not_dropped() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(72, 5))
    neurons = fedspu.Neurons(
        (), {n: tuple(p.shape) for n, p in model.named_parameters()}
    )
    x = images()
    x[3, 1, 2, 2] = float("nan")
    with fedspu.partial_training(model, neurons, {}):
        assert all(bool(model(x)[3].isnan().any()) for _ in range(10))
