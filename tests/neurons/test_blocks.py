import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspu import Blocks, choose_random, extract, merge, state_of, stream
from fedspu.errors import ModelError
from fedspu.neurons.blocks import put, take
from tests.oracles.models import is_in_blocks, mapped, random_model
from tests.oracles.tables import Case, cases, same_bits, same_state
from tests.oracles.zoo import ZOO, Entry

quick = settings(max_examples=50, deadline=None)


@given(cases())
@quick
def test_merging_what_was_extracted_changes_no_bit(case: Case) -> None:
    blocks = case.neurons.blocks(case.active)
    merged = merge(case.state, blocks, extract(case.state, blocks))
    assert same_state(merged, case.state)


@given(cases())
@quick
def test_extracting_what_was_merged_gives_it_back(case: Case) -> None:
    blocks = case.neurons.blocks(case.active)
    payload = {n: torch.randn_like(t) for n, t in extract(case.state, blocks).items()}
    assert same_state(extract(merge(case.state, blocks, payload), blocks), payload)


@given(cases())
@quick
def test_merging_changes_nothing_outside_the_blocks(case: Case) -> None:
    blocks = case.neurons.blocks(case.active)
    payload = {n: t + 1 for n, t in extract(case.state, blocks).items()}
    merged = merge(case.state, blocks, payload)
    for name, values in merged.items():
        inside = is_in_blocks(case.neurons, case.active, name)
        assert same_bits(values[~inside], case.state[name][~inside])
        assert (values[inside] != case.state[name][inside]).all()


@given(cases())
@quick
def test_a_payload_is_the_active_entries_in_their_own_order(case: Case) -> None:
    blocks = case.neurons.blocks(case.active)
    for name, block in extract(case.state, blocks).items():
        inside = is_in_blocks(case.neurons, case.active, name)
        assert same_bits(block.flatten(), case.state[name][inside])


@given(cases())
@quick
def test_no_memory_is_shared(case: Case) -> None:
    blocks = case.neurons.blocks(case.active)
    payload = extract(case.state, blocks)
    merged = merge(case.state, blocks, payload)
    before = {name: tensor.clone() for name, tensor in case.state.items()}
    kept = {name: tensor.clone() for name, tensor in payload.items()}
    for tensor in merged.values():
        tensor.fill_(7)
    assert same_state(payload, kept)
    assert same_state(case.state, before)
    for tensor in payload.values():
        tensor.fill_(8)
    assert same_state(case.state, before)


@given(cases())
@quick
def test_neither_state_nor_payload_is_changed_by_merging(case: Case) -> None:
    blocks = case.neurons.blocks(case.active)
    payload = {n: t + 1 for n, t in extract(case.state, blocks).items()}
    before = {name: tensor.clone() for name, tensor in case.state.items()}
    kept = {name: tensor.clone() for name, tensor in payload.items()}
    merge(case.state, blocks, payload)
    assert same_state(case.state, before)
    assert same_state(payload, kept)


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
@pytest.mark.parametrize("p", [0.3, 1])
def test_merging_what_was_extracted_changes_no_bit_of_a_model(
    entry: Entry, p: float
) -> None:
    neurons, state = mapped(entry.name), state_of(random_model(entry))
    blocks = neurons.blocks(choose_random(neurons, p, stream(0, "active")))
    payload = extract(state, blocks)
    assert same_state(merge(state, blocks, payload), state)
    assert payload.keys() == neurons.shapes.keys()


# By hand ------------------------------------------------------------------------------


def test_positions_on_axes_that_are_not_neighbours_select_their_product() -> None:
    values = torch.arange(24.0).view(2, 3, 4)  # entry (i, j, k) is 12 i + 4 j + k
    where = (torch.tensor([1]), None, torch.tensor([0, 3]))
    block = take(values, where)
    assert block.tolist() == [[[12, 15], [16, 19], [20, 23]]]
    put(values, where, -block)
    assert values.flatten().tolist() == [
        *range(12), -12, 13, 14, -15, -16, 17, 18, -19, -20, 21, 22, -23,
    ]  # fmt: skip


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.data(),
)
@quick
def test_any_axes_may_have_positions_and_any_may_have_none(
    shape: list[int], data: st.DataObject
) -> None:
    where = tuple(
        data.draw(
            st.none()
            | st.sets(st.integers(0, n - 1), min_size=1).map(
                lambda chosen: torch.tensor(sorted(chosen))
            )
        )
        for n in shape
    )
    values = torch.arange(float(torch.Size(shape).numel())).view(shape)
    expected = values.clone()
    for dim, positions in enumerate(where):
        if positions is not None:
            expected = expected.index_select(dim, positions)
    assert torch.equal(take(values, where), expected)
    put(values, where, -1 - expected)
    assert (values < 0).sum() == expected.numel()
    assert torch.equal(take(values, where), -1 - expected)


def test_a_scalar_is_one_block() -> None:
    state = {"scale": torch.tensor(3.0)}
    blocks: Blocks = {"scale": ()}
    payload = extract(state, blocks)
    assert payload["scale"].item() == 3
    assert merge(state, blocks, {"scale": torch.tensor(4.0)})["scale"].item() == 4


def test_a_payload_takes_the_dtype_of_the_state_it_is_merged_into() -> None:
    state = {"w": torch.zeros(3, dtype=torch.float64)}
    merged = merge(state, {"w": (torch.tensor([1]),)}, {"w": torch.tensor([2.5])})
    assert merged["w"].dtype == torch.float64
    assert merged["w"].tolist() == [0, 2.5, 0]


def test_tensors_without_a_block_are_copied() -> None:
    state = {"w": torch.zeros(3), "count": torch.tensor(5)}
    merged = merge(state, {"w": (None,)}, {"w": torch.ones(3)})
    assert merged["count"].item() == 5
    assert merged["count"].data_ptr() != state["count"].data_ptr()


def test_a_tensor_the_state_does_not_have_is_refused_by_name() -> None:
    blocks: Blocks = {"fc.weight": (None, None)}
    with pytest.raises(ModelError, match=r"no tensor named fc\.weight; there are w"):
        extract({"w": torch.zeros(3)}, blocks)
    with pytest.raises(ModelError, match=r"no tensor named fc\.weight"):
        merge({"w": torch.zeros(3)}, blocks, {"fc.weight": torch.zeros(1, 1)})


def test_a_tensor_the_payload_lacks_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="no tensor named w"):
        merge({"w": torch.zeros(3)}, {"w": (None,)}, {})
