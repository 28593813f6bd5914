import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedspu import (
    Active,
    Axis,
    Blocks,
    NeuronGroup,
    Neurons,
    choose_random,
    extract,
    load_state,
    map_neurons,
    slim_model,
    state_of,
    stream,
)
from fedspu.neurons.multi_head import SlimAttention
from fedspu.neurons.slim import slim_neurons, slim_state, slimmable
from tests.oracles.models import (
    Fn,
    loss_of,
    mapped,
    quietly_mapped,
    random_active,
    random_input,
    random_model,
    run,
    seeded,
    shaken,
    with_zeros_outside,
)
from tests.oracles.tables import actives, same_state, tables
from tests.oracles.zoo import ZOO, ZOO_BY_NAME, Entry, chain, noise, tokens

SLIM = [
    entry
    for entry in ZOO
    if entry.slim or entry.name in ("glu", "gru", "lstm")  # found, and slim, as well
]
MIXING = ("mlp_layernorm", "transformer", "vit")
PER_CHANNEL = [entry for entry in SLIM if entry.name not in MIXING]


def zeroed(model: nn.Module, blocks: Blocks) -> nn.Module:
    """The full model with everything outside the blocks zero."""
    model = copy.deepcopy(model)
    load_state(model, with_zeros_outside(state_of(model), blocks))
    return model


def assert_same(one: Tensor, other: Tensor) -> None:
    assert one.shape == other.shape
    assert torch.allclose(one, other, rtol=0, atol=1e-10)


def channels_of(module: nn.Module, blocks: Blocks) -> dict[int, Tensor | None]:
    """The active channels of each weight of one axis, by the weight's identity."""
    return {
        id(parameter): blocks[name][0]
        for name, parameter in module.named_parameters()
        if parameter.dim() == 1
    }


def norms_over_active(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, blocks: Blocks
) -> None:
    """Let norms that mix channels take their statistics over the active ones alone.

    What they say of the other channels is zero, as their weights and biases are.
    """
    channels = channels_of(model, blocks)

    def normed(x: Tensor, places: Tensor | None, dims: list[int]) -> Tensor:
        seen = x if places is None else x.index_select(dims[0], places)
        mean = seen.mean(dims, keepdim=True)
        variance = seen.var(dims, unbiased=False, keepdim=True)
        return (x - mean) / (variance + 1e-5).sqrt()

    def layer_norm(
        x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float = 1e-5
    ) -> Tensor:
        assert eps == 1e-5
        return normed(x, channels[id(weight)], [-1]) * weight + bias

    def group_norm(
        x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5
    ) -> Tensor:
        assert (groups, eps) == (1, 1e-5)
        out = normed(x, channels[id(weight)], [1, 2, 3])
        return out * weight[:, None, None] + bias[:, None, None]

    monkeypatch.setattr(F, "layer_norm", layer_norm)
    monkeypatch.setattr(F, "group_norm", group_norm)


# What a slim model computes -----------------------------------------------------------


@pytest.mark.parametrize("entry", PER_CHANNEL, ids=lambda entry: entry.name)
@pytest.mark.parametrize("p", [0.2, 0.5, 0.7, 1])
def test_a_slim_model_is_the_full_one_with_zeros_outside_the_blocks(
    entry: Entry, p: float
) -> None:
    neurons, model = mapped(entry.name), random_model(entry).eval()
    x = random_input(entry)
    active = random_active(neurons, p, seed=int(10 * p))
    slim = slim_model(model, neurons, active)
    assert_same(run(slim, x), run(zeroed(model, neurons.blocks(active)), x))


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("p", [0.2, 0.5, 0.7, 1])
@pytest.mark.parametrize("is_training", [True, False])
def test_where_norms_mix_channels_they_see_the_active_ones_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, p: float, is_training: bool
) -> None:
    entry, neurons = ZOO_BY_NAME[name], mapped(name)
    model, x = random_model(entry).train(is_training), random_input(entry)
    active = random_active(neurons, p, seed=int(10 * p))
    output = run(slim_model(model, neurons, active), x)
    full = zeroed(model, neurons.blocks(active))
    norms_over_active(monkeypatch, full, neurons.blocks(active))
    assert_same(output, run(full, x))


@pytest.mark.parametrize("p", [0.3, 0.6])
def test_a_group_norm_of_one_group_sees_the_active_channels_alone(
    monkeypatch: pytest.MonkeyPatch, p: float
) -> None:
    with seeded(0):
        model = shaken(
            chain(
                conv1=nn.Conv2d(3, 8, 3),
                norm=nn.GroupNorm(1, 8),
                relu=nn.ReLU(),
                conv2=nn.Conv2d(8, 4, 3),
            )
        )
    x = noise(2, 3, 8, 8).double()
    neurons = map_neurons(model, x)
    active = random_active(neurons, p)
    output = slim_model(model, neurons, active)(x)
    full = zeroed(model, neurons.blocks(active))
    norms_over_active(monkeypatch, full, neurons.blocks(active))
    assert_same(output, full(x))


@pytest.mark.parametrize("name", ["transformer", "vit"])
def test_a_slim_transformer_is_the_same_without_gradients(name: str) -> None:
    # In eval mode torch takes a fused path through the encoder layers.
    entry, neurons = ZOO_BY_NAME[name], mapped(name)
    model, x = random_model(entry).eval(), random_input(entry)
    slim = slim_model(model, neurons, random_active(neurons, 0.5))
    expected = run(slim, x)
    with torch.no_grad():
        assert_same(run(slim, x), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_slim_encoder_of_padded_sentences_is_the_same_without_gradients() -> None:
    # With nested tensors on, as they are unless told otherwise.
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 12)
            layer = nn.TransformerEncoderLayer(12, 4, 10, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1)
            self.head = nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.encoder(self.embedding(x), src_key_padding_mask=x == 0)
            logits: Tensor = self.head(h[:, 0])
            return logits

    with seeded(0):
        model = shaken(Padded()).eval()
    x = tokens(2, 5, 10) + 1
    x[1, 3:] = 0
    neurons = map_neurons(model, x)
    slim = slim_model(model, neurons, random_active(neurons, 0.5))
    expected = run(slim, x)
    with torch.no_grad():
        assert_same(run(slim, x), expected)


# Its state ----------------------------------------------------------------------------


@pytest.mark.parametrize("entry", SLIM, ids=lambda entry: entry.name)
@pytest.mark.parametrize("p", [0.3, 0.8])
def test_the_state_of_a_slim_model_is_the_payload(entry: Entry, p: float) -> None:
    neurons, model = mapped(entry.name), random_model(entry)
    active = choose_random(neurons, p, stream(0, "active"))
    payload = extract(state_of(model), neurons.blocks(active))
    state = state_of(slim_model(model, neurons, active))
    assert payload.keys() <= state.keys()
    assert all(torch.equal(state[name], values) for name, values in payload.items())
    assert state.keys() == state_of(model).keys()


@pytest.mark.parametrize("entry", SLIM, ids=lambda entry: entry.name)
def test_a_payload_can_be_loaded_into_a_slim_model(entry: Entry) -> None:
    neurons = mapped(entry.name)
    active = random_active(neurons, 0.4)
    one, other = random_model(entry, seed=1).eval(), random_model(entry, seed=2).eval()
    slim, x = slim_model(one, neurons, active), random_input(entry)
    load_state(slim, state_of(slim_model(other, neurons, active)))
    assert_same(run(slim, x), run(slim_model(other, neurons, active), x))


@pytest.mark.parametrize("entry", SLIM, ids=lambda entry: entry.name)
def test_a_slim_model_trains(entry: Entry) -> None:
    neurons, model = mapped(entry.name), random_model(entry)
    slim = slim_model(model, neurons, random_active(neurons, 0.4)).train()
    before = state_of(model)
    x = random_input(entry)
    optimizer = torch.optim.SGD(slim.parameters(), lr=0.01)
    first = loss_of(slim, x)
    first.backward()
    frozen = [name for name, p in slim.named_parameters() if not p.requires_grad]
    assert frozen == [n for n, p in model.named_parameters() if not p.requires_grad]
    assert all(
        p.grad is not None and p.grad.shape == p.shape
        for name, p in slim.named_parameters()
        if name not in frozen
    )
    optimizer.step()
    assert loss_of(slim, x).item() < first.item()
    after = state_of(model)
    assert all(torch.equal(after[name], values) for name, values in before.items())


@pytest.mark.parametrize("entry", SLIM, ids=lambda entry: entry.name)
def test_a_slim_model_shares_nothing_with_the_full_one(entry: Entry) -> None:
    neurons, model = mapped(entry.name), random_model(entry)
    for active in (random_active(neurons, 0.4), neurons.everything()):
        slim = slim_model(model, neurons, active)
        mine = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
        its = {t.data_ptr() for t in (*slim.parameters(), *slim.buffers())}
        assert not mine & its


def test_a_slim_model_is_smaller_in_every_layer() -> None:
    entry, neurons = ZOO_BY_NAME["vgg"], mapped("vgg")
    slim = slim_model(entry.build(), neurons, random_active(neurons, 0.5))
    assert repr(slim) == repr(
        chain(
            conv1=nn.Conv2d(3, 3, 3, padding=1),
            bn1=nn.BatchNorm2d(3),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(3, 5, 3, padding=1),
            bn2=nn.BatchNorm2d(5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            conv3=nn.Conv2d(5, 3, 3, padding=1),
            bn3=nn.BatchNorm2d(3),
            relu3=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(3 * 2 * 2, 4),
            relu4=nn.ReLU(),
            dropout=nn.Dropout(0.5),
            fc2=nn.Linear(4, 4),
        )
    )


@pytest.mark.parametrize(
    ("name", "layer", "sizes"),
    [
        ("mobilenet", "block1.depthwise", {"groups": 6, "in_channels": 6}),
        ("depthwise_multiplier", "conv2", {"groups": 2, "out_channels": 4}),
        ("grouped_conv", "conv2", {"groups": 4, "in_channels": 8, "out_channels": 4}),
        ("unet", "up", {"in_channels": 5, "out_channels": 3}),
        ("mlp_layernorm", "norm1", {"normalized_shape": (5,)}),
        ("prelu_instancenorm", "prelu1", {"num_parameters": 3}),
        ("prelu_instancenorm", "norm1", {"num_features": 3}),
        ("tied_embedding", "embedding", {"num_embeddings": 11, "embedding_dim": 3}),
        ("gru", "gru", {"input_size": 5, "hidden_size": 3}),
        ("lstm", "lstm", {"input_size": 3, "hidden_size": 2}),
        (
            "transformer",
            "encoder.layers.0.self_attn",
            {"embed_dim": 6, "num_heads": 1, "head_dim": 4},
        ),
    ],
)
def test_the_sizes_a_layer_keeps_agree_with_its_tensors(
    name: str, layer: str, sizes: dict[str, object]
) -> None:
    neurons = mapped(name)
    slim = slim_model(ZOO_BY_NAME[name].build(), neurons, random_active(neurons, 0.5))
    found = slim.get_submodule(layer)
    assert {size: getattr(found, size) for size in sizes} == sizes


def test_tied_weights_are_tied_in_the_slim_model() -> None:
    neurons = mapped("tied_embedding")
    model = ZOO_BY_NAME["tied_embedding"].build()
    slim = slim_model(model, neurons, random_active(neurons, 0.5))
    decoder = slim.get_submodule("decoder")
    assert decoder.weight is slim.get_parameter("embedding.weight")


def test_a_buffer_beside_the_stream_is_sliced_with_it() -> None:
    class Shifted(nn.Module):
        shift: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(6, 8)
            self.fc2 = nn.Linear(8, 3)
            self.register_buffer("shift", noise(8), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.fc2(F.relu(self.fc1(x) + self.shift))
            return logits

    with seeded(0):
        model = shaken(Shifted())
    x = noise(2, 6).double()
    neurons = map_neurons(model, x)
    active = {"fc1": torch.tensor([1, 2, 6])}
    slim = slim_model(model, neurons, active)
    assert torch.equal(slim.get_buffer("shift"), model.shift[[1, 2, 6]])
    assert_same(slim(x), zeroed(model, neurons.blocks(active))(x))


def test_the_mode_of_the_model_is_kept() -> None:
    neurons, model = mapped("vgg"), ZOO_BY_NAME["vgg"].build()
    model.get_submodule("bn1").eval()
    slim = slim_model(model, neurons, random_active(neurons, 0.5))
    assert slim.training
    assert not slim.get_submodule("bn1").training


# Groups that cannot be sliced ---------------------------------------------------------


def test_groups_that_cannot_be_sliced_are_kept_whole_with_a_warning() -> None:
    entry = ZOO_BY_NAME["groupnorm"]
    stuck = [replace(g, slim=g.name != "conv1") for g in mapped("groupnorm").groups]
    neurons = replace(mapped("groupnorm"), groups=tuple(stuck), uncounted={})
    model, x = random_model(entry).eval(), random_input(entry)
    active = random_active(neurons, 0.5)
    with pytest.warns(UserWarning, match="cannot be sliced: conv1$"):
        slim = slim_model(model, neurons, active)
    kept = {**active, "conv1": torch.arange(8)}
    assert slim.get_parameter("conv1.weight").shape == (8, 3, 3, 3)
    assert slim.get_parameter("conv2.weight").shape == (3, 8, 3, 3)
    assert_same(run(slim, x), run(zeroed(model, neurons.blocks(kept)), x))
    payload = extract(state_of(model), neurons.blocks(slimmable(neurons, active)))
    state = state_of(slim)
    assert all(torch.equal(state[name], values) for name, values in payload.items())


@pytest.mark.parametrize(
    "name", ["view_sizes", "own_attention", "untaken_branch", "pixel_shuffle"]
)
def test_a_slim_copy_of_a_model_with_fixed_sizes_still_runs(name: str) -> None:
    entry, neurons = ZOO_BY_NAME[name], mapped(name)
    model, x = random_model(entry).eval(), entry.example().double()
    active = random_active(neurons, 0.5)
    kept = neurons.blocks(slimmable(neurons, active))
    slim = quietly_slim(model, neurons, active)
    assert_same(run(slim, x), run(zeroed(model, kept), x))


@pytest.mark.parametrize("cut", [slice(2, 6), slice(4, None), slice(None, 6)])
def test_a_slim_copy_does_not_read_other_neurons_by_their_place(cut: slice) -> None:
    # Positions written into the model mean other neurons in a sliced layer, though
    # every shape may still fit.
    width = len(range(8)[cut])
    with seeded(0):
        model = shaken(
            Fn(
                lambda self, x: self.fc2(F.relu(self.fc1(x))[:, cut]),
                fc1=nn.Linear(6, 8),
                fc2=nn.Linear(width, 3),
            )
        )
    x = noise(2, 6).double()
    neurons = quietly_mapped(model, x)
    for seed in range(3):
        active = random_active(neurons, 0.5, seed)
        kept = neurons.blocks(slimmable(neurons, active))
        assert_same(quietly_slim(model, neurons, active)(x), zeroed(model, kept)(x))


def test_a_slim_copy_does_not_move_channels_to_another_norm_group() -> None:
    # Channels 0-5 and 6-11 are normed together; 0-3 come from one layer, 4-11 from the
    # other. Without two of the first four, six and six would be other ones.
    with seeded(0):
        model = shaken(
            Fn(
                lambda self, x: self.out(
                    self.norm(torch.cat([self.a(x), self.b(x)], 1))
                ),
                a=nn.Conv2d(3, 4, 1),
                b=nn.Conv2d(3, 8, 1),
                norm=nn.GroupNorm(2, 12),
                out=nn.Conv2d(12, 3, 1),
            )
        )
    x = noise(2, 3, 4, 4).double()
    neurons = quietly_mapped(model, x)
    active = random_active(neurons, 0.5)
    kept = neurons.blocks(slimmable(neurons, active))
    channels = kept["norm.weight"][0]
    full = zeroed(model, kept)
    a, b, out = (full.get_submodule(name) for name in ("a", "b", "out"))
    before, halves = torch.cat([a(x), b(x)], 1), []
    for half in (range(6), range(6, 12)):
        seen = [c for c in half if channels is None or c in channels]
        mean = before[:, seen].mean((1, 2, 3), keepdim=True)
        var = before[:, seen].var((1, 2, 3), unbiased=False, keepdim=True)
        halves.append((before[:, list(half)] - mean) / (var + 1e-5).sqrt())
    scaled = torch.cat(halves, 1) * full.get_parameter("norm.weight")[:, None, None]
    expected = out(scaled + full.get_parameter("norm.bias")[:, None, None])
    assert_same(quietly_slim(model, neurons, active)(x), expected)


def quietly_slim(model: nn.Module, neurons: Neurons, active: Active) -> nn.Module:
    """A slim copy, without a word on what stayed whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return slim_model(model, neurons, active)


def test_no_warning_where_all_neurons_are_active_anyway() -> None:
    neurons = mapped("groupnorm")
    slim_model(ZOO_BY_NAME["groupnorm"].build(), neurons, neurons.everything())


def test_a_norm_without_values_of_its_own_stays_quiet() -> None:
    model = chain(
        conv1=nn.Conv2d(3, 8, 3), norm=nn.InstanceNorm2d(8), conv2=nn.Conv2d(8, 4, 3)
    ).double()
    x = noise(2, 3, 8, 8).double()
    neurons = map_neurons(model, x)
    active = {"conv1": torch.tensor([1, 2, 6])}
    slim = slim_model(model, neurons, active)
    assert_same(slim(x), zeroed(model, neurons.blocks(active))(x))


# Attention ----------------------------------------------------------------------------

PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])
CAUSAL = torch.ones(4, 5, dtype=torch.bool).triu(1)
PER_HEAD = noise(2 * 4, 4, 5).double()

CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # How the layer is made, and how it is called, on 4 queries and 5 keys.
    "plain": ({}, {}),
    "bool mask": ({}, {"attn_mask": CAUSAL}),
    "float mask": ({}, {"attn_mask": noise(4, 5).double()}),
    "mask per head": ({}, {"attn_mask": PER_HEAD}),
    "bool mask per head": ({}, {"attn_mask": (PER_HEAD > 1)}),
    "padding": ({}, {"key_padding_mask": PADDING}),
    "float padding": ({}, {"key_padding_mask": noise(2, 5).double()}),
    "mask and padding": ({}, {"attn_mask": CAUSAL, "key_padding_mask": PADDING}),
    "no weights": ({}, {"need_weights": False}),
    "masked, no weights": (
        {},
        {"need_weights": False, "attn_mask": CAUSAL, "key_padding_mask": PADDING},
    ),
    "weights of each head": ({}, {"average_attn_weights": False}),
    "no bias": ({"bias": False}, {}),
    "own widths": ({"kdim": 6, "vdim": 7}, {"attn_mask": CAUSAL}),
    "bias for keys": (
        {"add_bias_kv": True},
        {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
    ),
    "zero attention": (
        {"add_zero_attn": True},
        {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
    ),
    "all of it": (
        {"kdim": 6, "vdim": 7, "add_bias_kv": True, "add_zero_attn": True},
        {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
    ),
}


def attention(**made: Any) -> nn.MultiheadAttention:
    with seeded(0):
        layer = shaken(nn.MultiheadAttention(8, 4, **made))
    assert isinstance(layer, nn.MultiheadAttention)
    return layer


def inputs(layer: nn.MultiheadAttention) -> list[Tensor]:
    """Two examples: 4 queries, 5 keys and values."""
    shapes = [(2, 4, 8), (2, 5, layer.kdim), (2, 5, layer.vdim)]
    tensors = [noise(*shape).double() for shape in shapes]
    return tensors if layer.batch_first else [x.transpose(0, 1) for x in tensors]


def assert_same_answer(one: Any, other: Any) -> None:
    assert_same(one[0], other[0])
    assert (one[1] is None) == (other[1] is None)
    if one[1] is not None:
        assert_same(one[1], other[1])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_an_unsliced_slim_attention_is_torch_s_own(
    call: str, batch_first: bool
) -> None:
    made, given = CALLS[call]
    layer = attention(batch_first=batch_first, **made)
    expected = layer(*inputs(layer), **given)
    SlimAttention.shrink(layer, torch.arange(4))
    assert_same_answer(layer(*inputs(layer), **given), expected)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"attn_mask": CAUSAL},
        {"attn_mask": PER_HEAD[:4]},
        {"key_padding_mask": PADDING[1]},
        {"average_attn_weights": False},
        {"need_weights": False, "key_padding_mask": PADDING[1]},
    ],
)
def test_a_slim_attention_takes_a_single_example(
    given: dict[str, Any], batch_first: bool
) -> None:
    layer = attention(batch_first=batch_first)
    one = [noise(4, 8).double(), noise(5, 8).double(), noise(5, 8).double()]
    expected = layer(*one, **given)
    SlimAttention.shrink(layer, torch.arange(4))
    assert_same_answer(layer(*one, **given), expected)


def test_a_slim_attention_takes_the_causal_hint() -> None:
    layer = attention(batch_first=True)
    x = noise(2, 5, 8).double()
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    for need_weights in (True, False):
        given: Any = {
            "attn_mask": mask,
            "is_causal": True,
            "need_weights": need_weights,
        }
        slim = copy.deepcopy(layer)
        SlimAttention.shrink(slim, torch.arange(4))
        assert_same_answer(slim(x, x, x, **given), layer(x, x, x, **given))


def test_a_slim_attention_drops_as_often_as_told() -> None:
    layer = attention(batch_first=True, dropout=0.5)
    x = noise(2, 5, 8).double()
    slim = copy.deepcopy(layer)
    SlimAttention.shrink(slim, torch.arange(4))
    with seeded(1):
        _, weights = slim(x, x, x, average_attn_weights=False)
    assert 0.3 < (weights == 0).double().mean() < 0.7
    assert_same_answer(slim.eval()(x, x, x), layer.eval()(x, x, x))


class Attends(nn.Module):
    """Streams of their own for queries, keys and values, and one behind."""

    given: Any = None

    def __init__(self, made: dict[str, Any]) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 4, **made)
        self.query = nn.Linear(6, 8)
        self.key = nn.Linear(6, self.attend.kdim)
        self.value = nn.Linear(6, self.attend.vdim)
        if self.attend._qkv_same_embed_dim:  # then one weight reads them all
            self.key = self.value = self.query
        self.head = nn.Linear(8, 3)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        answer, _ = self.attend(
            self.query(queries), self.key(keys), self.value(keys), **(self.given or {})
        )
        logits: Tensor = self.head(answer)
        return logits


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("p", [0.3, 0.5])
def test_a_sliced_attention_is_the_full_one_with_zeros(
    call: str, batch_first: bool, p: float
) -> None:
    made, given = CALLS[call]
    with seeded(0):
        model = shaken(Attends({"batch_first": batch_first, **made}))
    x = (noise(2, 4, 6).double(), noise(2, 5, 6).double())
    if not batch_first:
        x = (x[0].transpose(0, 1), x[1].transpose(0, 1))
    neurons = map_neurons(model, x)  # not yet with masks, which may name heads
    assert {4, 8} <= {group.size for group in neurons.groups}  # heads and streams
    model.given = given
    active = random_active(neurons, p)
    slim = slim_model(model, neurons, active)
    assert_same(run(slim, x), run(zeroed(model, neurons.blocks(active)), x))


@pytest.mark.parametrize("num_heads", [1, 2])
def test_attention_whose_inputs_alone_shrink_is_the_full_one_with_zeros(
    num_heads: int,
) -> None:
    # What it makes is the model's output, and a single head cannot be left out.
    with seeded(0):
        model = shaken(
            Fn(
                lambda self, x: self.attend(*[self.fc(x)] * 3)[0],
                fc=nn.Linear(6, 8),
                attend=nn.MultiheadAttention(8, num_heads, batch_first=True),
            )
        )
    x = noise(2, 5, 6).double()
    neurons = map_neurons(model, x)
    active = {**neurons.everything(), "fc": torch.tensor([0, 2, 5])}
    slim = slim_model(model, neurons, active)
    assert_same(slim(x), zeroed(model, neurons.blocks(active))(x))


def test_the_slim_attention_of_a_slim_model_can_be_saved_and_copied() -> None:
    entry, neurons = ZOO_BY_NAME["transformer"], mapped("transformer")
    slim = slim_model(random_model(entry), neurons, random_active(neurons, 0.7)).eval()
    again = copy.deepcopy(slim)
    again.load_state_dict(slim.state_dict())
    assert_same(run(again, entry.example()), run(slim, entry.example()))


Build = Callable[[], nn.Module]


@pytest.mark.parametrize(
    "build",
    [
        lambda: chain(
            conv=nn.Conv2d(3, 8, 3),
            up=nn.ConvTranspose2d(8, 6, 2, groups=2),
            relu=nn.ReLU(),
            out=nn.Conv2d(6, 3, 1),
        ),
        lambda: chain(
            conv=nn.Conv2d(3, 5, 3),
            up=nn.ConvTranspose2d(5, 10, 2, groups=5),
            relu=nn.ReLU(),
            out=nn.Conv2d(10, 3, 1),
        ),
        lambda: chain(
            conv=nn.Conv2d(3, 8, 3),
            norm=nn.BatchNorm2d(8, affine=False),
            relu=nn.ReLU(),
            out=nn.Conv2d(8, 3, 1),
        ),
        lambda: chain(
            conv=nn.Conv2d(3, 8, 3, bias=False),
            norm=nn.BatchNorm2d(8, track_running_stats=False),
            relu=nn.ReLU(),
            out=nn.Conv2d(8, 3, 1),
        ),
        lambda: chain(
            conv=nn.Conv2d(3, 8, 3, groups=1, padding_mode="reflect", padding=1),
            glu=nn.GLU(1),
            out=nn.Conv2d(4, 3, 1),
        ),
    ],
    ids=["grouped up", "depthwise up", "no affine", "no statistics", "gated"],
)
def test_layers_the_zoo_has_not_are_sliced_too(build: Build) -> None:
    with seeded(0):
        model = shaken(build()).eval()
    x = noise(2, 3, 8, 8).double()
    neurons = quietly_mapped(model, x)
    active = random_active(neurons, 0.5)
    assert all(group.slim for group in neurons.groups)
    slim = slim_model(model, neurons, active)
    assert len(slim.get_parameter("conv.weight")) < len(
        model.get_parameter("conv.weight")
    )
    assert_same(slim(x), zeroed(model, neurons.blocks(active))(x))


# The table of a slim model ------------------------------------------------------------


def within(kept: Active, some: Active) -> Active:
    """Some of the kept neurons, as the full model numbers them."""
    return {name: kept[name][some[name]] for name in kept}


def half_slim(neurons: Neurons, p: float, seed: int) -> Active:
    """Random neurons that a slim model can have."""
    return slimmable(neurons, random_active(neurons, p, seed))


def hidden_sizes(neurons: Neurons) -> dict[str, int]:
    return {group.name: group.size for group in neurons.groups}


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
@pytest.mark.parametrize("p", [0.05, 0.4, 0.7, 1])
def test_the_slim_table_is_that_of_the_slim_model(entry: Entry, p: float) -> None:
    neurons, model = mapped(entry.name), random_model(entry)
    active = half_slim(neurons, p, seed=3)
    slim, table = slim_model(model, neurons, active), slim_neurons(neurons, active)
    tensors = dict(slim.named_parameters()) | dict(slim.named_buffers())
    assert table.shapes == {name: tuple(tensors[name].shape) for name in table.shapes}
    assert table.shapes.keys() == neurons.shapes.keys()
    assert hidden_sizes(table) == {name: len(kept) for name, kept in active.items()}
    for group, full in zip(table.groups, neurons.groups, strict=True):
        assert (group.permutable, group.slim) == (full.permutable, full.slim)
        assert [(a.tensor, a.dim) for a in group.axes] == [
            (a.tensor, a.dim) for a in full.axes
        ]
        for axis in group.axes:  # also of buffers that do not travel
            places = axis.positions(group.size)
            assert int(places.max()) < tensors[axis.tensor].shape[axis.dim]
    assert table.statistics == neurons.statistics
    assert table.norm_tensors == neurons.norm_tensors


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
@pytest.mark.parametrize(("p", "q"), [(0.7, 0.5), (0.5, 0.05), (1, 0.6), (0.6, 1)])
def test_slimming_a_slim_model_is_slimming_once(
    entry: Entry, p: float, q: float
) -> None:
    neurons, model = mapped(entry.name), random_model(entry).eval()
    first = half_slim(neurons, p, seed=1)
    table = slim_neurons(neurons, first)
    second = half_slim(table, q, seed=2)
    both = within(first, second)

    twice = slim_model(slim_model(model, neurons, first), table, second)
    once = slim_model(model, neurons, both)
    assert same_state(state_of(twice), state_of(once))
    x = random_input(entry)
    assert_same(run(twice, x), run(once, x))
    assert slim_neurons(table, second) == slim_neurons(neurons, both)


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
@pytest.mark.parametrize("p", [0.05, 0.5, 1])
def test_a_slim_state_is_the_state_of_the_slim_model(entry: Entry, p: float) -> None:
    neurons, model = mapped(entry.name), random_model(entry)
    active = half_slim(neurons, p, seed=4)
    expected = state_of(slim_model(model, neurons, active))
    found = slim_state(state_of(model), neurons, active)
    assert same_numbers(found, expected)
    load_state(slim_model(model, neurons, active), found)


def same_numbers(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def test_a_slim_state_has_no_tensor_of_the_full_one() -> None:
    entry, neurons = ZOO_BY_NAME["vgg"], mapped("vgg")
    state = state_of(entry.build())
    for active in (neurons.everything(), random_active(neurons, 0.5)):
        found = slim_state(state, neurons, active)
        mine = {tensor.data_ptr() for tensor in state.values()}
        assert not mine & {tensor.data_ptr() for tensor in found.values()}


def test_a_slim_table_worked_out_by_hand() -> None:
    # Along t, one after the other: a position of nobody, a's 3 neurons of two positions
    # each, b's 2 neurons in three copies, two apart, and another of nobody.
    neurons = Neurons(
        groups=(
            NeuronGroup("a", 3, (Axis("t", 0, repeat=2, offset=1), Axis("u", 0))),
            NeuronGroup("b", 2, (Axis("t", 0, offset=7, copies=3, stride=2),)),
        ),
        shapes={"t": (14, 5), "u": (3,)},
    )
    table = slim_neurons(neurons, {"a": torch.tensor([0, 2]), "b": torch.tensor([1])})
    assert table.shapes == {"t": (9, 5), "u": (2,)}
    assert [group.axes for group in table.groups] == [
        (Axis("t", 0, repeat=2, offset=1), Axis("u", 0)),
        (Axis("t", 0, offset=5, copies=3, stride=1),),
    ]


def test_copies_that_end_up_unevenly_spaced_are_listed() -> None:
    # a a b b a a . . a a: without one of b, the copies of a are 3 and 4 apart.
    neurons = Neurons(
        groups=(
            NeuronGroup("a", 2, (Axis("t", 0, copies=3, stride=4),)),
            NeuronGroup("b", 2, (Axis("t", 0, offset=2),)),
        ),
        shapes={"t": (10,)},
    )
    table = slim_neurons(neurons, {"a": torch.arange(2), "b": torch.tensor([1])})
    assert table.groups[0].axes == (Axis("t", 0, index=(0, 3, 7, 1, 4, 8)),)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_slimming_twice_is_slimming_once_for_any_table(data: st.DataObject) -> None:
    """Repeats, offsets, copies and strides; several groups side by side, gaps."""
    neurons = data.draw(tables())
    first = data.draw(actives(neurons))
    table = slim_neurons(neurons, first)
    second = data.draw(actives(table))
    both = within(first, second)
    again = slim_neurons(table, second)
    assert again.shapes == slim_neurons(neurons, both).shapes

    # Every entry has a number of its own: the same ones are left either way.
    state = {
        name: torch.arange(torch.Size(shape).numel()).view(shape).double()
        for name, shape in neurons.shapes.items()
    }
    small = slim_state(state, neurons, first)
    assert {name: tuple(t.shape) for name, t in small.items()} == table.shapes
    assert same_numbers(
        slim_state(small, table, second), slim_state(state, neurons, both)
    )


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_neuron_of_a_slim_table_has_the_entries_it_had(data: st.DataObject) -> None:
    neurons = data.draw(tables())
    active = data.draw(actives(neurons))
    table = slim_neurons(neurons, active)
    for full, slim in zip(neurons.groups, table.groups, strict=True):
        for before, after in zip(full.axes, slim.axes, strict=True):
            size = neurons.shapes[before.tensor][before.dim]
            left = neurons.active_along(active, before.tensor, before.dim, size)
            numbers = torch.arange(size) if left is None else left
            kept = before.positions(full.size)[active[full.name]]
            assert torch.equal(numbers[after.positions(slim.size)], kept)
