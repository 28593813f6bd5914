import copy
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu import (
    Axis,
    NeuronGroup,
    Neurons,
    NeuronWarning,
    choose_ordered,
    map_neurons,
)
from fedspu.errors import ModelError
from fedspu.neurons.calls import undisturbed
from fedspu.neurons.probe import Probe
from fedspu.neurons.proof import prove
from fedspu.neurons.tracing.classes import Classes
from tests.oracles.models import (
    Fn,
    mapped,
    quietly_mapped,
    random_input,
    random_model,
    reordered,
    run,
    seeded,
    shaken,
)
from tests.oracles.zoo import (
    ZOO,
    ZOO_BY_NAME,
    Entry,
    Group,
    along,
    chain,
    noise,
    tokens,
)

OUTPUT = "they reach the model's output"

SURE = [entry for entry in ZOO if not entry.may_be_active]
TRAPS = [entry for entry in ZOO if entry.may_be_active]


def found(neurons: Neurons) -> list[Group]:
    """The groups of a table as the zoo writes them: by travelling tensors alone."""
    groups = [
        Group(
            group.size,
            frozenset(
                (axis.tensor, axis.dim)
                for axis in group.axes
                if axis.tensor in neurons.shapes
            ),
        )
        for group in neurons.groups
    ]
    return sorted(groups, key=_sortable)


def _sortable(group: Group) -> Any:
    return (sorted(group.axes), group.size)


def messages_of(model: nn.Module, example: Any) -> tuple[Neurons, list[str]]:
    """A model's table, and what was warned of while it was made."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        neurons = map_neurons(model, example)
    assert all(warning.category is NeuronWarning for warning in caught)
    return neurons, [str(warning.message) for warning in caught]


# The zoo's tables, worked out by hand -------------------------------------------------


@pytest.mark.parametrize("entry", SURE, ids=lambda entry: entry.name)
def test_the_groups_are_those_worked_out_by_hand(entry: Entry) -> None:
    assert found(mapped(entry.name)) == sorted(entry.groups, key=_sortable)


@pytest.mark.parametrize("entry", SURE, ids=lambda entry: entry.name)
def test_the_share_at_half_is_the_one_worked_out_by_hand(entry: Entry) -> None:
    neurons = mapped(entry.name)
    assert neurons.num_entries(choose_ordered(neurons, 0.5)) == entry.active_at_half


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
def test_all_entries_are_counted_as_by_hand(entry: Entry) -> None:
    assert mapped(entry.name).num_entries() == entry.total


@pytest.mark.parametrize("entry", SURE, ids=lambda entry: entry.name)
def test_every_group_can_be_slimmed_and_sliced_where_that_is_possible(
    entry: Entry,
) -> None:
    groups = mapped(entry.name).groups
    assert all(group.slim for group in groups)
    assert any(group.padded for group in groups) != entry.slim
    assert all(group.permutable for group in groups) == entry.slim


@pytest.mark.parametrize("entry", SURE, ids=lambda entry: entry.name)
def test_a_model_that_is_understood_gives_no_warning(entry: Entry) -> None:
    _, messages = messages_of(entry.build(), entry.example())
    assert messages == []


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("emnist_cnn", [12434, 25094, 38042, 51278, 64802]),
        ("cifar_cnn", [5236, 20558, 45966, 81460, 134946]),
        ("speech_cnn", [3725, 8215, 13505, 19595, 26485]),
    ],
)
def test_the_paper_s_networks_send_this_many_entries(
    name: str, entries: list[int]
) -> None:
    neurons = mapped(name)
    counts = [
        neurons.num_entries(choose_ordered(neurons, p)) for p in (0.2, 0.4, 0.6, 0.8, 1)
    ]
    assert counts == entries


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
def test_a_table_does_not_depend_on_weights_or_generators(entry: Entry) -> None:
    for seed in (1, 2):
        with seeded(seed):
            model = entry.build()
            assert quietly_mapped(model, entry.example()) == mapped(entry.name)


@pytest.mark.parametrize("name", ["vgg", "groupnorm", "transformer", "gru"])
def test_a_table_does_not_depend_on_the_size_of_the_batch(name: str) -> None:
    entry = ZOO_BY_NAME[name]
    for batch in (1, 5):
        example = entry.example()[:1].repeat(batch, *[1] * (entry.example().dim() - 1))
        assert quietly_mapped(entry.build(), example).groups == mapped(name).groups


@pytest.mark.parametrize("entry", SURE, ids=lambda entry: entry.name)
def test_statistics_are_those_of_norms(entry: Entry) -> None:
    neurons = mapped(entry.name)
    expected = {
        name
        for name in neurons.shapes
        if name.endswith(("running_mean", "running_var"))
    }
    assert neurons.statistics == expected
    assert expected <= neurons.norm_tensors


def test_norm_tensors_are_all_that_norms_have() -> None:
    tensors = ("weight", "bias", "running_mean", "running_var")
    assert mapped("vgg").norm_tensors == {
        f"bn{i}.{tensor}" for i in (1, 2, 3) for tensor in tensors
    }
    assert mapped("mlp_layernorm").norm_tensors == {
        f"norm{i}.{tensor}" for i in (1, 2) for tensor in ("weight", "bias")
    }


# Every group is right -----------------------------------------------------------------


def is_symmetry(entry: Entry, group: NeuronGroup, order: list[int]) -> bool:
    """Whether reordering a group leaves the output alone, whatever the weights."""
    for seed in range(3):
        model = random_model(entry, seed).eval()
        # The example itself, so that the branch it takes is taken.
        x = random_input(entry, seed) if entry.name != "untaken_branch" else None
        x = entry.example().double() if x is None else x
        with torch.no_grad():
            before, after = run(model, x), run(reordered(model, group, order), x)
        if not torch.allclose(before, after, rtol=1e-9, atol=1e-9):
            return False
    return True


def swapped(size: int, j: int) -> list[int]:
    order = list(range(size))
    order[j], order[j + 1] = j + 1, j
    return order


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
def test_a_permutable_group_may_be_put_in_any_order(entry: Entry) -> None:
    for group in mapped(entry.name).groups:
        if group.permutable:
            order = np.random.default_rng(group.size).permutation(group.size).tolist()
            assert is_symmetry(entry, group, order), group.name
            assert is_symmetry(entry, group, order[1:] + order[:1]), group.name


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
def test_each_neuron_of_an_aligned_group_may_change_places_with_a_neighbour(
    entry: Entry,
) -> None:
    for group in mapped(entry.name).groups:
        if not group.permutable and group.size > 1:
            works = [
                is_symmetry(entry, group, swapped(group.size, j))
                for j in range(group.size - 1)
            ]
            moved = {i for j, w in enumerate(works) if w for i in (j, j + 1)}
            assert moved == set(range(group.size)), group.name


@pytest.mark.parametrize("name", ["groupnorm", "own_attention"])
def test_an_aligned_group_is_not_called_permutable(name: str) -> None:
    entry = ZOO_BY_NAME[name]
    for group in mapped(name).groups:
        order = np.random.default_rng(0).permutation(group.size).tolist()
        assert group.permutable == is_symmetry(entry, group, order)


@pytest.mark.parametrize("entry", TRAPS, ids=lambda entry: entry.name)
def test_what_is_in_no_group_is_named_by_a_warning(entry: Entry) -> None:
    neurons, messages = messages_of(entry.build(), entry.example())
    grouped = {axis.tensor for group in neurons.groups for axis in group.axes}
    ends = {name for f in neurons.fixed if f.reason == OUTPUT for name in f.tensors}
    for name in neurons.shapes.keys() - grouped - ends:
        assert any(name in message for message in messages), name


HIDDEN = {
    "glu": ("fc1.weight", "fc1.bias"),
    "fglu": ("fc1.weight", "fc1.bias"),
    "own_attention": ("qkv.weight", "qkv.bias"),
    "view_sizes": ("fc.weight", "fc.bias"),
    "tokens_flattened": ("fc1.weight", "fc1.bias"),
    "pixel_shuffle": ("conv1.weight", "conv1.bias"),
    "channel_shuffle": ("conv1.weight", "conv1.bias"),
    "flip_channels": ("fc1.weight", "fc1.bias"),
    "cumsum": ("conv.weight", "conv.bias"),
    "bare_parameter": ("weight1", "bias1", "weight2"),
}
"""The hidden tensors of each trap: grouped rightly, or always active and named."""


@pytest.mark.parametrize("name", HIDDEN)
def test_a_trap_is_grouped_or_always_active_with_a_warning(name: str) -> None:
    entry = ZOO_BY_NAME[name]
    neurons, messages = messages_of(entry.build(), entry.example())
    blocks = neurons.blocks(choose_ordered(neurons, 0.5))
    for tensor in HIDDEN[name]:
        is_whole = all(axis is None for axis in blocks[tensor])
        assert is_whole == any(
            "always active" in message and tensor in message for message in messages
        )


def test_a_branch_not_taken_is_named_and_nothing_may_move() -> None:
    entry = ZOO_BY_NAME["untaken_branch"]
    neurons, messages = messages_of(entry.build(), entry.example())
    assert neurons.unreached == ("below.weight", "below.bias")
    assert any("below.weight, below.bias" in message for message in messages)
    assert not any(group.permutable or group.slim for group in neurons.groups)


def scrambled(width: int, scramble: Callable[[Tensor], Tensor]) -> nn.Module:
    """Hidden units that the second layer reads from other places than it seems."""
    return Fn(
        lambda self, x: self.fc2(scramble(F.relu(self.fc1(x)))),
        fc1=nn.Linear(6, width),
        fc2=nn.Linear(width, 3),
    )


def shuffle(x: Tensor) -> Tensor:
    halves: Tensor = x.unflatten(-1, (2, -1))
    return halves.transpose(-1, -2).flatten(-2)


SCRAMBLES = pytest.mark.parametrize(
    ("scramble", "widths"),
    [
        (lambda x: x.flip(-1), range(3, 25)),
        (lambda x: x.roll(1, -1), range(3, 25)),
        (shuffle, range(4, 25, 2)),
    ],
    ids=["flip", "roll", "shuffle"],
)


@pytest.mark.parametrize("batch", [1, 2, 4])
@SCRAMBLES
def test_a_table_that_reads_neurons_from_other_places_is_not_proved(
    scramble: Callable[[Tensor], Tensor], widths: range, batch: int
) -> None:
    # Neither a symmetry of the scrambling itself (a flip exchanges the two in the
    # middle) nor units that are silent on the example may pass for a proof.
    proved = {}
    for width in widths:
        wrong = NeuronGroup(
            "fc1", width, (*rows("fc1"), Axis("fc2.weight", 1)), permutable=True
        )
        if right := proved_of(scrambled(width, scramble), noise(batch, 6), wrong):
            proved[width] = "permutable" if right[0].permutable else "aligned"
    assert proved == {}


def proved_of(
    model: nn.Module, example: Tensor, group: NeuronGroup
) -> list[NeuronGroup]:
    """What the proof leaves of a table with one group."""
    with undisturbed():
        right, _ = prove(Probe(model, example), [group], {("fc2.weight", 1)})
    return right


@SCRAMBLES
def test_neurons_are_followed_to_the_places_they_are_read_from(
    scramble: Callable[[Tensor], Tensor], widths: range
) -> None:
    for width in widths:
        [group] = map_neurons(scrambled(width, scramble), noise(2, 6)).groups
        assert group.permutable
        made, read = (
            next(axis for axis in group.axes if axis.tensor == name)
            for name in ("fc1.weight", "fc2.weight")
        )
        places = scramble(torch.arange(width)[None])[0].argsort()
        assert made.positions(width)[:, 0].tolist() == list(range(width))
        assert read.positions(width)[:, 0].tolist() == places.tolist()


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_features_of_flattened_tokens_are_no_group_of_neighbours(batch: int) -> None:
    # Unit j is columns j, j + width, ...; a table of runs of four would be wrong.
    wrong = []
    for width in range(2, 25):
        model = Fn(
            lambda self, x: self.fc2(F.relu(self.fc1(x)).flatten(1)),
            fc1=nn.Linear(6, width),
            fc2=nn.Linear(4 * width, 3),
        )
        right = Axis("fc2.weight", 1, 1, 0, 4, width)
        for group in quietly_mapped(model, noise(batch, 4, 6)).groups:
            if right not in group.axes:
                wrong.append(width)
    assert wrong == []


def test_neurons_whose_weight_is_not_in_the_table_do_not_move_alone() -> None:
    # The rows of a weight-normed layer are not found: their biases alone are no group.
    model = chain(
        fc1=nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)),
        relu=nn.ReLU(),
        fc2=nn.Linear(8, 3),
    )
    neurons = quietly_mapped(model, noise(2, 6))
    for group in neurons.groups:
        assert "fc1.parametrizations.weight.original1" in group.tensors


def test_a_zero_initialised_norm_hides_nothing() -> None:
    # As in He et al.'s trick: the last norm of each block starts at zero.
    model = ZOO_BY_NAME["resnet_basic"].build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bn2.weight"):
                parameter.zero_()
    assert quietly_mapped(model, noise(2, 3, 8, 8)) == mapped("resnet_basic")


def test_a_zero_initialised_norm_does_not_hide_a_wrong_table() -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
            self.bn = nn.BatchNorm2d(6)
            self.conv2 = nn.Conv2d(6, 3, 1)
            nn.init.zeros_(self.bn.weight)

        def forward(self, x: Tensor) -> Tensor:
            mixed: Tensor = self.conv2(self.bn(self.conv1(x)).roll(1, 1))
            return mixed + x

    wrong = NeuronGroup(
        "conv1",
        6,
        (*rows("conv1"), *normed("bn"), Axis("conv2.weight", 1)),
        permutable=True,
    )
    with undisturbed():
        right, _ = prove(Probe(Shuffled(), noise(2, 3, 8, 8)), [wrong], set())
    assert right == []


class Positioned(nn.Module):
    """Tokens and sinusoids, kept in a buffer, through an encoder layer."""

    pe: Tensor

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 12)
        angles = torch.arange(20.0)[:, None] / 100 ** (torch.arange(0, 12, 2) / 12)
        pe = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
        self.register_buffer("pe", pe[None], persistent=persistent)
        layer = nn.TransformerEncoderLayer(12, 3, 10, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(self.embedding(x) + self.pe[:, : x.shape[1]])
        logits: Tensor = self.head(h.mean(1))
        return logits


@pytest.mark.parametrize("persistent", [True, False])
def test_the_stream_is_found_beside_a_positional_encoding(persistent: bool) -> None:
    neurons, messages = messages_of(Positioned(persistent), tokens(2, 5, 11))
    by_name = {g.name: (g.size, g.permutable, g.slim) for g in neurons.groups}
    assert sorted(by_name.values()) == [
        (3, True, True),
        (10, True, True),
        (12, True, True),
    ]
    stream = next(group for group in neurons.groups if group.size == 12)
    axes = {(axis.tensor, axis.dim) for axis in stream.axes}
    assert along(1, "embedding.weight", "head.weight") <= axes
    assert ("pe", 2) in axes  # it moves, and is slimmed, with the stream
    assert "pe" not in neurons.shapes  # but it does not travel
    assert messages == []


# Tables written by hand ---------------------------------------------------------------


def by_hand(*groups: NeuronGroup) -> dict[str, tuple[int, frozenset[Axis]]]:
    return {group.name: (group.size, frozenset(group.axes)) for group in groups}


def rows(*layers: str, **how: Any) -> list[Axis]:
    return [Axis(f"{x}.{t}", 0, **how) for x in layers for t in ("weight", "bias")]


def normed(*layers: str, **how: Any) -> list[Axis]:
    tensors = ("weight", "bias", "running_mean", "running_var")
    return [Axis(f"{layer}.{t}", 0, **how) for layer in layers for t in tensors]


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        (
            "cifar_cnn",
            [
                ("conv1", 6, [*rows("conv1"), *normed("bn1"), Axis("conv2.weight", 1)]),
                (
                    "conv2",
                    16,
                    [
                        *rows("conv2"),
                        *normed("bn2"),
                        Axis("fc1.weight", 1, repeat=8 * 8),
                    ],
                ),
                ("fc1", 120, [Axis("fc1.weight", 0), Axis("fc2.weight", 1)]),
                ("fc2", 84, [Axis("fc2.weight", 0), Axis("fc3.weight", 1)]),
            ],
        ),
        (
            "two_inputs",
            [
                ("conv", 6, [*rows("conv"), Axis("fc.weight", 1)]),
                ("side", 7, [*rows("side"), Axis("fc.weight", 1, offset=6)]),
            ],
        ),
        (
            "grouped_conv",
            [
                (
                    "conv1",
                    4,
                    [
                        *rows("conv1", copies=4, stride=4),
                        *normed("bn1", copies=4, stride=4),
                        Axis("conv2.weight", 1),
                    ],
                ),
                (
                    "conv2",
                    3,
                    [
                        *rows("conv2", copies=4, stride=3),
                        *normed("bn2", copies=4, stride=3),
                        Axis("conv3.weight", 1, copies=4, stride=3),
                    ],
                ),
                ("conv3", 7, [*rows("conv3"), Axis("fc.weight", 1)]),
            ],
        ),
        (
            "depthwise_multiplier",
            [
                (
                    "conv1",
                    5,
                    [
                        *rows("conv1"),
                        *rows("conv2", repeat=2),
                        Axis("conv3.weight", 1, repeat=2),
                    ],
                ),
                ("conv3", 6, [*rows("conv3"), Axis("fc.weight", 1)]),
            ],
        ),
        (
            "gru",
            [
                (
                    "gru",
                    7,
                    [
                        *(
                            Axis(f"gru.{tensor}_l0", 0, copies=3, stride=7)
                            for tensor in (
                                "weight_ih",
                                "weight_hh",
                                "bias_ih",
                                "bias_hh",
                            )
                        ),
                        Axis("gru.weight_hh_l0", 1),
                        Axis("fc.weight", 1),
                    ],
                ),
            ],
        ),
    ],
)
def test_a_table_written_by_hand_is_the_one_found(
    name: str, groups: list[tuple[str, int, list[Axis]]]
) -> None:
    hand = by_hand(*(NeuronGroup(g, size, tuple(axes)) for g, size, axes in groups))
    assert by_hand(*mapped(name).groups) == hand


def test_the_heads_of_an_attention_are_runs_of_rows_in_each_third() -> None:
    name = "encoder.layers.0.self_attn"
    heads = next(group for group in mapped("transformer").groups if group.name == name)
    assert set(heads.axes) == {
        Axis(f"{name}.in_proj_weight", 0, repeat=4, copies=3, stride=12),
        Axis(f"{name}.in_proj_bias", 0, repeat=4, copies=3, stride=12),
        Axis(f"{name}.out_proj.weight", 1, repeat=4),
    }


# Layers that the zoo has not ----------------------------------------------------------


@pytest.mark.parametrize("multiple", [2, 3, 4])
def test_each_output_of_a_depthwise_layer_on_the_input_is_a_neuron(
    multiple: int,
) -> None:
    width = 3 * multiple
    model = chain(
        conv=nn.Conv2d(3, width, 3, groups=3),
        relu=nn.ReLU(),
        out=nn.Conv2d(width, 3, 1),
    )
    [group] = map_neurons(model, noise(2, 3, 8, 8)).groups
    assert (group.name, group.size, group.permutable) == ("conv", width, False)


def test_a_depthwise_layer_with_one_output_for_each_colour_has_no_neurons() -> None:
    model = chain(
        conv=nn.Conv2d(3, 3, 3, groups=3), relu=nn.ReLU(), out=nn.Conv2d(3, 3, 1)
    )
    with pytest.warns(NeuronWarning):
        assert not map_neurons(model, noise(2, 3, 8, 8)).groups


def test_a_grouped_transposed_convolution_has_one_neuron_per_local_channel() -> None:
    model = chain(
        conv=nn.Conv2d(3, 8, 3),
        up=nn.ConvTranspose2d(8, 6, 2, groups=2),  # weight: (8, 3, 2, 2)
        relu=nn.ReLU(),
        out=nn.Conv2d(6, 3, 1),
    )
    assert by_hand(*map_neurons(model, noise(2, 3, 8, 8)).groups) == by_hand(
        NeuronGroup(
            "conv",
            4,
            (
                *rows("conv", copies=2, stride=4),
                Axis("up.weight", 0, copies=2, stride=4),
            ),
        ),
        NeuronGroup(
            "up",
            3,
            (
                Axis("up.weight", 1),
                Axis("up.bias", 0, copies=2, stride=3),
                Axis("out.weight", 1, copies=2, stride=3),
            ),
        ),
    )


def test_an_rms_norm_scales_its_channels() -> None:
    model = chain(fc1=nn.Linear(6, 8), norm=nn.RMSNorm(8), fc2=nn.Linear(8, 3))
    assert by_hand(*map_neurons(model, noise(2, 6)).groups) == by_hand(
        NeuronGroup(
            "fc1", 8, (*rows("fc1"), Axis("norm.weight", 0), Axis("fc2.weight", 1))
        )
    )


@pytest.mark.parametrize("num_heads", [1, 2])
def test_attention_may_be_the_last_layer(num_heads: int) -> None:
    model = Fn(
        lambda self, x: self.attend(*[self.fc(x)] * 3)[0].mean(1),
        fc=nn.Linear(6, 8),
        attend=nn.MultiheadAttention(8, num_heads, batch_first=True),
    )
    neurons = map_neurons(model, noise(2, 5, 6))
    sizes = {group.name: group.size for group in neurons.groups}
    assert sizes["fc"] == 8


def test_keys_and_values_may_have_widths_of_their_own() -> None:
    model = Fn(
        lambda self, x: self.head(
            self.attend(self.query(x), self.key(x), self.value(x))[0].mean(1)
        ),
        query=nn.Linear(6, 8),
        key=nn.Linear(6, 5),
        value=nn.Linear(6, 7),
        attend=nn.MultiheadAttention(
            8, 2, kdim=5, vdim=7, add_bias_kv=True, batch_first=True
        ),
        head=nn.Linear(8, 2),
    )
    neurons = map_neurons(model, noise(2, 5, 6))
    heads = next(group for group in neurons.groups if group.size == 2)
    assert set(heads.axes) == {
        Axis("attend.q_proj_weight", 0, repeat=4),
        Axis("attend.k_proj_weight", 0, repeat=4),
        Axis("attend.v_proj_weight", 0, repeat=4),
        Axis("attend.in_proj_bias", 0, repeat=4, copies=3, stride=8),
        Axis("attend.bias_k", 2, repeat=4),
        Axis("attend.bias_v", 2, repeat=4),
        Axis("attend.out_proj.weight", 1, repeat=4),
    }
    assert sorted(group.size for group in neurons.groups) == [2, 5, 7, 8, 8]


def test_a_norm_without_values_of_its_own_disturbs_no_table() -> None:
    # In a slim copy this norm meets another width than it was told, and warns.
    model = chain(
        conv1=nn.Conv2d(3, 8, 3),
        norm=nn.InstanceNorm2d(8),
        conv2=nn.Conv2d(8, 4, 3),
    )
    neurons, messages = messages_of(model, noise(2, 3, 8, 8))
    assert by_hand(*neurons.groups) == by_hand(
        NeuronGroup("conv1", 8, (*rows("conv1"), Axis("conv2.weight", 1)))
    )
    assert messages == []


def test_a_model_without_neurons_has_an_empty_table() -> None:
    assert map_neurons(nn.Linear(6, 3), noise(2, 6)).groups == ()
    assert map_neurons(nn.ReLU(), noise(2, 6)).groups == ()


def test_a_model_is_mapped_without_gradients_too() -> None:
    entry = ZOO_BY_NAME["vgg"]
    model, example = entry.build(), entry.example()
    with torch.no_grad():
        assert map_neurons(model, example) == mapped("vgg")
    with torch.inference_mode():
        assert map_neurons(model, example) == mapped("vgg")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_is_mapped_in_any_precision(dtype: torch.dtype) -> None:
    entry = ZOO_BY_NAME["vgg"]
    model = entry.build().to(dtype)
    assert map_neurons(model, entry.example().to(dtype)) == mapped("vgg")


# The caller's model and generators ----------------------------------------------------


class Careless(nn.Module):
    """Draws from every global generator there is."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.dropout = nn.Dropout(0.5)
        self.bn = nn.BatchNorm1d(8)
        self.fc2 = nn.Linear(8, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        np.random.rand()  # noqa: NPY002  # that is what is careless
        torch.rand(1)
        h = self.bn(self.dropout(F.relu(self.fc1(x))))
        logits: Tensor = self.fc2(h) * self.frozen
        return logits


def generators() -> list[object]:
    of_numpy = np.random.get_state(legacy=False)["state"]  # noqa: NPY002  # must not move
    where = [of_numpy["key"].tolist(), of_numpy["pos"]]
    return [random.getstate(), where, torch.get_rng_state().tolist()]


def test_the_caller_s_model_is_left_as_it_was() -> None:
    model = Careless().train()
    model.bn.eval()
    F.cross_entropy(model(noise(4, 6)), torch.tensor([0, 1, 2, 0])).backward()
    before = copy.deepcopy(model.state_dict())
    own = {name: id(parameter) for name, parameter in model.named_parameters()}
    grads = {
        name: None if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    map_neurons(model, noise(4, 6))
    after = model.state_dict()
    assert all(torch.equal(after[name], values) for name, values in before.items())
    assert {name: id(p) for name, p in model.named_parameters()} == own
    modes = {name: layer.training for name, layer in model.named_modules()}
    assert modes == {name: name != "bn" for name in modes}
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {"frozen"}
    for name, parameter in model.named_parameters():
        grad = grads[name]
        assert parameter.grad is None if grad is None else grad is not None
        if grad is not None and parameter.grad is not None:
            assert torch.equal(parameter.grad, grad)


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
def test_every_zoo_model_is_left_as_it_was(entry: Entry) -> None:
    model = entry.build().train()
    before = copy.deepcopy(model.state_dict())
    learn = [parameter.requires_grad for parameter in model.parameters()]
    quietly_mapped(model, entry.example())
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], values) for name, values in before.items())
    assert all(layer.training for layer in model.modules())
    assert [parameter.requires_grad for parameter in model.parameters()] == learn
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any("forward" in vars(layer) for layer in model.modules())


def test_the_example_is_left_as_it_was() -> None:
    x = noise(4, 6)
    before = x.clone()
    map_neurons(Careless(), x)
    assert torch.equal(x, before)
    assert not x.requires_grad


def test_no_generator_is_moved() -> None:
    model = Careless()
    before = generators()
    map_neurons(model, noise(4, 6))
    assert generators() == before


def test_no_generator_is_moved_by_a_model_that_fails() -> None:
    def fail(self: nn.Module, x: Tensor) -> Tensor:
        random.random()
        torch.rand(1)
        raise ValueError("too bad")

    before = generators()
    with pytest.raises(ModelError):
        map_neurons(Fn(fail), noise(4, 6))
    assert generators() == before


def test_the_number_of_threads_is_as_before() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        map_neurons(Careless(), noise(4, 6))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_grad_mode_is_as_before() -> None:
    with torch.no_grad():
        map_neurons(Careless(), noise(4, 6))
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


# Models that cannot be mapped ---------------------------------------------------------


class Assertive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 5, "five features, please"
        return x


class Keyed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        values: dict[str, Tensor] = {}
        return values["features, please"]


@pytest.mark.parametrize(
    ("model", "example", "message"),
    [
        (nn.Linear(5, 3), noise(2, 6), "Linear failed on the example input: .*shapes"),
        (nn.Conv2d(3, 4, 3), noise(2, 1, 8, 8), "Conv2d failed on the example input"),
        (nn.Embedding(5, 3), noise(2, 6), "Embedding failed on the example input"),
        (nn.Embedding(5, 3), torch.tensor([7]), "Embedding failed on the example"),
        (nn.Linear(5, 3), (noise(2, 5), noise(2, 5)), "Linear failed on the example"),
        (nn.Linear(5, 3), {"y": noise(2, 5)}, "Linear failed on the example input"),
        (Assertive(), noise(2, 6), "Assertive failed on .*five features, please"),
        (Keyed(), noise(2, 6), "Keyed failed on .*features, please"),
    ],
)
def test_a_model_that_fails_on_the_example_is_refused_with_its_own_words(
    model: nn.Module, example: Any, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        map_neurons(model, example)


@pytest.mark.parametrize(
    ("output", "kind"),
    [(None, "NoneType"), ("text", "str"), ([], "list"), (1.5, "float")],
)
def test_a_model_that_returns_no_tensor_is_refused(output: object, kind: str) -> None:
    model = Fn(lambda self, x: output, fc=nn.Linear(6, 3))
    with pytest.raises(ModelError, match=f"returned a {kind}; expected a tensor"):
        map_neurons(model, noise(2, 6))


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(6, 3)
    model.lock = threading.Lock()  # type: ignore[assignment]  # any attribute will do
    with pytest.raises(ModelError, match=r"Linear cannot be copied .*copy\.deepcopy"):
        map_neurons(model, noise(2, 6))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda out: (out, None),
        lambda out: {"logits": out, "name": "text"},
        lambda out: [[out], out.sum()],
    ],
)
def test_tensors_may_be_returned_in_any_container(
    wrap: Callable[[Tensor], object],
) -> None:
    model = Fn(
        lambda self, x: wrap(self.fc2(F.relu(self.fc1(x)))),
        fc1=nn.Linear(6, 8),
        fc2=nn.Linear(8, 3),
    )
    neurons = map_neurons(model, noise(2, 6))
    assert {group.name: group.size for group in neurons.groups} == {"fc1": 8}


def test_a_hidden_layer_that_is_returned_too_is_always_active() -> None:
    def both(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.fc1(x))
        return self.fc2(hidden), hidden

    model = Fn(both, fc1=nn.Linear(6, 8), fc2=nn.Linear(8, 3))
    with pytest.warns(NeuronWarning, match="nothing can be frozen"):
        neurons = map_neurons(model, noise(2, 6))
    assert neurons.groups == ()
    assert neurons.fixed[0].reason == OUTPUT
    assert "fc1.weight" in neurons.fixed[0].tensors


class Encoder(nn.Module):
    """Two residual layers, and a head if there are classes."""

    def __init__(self, num_classes: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.up = nn.ModuleList(nn.Linear(16, 8) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(8, 16) for _ in range(2))
        self.head = nn.Linear(16, num_classes) if num_classes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.relu(up(x)))
        scores: Tensor = self.head(x)
        return scores


def test_a_model_that_returns_its_features_says_why_little_can_be_frozen() -> None:
    with pytest.warns(NeuronWarning, match="little can be frozen") as caught:
        neurons = map_neurons(Encoder(), noise(2, 6))
    assert len(neurons.groups) == 2  # the hidden neurons of both layers
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "first.weight, first.bias, up.0.weight and 5 more" in message
    assert OUTPUT in message


def test_the_same_model_with_a_head_gives_no_warning() -> None:
    _, messages = messages_of(Encoder(3), noise(2, 6))
    assert messages == []


class Bottleneck(nn.Module):
    """Features are added to themselves in reverse, then pass single ReLU neurons."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, width), nn.Linear(width, 1)
        self.more = nn.ModuleList(nn.Linear(1, 1) for _ in range(number))
        self.out = nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.wide(x)
        narrow = torch.relu(self.narrow(wide + 2 * wide.flip(-1)))
        for layer in self.more:
            narrow = torch.relu(layer(narrow))
        scores: Tensor = self.out(narrow)
        return scores


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("width", [6, 8, 10])
def test_silence_does_not_count_as_proof(width: int, number: int) -> None:
    """The ReLUs pass nothing in most trials; then a wrong table changes nothing."""
    model = Bottleneck(width, number)
    axes = (*rows("wide"), Axis("narrow.weight", 1))
    wrong = NeuronGroup("wide", width, axes, permutable=True)
    with undisturbed():
        right, _ = prove(Probe(model, torch.randn(2, 4)), [wrong], set())
    assert right == []
    for group in quietly_mapped(model, torch.randn(2, 4)).groups:
        if group.name == "wide":  # a feature and its mirror image are one neuron
            assert group.size == width // 2


def test_values_that_overflow_do_not_count_as_proof() -> None:
    # Exponentials of exponentials: with random weights the output is not finite.
    def burst(self: Any, x: Tensor) -> Tensor:
        h = torch.exp(torch.exp(4 * self.fc1(x)).roll(1, -1))
        return self.fc2(h)  # type: ignore[no-any-return]  # a layer's output

    with seeded(0):
        model = shaken(Fn(burst, fc1=nn.Linear(6, 8), fc2=nn.Linear(8, 3)))
    assert quietly_mapped(model, noise(2, 6).double()).groups == ()


# Experts ------------------------------------------------------------------------------


class Experts(nn.Module):
    """Each row passes one of three experts, all of them in two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.up = nn.Parameter(torch.randn(3, 16, 8))
        self.down = nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 3, 6], dtype=torch.int32)
        x = F.relu(self.first(x))
        hidden = F.relu(F.grouped_mm(x, self.up, offs=ends))
        scores: Tensor = self.head(x + F.grouped_mm(hidden, self.down, offs=ends))
        return scores


def test_the_neurons_of_experts_are_those_of_all_experts_together() -> None:
    with seeded(0):
        neurons = map_neurons(Experts(), noise(6, 6))
    assert [group.size for group in neurons.groups] == [16, 8]
    assert all(group.permutable for group in neurons.groups)


# How often the model runs -------------------------------------------------------------


class Counted(torch.autograd.Function):
    """The identity; counts how often values and gradients pass it."""

    forwards, backwards = 0, 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Counted.forwards += 1
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Counted.backwards += 1
        return gradients[0]


def test_a_plain_model_is_proved_in_nineteen_passes_and_three_backward_ones() -> None:
    counted: Any = Counted.apply
    model = Fn(
        lambda self, x: self.fc2(counted(F.relu(self.fc1(x)))),
        fc1=nn.Linear(6, 32),
        fc2=nn.Linear(32, 3),
    )
    Counted.forwards = Counted.backwards = 0
    quietly_mapped(model, noise(2, 6))
    assert Counted.forwards <= 19
    assert Counted.backwards <= 3  # one for each trial


def test_any_number_of_neurons_becomes_one_in_few_steps() -> None:
    """A vocabulary is one block: one step for each word would be quadratic."""
    classes = Classes()
    words = classes.new(1000)
    classes.join(words, words.max())
    assert classes.roots(words).unique().tolist() == [0]
    assert classes.version <= 3


def test_the_influences_of_some_parameters_are_those_among_all() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    probe = Probe(model, noise(2, 6))
    everything, some = probe.influences(), probe.influences({"0.bias", "2.weight"})
    assert everything is not None
    assert some is not None
    assert some.keys() == {"0.bias", "2.weight"}
    assert all(torch.equal(some[name], everything[name]) for name in some)


def test_no_influences_are_asked_for_and_none_are_found() -> None:
    probe = Probe(nn.Linear(6, 3), noise(2, 6))
    assert probe.influences(set()) == {}


# Data that moves ----------------------------------------------------------------------


class Rotary(nn.Module):
    """Attention whose queries and keys are turned by their position."""

    def __init__(self, width: int = 8, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width // num_heads)
        self.value = nn.Linear(width, width // num_heads)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = {self.query: self.num_heads, self.key: 1, self.value: 1}
        q, k, v = (
            layer(x).unflatten(-1, (number, -1)).transpose(1, 2)
            for layer, number in heads.items()
        )
        places = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        angles = places * torch.ones(q.shape[-1], dtype=x.dtype)
        q, k = (z * angles.cos() + self._turned(z) * angles.sin() for z in (q, k))
        k, v = (z.repeat_interleave(self.num_heads, 1) for z in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    @staticmethod
    def _turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat([-x[..., half:], x[..., :half]], -1)


class RotaryNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Rotary() for _ in range(3))
        self.hidden = nn.Linear(8, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(F.relu(self.hidden(x)))
        return logits


def test_a_loop_through_a_concatenation_comes_to_an_end() -> None:
    neurons = quietly_mapped(RotaryNet(), torch.arange(10).view(2, 5))

    assert {"embedding", "hidden"} <= {group.name for group in neurons.groups}


def interleaved(x: Tensor) -> Tensor:
    n, channels, *size = x.shape
    x = x.view(n, 2, channels // 2, *size).transpose(1, 2).contiguous()
    return x.view(n, channels, *size)


class ShuffledHalves(nn.Module):
    """One half of the channels goes through layers; then both are interleaved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.body = nn.Sequential(
            nn.Conv2d(half, half, 1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(),
            nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False),
            nn.BatchNorm2d(half),
        )

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        return interleaved(torch.cat((left, self.body(right)), 1))


class Forked(nn.Module):
    """Two layers side by side, interleaved."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.left = nn.Conv2d(before, width // 2, 1)
        self.right = nn.Conv2d(before, width // 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return interleaved(torch.cat((self.left(x), self.right(x)), 1))


def shuffle_net() -> nn.Module:
    return chain(
        first=nn.Conv2d(3, 6, 1),
        fork=Forked(6, 8),
        units=nn.Sequential(ShuffledHalves(8), ShuffledHalves(8)),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        head=nn.Linear(8, 3),
    )


def test_shuffled_channels_are_followed() -> None:
    neurons = quietly_mapped(shuffle_net(), torch.zeros(2, 3, 4, 4))

    assert [group.permutable for group in neurons.groups] == [True] * len(
        neurons.groups
    )
    share = neurons.num_entries(choose_ordered(neurons, 0.5)) / neurons.num_entries()
    assert share < 0.5


def test_many_groups_along_one_tensor_all_have_names() -> None:
    # As in MarkupLM, whose embeddings of fifty levels are read by one layer.
    with seeded(0):
        model = Fn(
            lambda self, x: self.out(torch.cat([each(x) for each in self.parts], 1)),
            out=nn.Linear(12 * 3, 4),
            parts=nn.ModuleList(nn.Linear(5, 3) for _ in range(12)),
        )
    neurons = map_neurons(model, noise(2, 5))
    assert [group.size for group in neurons.groups] == [3] * 12
    assert {"out", "out.weight", "out.weight#2", "out.weight#11"} <= {
        group.name for group in neurons.groups
    }
