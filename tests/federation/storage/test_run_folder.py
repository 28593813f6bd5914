import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedspu
from fedspu.engines.local import LocalEngine
from fedspu.errors import FedSPUError, StorageError
from fedspu.federation.engine import Answer, Cost, Missing
from fedspu.federation.messages import Request, TrainReply, TrainRequest
from fedspu.federation.rounds import Round, Scores, Used
from fedspu.federation.server import Federation
from fedspu.federation.storage.run_folder import RunFolder
from fedspu.federation.storage.saved_run import SavedRun
from fedspu.federation.values import Values
from fedspu.methods import make_method
from fedspu.methods.method import ClientRound, Memory, Method, ModelState, Offer
from fedspu.prepare import prepare
from fedspu.settings import MethodSettings
from tests.oracles.federation import (
    ConvNet,
    empty_reply,
    examples,
    folder_content,
    mlp,
    named,
    same_bits,
)
from tests.oracles.tampering import fields

State = fedspu.State


def state(value: float) -> State:
    return {"w": torch.full((2, 3), float(value)), "n": torch.tensor(7)}


def new_folder(path: Path) -> RunFolder:
    return RunFolder.create(path, 'model = "x"\n', '{"neurons": 1}', state(0.0))


def save(folder: RunFolder, federation: Federation, scores: Scores) -> None:
    """Save a round in which those took part whose last round it is."""
    t = federation.round
    answers = {
        client: Used(empty_reply(t, client), Cost(0, 0, 0, 0, 0.0, 0.0))
        for client, last in federation.last.items()
        if last == t
    }
    lines = {"rounds.jsonl": [{"round": t}]}
    folder.save(Round(federation, answers, scores=scores), lines)


def save_round(folder: RunFolder, t: int, *clients: int, **given: Any) -> None:
    """Save a round in which these took part."""
    for k in clients:
        kept = Memory(ModelState(state(10 * t + k)), (0.1, 1 / 3))
        folder.shelf.put(k, t, kept)
    before = SavedRun(folder.path).checkpoint()
    last = {**before.federation.last, **dict.fromkeys(clients, t)}
    federation = Federation(t, state(t), frozenset({9}), last, **given)
    personal = {**before.scores.personal, **dict.fromkeys(clients, Values(0.25, 1 / t))}
    save(
        folder, federation, Scores(personal, frozenset(last), Values(0.1 * t, 0.3 * t))
    )


# What is written is what is read ------------------------------------------------------


def test_a_saved_round_is_read_again_bit_for_bit(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")
    save_round(folder, 1, 0, 2)
    save_round(folder, 2, 2, 3)
    folder.close()
    saved = SavedRun(tmp_path / "run")
    found = saved.checkpoint()
    assert found.federation.round == saved.round == 2
    assert found.federation.stopped == {9}
    assert same_bits(found.federation.global_state, state(2))
    assert found.federation.last == {0: 1, 2: 2, 3: 2}
    for client, value in {0: 10, 2: 22, 3: 23}.items():
        memory = saved.memory(client)
        assert memory.own is not None
        assert same_bits(memory.own.state, state(value))
        assert memory.own.active is None
        assert memory.losses == (0.1, 1 / 3)
    assert found.scores.personal == {
        0: Values(0.25, 1.0),
        2: Values(0.25, 0.5),
        3: Values(0.25, 0.5),
    }
    assert found.scores.participating == {0, 2, 3}
    assert found.scores.global_ == Values(0.1 * 2, 0.3 * 2)
    assert saved.lines("rounds.jsonl") == [{"round": 1}, {"round": 2}]
    assert saved.plan_text() == '{"neurons": 1}'
    assert not saved.is_finished


def test_a_new_folder_stands_at_round_0(tmp_path: Path) -> None:
    new_folder(tmp_path / "a" / "run").close()
    saved = SavedRun(tmp_path / "a" / "run")
    found = saved.checkpoint()
    assert found.federation.round == 0
    assert same_bits(found.federation.global_state, state(0.0))
    assert same_bits(saved.initial(), state(0.0))
    assert found.federation.last == {}
    assert found.federation.extra == {}
    assert found.scores == Scores()


def test_only_the_last_two_rounds_models_are_kept(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")
    for t in range(1, 4):
        save_round(folder, t, 0, t)
    folder.close()
    assert sorted(p.name for p in (tmp_path / "run/personal").iterdir()) == [
        "client-0-round-2.safetensors",
        "client-0-round-3.safetensors",
        "client-1-round-1.safetensors",
        "client-2-round-2.safetensors",
        "client-3-round-3.safetensors",
    ]
    assert sorted(p.name for p in (tmp_path / "run/checkpoint").iterdir()) == [
        "clients.jsonl",
        "global-round-2.safetensors",
        "global-round-3.safetensors",
        "initial.safetensors",
        "plan.json",
        "save-round-2.json",
        "save-round-3.json",
    ]


def test_model_files_are_plain_safetensors(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")
    save_round(folder, 1, 4)
    folder.close()
    read = load_file(tmp_path / "run/personal/client-4-round-1.safetensors")
    losses = torch.tensor([0.1, 1 / 3], dtype=torch.float64)
    assert same_bits(read, {**state(14), "losses:": losses})


def test_a_slim_model_is_read_again_with_the_neurons_it_has(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")
    kept = {"fc": torch.tensor([1, 4]), "a.b": torch.tensor([0])}
    slim = {"fc": torch.tensor([1, 4]), "a.b": torch.tensor([0, 1])}  # a.b whole
    memories = {
        3: Memory(ModelState(state(5), slim), (0.5,), kept),
        4: Memory(ModelState(state(6))),
        5: Memory(None, (), kept),
        6: Memory(ModelState(state(7), slim)),
    }
    for client, memory in memories.items():
        folder.shelf.put(client, 1, memory)
    last = dict.fromkeys(memories, 1)
    save(folder, Federation(1, state(1), last=last, kept={3: kept}), Scores())
    folder.close()
    saved = SavedRun(tmp_path / "run")
    for client, memory in memories.items():
        assert_same(saved.memory(client), memory)
    # The server knows what was chosen too.
    federation = saved.checkpoint().federation
    assert federation.kept.keys() == {3}
    assert same_bits(dict(federation.kept[3]), kept)


def assert_same(a: Memory, b: Memory) -> None:
    assert a.losses == b.losses
    assert same_bits(a.extra, b.extra)
    assert (a.own is None) == (b.own is None)
    if a.own is not None and b.own is not None:
        assert same_bits(a.own.state, b.own.state)
        assert same_bits(a.own.active or {}, b.own.active or {})


def test_of_a_client_that_never_took_part_nothing_is_kept(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")
    save_round(folder, 1, 0)
    folder.close()
    saved = SavedRun(tmp_path / "run")
    assert saved.memory(5) == Memory()
    assert same_bits(saved.initial(), state(0.0))


def test_the_server_s_memory_is_read_again_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "run"
    folder = new_folder(path)
    extra = {"mean:w": torch.tensor([0.1, -0.0], dtype=torch.float64)}
    for t in (1, 2):
        save_round(folder, t, 0, extra={**extra, "turns": torch.tensor(t)})
    found = SavedRun(path).checkpoint().federation.extra
    assert same_bits(found, {**extra, "turns": torch.tensor(2)})
    save_round(folder, 3, 0)  # it has none any more
    assert SavedRun(path).checkpoint().federation.extra == {}
    assert [p.name for p in path.glob("checkpoint/extra-*")] == [
        "extra-round-2.safetensors"
    ]
    folder.close()


# In use ------------------------------------------------------------------------------


def test_a_folder_with_anything_in_it_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        StorageError,
        match="in use already: it holds something else; choose another --out",
    ):
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
    assert SavedRun(path).round == 1


def test_a_run_that_was_finished_meanwhile_is_not_played_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process goes on with the run while this one prepares its data."""
    path = interrupted(tmp_path / "run", after=1)

    def slowly(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr("fedspu.runs.prepare", prepare)
        with suppress(StorageError):  # or it may find that the folder is in use
            fedspu.resume(path, model=ConvNet, data=examples())
        return prepare(*args, **kwargs)

    monkeypatch.setattr("fedspu.runs.prepare", slowly)
    fedspu.resume(path, model=ConvNet, data=examples())
    lines = SavedRun(path).lines("rounds.jsonl")
    assert [line["round"] for line in lines] == [1, 2, 3]


# Crashes -----------------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone; nothing may be tidied up."""


def interrupted(path: Path, after: int, **given: Any) -> Path:
    """A run folder of a run that was interrupted after so many rounds."""

    def watch(plan: Any, played: Any) -> None:
        if played.federation.round == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(path, watch=watch, **given)
    return path


def simulate(path: Path, watch: Any = None, **given: Any) -> None:
    method = given.pop("method_record", None)
    fedspu.simulate(
        named(out=path, **given),
        model=ConvNet,
        data=examples(),
        method=method,
        watch=watch,
    )


def whole(path: Path, **given: Any) -> dict[str, bytes]:
    simulate(path, **given)
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


@pytest.mark.parametrize("optimizer", ["none", "momentum"])
def test_a_crash_before_any_rename_leaves_the_round_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    given = {"server__optimizer": optimizer}
    expected = whole(tmp_path / "whole", **given)
    # Round 0 renames settings, plan, w0, the global model and the index; a round three
    # personal models, the global one, the server's memory if any, and the index.
    per_round, crashes = 5, range(5, 5 + 3 * 5)
    if optimizer != "none":  # in the second round alone
        per_round, crashes = 6, range(5 + 6, 5 + 2 * 6)
    for crash in crashes:
        count = iter(range(100))
        path = tmp_path / f"crash-{crash}"
        with monkeypatch.context() as patch:
            fails = failing_replace(lambda _, n=count, c=crash: next(n) == c, Killed())  # type: ignore[misc]  # bound now
            patch.setattr(os, "replace", fails)
            with pytest.raises(Killed):
                simulate(path, **given)
        assert SavedRun(path).round == (crash - 5) // per_round
        fedspu.resume(path, model=ConvNet, data=examples())
        assert folder_content(path) == expected


@pytest.mark.parametrize("name", ["global-round-1", "extra-round-1", "-round-1.saf"])
def test_a_crash_after_the_rename_leaves_the_round_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    given = {"server__optimizer": "momentum", "clients__per_round": 6}
    expected = whole(tmp_path / "whole", **given)
    path, unlink = tmp_path / "crash", Path.unlink

    def killed(self: Path, *args: Any, **kwargs: Any) -> None:
        if name in self.name:
            raise Killed
        unlink(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(Killed):
            simulate(path, **given)
    assert SavedRun(path).round == 3
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
    monkeypatch.setattr(os, "replace", full("save-round-"))
    with pytest.raises(StorageError, match="No space left") as caught:
        simulate(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    assert "--resume" not in str(caught.value)  # there is nothing to go on with


@pytest.mark.parametrize("name", ["client-", "global-", "save-round-"])
def test_a_full_disk_on_the_way_says_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    expected = whole(tmp_path / "whole")
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        # One round is saved: three clients, and round 0's global model and index.
        patch.setattr(os, "replace", full(name, after=3 if name[0] == "c" else 2))
        with pytest.raises(StorageError, match="rounds up to 1 are saved"):
            simulate(path)
    assert SavedRun(path).round == 1
    assert not list(path.rglob("*.part"))
    fedspu.resume(path, model=ConvNet, data=examples())
    assert folder_content(path) == expected


# Damage: tests/federation/test_damage.py has more -------------------------------------


@pytest.mark.parametrize(
    ("name", "words"), [("nowhere", "no such folder"), ("empty", "not a run folder")]
)
def test_a_folder_that_is_no_run_folder_is_refused_and_left_alone(
    tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match=words):
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


# What methods and clients leave in it -------------------------------------------------


def counting(seen: dict[int, State]) -> Method:
    """FedAvg that counts turns on the server, and notes what its offers are given."""

    def offer(now: ClientRound) -> Offer:
        seen[now.round] = {name: t.clone() for name, t in now.server.items()}
        return Offer(now.neurons.everything())

    def count(extra: State, replies: Mapping[int, TrainReply]) -> State:
        turns = extra.get("turns", torch.zeros(6)).clone()
        for client in replies:
            turns[client] += 1
        return {"turns": turns}

    record = make_method(MethodSettings(name="fedavg"))
    return replace(record, offer=offer, server=count)


def test_a_resumed_run_offers_by_the_server_s_memory_of_the_one_interrupted(
    tmp_path: Path,
) -> None:
    straight: dict[int, State] = {}
    resumed: dict[int, State] = {}
    expected = whole(tmp_path / "whole", method_record=counting(straight))
    path = interrupted(tmp_path / "run", after=2, method_record=counting({}))
    fedspu.resume(path, model=ConvNet, data=examples(), method=counting(resumed))
    assert folder_content(path) == expected
    assert float(straight[3]["turns"].sum()) == 6
    assert resumed.keys() == {3}
    assert same_bits(resumed[3], straight[3])


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_resumed_run_steps_by_the_means_of_the_one_interrupted(
    tmp_path: Path, optimizer: str
) -> None:
    given = {"server__optimizer": optimizer, "server__lr": 0.5}
    expected = whole(tmp_path / "whole", **given)
    assert any("extra-round-3" in name for name in expected)
    path = interrupted(tmp_path / "run", after=1, **given)
    fedspu.resume(path, model=ConvNet, data=examples())
    assert folder_content(path) == expected


@pytest.mark.filterwarnings("ignore:1 of clients")
def test_a_refused_turn_is_recorded_and_leaves_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 2's second reply is not finite; then it begins from its first turn."""
    exchange = LocalEngine.exchange
    change = fields(train_loss=float("nan"))

    def broken(
        self: LocalEngine, requests: Mapping[int, Request], broadcast: Any = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        asked = {client: requests[client] for client in requests}
        for client, answer in exchange(self, asked, broadcast):
            request = asked[client]
            is_it = isinstance(request, TrainRequest) and request.round == 2
            if is_it and client == 2 and isinstance(answer, Answer):
                yield client, change(self.plan, request, answer)
            else:
                yield client, answer

    monkeypatch.setattr(LocalEngine, "exchange", broken)
    given = {"clients__per_round": 6}
    expected = whole(tmp_path / "whole", **given)
    path = interrupted(tmp_path / "run", after=2, **given)
    lines = SavedRun(path).lines("rounds.jsonl")
    reasons = [line["refused_clients"] for line in lines]
    assert reasons == [{}, {"2": "its training loss is nan"}]
    assert SavedRun(path).checkpoint().federation.last[2] == 1
    assert sorted(p.name for p in path.glob("personal/client-2-*")) == [
        "client-2-round-1.safetensors"
    ]
    fedspu.resume(path, model=ConvNet, data=examples())
    assert folder_content(path) == expected
    summary = json.loads((path / "summary.json").read_text())
    assert summary["refused_turns"] == 1
