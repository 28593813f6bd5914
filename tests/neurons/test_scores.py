"""Scores against a slow loop, for layers whose neurons are written out by hand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu import Axis, NeuronGroup, Neurons, choose_top, map_neurons
from fedspu.neurons.scores import score_neurons
from tests.oracles.models import Fn, quietly_mapped, random_input, seeded, shaken
from tests.oracles.zoo import ZOO_BY_NAME, chain, noise

# A part of what makes a neuron: a parameter, an axis of it, and the neuron's positions.
Part = tuple[str, int, Callable[[int], list[int]]]
Layer = list[Part]


def slow_norm(layer: Layer, values: Mapping[str, Tensor], j: int, order: int) -> float:
    """The norm of everything in one layer that makes neuron j."""
    total = 0.0
    for name, dim, positions in layer:
        for position in positions(j):
            for value in values[name].select(dim, position).flatten().tolist():
                total += abs(value) ** order
    return float(total ** (1 / order))


def each(j: int) -> list[int]:
    return [j]


def every(stride: int, copies: int) -> Callable[[int], list[int]]:
    return lambda j: [j + stride * copy for copy in range(copies)]


def runs(length: int) -> Callable[[int], list[int]]:
    return lambda j: [length * j + i for i in range(length)]


def heads(width: int, stride: int) -> Callable[[int], list[int]]:
    """Rows of queries, keys and values: three blocks of ``stride`` rows."""
    return lambda j: [
        stride * c + width * j + i for c in range(3) for i in range(width)
    ]


def rows(layer: str, positions: Callable[[int], list[int]] = each) -> Layer:
    """Rows of weight and bias."""
    return [(f"{layer}.weight", 0, positions), (f"{layer}.bias", 0, positions)]


def weights(layer: str, dim: int = 0) -> Layer:
    """Of a layer without a bias."""
    return [(f"{layer}.weight", dim, each)]


def gates(layer: str, end: str, size: int, copies: int) -> Layer:
    """The gates of one direction of a recurrent layer; not what reads the unit."""
    names = [f"{layer}.{n}_{end}" for n in ("weight_ih", "weight_hh")]
    names += [f"{layer}.{n}_{end}" for n in ("bias_ih", "bias_hh")]
    return [(name, 0, every(size, copies)) for name in names]


@dataclass(frozen=True)
class Made:
    """Some groups of a model, each with its size and the layers that make it."""

    build: Callable[[], nn.Module]
    example: Callable[[], Any]
    groups: dict[str, tuple[int, list[Layer]]]


def of_zoo(name: str, **groups: tuple[int, list[Layer]]) -> Made:
    entry = ZOO_BY_NAME[name]
    named = {key.replace("__", "."): value for key, value in groups.items()}
    return Made(entry.build, lambda: random_input(entry), named)


def attends() -> nn.Module:
    """Four heads of two; widths of their own for queries, keys and values."""

    def forward(self: Any, x: Tensor) -> Any:
        answer, _ = self.attend(self.query(x), self.key(x), self.value(x))
        return self.head(answer)

    return Fn(
        forward,
        query=nn.Linear(5, 8),
        key=nn.Linear(5, 6),
        value=nn.Linear(5, 7),
        attend=nn.MultiheadAttention(
            8, 4, kdim=6, vdim=7, add_bias_kv=True, batch_first=True
        ),
        head=nn.Linear(8, 3),
    )


STREAM = [
    weights("embedding", 1),
    *(rows(f"encoder.layers.{i}.self_attn.out_proj") for i in (0, 1)),
    *(rows(f"encoder.layers.{i}.linear2") for i in (0, 1)),
]
IN_PROJ = "encoder.layers.1.self_attn.in_proj"

CASES: dict[str, Made] = {
    "convolution and linear": Made(
        lambda: chain(
            conv=nn.Conv2d(3, 4, 3),
            norm=nn.BatchNorm2d(4),
            relu=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(4 * 2 * 2, 5),
            tanh=nn.Tanh(),
            fc2=nn.Linear(5, 3),
        ),
        lambda: noise(2, 3, 4, 4).double(),
        {"conv": (4, [rows("conv")]), "fc1": (5, [rows("fc1")])},
    ),
    "no bias": of_zoo("cifar_cnn", fc1=(120, [weights("fc1")])),
    "norms and PReLU": of_zoo(
        "prelu_instancenorm", conv1=(7, [rows("conv1")]), conv2=(6, [rows("conv2")])
    ),
    "transposed": of_zoo(
        "unet",
        up=(6, [[("up.weight", 1, each), ("up.bias", 0, each)]]),
        down2=(10, [rows("down2")]),  # which up reads along its first axis
        merge=(7, [rows("merge")]),
    ),
    "grouped and transposed": Made(
        lambda: chain(
            conv=nn.Conv2d(3, 8, 3),
            up=nn.ConvTranspose2d(8, 6, 2, groups=2),  # weight: (8, 3, 2, 2)
            relu=nn.ReLU(),
            out=nn.Conv2d(6, 3, 1),
        ),
        lambda: noise(2, 3, 8, 8).double(),
        {
            "conv": (4, [rows("conv", every(4, 2))]),
            "up": (3, [[("up.weight", 1, each), ("up.bias", 0, every(3, 2))]]),
        },
    ),
    "depthwise": of_zoo(
        "mobilenet",
        block1__expand=(12, [weights("block1.expand"), weights("block1.depthwise")]),
    ),
    "depthwise with a multiplier": of_zoo(
        "depthwise_multiplier", conv1=(5, [rows("conv1"), rows("conv2", runs(2))])
    ),
    "depthwise and transposed": Made(
        lambda: chain(
            conv=nn.Conv2d(3, 5, 3),
            up=nn.ConvTranspose2d(5, 10, 2, groups=5),  # weight: (5, 2, 2, 2)
            relu=nn.ReLU(),
            out=nn.Conv2d(10, 3, 1),
        ),
        lambda: noise(2, 3, 8, 8).double(),
        {
            "conv": (
                5,
                [rows("conv"), [("up.weight", 0, each), ("up.bias", 0, runs(2))]],
            )
        },
    ),
    "grouped": of_zoo(
        "grouped_conv",
        conv1=(4, [rows("conv1", every(4, 4))]),  # one channel of each of four groups
        conv2=(3, [rows("conv2", every(3, 4))]),
    ),
    "gated": of_zoo("glu", fc1=(7, [rows("fc1", every(7, 2))])),
    "embedding": of_zoo("lstm", embedding=(6, [weights("embedding", 1)])),
    "tied embedding": of_zoo(
        "tied_embedding", embedding=(7, [weights("embedding", 1), rows("fc2")])
    ),
    "GRU": of_zoo("gru", gru=(7, [gates("gru", "l0", 7, 3)])),
    "LSTM": of_zoo(
        "lstm",
        lstm=(5, [gates("lstm", "l0", 5, 4)]),
        lstm__weight_ih_l0_reverse=(5, [gates("lstm", "l0_reverse", 5, 4)]),
        lstm__weight_ih_l1=(5, [gates("lstm", "l1", 5, 4)]),
    ),
    "attention heads": of_zoo(
        "transformer",
        encoder__layers__1__self_attn=(
            3,
            [
                [
                    (f"{IN_PROJ}_weight", 0, heads(4, 12)),
                    (f"{IN_PROJ}_bias", 0, heads(4, 12)),
                ]
            ],
        ),
    ),
    "attention with widths of its own": Made(
        attends,
        lambda: noise(2, 4, 5).double(),
        {
            "attend": (
                4,
                [
                    [
                        *((f"attend.{n}_proj_weight", 0, runs(2)) for n in "qkv"),
                        ("attend.in_proj_bias", 0, heads(2, 8)),
                        ("attend.bias_k", 2, runs(2)),
                        ("attend.bias_v", 2, runs(2)),
                    ]
                ],
            ),
            "query": (8, [rows("query")]),
        },
    ),
    "residual": of_zoo(
        "resnet_basic",
        stage2__a__conv2=(
            10,
            [
                weights("stage2.a.conv2"),
                weights("stage2.a.shortcut.conv"),
                weights("stage2.b.conv2"),
            ],
        ),
    ),
    "residual stream": of_zoo("transformer", position=(12, STREAM)),
    "shared": of_zoo("shared_linear", first=(9, [rows("first"), rows("hidden")])),
}


def drawn(model: nn.Module) -> dict[str, Tensor]:
    """Values of every parameter's shape that are not its own."""
    with seeded(5):
        return {n: torch.randn_like(p.detach()) for n, p in model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("of", ["weights", "gradients"])
def test_a_score_is_the_norm_of_what_makes_a_neuron_layer_by_layer(
    case: str, order: int, of: str
) -> None:
    made = CASES[case]
    with seeded(0):
        model = shaken(made.build())
    neurons = quietly_mapped(model, made.example())
    own = {name: p.detach() for name, p in model.named_parameters()}
    values = own if of == "weights" else drawn(model)
    scores = score_neurons(model, neurons, values, order)

    assert scores.keys() == {group.name for group in neurons.groups}
    assert all(len(scores[group.name]) == group.size for group in neurons.groups)
    for name, (size, layers) in made.groups.items():
        expected = [
            sum(slow_norm(layer, values, j, order) for layer in layers)
            for j in range(size)
        ]
        assert scores[name].tolist() == pytest.approx(expected, rel=1e-12), name


def test_scores_worked_out_by_hand() -> None:
    model = chain(fc1=nn.Linear(2, 3), relu=nn.ReLU(), fc2=nn.Linear(3, 1))
    neurons = map_neurons(model, noise(2, 2))
    values = {
        "fc1.weight": torch.tensor([[3.0, 0.0], [-1.0, 2.0], [0.0, 0.0]]),
        "fc1.bias": torch.tensor([-4.0, 2.0, 0.0]),
        "fc2.weight": torch.tensor([[9.0, 9.0, 9.0]]),  # reads the neurons
        "fc2.bias": torch.tensor([9.0]),
    }
    assert score_neurons(model, neurons, values, 1)["fc1"].tolist() == [7, 5, 0]
    assert score_neurons(model, neurons, values, 2)["fc1"].tolist() == [5, 3, 0]


def test_layers_of_a_group_are_summed_and_not_joined_in_one_norm() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(2, 2, bias=False)
            self.fc2 = nn.Linear(2, 2, bias=False)
            self.fc3 = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.fc3(F.relu(self.fc1(x) + self.fc2(x)))
            return logits

    model = Residual()
    neurons = map_neurons(model, noise(2, 2))
    values = {
        "fc1.weight": torch.tensor([[3.0, 4.0], [1.0, 0.0]]),
        "fc2.weight": torch.tensor([[0.0, 12.0], [0.0, 7.0]]),
        "fc3.weight": torch.ones(1, 2),
    }
    # 5 + 12, not the 13 of all in one; 1 + 7.
    assert score_neurons(model, neurons, values, 2)["fc1"].tolist() == [17, 8]


@pytest.mark.parametrize("order", [1, 2])
def test_bare_parameters_are_scored_over_all_that_lies_along_them(order: int) -> None:
    """Of a group that no layer makes; here a table written by hand."""
    with seeded(0):
        model = shaken(ZOO_BY_NAME["bare_parameter"].build())
    hidden = NeuronGroup(
        "hidden", 7, (Axis("weight1", 1), Axis("bias1", 0), Axis("weight2", 1))
    )
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    values = {name: p.detach() for name, p in model.named_parameters()}
    scores = score_neurons(model, Neurons((hidden,), shapes), values, order)
    parts: list[Part] = [("weight1", 1, each), ("bias1", 0, each), ("weight2", 1, each)]
    expected = [
        sum(slow_norm([part], values, j, order) for part in parts) for j in range(7)
    ]
    assert scores["hidden"].tolist() == pytest.approx(expected, rel=1e-12)


def test_norms_do_not_count_however_large_their_values() -> None:
    made = CASES["norms and PReLU"]
    with seeded(0):
        model = shaken(made.build())
    neurons = map_neurons(model, made.example())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    after = {
        name: 1e6 + values if name.startswith(("norm", "prelu")) else values
        for name, values in before.items()
    }
    first, second = (score_neurons(model, neurons, v, 2) for v in (before, after))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_scores_are_summed_in_double_and_change_nothing() -> None:
    """In float32 a sum of ten million and one half would lose the half."""
    model = chain(fc1=nn.Linear(2, 2, bias=False), fc2=nn.Linear(2, 1))
    neurons = map_neurons(model, noise(2, 2))
    values = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    values["fc1.weight"] = torch.tensor([[1e7, 0.25], [1e7, 0.5]])
    scores = score_neurons(model, neurons, values, 1)["fc1"]
    assert scores.tolist() == [1e7 + 0.25, 1e7 + 0.5]
    assert values["fc1.weight"].dtype == torch.float32
    assert choose_top(neurons, 0.5, {"fc1": scores})["fc1"].tolist() == [1]
