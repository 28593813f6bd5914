from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspu.errors import StorageError
from fedspu.federation.client import Memory
from fedspu.federation.memory import Entry, Memories, Shelf, check_whole
from fedspu.methods.method import Held

MODEL_BYTES = 400


def memory(value: float, *losses: float) -> Memory:
    return Memory(Held({"w": torch.full((100,), value)}), losses)


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
    entries = {k: shelf.put(k, 1, memory(k, 0.5 * k)) for k in range(8)}
    for client in asked:
        found = shelf.get(entries[client])
        assert value_of(found) == client
        assert found.losses == (0.5 * client,)
        assert len(shelf._memories) <= max(1, cache // MODEL_BYTES)


def test_another_process_finds_what_was_put(tmp_path: Path) -> None:
    entry = Shelf(tmp_path).put(3, 2, memory(7.0, 0.25))
    assert value_of(Shelf(tmp_path).get(entry)) == 7
    assert entry.losses == (0.25,)


def test_a_model_is_never_overwritten(tmp_path: Path) -> None:
    """Whoever has an old entry still finds what it stands for."""
    shelf = Shelf(tmp_path)
    before, after = (shelf.put(3, t, memory(t)) for t in (1, 2))
    assert [value_of(Shelf(tmp_path).get(entry)) for entry in (before, after)] == [1, 2]


def test_who_keeps_nothing_has_no_file(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    entry = shelf.put(3, 1, Memory(None, (0.5,)))
    assert entry == Entry(None, (0.5,))
    assert list(tmp_path.iterdir()) == []
    assert shelf.get(entry) == Memory(None, (0.5,))


def test_what_is_dropped_is_gone_from_disk_and_ram(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    entry = shelf.put(3, 1, memory(1))
    assert entry.file is not None
    shelf.drop(entry.file)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match=entry.file):
        shelf.get(entry)


def test_without_a_folder_the_last_model_of_each_client_stays() -> None:
    memories = Memories()
    for t in range(1, 4):
        memories.update({k: memories.shelf.put(k, t, memory(t)) for k in (0, 5)})
    assert sorted(memories) == [0, 5]
    assert [value_of(found) for found in memories.values()] == [3, 3]
    assert len(memories.shelf._memories) == 2


@pytest.mark.parametrize("length", [0, 7, -1])
def test_a_file_that_is_cut_off_is_found_out_without_reading_it(
    tmp_path: Path, length: int
) -> None:
    entry = Shelf(tmp_path).put(3, 1, memory(1))
    assert entry.file is not None
    file = tmp_path / entry.file
    check_whole(file)
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(StorageError, match=entry.file):
        check_whole(file)
