from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from fedspu import (
    Active,
    Axis,
    NeuronGroup,
    Neurons,
    choose_ordered,
    choose_random,
    load_state,
    state_of,
    stream,
)
from fedspu.errors import ModelError
from fedspu.neurons.table import Fixed
from tests.oracles.models import is_in_blocks, mapped, mask_of, random_model
from tests.oracles.tables import Case, cases, same_state
from tests.oracles.zoo import ZOO, Entry, chain

# Neuron j of "a" makes row j of the first layer, and is read by columns 2j, 2j + 1 of
# the second from column 1 on; column 0 and the rows belong to nobody.
HAND = Neurons(
    groups=(NeuronGroup("a", 3, (Axis("one", 0), Axis("two", 1, repeat=2, offset=1))),),
    shapes={"one": (3, 4), "two": (2, 7), "scale": ()},
)


@pytest.mark.parametrize(
    ("axis", "size", "rows"),
    [
        (Axis("w", 0), 3, [[0], [1], [2]]),
        (Axis("w", 0, repeat=2), 3, [[0, 1], [2, 3], [4, 5]]),
        (Axis("w", 0, offset=5), 2, [[5], [6]]),
        (Axis("w", 0, copies=3, stride=3), 3, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
        (Axis("w", 0, 2, 1, 2, 6), 2, [[1, 2, 7, 8], [3, 4, 9, 10]]),
    ],
)  # fmt: skip
def test_a_neuron_owns_the_positions_its_axis_says(
    axis: Axis, size: int, rows: list[list[int]]
) -> None:
    assert axis.positions(size).tolist() == rows


def test_blocks_are_worked_out_by_hand() -> None:
    blocks = HAND.blocks({"a": torch.tensor([0, 2])})
    assert blocks["one"][0] is not None
    assert blocks["one"][0].tolist() == [0, 2]
    assert blocks["one"][1] is None
    assert blocks["two"][0] is None
    assert blocks["two"][1] is not None
    assert blocks["two"][1].tolist() == [0, 1, 2, 5, 6]
    assert blocks["scale"] == ()


def test_blocks_of_other_tensors_than_those_that_travel() -> None:
    """As of buffers beside the stream: asked for by their shapes, and no others."""
    table = replace(
        HAND, groups=(replace(HAND.groups[0], axes=(*HAND.groups[0].axes, SHIFT)),)
    )
    active = {"a": torch.tensor([1])}
    assert "shift" not in table.blocks(active)
    blocks = table.blocks(active, {"shift": (2, 3), "count": (), "one": (3, 4)})
    assert blocks.keys() == {"shift", "count", "one"}
    assert blocks["count"] == ()
    assert [None if w is None else w.tolist() for w in blocks["shift"]] == [None, [1]]
    assert [None if w is None else w.tolist() for w in blocks["one"]] == [[1], None]
    assert table.blocks(active, {}) == {}


SHIFT = Axis("shift", 1)


@given(cases())
def test_asked_for_what_travels_blocks_are_as_ever(case: Case) -> None:
    neurons, active = case.neurons, case.active
    plain, asked = neurons.blocks(active), neurons.blocks(active, neurons.shapes)
    assert plain.keys() == asked.keys()
    for name, where in plain.items():
        for one, other in zip(where, asked[name], strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one, other)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_an_entry_is_in_the_blocks_if_all_the_neurons_it_connects_are_active(
    case: Case,
) -> None:
    blocks = case.neurons.blocks(case.active)
    assert blocks.keys() == case.neurons.shapes.keys()
    for name, where in blocks.items():
        expected = is_in_blocks(case.neurons, case.active, name)
        assert torch.equal(mask_of(case.neurons.shapes[name], where), expected)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_positions_are_sorted_and_distinct(case: Case) -> None:
    for where in case.neurons.blocks(case.active).values():
        for positions in where:
            if positions is not None:
                assert positions.tolist() == sorted(set(positions.tolist()))


@given(cases())
@settings(max_examples=60, deadline=None)
def test_entries_are_counted_one_by_one(case: Case) -> None:
    counted = sum(
        int(is_in_blocks(case.neurons, case.active, name).sum())
        for name in case.neurons.shapes
    )
    assert case.neurons.num_entries(case.active) == counted


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
@pytest.mark.parametrize("p", [0.2, 0.6])
def test_blocks_of_a_model_are_the_entries_between_active_neurons(
    entry: Entry, p: float
) -> None:
    neurons = mapped(entry.name)
    active = choose_random(neurons, p, stream(0, "active"))
    for name, where in neurons.blocks(active).items():
        expected = is_in_blocks(neurons, active, name)
        assert torch.equal(mask_of(neurons.shapes[name], where), expected)


def test_with_all_neurons_active_nothing_is_listed() -> None:
    neurons = mapped("transformer")
    blocks = neurons.blocks(choose_ordered(neurons, 1))
    assert all(axis is None for where in blocks.values() for axis in where)
    assert neurons.num_entries() == sum(
        torch.Size(shape).numel() for shape in neurons.shapes.values()
    )


# Tables and choices that contradict themselves ----------------------------------------


def group(name: str, *axes: Axis, size: int = 3) -> NeuronGroup:
    return NeuronGroup(name, size, axes)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((group("a"), group("a")), "named twice: a"),
        ((group("a", size=0),), "a has no neurons"),
        (
            (group("a", Axis("one", 0)), group("b", Axis("one", 0))),
            "a, b share positions along axis 0 of one",
        ),
        (
            (group("a", Axis("two", 1)), group("b", Axis("two", 1, offset=2))),
            "a, b share positions along axis 1 of two",
        ),
        ((group("a", Axis("one", 0, copies=2, stride=1)),), "share positions"),
        ((group("a", Axis("one", 0, offset=1)),), r"position 3 .* shape is \(3, 4\)"),
        ((group("a", Axis("one", 2)),), "axis 2 of one"),
        ((group("a", Axis("two", -1)),), "axis -1 of two"),
        ((group("a", Axis("two", 1, offset=-1)),), "axis 1 of two"),
        ((group("a", Axis("two", 1, repeat=0)),), "axis 1 of two"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(
    groups: tuple[NeuronGroup, ...], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        Neurons(groups, HAND.shapes)


@pytest.mark.parametrize(
    ("active", "message"),
    [
        ({}, "a is in only one of the two"),
        (
            {"a": torch.tensor([0]), "b": torch.tensor([0])},
            "b is in only one of the two",
        ),
        ({"a": torch.tensor([], dtype=torch.long)}, "at least one index"),
        ({"a": torch.tensor([1, 3])}, r"in 0\.\.2; got \[1, 3\]"),
        ({"a": torch.tensor([-1])}, r"in 0\.\.2"),
    ],
)
def test_active_neurons_that_do_not_fit_are_refused(
    active: Active, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        HAND.blocks(active)


@pytest.mark.parametrize("indices", [[2, 0], [0, 0]])
def test_active_neurons_out_of_order_or_twice_are_refused(indices: list[int]) -> None:
    with pytest.raises(ModelError):
        HAND.blocks({"a": torch.tensor(indices)})


# How it prints ------------------------------------------------------------------------


def test_the_table_prints_one_line_per_group() -> None:
    table = Neurons(
        groups=(
            replace(HAND.groups[0], permutable=True),
            NeuronGroup("lstm", 2, (Axis("one", 1, copies=2, stride=2),), False, False),
        ),
        shapes=HAND.shapes,
        fixed=(Fixed(("head.weight", "head.bias"), "a good reason"),),
        unreached=("spare.weight",),
    )
    assert str(table).splitlines() == [
        "group  neurons  kind        slim  lies along",
        "-----  -------  ----------  ----  ----------",
        "a      3        permutable  yes   one[0], two[1] x2 from 1",
        "lstm   2        aligned     no    one[1] x2 every 2",
        "always active: neurons of head.weight, head.bias (a good reason)",
        "not reached by the example: spare.weight",
    ]


def test_a_table_without_groups_prints() -> None:
    assert str(Neurons((), {})).startswith("group  neurons")


# Values of a model --------------------------------------------------------------------


def tied() -> nn.Module:
    model = chain(a=nn.Linear(3, 3, bias=False), b=nn.Linear(3, 3, bias=False))
    model.get_submodule("b").weight = model.get_submodule("a").weight
    model.register_buffer("kept", torch.ones(2))
    model.register_buffer("passing", torch.ones(2), persistent=False)
    return model


def test_a_state_has_tied_tensors_once_and_saved_buffers_only() -> None:
    assert list(state_of(tied())) == ["kept", "a.weight"]


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
def test_a_state_loaded_into_another_model_makes_it_the_same(entry: Entry) -> None:
    one, other = random_model(entry, seed=1), random_model(entry, seed=2)
    load_state(other, state_of(one))
    assert same_state(state_of(other), state_of(one))
    after = other.state_dict()
    assert all(torch.equal(after[name], t) for name, t in one.state_dict().items())


def test_a_state_shares_no_memory_with_the_model() -> None:
    model = tied()
    state = state_of(model)
    state["a.weight"].fill_(7)
    assert not (model.get_parameter("a.weight") == 7).any()
    load_state(model, state)
    state["a.weight"].fill_(8)
    assert (model.get_parameter("b.weight") == 7).all()


def test_loading_part_of_a_state_keeps_the_rest() -> None:
    model = tied()
    before = state_of(model)
    load_state(model, {"kept": torch.zeros(2)})
    assert torch.equal(state_of(model)["a.weight"], before["a.weight"])
    assert state_of(model)["kept"].tolist() == [0, 0]


def test_loading_leaves_parameters_learnable() -> None:
    model = tied()
    load_state(model, state_of(model))
    weight = model.get_parameter("a.weight")
    assert weight.requires_grad
    assert weight.is_leaf


def test_an_unknown_name_and_a_wrong_shape_are_refused() -> None:
    with pytest.raises(ModelError, match=r"no tensor named b\.weight"):
        load_state(tied(), {"b.weight": torch.ones(3, 3)})
    with pytest.raises(ModelError, match=r"shape \(3, 3\) in the model and \(3, 1\)"):
        load_state(tied(), {"a.weight": torch.ones(3, 1)})
