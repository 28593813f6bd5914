from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspu import State
from fedspu.errors import StorageError
from fedspu.federation.client_memory import Shelf, pack_memory, unpack_memory
from fedspu.federation.engine import Cost
from fedspu.federation.rounds import Round, Used, drop_old_memories
from fedspu.federation.server import Federation
from fedspu.methods.method import Memory, ModelState
from tests.oracles.federation import empty_reply, same_bits

MODEL_BYTES = 400


def memory(value: float, *losses: float) -> Memory:
    return Memory(ModelState({"w": torch.full((100,), float(value))}), losses)


def value_of(found: Memory) -> float:
    assert found.own is not None
    return float(found.own.state["w"][0])


@settings(max_examples=30)
@given(
    cache=st.sampled_from([0, MODEL_BYTES, 3 * MODEL_BYTES, 10**9]),
    asked=st.lists(st.integers(0, 7), max_size=30),
)
def test_what_is_in_ram_changes_nothing_about_what_is_found(
    cache: int, asked: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    shelf = Shelf(tmp_path_factory.mktemp("shelf"), cache)
    for client in range(8):
        shelf.put(client, 1, memory(client, 0.5 * client))
    for client in asked:
        found = shelf.get(client, 1)
        assert value_of(found) == client
        assert found.losses == (0.5 * client,)
        assert len(shelf._memories) <= max(1, cache // MODEL_BYTES)


def test_another_process_finds_what_was_put(tmp_path: Path) -> None:
    Shelf(tmp_path).put(3, 2, memory(7.0, 0.25))
    found = Shelf(tmp_path).get(3, 2)
    assert value_of(found) == 7
    assert found.losses == (0.25,)


def test_a_memory_of_one_round_is_not_that_of_another(tmp_path: Path) -> None:
    """Whoever asks for an earlier round still finds what the client had then."""
    shelf = Shelf(tmp_path)
    for t in (1, 2):
        shelf.put(3, t, memory(t))
    assert [value_of(Shelf(tmp_path).get(3, t)) for t in (1, 2)] == [1, 2]
    assert [value_of(shelf.get(3, t)) for t in (1, 2)] == [1, 2]


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_round_played_again_replaces_what_was_kept_of_it(
    is_on_disk: bool, tmp_path: Path
) -> None:
    shelf = Shelf(tmp_path if is_on_disk else None)
    shelf.put(3, 1, memory(1))
    shelf.put(3, 1, memory(2))
    assert value_of(shelf.get(3, 1)) == 2


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_before_its_first_round_a_client_has_nothing(
    is_on_disk: bool, tmp_path: Path
) -> None:
    shelf = Shelf(tmp_path if is_on_disk else None)
    shelf.put(3, 1, memory(1))
    assert shelf.get(3, 0) == Memory()


def test_who_keeps_nothing_but_losses_has_a_file_of_them_alone(tmp_path: Path) -> None:
    Shelf(tmp_path).put(3, 1, Memory(None, (0.5,)))
    Shelf(tmp_path).put(4, 1, Memory())
    assert Shelf(tmp_path).get(3, 1) == Memory(None, (0.5,))
    assert Shelf(tmp_path).get(4, 1) == Memory()
    assert all(file.stat().st_size < 200 for file in tmp_path.iterdir())


def test_what_is_dropped_is_gone_from_disk_and_ram(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.put(3, 1, memory(1))
    shelf.drop(3, 1)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match=r"client-3-round-1"):
        shelf.get(3, 1)


def test_without_a_folder_what_is_dropped_is_gone() -> None:
    shelf = Shelf(None)
    shelf.put(3, 1, memory(1))
    shelf.drop(3, 1)
    assert shelf.names() == []
    with pytest.raises(KeyError):
        shelf.get(3, 1)


def test_dropping_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    for shelf in (Shelf(None), Shelf(tmp_path)):
        shelf.drop(3, 1)


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_only_the_memories_of_clients_last_rounds_are_kept_if_so_asked(
    is_on_disk: bool, tmp_path: Path
) -> None:
    shelf = Shelf(tmp_path if is_on_disk else None)
    for client, t in [(0, 1), (0, 2), (5, 1), (5, 3), (7, 2)]:
        shelf.put(client, t, memory(t))
    shelf.keep_only({(0, 2), (5, 1), (6, 4)})
    assert sorted(shelf.names()) == [(0, 2), (5, 1)]


def test_files_that_are_no_memories_are_let_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    shelf = Shelf(tmp_path)
    shelf.put(3, 1, memory(1))
    assert shelf.names() == [(3, 1)]
    shelf.keep_only(())
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def played(federation: Federation, clients: list[int], refused: list[int]) -> Round:
    """A round in which these clients took part, and those were refused."""
    t = federation.round + 1
    answers = {k: Used(empty_reply(t, k), Cost(0, 0, 0, 0, 0.0, 0.0)) for k in clients}
    last = {**federation.last, **dict.fromkeys(clients, t)}
    return Round(
        Federation(t, {}, last=last), answers, refused=dict.fromkeys(refused, "why")
    )


def test_in_memory_the_last_model_of_each_client_stays() -> None:
    shelf, federation = Shelf(None), Federation(0, {})
    for t in range(1, 4):
        for client in (0, 5):
            shelf.put(client, t, memory(t))
        done = played(federation, [0, 5], [])
        drop_old_memories(shelf, federation, done)
        federation = done.federation
    assert sorted(shelf.names()) == [(0, 3), (5, 3)]
    assert [value_of(shelf.get(k, 3)) for k in (0, 5)] == [3, 3]


def test_of_a_refused_client_what_it_had_before_stays() -> None:
    shelf, federation = Shelf(None), Federation(1, {}, last={2: 1, 3: 1})
    for client, t in [(2, 1), (3, 1), (2, 2), (3, 2), (4, 2)]:
        shelf.put(client, t, memory(t))
    drop_old_memories(shelf, federation, played(federation, [3], [2, 4]))
    assert sorted(shelf.names()) == [(2, 1), (3, 2)]


# As tensors by name -------------------------------------------------------------------


def states(*names: str) -> st.SearchStrategy[State]:
    """Tensors of some of these names, of several kinds and shapes."""
    kinds = st.sampled_from(
        [
            torch.tensor([0.5, -0.0, float("inf")]),
            torch.tensor(7),
            torch.zeros(2, 0),
            torch.tensor([[True, False]]),
            torch.tensor([1e-300], dtype=torch.float64),
        ]
    )
    return st.dictionaries(st.sampled_from(names), kinds.map(torch.clone))


@given(
    own=st.none() | states("a.weight", "b", "w:0").filter(bool),
    groups=st.none() | st.dictionaries(st.sampled_from(["fc", "a.b"]), st.just([1, 4])),
    losses=st.lists(st.floats(allow_nan=False), max_size=3),
    extra=states("a.weight", "mask", "losses:", "slim:fc"),
)
def test_a_memory_survives_its_tensors(
    own: State | None,
    groups: dict[str, list[int]] | None,
    losses: list[float],
    extra: State,
) -> None:
    slim = {name: torch.tensor(i) for name, i in (groups or {}).items()} or None
    model = None if own is None else ModelState(own, slim)
    found = unpack_memory(pack_memory(Memory(model, tuple(losses), extra)))
    assert found.losses == tuple(losses)
    assert same_bits(found.extra, extra)
    assert (found.own is None) == (own is None)
    if found.own is not None and own is not None:
        assert same_bits(found.own.state, own)
        assert (found.own.active is None) == (slim is None)
        assert same_bits(found.own.active or {}, slim or {})


def test_what_is_kept_twice_can_be_written(tmp_path: Path) -> None:
    """A method may keep the tensors of its model once more as something else."""
    w = torch.arange(6.0)
    Shelf(tmp_path).put(3, 1, Memory(ModelState({"w": w}), extra={"w": w, "half": w}))
    found = Shelf(tmp_path).get(3, 1)
    assert same_bits(found.extra, {"w": w, "half": w})
