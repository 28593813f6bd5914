import json
import os
from pathlib import Path

import pytest

from fedspu.federation.storage.run_folder import RunFolder
from tests.cli.commands import Command
from tests.oracles.federation import folder_content

pytestmark = pytest.mark.usefixtures("nets")


@pytest.fixture
def mine(command: Command, nets: str) -> Path:
    assert command("run", "small.toml", "--out", "mine").code == 0
    return Path("mine")


def break_(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_a_whole_run_is_said_to_be_whole(command: Command, mine: Path) -> None:
    before = folder_content(mine)
    result = command("check", mine)
    assert result.code == 0
    first, second, last = result.out.splitlines()
    assert first.startswith("Save after round 3: whole (models of ")
    assert second.startswith("Save after round 2: whole")
    assert last == "The run is finished, and its models can be used."
    assert folder_content(mine) == before


@pytest.mark.filterwarnings("always:.*using the save before")
def test_damage_is_named_with_what_can_be_done(command: Command, mine: Path) -> None:
    break_(mine / "checkpoint/global-round-3.safetensors")
    result = command("check", mine)
    assert result.code == 2
    assert "Save after round 3: damaged" in result.out
    assert (
        "global-round-3.safetensors is damaged: it is not what was saved" in result.out
    )
    assert "`fedspu run --resume mine --trust` resumes after round 2." in result.out
    assert result.error == "mine is damaged"
    result = command("run", "--resume", mine, "--trust")
    assert result.code == 0
    assert "not what was saved; using the save before, after round 2" in result.err
    assert command("check", mine).code == 0


def test_a_lost_personal_model_costs_only_itself(command: Command, mine: Path) -> None:
    for file in mine.glob("personal/client-0-*"):
        break_(file)
    found = json.loads(command("check", mine, "--json").out)
    assert found["is_whole"] is False
    assert list(found["saves"][0]["lost_clients"]) == ["0"]
    assert found["saves"][0]["damage"] == []
    clients = found["saves"][0]["num_clients"]
    assert found["advice"] == (
        f"The run cannot be resumed, but the models of {clients - 1} of {clients} "
        "clients can be loaded with fedspu.load_personal."
    )


@pytest.mark.filterwarnings("always:.*using a copy")
def test_edited_settings_are_named(command: Command, mine: Path) -> None:
    file = mine / "settings.toml"
    file.write_text(file.read_text().replace("seed = 0", "seed = 5"))
    result = command("check", mine)
    assert result.code == 2
    assert "mine/settings.toml says seed = 5, but the run began with" in result.out
    assert "Fix that first" in result.out
    file.unlink()  # a copy is used
    assert command("check", mine).code == 0
    result = command("run", "--resume", mine, "--trust")
    assert result.code == 0
    assert "settings.toml is missing; using a copy of it" in result.err


def test_what_is_in_the_way_of_resuming_is_said(command: Command, mine: Path) -> None:
    (mine / ".lock").unlink()
    (mine / ".lock").symlink_to("elsewhere")
    result = command("check", mine)
    assert result.code == 2
    assert "mine/.lock is not an ordinary file; remove it" in result.out
    (mine / ".lock").unlink()
    assert command("check", mine).code == 0
    assert not (mine / ".lock").exists()  # nothing is changed
    os.link(mine / "rounds.jsonl", "linked")
    assert "has other names" in command("check", mine).out


def test_folders_and_odd_names_do_no_harm(command: Command, mine: Path) -> None:
    for name in ("save-round-99.json", "global-round-1.safetensors"):
        (mine / "checkpoint" / name).mkdir()
    (mine / "checkpoint/save-round-007.json").write_text("mine")
    (mine / "personal/client-9-round-9.safetensors").mkdir()
    (mine / "checkpoint/save-round-99.json").rmdir()
    assert command("check", mine).code == 0
    assert command("run", "--resume", mine, "--trust", "--rounds", 5).code == 0
    assert (mine / "checkpoint/save-round-007.json").read_text() == "mine"


def test_a_record_of_nothing_but_a_hole_is_not_read(
    command: Command, mine: Path
) -> None:
    with (mine / "rounds.jsonl").open("r+b") as file:
        file.truncate(2**38)
    assert command("check", mine).code == 0


@pytest.mark.parametrize("name", ["nowhere", ".", "f.npz", "small.toml"])
def test_what_is_no_run_is_refused(command: Command, name: str) -> None:
    result = command("check", name)
    assert (result.code, result.out) == (2, "")
    wrong = " is not a run folder: it has no checkpoint"
    assert name + (wrong if Path(name).exists() else ": no such folder") in result.error


def test_a_run_that_goes_on_is_not_checked(command: Command, mine: Path) -> None:
    folder = RunFolder.open(mine)
    result = command("check", mine)
    folder.close()
    assert (result.code, result.out) == (2, "")
    assert "mine is being written by another run" in result.error


def test_without_a_folder_the_command_says_what_it_wants(command: Command) -> None:
    result = command("check")
    assert result.code == 2
    assert "Missing argument 'RUN'" in result.err
