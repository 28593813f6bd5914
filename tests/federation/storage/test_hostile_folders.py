"""Run folders from someone else: nothing outside of them is touched, nothing is run."""

import json
import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import fedspu
from fedspu.errors import FedSPUError, StorageError
from fedspu.federation.storage.check import check_run
from tests.oracles.federation import examples, folder_content, mlp
from tests.reliability.small_run import compare_two, play


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted after its second round."""
    path = tmp_path_factory.mktemp("made") / "run"

    def watch(plan: Any, played: Any) -> None:
        if played.federation.round == 2:
            shutil.copytree(path, path.with_name("half"))

    play(path, watch)
    return path.with_name("half")


@pytest.fixture
def path(half: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(half, tmp_path / "run"))


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of the user's, with a model in it."""
    folder = tmp_path / "victim"
    folder.mkdir()
    for name in ("rounds.jsonl", "client-0-round-1.safetensors", "notes.txt"):
        (folder / name).write_text("mine")
    return folder


def resume(path: Path) -> None:
    fedspu.resume(path, model=mlp, data=examples())


def load(path: Path) -> None:
    fedspu.load_personal(path, 0, mlp, examples())


def refused(path: Path, victim: Path | None = None) -> None:
    """Everyone who reads a folder refuses it in one line, and touches nothing else."""
    before = folder_content(victim) if victim else {}
    with pytest.raises(FedSPUError) as caught:
        resume(path)
    assert len(str(caught.value).splitlines()) == 1
    if victim:
        assert folder_content(victim) == before


# Forged indices -----------------------------------------------------------------------


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the index of every save, and make its hash right again."""
    for file in sorted((path / "checkpoint").glob("save-round-*.json")):
        index = json.loads(file.read_text())["index"]
        change(index)
        text = json.dumps(index)
        digest = sha256(text.encode()).hexdigest()
        file.write_text(f'{{"index": {text}, "sha256": "{digest}"}}\n')


def forge_journal(path: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Change the journal, and all indices so that they mark it as it is now."""
    file = path / "checkpoint/clients.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines)
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    file.write_bytes(content)
    mark = [len(content), sha256(content).hexdigest()]
    forge(path, lambda i: i["records"].update({"checkpoint/clients.jsonl": mark}))


MARK = [4, sha256(b"mine").hexdigest()]

FORGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another file": lambda i: i["files"].update({"../victim/notes.txt": MARK}),
    "another record": lambda i: i["records"].update({"../victim/rounds.jsonl": MARK}),
    "a record less": lambda i: i["records"].pop("times.jsonl"),
    "no plan": lambda i: i["files"].pop("checkpoint/plan.json"),
    "a word for a round": lambda i: i.update(round="2"),
    "another round": lambda i: i.update(round=7),
    "a round below 0": lambda i: i.update(round=-1),
    "a huge round": lambda i: i.update(round=10**12),
    "a huge number": lambda i: i.update(round=10**400),
    "a round that is true": lambda i: i.update(round=True),
    "one key more": lambda i: i.update(more=1),
    "no data": lambda i: i.pop("data"),
    "a score that is no number": lambda i: i.update(global_score=[float("nan"), 0.5]),
    "a validation score that is none": lambda i: i.update(global_score=[0.5, None]),
    "one score instead of two": lambda i: i.update(global_score=0.5),
    "three scores": lambda i: i.update(global_score=[0.5, 0.5, 0.5]),
    "a mark that is a word": lambda i: i.update(global_state="mark"),
    "a mark of three": lambda i: i.update(global_state=[1, "a", 2]),
    "a negative length": lambda i: i.update(global_state=[-5, "a" * 64]),
    "an enormous length": lambda i: i.update(global_state=[2**60, "a" * 64]),
    "records without lines": lambda i: [
        i["records"].update({n: [0, sha256().hexdigest()]}) for n in i["records"]
    ],
    "settings that are a list": lambda i: i.update(settings=[]),
    "no settings": lambda i: i.update(settings={}),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_index_is_refused(path: Path, victim: Path, name: str) -> None:
    forge(path, FORGED[name])
    refused(path, victim)


JOURNALS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "a client that is a path": lambda j: j[1]["memories"].update({"../0": MARK}),
    "a client below 0": lambda j: j[1]["memories"].update({"-1": MARK}),
    "a client too many": lambda j: j[1]["stopped"].append(99),
    "a client that is huge": lambda j: j[1]["memories"].update({str(10**30): MARK}),
    "a line twice": lambda j: j.append(j[-1]),
    "a line less": lambda j: j.pop(1),
    "a line that is a list": lambda j: j.insert(1, []),  # type: ignore[arg-type]  # on purpose
    "another round": lambda j: j[1].update(round=3),
    "a score of infinity": lambda j: j[1]["scores"].update({"0": [float("inf"), 0.5]}),
    "a validation score of infinity": lambda j: j[1]["scores"].update(
        {"0": [0.5, float("inf")]}
    ),
    "a score without the other": lambda j: j[1]["scores"].update({"0": [0.5]}),
    "a score of nobody": lambda j: j[1]["scores"].update({"70": [0.5, 0.5]}),
    "neurons of nothing": lambda j: j[1]["kept"].update({"0": {"nothing": [1]}}),
    "neurons out of range": lambda j: j[1]["kept"].update({"0": {"1": [99], "3": []}}),
    "neurons twice": lambda j: j[1]["kept"].update({"0": {"1": [1, 1], "3": []}}),
}


@pytest.mark.parametrize("name", JOURNALS)
def test_a_forged_journal_is_refused(path: Path, victim: Path, name: str) -> None:
    forge_journal(path, JOURNALS[name])
    refused(path, victim)


def test_forging_as_such_is_not_what_is_refused(path: Path) -> None:
    """The two tests above must be able to fail: what is sound is accepted."""
    forge_journal(path, lambda j: j[1]["scores"].update({"0": [0.5, 0.25]}))
    forge(path, lambda i: i.update(global_score=[0.5, 0.25]))
    resume(path)


def test_a_comparison_runs_no_code_that_an_older_save_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last save names what the user asked for, and is damaged."""
    compare_two(tmp_path / "out")
    cell = next((tmp_path / "out").glob("fedspu-*"))
    code = "from pathlib import Path\nPath('ran').touch()\n"
    (tmp_path / "evil_module.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    (cell / "checkpoint/global-round-2.safetensors").unlink()
    settings = cell / "settings.toml"
    place = "tests.oracles.federation:digits_mlp"
    evil = "evil_module:build"
    settings.write_text(settings.read_text().replace(place, evil))
    last = (cell / "checkpoint/save-round-2.json").read_bytes()
    forge(cell, lambda i: i["settings"].update(model=evil))
    (cell / "checkpoint/save-round-2.json").write_bytes(last)
    forge_last = json.loads(last)["index"]
    forge_last["files"].pop("summary.json")
    text = json.dumps(forge_last)
    digest = sha256(text.encode()).hexdigest()
    (cell / "checkpoint/save-round-2.json").write_text(
        f'{{"index": {text}, "sha256": "{digest}"}}\n'
    )
    with pytest.raises(FedSPUError, match="is asked for now"):
        compare_two(tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_records_that_no_summary_can_be_made_of_are_refused_at_once(
    path: Path,
) -> None:
    file = path / "rounds.jsonl"
    file.write_bytes(b"{}\n")
    mark = [3, sha256(b"{}\n").hexdigest()]
    forge(path, lambda i: i["records"].update({"rounds.jsonl": mark}))
    with pytest.raises(StorageError, match="records are damaged"):
        resume(path)


# Links and strangers ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        ".lock",
        "rounds.jsonl",
        "times.jsonl",
        "checkpoint",
        "checkpoint/clients.jsonl",
        "checkpoint/initial.safetensors",
        "checkpoint/save-round-2.json",
        "personal",
    ],
)
def test_no_link_is_followed(path: Path, victim: Path, name: str) -> None:
    """Not even to a copy of what belongs there."""
    place = path / name
    moved = victim / place.name.removeprefix(".")
    place.rename(moved)
    place.symlink_to(moved)
    if name.endswith("save-round-2.json"):
        with pytest.warns(UserWarning, match=r"save-round-2.json is a link"):
            resume(path)
        assert moved.exists()
    else:
        refused(path, victim)


def test_an_empty_folder_of_models_that_is_a_link_is_refused(
    tmp_path: Path, victim: Path
) -> None:
    """After round 0 there is no model yet, so none is missed."""
    path = tmp_path / "run"

    def watch(plan: Any, played: Any) -> None:
        if not (tmp_path / "zero").exists():
            shutil.copytree(path, tmp_path / "zero")

    play(path, watch)
    path = tmp_path / "zero"
    (path / "checkpoint/save-round-1.json").unlink()
    shutil.rmtree(path / "personal")
    (path / "personal").symlink_to(victim)
    refused(path, victim)
    assert not check_run(path).is_whole


@pytest.mark.parametrize("name", ["rounds.jsonl", "checkpoint/clients.jsonl"])
def test_a_record_with_another_name_outside_is_not_changed(
    path: Path, victim: Path, name: str
) -> None:
    content = (path / name).read_bytes()
    (path / name).write_bytes(content + b"{}\n")  # so that it would be cut
    os.link(path / name, victim / "linked")
    refused(path, victim)


def test_a_user_s_own_files_in_a_run_folder_stay(path: Path) -> None:
    notes = [
        path / "notes.txt",
        path / "personal/notes.txt",
        path / "personal/client-0-round-1.safetensors.bak",
        path / "checkpoint/global-round-1.safetensors.old",
        path / "checkpoint/federation-notes.json",
    ]
    for file in notes:
        file.write_text("mine")
    resume(path)
    assert all(file.read_text() == "mine" for file in notes)


def test_what_is_not_ours_is_no_half_made_run(path: Path) -> None:
    """A folder without saves is cleared only if nothing else is in it."""
    for file in (path / "checkpoint").glob("save-round-*"):
        file.unlink()
    (path / "personal/notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="in use already"):
        play(path)
    (path / "personal/notes.txt").unlink()
    play(path)


# Pipes and the like -------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["rounds.jsonl", "checkpoint/plan.json", "personal/client-0-round-1.safetensors"],
)
def test_a_pipe_instead_of_a_file_is_refused_at_once(path: Path, name: str) -> None:
    for file in path.glob(name.replace("0-round-1", "*")):
        file.unlink()
        os.mkfifo(file)
    refused(path)
    assert not check_run(path).is_whole


def test_personal_models_can_be_read_by_their_owner_only(path: Path) -> None:
    resume(path)
    for folder in ("personal", "checkpoint"):
        assert (path / folder).stat().st_mode & 0o777 == 0o700
        for file in (path / folder).iterdir():
            assert file.stat().st_mode & 0o777 == 0o600, file
