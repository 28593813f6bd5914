"""The patterns of public architectures: mapped usefully, and every law holds."""

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedspu
from fedspu import Neurons, NeuronWarning, extract, map_neurons, merge, slim_model
from fedspu.neurons.calls import as_double, call, copy_model, outputs_of
from fedspu.neurons.slim import slimmable
from tests.oracles.models import reordered, seeded
from tests.oracles.patterns import PATTERNS, LanguageModel, Pattern, T5Attention

EACH = pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)


@cache
def table_of(name: str) -> Neurons:
    pattern = next(p for p in PATTERNS if p.name == name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedspu.NeuronWarning)
        return map_neurons(model_of(pattern), pattern.example())


def model_of(pattern: Pattern, seed: int = 0) -> nn.Module:
    with seeded(seed):
        return pattern.build()


def random_double(pattern: Pattern, seed: int) -> tuple[nn.Module, Any]:
    """The model in float64 with other weights, and its example."""
    model = model_of(pattern, seed).double().eval()
    with seeded(seed), torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model, as_double(pattern.example())


def output(model: nn.Module, example: Any) -> Tensor:
    model.train()  # drops what some models keep of other weights
    with torch.no_grad():
        [found] = outputs_of(call(model.eval(), example))
        return found


@EACH
def test_half_of_the_neurons_are_little_more_than_half_of_the_entries(
    pattern: Pattern,
) -> None:
    neurons = table_of(pattern.name)
    active = fedspu.choose_ordered(neurons, 0.5)
    assert neurons.num_entries(active) <= pattern.share * neurons.num_entries()


@EACH
def test_any_order_of_permutable_neurons_gives_the_same_output(
    pattern: Pattern,
) -> None:
    model, example = random_double(pattern, 5)
    before = output(model, example)
    for group in table_of(pattern.name).groups:
        if group.permutable:
            order = torch.randperm(
                group.size, generator=torch.Generator().manual_seed(1)
            ).tolist()
            after = output(reordered(copy_model(model), group, order), example)
            # A norm in float32 rounds otherwise once its channels are reordered.
            assert torch.allclose(before, after, rtol=1e-4, atol=1e-4), group.name


@EACH
@pytest.mark.parametrize("layout", ["auto", "index"])
def test_a_partial_step_is_the_dense_step_in_the_blocks(
    pattern: Pattern, layout: Any
) -> None:
    neurons = table_of(pattern.name)
    active = fedspu.choose_random(neurons, 0.5, fedspu.stream(0, "neurons"))
    blocks = neurons.blocks(active)
    model, example = random_double(pattern, 3)
    model.train()
    own = fedspu.state_of(model)

    dense = copy_model(model)
    [found] = outputs_of(call(dense, example))
    found.square().mean().backward()
    with fedspu.partial_training(model, neurons, active, layout=layout) as trainable:
        optimizer = torch.optim.SGD(trainable, lr=0.1)
        [found] = outputs_of(call(model, example))
        found.square().mean().backward()
        optimizer.step()

    for name, parameter in dense.named_parameters():
        now = model.get_parameter(name)
        inside = torch.zeros(parameter.shape, dtype=torch.bool)
        ones = {name: torch.ones(parameter.shape)}
        inside = fedspu.merge(
            {name: inside.float()},
            {name: blocks[name]},
            fedspu.extract(ones, {name: blocks[name]}),
        )[name].bool()
        assert torch.equal(now[~inside], own[name][~inside]), name
        if parameter.grad is not None:
            step = (own[name] - 0.1 * parameter.grad)[inside]
            assert torch.allclose(now[inside], step, rtol=1e-6, atol=1e-6), name


@EACH
def test_a_slim_copy_has_the_active_entries_and_the_output_s_shape(
    pattern: Pattern,
) -> None:
    neurons = table_of(pattern.name)
    active = fedspu.choose_random(neurons, 0.5, fedspu.stream(1, "neurons"))
    kept = slimmable(neurons, active)
    model, example = random_double(pattern, 4)
    slim = fedspu.slim_model(model, neurons, kept)
    assert output(slim, example).shape == output(model, example).shape
    payload = fedspu.extract(fedspu.state_of(model), neurons.blocks(kept))
    assert all(
        torch.equal(payload[name], tensor)
        for name, tensor in fedspu.state_of(slim).items()
        if name in payload
    )


@EACH
def test_the_model_is_left_as_it_was(pattern: Pattern) -> None:
    model = model_of(pattern).train()
    call(model, pattern.example())  # some models keep what they computed
    before = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedspu.NeuronWarning)
        assert map_neurons(model, pattern.example()) == table_of(pattern.name)
    after = model.state_dict()
    assert all(torch.equal(after[name], values) for name, values in before.items())
    assert all(layer.training for layer in model.modules())


# What the tables look like ------------------------------------------------------------


def sizes(name: str) -> dict[str, int]:
    return {group.name: group.size for group in table_of(name).groups}


def test_heads_that_share_keys_are_one_neuron() -> None:
    heads = next(g for g in table_of("llama").groups if "q_proj" in g.name)
    assert heads.size == 2
    assert heads.permutable
    widths = {axis.tensor.split(".")[-2]: axis.repeat for axis in heads.axes}
    assert widths == {"q_proj": 8, "k_proj": 4, "v_proj": 4, "o_proj": 8}


@pytest.mark.parametrize("name", ["fused_qkv", "interleaved_qkv", "gpt2"])
def test_one_matrix_for_queries_keys_and_values_has_whole_heads(name: str) -> None:
    assert sizes(name)["blocks.0.attention.qkv"] == 4


def test_a_packed_gate_and_its_value_are_one_neuron() -> None:
    group = next(g for g in table_of("llama").groups if "gate_up" in g.name)
    assert group.size == 24
    assert fedspu.Axis(f"{group.name}.weight", 0, copies=2, stride=24) in group.axes


def test_a_norm_in_float32_hides_no_stream() -> None:
    stream = table_of("t5").groups[0]
    assert (stream.size, stream.permutable) == (16, True)


def test_a_parameter_that_nothing_reads_does_not_keep_a_model_from_being_slimmed() -> (
    None
):
    neurons = table_of("vit")
    assert neurons.unreached == ("mask_token",)
    assert any(group.slim for group in neurons.groups)


def test_a_table_kept_as_a_plain_attribute_stays_in_place() -> None:
    neurons = table_of("vit_plain_table")
    stream = next(group for group in neurons.groups if group.size == 16)
    assert not stream.permutable


@pytest.mark.filterwarnings("ignore::fedspu.NeuronWarning")
def test_a_table_kept_as_a_plain_attribute_is_sliced_in_a_slim_copy() -> None:
    pattern = next(p for p in PATTERNS if p.name == "vit_plain_table")
    with seeded(0):
        model: Any = pattern.build().double().eval()
    example = pattern.example().double()
    neurons = map_neurons(model, example)
    stream = next(group for group in neurons.groups if group.size == 16)
    assert stream.slim
    active = neurons.everything() | {stream.name: torch.arange(0, 16, 3)}
    slim: Any = slim_model(model, neurons, active)
    assert slim.positions.shape[-1] == 6
    assert model.positions.shape[-1] == 16
    assert slim(example).shape == model(example).shape


class Thrown(nn.Module):
    """It computes a pooled vector that nobody reads, and a table without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(20, 8), nn.Linear(8, 12)
        self.back, self.pooler = nn.Linear(12, 8), nn.Linear(8, 8)
        self.places = nn.Embedding(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, words: Tensor) -> Tensor:
        with torch.no_grad():
            places = self.places(torch.arange(words.shape[1]))
        x = self.embed(words) + places
        x = x + self.back(torch.relu(self.fc(x)))
        torch.tanh(self.pooler(x[:, 0]))
        out: Tensor = self.head(x.mean(1))
        return out


def test_what_a_model_computes_and_throws_away_is_followed_as_well() -> None:
    with seeded(0):
        model = Thrown().double()
        words = torch.randint(20, (2, 6))
    with pytest.warns(NeuronWarning, match="pooler.bias .the output does not depend"):
        neurons = map_neurons(model, words)
    assert neurons.unreached == ()
    stream = next(group for group in neurons.groups if group.size == 8)
    assert (stream.permutable, stream.slim, stream.padded) == (True, True, False)
    assert {("pooler.weight", 1), ("places.weight", 1)} <= {
        (axis.tensor, axis.dim) for axis in stream.axes
    }
    active = neurons.everything() | {stream.name: torch.tensor([0, 3, 4])}
    slim = slim_model(model, neurons, active)
    full = copy.deepcopy(model)
    blocks = neurons.blocks(active)
    with torch.no_grad():
        for name, tensor in full.named_parameters():
            part = extract({name: tensor.clone()}, {name: blocks[name]})
            zeros = {name: torch.zeros_like(tensor)}
            tensor.copy_(merge(zeros, {name: blocks[name]}, part)[name])
    assert torch.allclose(slim(words), full(words))


def test_neurons_along_a_computed_table_stay_in_place() -> None:
    neurons = table_of("vit_computed_table")
    stream = next(group for group in neurons.groups if group.size == 16)
    assert (stream.name, stream.permutable, stream.padded) == ("patches", False, True)
    assert set(stream.tensors) <= set(neurons.shapes)


def test_hidden_states_beside_the_logits_are_not_the_output() -> None:
    neurons = table_of("llama")
    assert "embedding" in sizes("llama")
    assert not any("norm.weight" in f.tensors for f in neurons.fixed)


@pytest.mark.filterwarnings("ignore::fedspu.NeuronWarning")
def test_a_model_in_bfloat16_has_the_same_table() -> None:
    with seeded(0):
        model = LanguageModel(T5Attention).bfloat16()
    example = next(p for p in PATTERNS if p.name == "t5").example()
    assert map_neurons(model, example).groups == table_of("t5").groups


def test_frozen_parameters_do_not_travel() -> None:
    with seeded(0):
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    neurons = map_neurons(model, torch.randn(2, 6))
    assert set(neurons.shapes) == {"2.weight", "2.bias"}
    assert [group.size for group in neurons.groups] == [8]


def test_an_fx_model_has_the_table_of_the_model() -> None:
    with seeded(0):
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    traced = torch.fx.symbolic_trace(model)
    x = torch.randn(2, 6)
    assert map_neurons(traced, x) == map_neurons(model, x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own
def test_a_compiled_model_is_mapped_without_being_compiled() -> None:
    with seeded(0):
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    compiled: Any = torch.compile(model)
    [group] = map_neurons(compiled, torch.randn(2, 6)).groups
    assert (group.name, group.size, group.permutable) == ("_orig_mod.0", 8, True)


def test_a_model_that_cannot_be_followed_is_always_active() -> None:
    class Impatient(nn.Module):
        """Refuses to run while its operations are followed."""

        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            if torch._C._len_torch_dispatch_stack() > 0:
                raise RuntimeError("somebody is looking")
            logits: Tensor = self.fc2(self.fc1(x))
            return logits

    with (
        pytest.warns(fedspu.NeuronWarning, match="nothing can be frozen"),
        pytest.warns(fedspu.NeuronWarning, match=r"fc1\.weight, .*no neurons"),
    ):
        assert map_neurons(Impatient(), torch.randn(2, 6)).groups == ()


def test_a_warning_says_that_nothing_can_be_frozen() -> None:
    class InOrder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.fc2(self.fc1(x).cumsum(-1))
            return logits

    with (
        pytest.warns(fedspu.NeuronWarning, match="nothing can be frozen"),
        pytest.warns(fedspu.NeuronWarning, match=r"fc1\.weight.*operation cumsum"),
    ):
        assert map_neurons(InOrder(), torch.randn(2, 6)).groups == ()
