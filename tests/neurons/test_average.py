from collections.abc import Mapping
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspu import Blocks, State, Update, average, extract, merge, state_of
from fedspu.errors import ModelError
from tests.oracles.models import is_in_blocks, mapped, mask_of, random_model
from tests.oracles.tables import (
    DTYPES,
    Case,
    actives,
    cases,
    same_bits,
    same_state,
    states,
    tables,
)
from tests.oracles.zoo import ZOO, Entry

quick = settings(max_examples=40, deadline=None)
CLOSE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 1e-2}


def plain_average(
    state: Mapping[str, Tensor], updates: list[Update]
) -> dict[str, list[float]]:
    """Entry by entry: the mean over those who trained it, or the value it had."""
    averaged = {}
    for name, tensor in state.items():
        trained: dict[int, list[tuple[int, float]]] = {}
        for update in updates:
            mask = mask_of(tuple(tensor.shape), update.where[name])
            entries = mask.flatten().nonzero().flatten().tolist()
            values = update.payload[name].flatten().tolist()
            for entry, value in zip(entries, values, strict=True):
                trained.setdefault(entry, []).append((update.num_examples, value))
        averaged[name] = [
            _mean(trained[entry]) if entry in trained else value
            for entry, value in enumerate(tensor.flatten().tolist())
        ]
    return averaged


def _mean(trained: list[tuple[int, float]]) -> float:
    """The weighted mean, exactly."""
    total = sum(n for n, _ in trained)
    return float(sum(n * Fraction(value) for n, value in trained) / total)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[State, list[Update]]:
    """A state, and what up to four clients made of their blocks of it."""
    neurons = draw(tables())
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 999))
    state = states(neurons, dtype, seed)
    updates = []
    for number in range(draw(st.integers(0, 4))):
        blocks = neurons.blocks(draw(actives(neurons)))
        trained = states(neurons, dtype, seed + 1 + number)
        examples = draw(st.integers(1, 500))
        updates.append(Update(blocks, extract(trained, blocks), examples))
    return state, updates


@given(rounds())
@quick
def test_the_average_is_the_mean_over_those_who_trained_an_entry(
    played: tuple[State, list[Update]],
) -> None:
    state, updates = played
    averaged = average(state, updates)
    assert averaged.keys() == state.keys()
    for name, values in plain_average(state, updates).items():
        found = averaged[name].flatten().double()
        expected = torch.tensor(values, dtype=torch.float64)
        close = CLOSE[state[name].dtype]
        assert torch.allclose(found, expected, rtol=close, atol=close)


@given(rounds())
@quick
def test_an_entry_nobody_trained_keeps_its_bits(
    played: tuple[State, list[Update]],
) -> None:
    state, updates = played
    averaged = average(state, updates)
    for name, tensor in state.items():
        trained = torch.zeros(tensor.shape, dtype=torch.bool)
        for update in updates:
            trained |= mask_of(tuple(tensor.shape), update.where[name])
        assert same_bits(averaged[name][~trained], tensor[~trained])


@st.composite
def unchanged(draw: st.DrawFn) -> tuple[State, list[Update]]:
    """A state, and clients who return what they were sent."""
    neurons = draw(tables())
    state = states(neurons, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 999)))
    updates = []
    for _ in range(draw(st.integers(1, 5))):
        blocks = neurons.blocks(draw(actives(neurons)))
        examples = draw(st.integers(1, 10**6))
        updates.append(Update(blocks, extract(state, blocks), examples))
    return state, updates


@given(unchanged())
@quick
def test_averaging_unchanged_payloads_changes_no_bit(
    played: tuple[State, list[Update]],
) -> None:
    state, updates = played
    assert same_state(average(state, updates), state)


@given(rounds())
@quick
def test_averaging_shares_no_memory_and_changes_no_argument(
    played: tuple[State, list[Update]],
) -> None:
    state, updates = played
    before = {name: tensor.clone() for name, tensor in state.items()}
    payloads = [{n: t.clone() for n, t in u.payload.items()} for u in updates]
    for tensor in average(state, updates).values():
        tensor.fill_(7)
    assert same_state(state, before)
    for update, payload in zip(updates, payloads, strict=True):
        assert same_state(update.payload, payload)


@given(rounds())
@quick
def test_in_which_order_clients_are_listed_is_a_matter_of_rounding(
    played: tuple[State, list[Update]],
) -> None:
    state, updates = played
    first, second = average(state, updates), average(state, updates[::-1])
    for name in state:
        close = CLOSE[state[name].dtype]
        assert torch.allclose(first[name], second[name], rtol=close, atol=close)


@given(cases(), st.lists(st.integers(1, 99), min_size=1, max_size=4))
@quick
def test_with_all_neurons_active_the_average_is_fedavg(
    case: Case, examples: list[int]
) -> None:
    neurons = case.neurons
    blocks = neurons.blocks(neurons.everything())
    clients = [states(neurons, torch.float64, seed) for seed in range(len(examples))]
    state = {name: tensor.double() for name, tensor in case.state.items()}
    averaged = average(
        state,
        [
            Update(blocks, extract(client, blocks), n)
            for client, n in zip(clients, examples, strict=True)
        ],
    )
    for name in state:
        fedavg = torch.zeros_like(state[name])
        for client, n in zip(clients, examples, strict=True):
            fedavg += n / sum(examples) * client[name]
        assert torch.allclose(averaged[name], fedavg, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
def test_a_model_s_entries_are_averaged_over_those_who_trained_them(
    entry: Entry,
) -> None:
    neurons, state = mapped(entry.name), state_of(random_model(entry))
    first = {g.name: torch.arange(max(1, g.size // 2)) for g in neurons.groups}
    last = {g.name: torch.arange(g.size // 3, g.size) for g in neurons.groups}
    updates = []
    for active, n, shift in ((first, 1, 1.0), (last, 3, -1.0)):
        blocks = neurons.blocks(active)
        payload = {name: t + shift for name, t in extract(state, blocks).items()}
        updates.append(Update(blocks, payload, n))
    averaged = average(state, updates)
    for name, tensor in state.items():
        if name not in neurons.shapes:
            assert torch.equal(averaged[name], tensor)
            continue
        ours = is_in_blocks(neurons, first, name)
        theirs = is_in_blocks(neurons, last, name)
        # Both: (1 * 1 + 3 * -1) / 4; one alone: its own step.
        step = ours.double() - theirs.double() - 0.5 * (ours & theirs).double()
        assert torch.allclose(averaged[name], tensor + step, rtol=0, atol=1e-12)


# By hand ------------------------------------------------------------------------------


def update(where: Blocks, values: list[float], num_examples: int) -> Update:
    return Update(where, {"w": torch.tensor(values)}, num_examples)


def test_an_average_weighs_by_examples() -> None:
    state = {"w": torch.tensor([0.0, 0.0, 10.0])}
    first = update({"w": (torch.tensor([0, 1]),)}, [4.0, 4.0], 1)
    second = update({"w": (torch.tensor([1]),)}, [8.0], 3)
    assert average(state, [first, second])["w"].tolist() == [4, 7, 10]


def test_a_negative_zero_stays_negative() -> None:
    state = {"w": torch.tensor([-0.0, -0.0])}
    averaged = average(state, [update({"w": (torch.tensor([0]),)}, [-0.0], 5)])
    assert torch.signbit(averaged["w"]).tolist() == [True, True]


def test_no_update_leaves_the_state_as_it_is() -> None:
    state = {"w": torch.tensor([1.0, -0.0])}
    assert same_state(average(state, []), state)


def test_a_tensor_that_one_client_keeps_to_itself_is_averaged_over_the_others() -> None:
    # Norm policy "local": some blocks leave the norms out.
    state = {"w": torch.zeros(1), "norm": torch.zeros(1)}
    whole: Blocks = {"w": (None,), "norm": (None,)}
    ones = {"w": torch.ones(1), "norm": torch.ones(1)}
    without: Blocks = {"w": (None,)}
    averaged = average(
        state, [Update(whole, ones, 1), Update(without, {"w": torch.ones(1)}, 1)]
    )
    assert averaged["w"].item() == averaged["norm"].item() == 1


def test_steps_are_taken_and_summed_in_float64() -> None:
    # From 1 to 2^25 and to 4 - 2^25, two steps that float32 cannot hold: their mean is
    # one step up. Rounded before they are added they would lead to 3.
    state = {"w": torch.tensor([1.0])}
    updates = [update({"w": (None,)}, [v], 1) for v in (2.0**25, 4 - 2.0**25)]
    assert average(state, updates)["w"].item() == 2


@pytest.mark.parametrize("num_examples", [0, -3])
def test_an_update_without_examples_is_refused(num_examples: int) -> None:
    with pytest.raises(ModelError, match=f"num_examples = {num_examples}"):
        average({"w": torch.zeros(1)}, [update({"w": (None,)}, [1.0], num_examples)])


def test_integer_buffers_stay_with_the_client() -> None:
    entry = next(entry for entry in ZOO if entry.name == "vgg")
    neurons, state = mapped("vgg"), state_of(random_model(entry))
    blocks = neurons.blocks(neurons.everything())
    assert "bn1.num_batches_tracked" in state
    assert "bn1.num_batches_tracked" not in blocks
    averaged = average(state, [Update(blocks, extract(state, blocks), 1)])
    assert averaged["bn1.num_batches_tracked"].dtype == torch.int64
    merged = merge(state, blocks, extract(averaged, blocks))
    assert merged["bn1.num_batches_tracked"].dtype == torch.int64
