import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedspu
from fedspu import runs
from fedspu.errors import FedSPUError, StorageError
from fedspu.federation.client import Memory
from fedspu.federation.folder import (
    RunFolder,
    read_checkpoint,
    read_lines,
    read_personal,
)
from fedspu.federation.rounds import Accuracies
from fedspu.federation.server import Federation
from fedspu.methods.method import Held
from tests.oracles.federation import (
    ConvNet,
    examples,
    folder_content,
    mlp,
    named,
    same_bits,
)

State = fedspu.State


def state(value: float) -> State:
    return {"w": torch.full((2, 3), value), "n": torch.tensor(7)}


def new_folder(path: Path) -> RunFolder:
    return RunFolder.create(path, 'model = "x"\n', state(0.0))


def save_round(folder: RunFolder, t: int, *clients: int) -> None:
    folder.save(
        Federation(t, state(t), frozenset({9}), frozenset(clients)),
        Accuracies(dict.fromkeys(clients, 0.25), frozenset(clients), 0.1 * t),
        {
            k: folder.shelf.put(k, t, Memory(Held(state(10 * t + k)), (0.1, 1 / 3)))
            for k in clients
        },
        {"rounds.jsonl": [{"round": t}]},
    )


# What is written is what is read ------------------------------------------------------


def test_a_saved_round_is_read_again_bit_for_bit(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")
    save_round(folder, 1, 0, 2)
    save_round(folder, 2, 2, 3)
    folder.close()
    found = read_checkpoint(tmp_path / "run")
    assert found.federation.round == 2
    assert found.federation.stopped == {9}
    assert same_bits(found.federation.global_state, state(2))
    assert found.memories.keys() == {0, 2, 3}
    expected = {0: 10, 2: 22, 3: 23}
    for client, memory in found.memories.items():
        assert memory.own is not None
        assert same_bits(memory.own.state, state(expected[client]))
        assert memory.own.active is None
        assert same_bits(
            own_of(read_personal(tmp_path / "run", client)).state, memory.own.state
        )
        assert memory.losses == (0.1, 1 / 3)
    assert found.accuracies.personal == {0: 0.25, 2: 0.25, 3: 0.25}
    assert found.accuracies.global_ == 0.1 * 2
    assert read_lines(tmp_path / "run", "rounds.jsonl") == [{"round": 1}, {"round": 2}]


def test_a_new_folder_stands_at_round_0(tmp_path: Path) -> None:
    new_folder(tmp_path / "a" / "run").close()
    found = read_checkpoint(tmp_path / "a" / "run")
    assert found.federation.round == 0
    assert same_bits(found.federation.global_state, state(0.0))
    assert found.memories == {}


def test_only_the_last_round_s_models_are_kept(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")
    for t in range(1, 4):
        save_round(folder, t, 0, t)
    folder.close()
    assert sorted(p.name for p in (tmp_path / "run/personal").iterdir()) == [
        "client-0-round-3.safetensors",
        "client-1-round-1.safetensors",
        "client-2-round-2.safetensors",
        "client-3-round-3.safetensors",
    ]
    assert sorted(p.name for p in (tmp_path / "run/checkpoint").iterdir()) == [
        "clients.jsonl",
        "federation.json",
        "global-round-3.safetensors",
        "initial.safetensors",
    ]


def test_model_files_are_plain_safetensors(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")
    save_round(folder, 1, 4)
    folder.close()
    read = load_file(tmp_path / "run/personal/client-4-round-1.safetensors")
    assert same_bits(read, state(14))


def test_a_slim_model_is_read_again_with_the_neurons_it_has(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")
    kept = {"fc": torch.tensor([1, 4]), "a.b": torch.tensor([0])}
    slim = {"fc": torch.tensor([1, 4]), "a.b": torch.tensor([0, 1])}  # a.b whole
    memories = {
        3: Memory(Held(state(5), slim), (0.5,), kept),
        4: Memory(Held(state(6))),
        5: Memory(None, (), kept),
        6: Memory(Held(state(7), slim)),
    }
    folder.save(
        Federation(1, state(1), met=frozenset({3}), kept={3: kept}),
        Accuracies(),
        {k: folder.shelf.put(k, 1, memory) for k, memory in memories.items()},
        {},
    )
    folder.close()
    found = read_checkpoint(tmp_path / "run")
    for client, memory in memories.items():
        assert_same(found.memories[client], memory)
    assert same_bits(own_of(read_personal(tmp_path / "run", 3)).active or {}, slim)
    # The server knows what was chosen too.
    assert found.federation.kept.keys() == {3}
    assert same_bits(found.federation.kept[3], kept)


def own_of(memory: Memory) -> Held:
    assert memory.own is not None
    return memory.own


def assert_same(a: Memory, b: Memory) -> None:
    assert a.losses == b.losses
    assert same_bits(a.kept or {}, b.kept or {})
    assert (a.own is None) == (b.own is None)
    if a.own is not None and b.own is not None:
        assert same_bits(a.own.state, b.own.state)
        assert same_bits(a.own.active or {}, b.own.active or {})


def test_a_client_that_never_took_part_has_w0(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")
    save_round(folder, 1, 0)
    folder.close()
    own = own_of(read_personal(tmp_path / "run", 5))
    assert own.active is None
    assert same_bits(own.state, state(0.0))


# In use ------------------------------------------------------------------------------


def test_a_folder_with_anything_in_it_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="in use already; choose another --out"):
        new_folder(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(StorageError, match="in use already"):
        new_folder(tmp_path / "run")
    assert (tmp_path / "run").read_text() == "mine"


def test_an_empty_folder_can_be_used(tmp_path: Path) -> None:
    new_folder(tmp_path).close()
    assert (tmp_path / "settings.toml").exists()


def test_a_folder_cannot_be_written_by_two_runs_at_once(tmp_path: Path) -> None:
    first = new_folder(tmp_path / "run")
    save_round(first, 1, 0)
    before = folder_content(tmp_path / "run")
    with pytest.raises(StorageError, match="being written by another run"):
        RunFolder.open(tmp_path / "run")
    assert folder_content(tmp_path / "run") == before
    first.close()
    RunFolder.open(tmp_path / "run").close()


def test_a_run_that_comes_second_does_not_remove_the_first_one_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs find that the folder is not there, and both make it."""
    path, make = tmp_path / "run", Path.mkdir
    first: list[RunFolder] = []

    def mkdir(self: Path, *args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(Path, "mkdir", make)
        first.append(new_folder(path))
        save_round(first[0], 1, 0)
        make(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(StorageError):
        new_folder(path)
    first[0].close()
    assert read_checkpoint(path).federation.round == 1


def test_a_run_that_was_finished_meanwhile_is_not_played_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process goes on with the run while this one lays out its data."""
    path = interrupted(tmp_path / "run", after=1)
    lay_out = runs.lay_out

    def slowly(*args: Any) -> Any:
        monkeypatch.setattr(runs, "lay_out", lay_out)
        with suppress(StorageError):  # or it may find that the folder is in use
            fedspu.resume(path, model=ConvNet, data=examples())
        return lay_out(*args)

    monkeypatch.setattr(runs, "lay_out", slowly)
    fedspu.resume(path, model=ConvNet, data=examples())
    assert [line["round"] for line in read_lines(path, "rounds.jsonl")] == [1, 2, 3]


# Crashes -----------------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone; nothing may be tidied up."""


def interrupted(path: Path, after: int, **given: Any) -> Path:
    """A run folder of a run that was interrupted after so many rounds."""

    def watch(plan: Any, report: Any) -> None:
        if report.federation.round == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedspu.simulate(
            named(out=path, **given), model=ConvNet, data=examples(), watch=watch
        )
    return path


def whole(path: Path, **given: Any) -> dict[str, bytes]:
    fedspu.simulate(named(out=path, **given), model=ConvNet, data=examples())
    return folder_content(path)


def failing_replace(
    should_fail: Callable[[Path], bool], error: BaseException
) -> Callable[[Any, Any], None]:
    replace = os.replace

    def wrapped(source: Any, target: Any) -> None:
        if should_fail(Path(target)):
            raise error
        replace(source, target)

    return wrapped


def test_a_crash_before_any_rename_leaves_the_round_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole(tmp_path / "whole")
    # Round 0 renames settings, w0, the global model and the index; a round three
    # personal models, the global one and the index.
    for crash in range(4, 4 + 3 * 5):
        count = iter(range(100))
        path = tmp_path / f"crash-{crash}"
        with monkeypatch.context() as patch:
            fails = failing_replace(lambda _, n=count, c=crash: next(n) == c, Killed())  # type: ignore[misc]  # bound now
            patch.setattr(os, "replace", fails)
            with pytest.raises(Killed):
                fedspu.simulate(named(out=path), model=ConvNet, data=examples())
        assert read_checkpoint(path).federation.round == (crash - 4) // 5
        fedspu.resume(path, model=ConvNet, data=examples())
        assert folder_content(path) == expected


def test_a_crash_after_the_rename_leaves_the_round_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole(tmp_path / "whole")
    path, unlink = tmp_path / "crash", Path.unlink

    def killed(self: Path, *args: Any, **kwargs: Any) -> None:
        if "global-round-1" in self.name:
            raise Killed
        unlink(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(Killed):
            fedspu.simulate(named(out=path), model=ConvNet, data=examples())
    assert read_checkpoint(path).federation.round == 2
    fedspu.resume(path, model=ConvNet, data=examples())
    assert folder_content(path) == expected


def test_lines_that_were_not_saved_whole_are_cut_off(tmp_path: Path) -> None:
    expected = whole(tmp_path / "whole")
    path = interrupted(tmp_path / "run", after=2)
    for name in ("rounds.jsonl", "clients.jsonl", "times.jsonl"):
        with (path / name).open("ab") as file:
            file.write(b'{"round": 3, "cli')
    (path / "personal/client-0-round-3.safetensors").write_bytes(b"half")
    (path / "checkpoint/global-round-3.safetensors.part").write_bytes(b"half")
    fedspu.resume(path, model=ConvNet, data=examples())
    assert folder_content(path) == expected


# A full disk -------------------------------------------------------------------------


def full(name: str, *, after: int = 0) -> Callable[[Any, Any], None]:
    """No space is left once ``after`` files of this name have been written."""
    count = iter(range(100))
    error = OSError(errno.ENOSPC, "No space left on device")
    return failing_replace(lambda p: name in p.name and next(count) >= after, error)


def test_a_full_disk_at_the_beginning_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", full("federation.json"))
    with pytest.raises(StorageError, match="No space left") as caught:
        fedspu.simulate(named(out=tmp_path / "run"), model=ConvNet, data=examples())
    assert list(tmp_path.iterdir()) == []
    assert "--resume" not in str(caught.value)  # there is nothing to go on with


@pytest.mark.parametrize("name", ["client-", "global-", "federation.json"])
def test_a_full_disk_on_the_way_says_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    expected = whole(tmp_path / "whole")
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        # One round is saved: three clients, and round 0's global model and index.
        patch.setattr(os, "replace", full(name, after=3 if name[0] == "c" else 2))
        with pytest.raises(StorageError, match="rounds up to 1 are saved"):
            fedspu.simulate(named(out=path), model=ConvNet, data=examples())
    assert read_checkpoint(path).federation.round == 1
    assert not list(path.rglob("*.part"))
    fedspu.resume(path, model=ConvNet, data=examples())
    assert folder_content(path) == expected


# Damage ------------------------------------------------------------------------------


def edit_index(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = path / "checkpoint/federation.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def scramble(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"met"', b'"MET"'))


def only(path: Path, pattern: str) -> Path:
    return next(path.glob(pattern))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "no index": lambda p: (p / "checkpoint/federation.json").unlink(),
    "no checkpoint": lambda p: (p / "checkpoint").rename(p / "elsewhere"),
    "half an index": lambda p: cut(p / "checkpoint/federation.json"),
    "an empty index": lambda p: (p / "checkpoint/federation.json").write_bytes(b""),
    "an index of nothing": lambda p: (p / "checkpoint/federation.json").write_text(
        "{}"
    ),
    "an index that is a list": lambda p: (p / "checkpoint/federation.json").write_text(
        "[]"
    ),
    "an index in no encoding": lambda p: (p / "checkpoint/federation.json").write_bytes(
        b"\xff\xfe{"
    ),
    "a key less": lambda p: edit_index(p, lambda index: index.pop("lengths")),
    "no global model": lambda p: only(p, "checkpoint/global-*").unlink(),
    "half a global model": lambda p: cut(only(p, "checkpoint/global-*")),
    "no personal model": lambda p: only(p, "personal/*").unlink(),
    "half a personal model": lambda p: cut(only(p, "personal/*")),
    "no record": lambda p: (p / "rounds.jsonl").unlink(),
    "half a record": lambda p: cut(p / "rounds.jsonl"),
    "no client record": lambda p: (p / "clients.jsonl").unlink(),
    "half a client record": lambda p: cut(p / "clients.jsonl"),
    "no journal": lambda p: (p / "checkpoint/clients.jsonl").unlink(),
    "half a journal": lambda p: cut(p / "checkpoint/clients.jsonl"),
    "another journal": lambda p: scramble(p / "checkpoint/clients.jsonl"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_a_storage_error_that_names_it(
    tmp_path: Path, damage: str
) -> None:
    path = interrupted(tmp_path / "run", after=2)
    DAMAGE[damage](path)
    with pytest.raises(StorageError, match=str(path)):
        fedspu.resume(path, model=ConvNet, data=examples())


def test_a_folder_without_settings_is_refused(tmp_path: Path) -> None:
    path = interrupted(tmp_path / "run", after=1)
    (path / "settings.toml").unlink()
    with pytest.raises(FedSPUError, match=str(path)):
        fedspu.resume(path, model=ConvNet, data=examples())


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_a_folder_that_is_no_run_folder_is_refused_and_left_alone(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match="not a run folder"):
        fedspu.resume(tmp_path / name)
    assert [p.name for p in tmp_path.rglob("*")] == ["empty"]


class WiderNet(ConvNet):
    """The same names, but more neurons in the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 9, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(9)
        self.conv2 = nn.Conv2d(9, 6, 3, padding=1)


@pytest.mark.parametrize("model", [mlp, WiderNet])
def test_another_model_than_the_run_s_is_refused(tmp_path: Path, model: Any) -> None:
    path = interrupted(tmp_path / "run", after=1)
    before = folder_content(path)
    with pytest.raises(FedSPUError):
        fedspu.resume(path, model=model, data=examples())
    assert folder_content(path) == before
