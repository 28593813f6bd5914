import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspu import choose_random
from fedspu.random_streams import generator, stream, stream_key, torch_stream
from tests.oracles.models import mapped

names = st.tuples(
    st.integers(0, 2**40),
    st.sampled_from(["active", "batches", "cohort", "w0"]),
    st.integers(0, 500),
    st.integers(0, 100),
)


def global_states() -> list[object]:
    """Where Python's, numpy's and torch's own generators are."""
    of_numpy = np.random.get_state(legacy=False)["state"]  # noqa: NPY002  # it must not move
    keys = [of_numpy["key"].tolist(), of_numpy["pos"]]
    return [random.getstate(), keys, torch.get_rng_state().tolist()]


@given(names)
@settings(max_examples=25, deadline=None)
def test_one_name_gives_one_sequence(name: tuple[int, str, int, int]) -> None:
    first, again = stream(*name), stream(*name)
    first.random(7)  # what one caller drew is nothing to another
    first = stream(*name)
    assert first.random(5).tolist() == again.random(5).tolist()


@given(names, names)
@settings(max_examples=50, deadline=None)
def test_two_names_give_two_sequences(
    one: tuple[int, str, int, int], other: tuple[int, str, int, int]
) -> None:
    numbers = stream(*one).random(5).tolist(), stream(*other).random(5).tolist()
    assert (numbers[0] == numbers[1]) == (one == other)


@pytest.mark.parametrize(
    "other",
    [(2, "active", 3, 4), (1, "batch", 3, 4), (1, "active", 4, 3), (1, "active", 34)],
)
def test_seed_purpose_round_and_client_each_matter(other: tuple[int, str, int]) -> None:
    assert stream(*other).random() != stream(1, "active", 3, 4).random()


def test_a_key_is_enough_to_draw_a_stream_again_elsewhere() -> None:
    key = stream_key(1, "active", 3, 4)
    assert len(key) == 16
    assert generator(key).random() == stream(1, "active", 3, 4).random()


def test_a_stream_is_the_same_in_every_version() -> None:
    # Results of runs are compared across versions: these numbers may never change.
    assert stream(0, "active", 1, 2).integers(0, 1000, 4).tolist() == PINNED


PINNED = [398, 130, 802, 568]


def test_torch_follows_the_named_stream_inside() -> None:
    with torch_stream(1, "w0"):
        first = torch.rand(3)
    torch.rand(5)
    with torch_stream(1, "w0"):
        again = torch.rand(3)
    with torch_stream(1, "w1"):
        other = torch.rand(3)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_no_global_generator_is_moved() -> None:
    neurons = mapped("vgg")
    before = global_states()
    stream(1, "active").random(3)
    with torch_stream(1, "w0"):
        torch.rand(3)
    choose_random(neurons, 0.5, stream(1, "active"))
    assert global_states() == before


def test_no_global_generator_is_read() -> None:
    def drawn() -> list[list[float]]:
        active = choose_random(mapped("vgg"), 0.5, stream(1, "active"))
        with torch_stream(1, "w0"):
            weights = torch.rand(3)
        return [weights.tolist(), *(indices.tolist() for indices in active.values())]

    before = drawn()
    random.random()
    np.random.rand()  # noqa: NPY002  # the global generator is what must not matter
    torch.rand(1)
    assert drawn() == before


def test_torch_s_generator_is_restored_after_an_exception() -> None:
    def fail() -> None:
        with torch_stream(1, "w0"):
            torch.rand(3)
            raise KeyError

    before = torch.get_rng_state()
    with pytest.raises(KeyError):
        fail()
    assert torch.equal(torch.get_rng_state(), before)
