import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fedspu
from fedspu.errors import StorageError
from fedspu.federation.storage.run_folder import RunFolder
from fedspu.federation.storage.saved_run import SavedRun
from fedspu.methods import CATALOGUE
from fedspu.methods.method import Memory
from tests.oracles.federation import (
    ConvNet,
    examples,
    folder_content,
    named,
    same_bits,
)


def saved(path: Path, **given: Any) -> fedspu.Run:
    """A finished run of two rounds in this folder; some never take part."""
    chosen = named(out=path, rounds=2, clients__per_round=2, **given)
    return fedspu.simulate(chosen, model=ConvNet, data=examples())


def load(path: Path, client: int) -> nn.Module:
    return fedspu.load_personal(path, client, ConvNet, examples())


# What is read is what the run had -----------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="fedspu"),
        pytest.param({"method": "hermes", "early_stopping": True}, id="hermes"),
        pytest.param({"method": "fedavg", "server__optimizer": "adam"}, id="adam"),
    ],
)
def test_a_run_is_read_as_it_ended(tmp_path: Path, given: dict[str, Any]) -> None:
    run = saved(tmp_path / "run", **given)
    found = SavedRun(tmp_path / "run")
    checkpoint, last = found.checkpoint(), run.last
    assert found.is_finished
    assert found.round == checkpoint.federation.round == last.federation.round == 2
    assert checkpoint.scores == last.scores
    federation = checkpoint.federation
    assert same_bits(federation.global_state, last.federation.global_state)
    assert same_bits(federation.extra, last.federation.extra)
    assert federation.last == last.federation.last
    assert federation.num_examples == last.federation.num_examples
    assert federation.num_examples.keys() == federation.last.keys()
    assert federation.stopped == last.federation.stopped
    assert federation.kept.keys() == last.federation.kept.keys()
    for client, kept in federation.kept.items():
        assert same_bits(dict(kept), dict(last.federation.kept[client]))
    assert same_bits(found.initial(), run.plan.initial)
    assert found.lines("rounds.jsonl") == run.rounds
    assert found.lines("times.jsonl") == run.times
    for client in range(6):
        memory, expected = found.memory(client), run.memory(client)
        assert memory.losses == expected.losses
        assert (memory.own is None) == (expected.own is None)
        if memory.own is not None and expected.own is not None:
            assert same_bits(memory.own.state, expected.own.state)


def test_reading_changes_no_file_and_needs_no_lock(tmp_path: Path) -> None:
    saved(tmp_path / "run")
    before = folder_content(tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    found = SavedRun(tmp_path / "run")
    found.checkpoint()
    found.memory(0)
    load(tmp_path / "run", 0)
    folder.close()
    assert folder_content(tmp_path / "run") == before


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda e: f"{e.name}-{e.reading}")
def test_a_saved_personal_model_is_the_run_s_in_every_method(
    tmp_path: Path, entry: Any
) -> None:
    given = {"method__name": entry.name, "method__reading": entry.reading}
    run = saved(tmp_path / "run", method__finish_last=0, **given)
    assert len(run.last.federation.last) < 6  # some never took part
    for client in range(6):
        found, expected = load(tmp_path / "run", client), run.personal_model(client)
        assert same_bits(dict(found.state_dict()), dict(expected.state_dict()))
        assert not found.training


@pytest.mark.parametrize("method", ["fedspu", "local", "hermes"])
def test_a_client_that_never_took_part_has_w0(tmp_path: Path, method: str) -> None:
    run = saved(tmp_path / "run", method=method)
    found = SavedRun(tmp_path / "run")
    never = sorted(set(range(6)) - set(run.last.federation.last))
    assert never
    for client in never:
        assert found.memory(client) == Memory()
        own = dict(load(tmp_path / "run", client).state_dict())
        assert same_bits(own, run.plan.initial)


# Other versions -----------------------------------------------------------------------


OPENERS: dict[str, Callable[[Path], object]] = {
    "resume": lambda path: fedspu.resume(path, model=ConvNet, data=examples()),
    "open": RunFolder.open,
    "read": SavedRun,
    "load": lambda path: load(path, 0),
}


OLD: dict[str, dict[str, Any]] = {
    "1": {"round": 2, "global": "global-round-2.safetensors", "global_accuracy": 0.5},
    "2": {"version": 2, "round": 2, "global": "global-round-2.safetensors"},
}


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("version", [*OLD, "3", "5"])
def test_a_folder_of_another_version_is_refused_by_name_and_left_alone(
    tmp_path: Path, opener: str, version: str
) -> None:
    path = tmp_path / "run"
    saved(path)
    indices = sorted(path.glob("checkpoint/save-round-*"))
    if version in OLD:
        for file in indices:
            file.unlink()
        (path / "checkpoint/federation.json").write_text(json.dumps(OLD[version]))
    else:
        for file in indices:
            text = json.dumps({"version": int(version), "unheard": "of"})
            digest = sha256(text.encode()).hexdigest()
            file.write_text(f'{{"index": {text}, "sha256": "{digest}"}}\n')
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(StorageError) as caught:
        OPENERS[opener](path)
    text = str(caught.value)
    assert f"a run folder of version {version}, and this fedspu reads version 4" in text
    assert "play it again" in text
    after = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert after == before
