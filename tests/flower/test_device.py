"""A device: what it keeps, where, and what it says when that goes wrong."""

import errno
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspu import files, prepare
from fedspu.engines.flower import fleet
from fedspu.errors import DataError, FedSPUError, SettingsError
from fedspu.federation import client_memory
from fedspu.federation import plan as plan_module
from fedspu.federation.plan import Plan
from fedspu.federation.rounds import Round
from fedspu.files import lock
from fedspu.flower import device as device_module
from fedspu.flower.client_app import LOST, OTHER_MODEL, app
from fedspu.flower.config import node_settings, split
from fedspu.flower.device import Device
from tests.flower.fleet import NAMES, House
from tests.flower.grid import Nodes
from tests.flower.test_rounds import PowerCutError, cut_after
from tests.oracles.federation import same_bits

GIVEN = {"clients.per_round": 3, "early_stopping.on": False}


def own_runs(house: House, client: int) -> list[Path]:
    return [p for p in (house.folder / NAMES[client]).iterdir() if p.is_dir()]


def test_a_device_keeps_its_last_three_models_for_itself(tmp_path: Path) -> None:
    house = House(tmp_path, {**GIVEN, "rounds": 5})
    house.start(0, 1, 2)
    house.serve()
    for client in range(3):
        (run,) = own_runs(house, client)
        found = sorted(file.name for file in (run / "personal").iterdir())
        assert found == [f"client-{client}-round-{t}.safetensors" for t in (3, 4, 5)]
        for place in (run, *run.rglob("*")):
            mode = stat.S_IMODE(place.stat().st_mode)
            assert mode == (0o700 if place.is_dir() else 0o600), place


def test_personal_models_are_on_the_disk_before_the_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, bool]] = []
    write = files.write_whole

    def noted(path: Path, content: bytes, **kinds: bool) -> Any:
        written.append((path.name, kinds["durable"]))
        return write(path, content, **kinds)

    monkeypatch.setattr(client_memory, "write_whole", noted)
    house = House(tmp_path, {**GIVEN, "rounds": 1})
    house.start(0, 1, 2)
    house.serve()
    assert len(written) == 3
    assert all(durable for _, durable in written)


def test_two_runs_do_not_share_a_model(tmp_path: Path) -> None:
    house = House(tmp_path, {**GIVEN, "rounds": 1})
    house.start(0, 1, 2)
    house.serve()
    house.serve(changes={"deploy.out": str(tmp_path / "second")})
    assert len(own_runs(house, 0)) == 2


def test_a_model_is_mapped_once_and_then_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make = plan_module.make_plan

    def noted(*given: Any) -> Plan:
        made.append(given[-1].name)
        return make(*given)

    monkeypatch.setattr(device_module, "make_plan", noted)
    house = House(tmp_path, {**GIVEN, "rounds": 2})
    house.start(0, 1, 2)
    house.serve()
    assert len(made) == 3


def test_a_full_disk_costs_a_turn_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = files.write_whole
    is_full = False

    def full(path: Path, content: bytes, **kinds: bool) -> Any:
        if is_full and path.name.startswith("client-1"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, content, **kinds)

    monkeypatch.setattr(client_memory, "write_whole", full)
    house = House(tmp_path, {**GIVEN, "rounds": 3})
    house.start(0, 1, 2)

    def watch(plan: Plan, played: Round) -> None:
        nonlocal is_full
        is_full = played.federation.round == 1

    house.serve(watch)
    assert [sorted(played.answers) for played in house.seen] == [
        [0, 1, 2],
        [0, 2],
        [0, 1, 2],
    ]
    why = "it cannot use its own disk; its own log says more"
    assert house.seen[1].missing == {1: why}
    assert "No space left on device" in caplog.text
    assert house.memory(1, 1)
    assert house.memory(1, 3)


def test_a_device_that_lost_its_model_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(tmp_path, {**GIVEN, "rounds": 2})
    house.start(0, 1, 2)

    def watch(plan: Plan, played: Round) -> None:
        for file in (tmp_path / "hall").rglob("client-*.safetensors"):
            file.unlink()

    house.serve(watch)
    assert sorted(house.seen[1].answers) == [0, 2]
    assert house.seen[1].missing == {1: LOST}
    assert "client-1-round-1.safetensors" in caplog.text
    assert "start it again with --begin-anew" in caplog.text


def test_a_device_that_lost_its_model_is_not_asked_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(tmp_path, {**GIVEN, "rounds": 5})
    house.start(0, 1, 2)
    files: dict[Path, bytes] = {}

    def watch(plan: Plan, played: Round) -> None:
        if played.federation.round == 1:
            for file in (tmp_path / "hall").rglob("client-*.safetensors"):
                files[file] = file.read_bytes()
                file.unlink()
        if played.federation.round == 3:  # its owner has a copy
            for file, content in files.items():
                file.write_bytes(content)
            monkeypatch.setattr(fleet, "AGAIN_SECONDS", 0.0)
            house.stop(1)
            house.start(1)

    server = house.serve(watch)
    asked = [sorted({*r.answers, *r.missing}) for r in house.seen]
    assert asked == [[0, 1, 2], [0, 1, 2], [0, 2], [0, 1, 2], [0, 1, 2]]
    assert house.seen[3].missing == {}
    assert server.last.federation.last[1] == 5


def test_a_device_that_lost_its_model_may_begin_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(tmp_path, {**GIVEN, "rounds": 4})
    house.start(0, 2)
    house.start(1, anew=True)

    def watch(plan: Plan, played: Round) -> None:
        if played.federation.round == 2:
            shutil.rmtree(own_runs(house, 1)[0])

    house.serve(watch)
    assert [sorted(r.answers) for r in house.seen] == [
        [0, 1, 2],
        [0, 1, 2],
        [0, 2],
        [0, 1, 2],
    ]
    assert house.seen[2].missing == {1: "its model is lost, and it begins anew"}
    assert sorted(house.seen[2].federation.last) == [0, 2]
    assert house.memory(1, 4)
    # As a new client: it was sent the first model again.
    text = (tmp_path / "run/clients.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    sent = [x["bytes_initial"] > 0 for x in lines if x["client"] == 1]
    assert sent == [True, False, True]


def test_a_device_that_may_begin_anew_keeps_the_model_that_it_has(
    tmp_path: Path,
) -> None:
    house = House(tmp_path, {**GIVEN, "rounds": 2})
    house.start(0, 1, 2, anew=True)
    last = house.serve().last.federation
    whole = House(tmp_path / "whole", {**GIVEN, "rounds": 2})
    whole.start(0, 1, 2)
    assert same_bits(last.global_state, whole.serve().last.federation.global_state)


@pytest.mark.parametrize("name", ["settings.toml", "done.json"])
def test_a_disk_that_is_full_from_the_beginning_is_said_in_words(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write = files.write_whole

    def full(path: Path, content: bytes, **kinds: bool) -> Any:
        if path.name == name and "hall" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, content, **kinds)

    monkeypatch.setattr(device_module, "write_whole", full)
    house = House(tmp_path, {**GIVEN, "rounds": 2})
    house.start(0, 1, 2)
    house.serve()
    assert [sorted(played.answers) for played in house.seen] == [[0, 2]] * 2
    assert "the disk is full: free some space" in caplog.text


def test_a_device_that_comes_back_with_other_data_is_refused_and_told_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if the server has not noticed that it was away."""
    house = House(tmp_path, {**GIVEN, "rounds": 3})
    house.start(0, 1, 2)

    def watch(plan: Plan, played: Round) -> None:
        np.savez(tmp_path / "hall.npz", x=np.zeros((50, 9, 9), "f"), y=np.arange(50))

    house.serve(watch)
    assert [sorted(played.answers) for played in house.seen] == [
        [0, 1, 2],
        [0, 2],
        [0, 2],
    ]
    why = "the shape of its examples is (9, 9), in this run it is (1, 8, 8)"
    assert house.seen[1].missing[1].startswith(why)
    assert f"this device cannot take part: {why}" in caplog.text
    assert f"hall cannot take part: {why}" in caplog.text


def test_a_device_that_comes_back_with_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(tmp_path, {**GIVEN, "rounds": 3})
    house.start(0, 1, 2)

    def watch(plan: Plan, played: Round) -> None:
        monkeypatch.setattr(device_module, "fedspu_version", lambda: "0.0.1")

    with pytest.raises(FedSPUError, match="no device that still trains"):
        house.serve(watch, {"deploy.wait": 0.05})
    assert house.seen[1].missing[1].startswith("its version of fedspu is 0.0.1")
    assert house.memory(1, 1)


def test_a_device_whose_model_changes_during_a_run_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(tmp_path, {**GIVEN, "rounds": 3})
    house.start(0, 1, 2)
    other = Nodes({**house.config, "model": "mlp"})

    def watch(plan: Plan, played: Round) -> None:
        node = other.add(house.node_config(1), app)
        house.grid.answers[house.nodes["hall"]] = other.answers[node]

    house.serve(watch)
    assert [sorted(played.answers) for played in house.seen] == [
        [0, 1, 2],
        [0, 2],
        [0, 2],
    ]
    assert house.seen[1].missing == {1: OTHER_MODEL}
    assert "builds another model than at its first turn" in caplog.text


def test_data_that_vanishes_between_two_rounds_costs_turns_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(tmp_path, {**GIVEN, "rounds": 4})
    house.start(0, 1, 2)
    file = tmp_path / "hall.npz"

    def watch(plan: Plan, played: Round) -> None:
        if played.federation.round == 1:
            file.rename(tmp_path / "away.npz")
        if played.federation.round == 3:
            (tmp_path / "away.npz").rename(file)

    house.serve(watch)
    cohorts = [sorted(played.answers) for played in house.seen]
    assert cohorts == [[0, 1, 2], [0, 2], [0, 2], [0, 1, 2]]
    why = "it cannot use its own examples; its own log says more"
    assert house.seen[1].missing == {1: why}
    assert "hall.npz" in caplog.text


def test_a_damaged_model_is_not_used(tmp_path: Path) -> None:
    house = House(tmp_path, {**GIVEN, "rounds": 2})
    house.start(0, 1, 2)

    def watch(plan: Plan, played: Round) -> None:
        for file in (tmp_path / "hall").rglob("client-*.safetensors"):
            file.write_bytes(file.read_bytes()[:100])

    house.serve(watch)
    assert sorted(house.seen[1].answers) == [0, 2]


def test_a_server_may_go_back_by_one_save(tmp_path: Path) -> None:
    """The last save is damaged; devices still have what the one before needs."""
    whole = House(tmp_path / "a", {**GIVEN, "rounds": 4})
    whole.start(0, 1, 2)
    wanted = whole.serve().last.federation
    house = House(tmp_path / "b", {**GIVEN, "rounds": 4})
    house.start(0, 1, 2)
    with pytest.raises(PowerCutError):
        house.serve(cut_after(3))
    index = tmp_path / "b/run/checkpoint/save-round-3.json"
    index.write_bytes(index.read_bytes()[:-10])
    with pytest.warns(UserWarning, match="using the save before, after round 2"):
        last = house.serve().last.federation
    assert all(last.global_state[n].equal(w) for n, w in wanted.global_state.items())
    for client in range(3):
        assert house.memory(client, 4) == whole.memory(client, 4)


def test_a_process_of_a_device_waits_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_module, "LOCK_SECONDS", 0.05)
    house = House(tmp_path, {**GIVEN, "rounds": 2})
    house.start(0, 1, 2)
    held: list[Any] = []

    def watch(plan: Plan, played: Round) -> None:
        (run,) = own_runs(house, 1)
        held.append(lock(run / ".lock"))

    house.serve(watch)
    held[0].close()
    assert sorted(house.seen[1].answers) == [0, 2]
    assert "is used by another process of this device" in caplog.text


# Before it takes part -----------------------------------------------------------------


def hello_of(house: House, **changes: Any) -> Any:
    given, _ = split(house.config)
    return Device(given, node_settings({**house.node_config(0), **changes})).hello()


def test_a_device_says_what_its_data_looks_like(tmp_path: Path) -> None:
    house = House(tmp_path)
    hello = hello_of(house)
    assert (hello.x_shape, hello.y_shape) == ((1, 8, 8), ())
    assert (hello.x_dtype, hello.y_dtype) == ("float32", "int64")
    assert hello.num_examples == len(house.share(0)[1])


def test_a_device_without_examples_cannot_take_part(tmp_path: Path) -> None:
    house = House(tmp_path)
    file = tmp_path / "none.npz"
    np.savez(file, x=np.zeros((0, 1, 8, 8), np.float32), y=np.zeros(0, np.int64))
    with pytest.raises(DataError, match="no examples"):
        hello_of(house, data=f"arrays:{file}")


def test_a_device_with_two_examples_cannot_take_part(tmp_path: Path) -> None:
    house = House(tmp_path)
    file = tmp_path / "two.npz"
    np.savez(file, x=np.zeros((2, 1, 8, 8), np.float32), y=np.zeros(2, np.int64))
    with pytest.raises(DataError, match="2 examples; expected at least 3"):
        hello_of(house, data=f"arrays:{file}")


def test_a_folder_that_cannot_be_written_is_noticed_at_once(tmp_path: Path) -> None:
    house = House(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FedSPUError, match="cannot write"):
        hello_of(house, folder=str(tmp_path / "file" / "inside"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "../evil"}, r"node config: name = '../evil': expected"),
        ({"name": ""}, r"node config: name"),
        ({"capacity": 0}, r"node config: capacity = 0: expected a number above 0"),
        ({"capacity": "much"}, r"node config: capacity = 'much': expected a number"),
    ],
)
def test_wrong_node_configs_are_said_in_words(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    house = House(tmp_path)
    with pytest.raises(SettingsError, match=words):
        hello_of(house, **change)


def test_a_node_config_without_a_name_says_so(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="node config: name: not given"):
        node_settings({"capacity": 1.0, "data": "digits"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"deploy.devces": 3},
            r"deploy.devces: no such setting \(did you mean",
        ),
        ({"deploy.wait": -1}, r"deploy.wait = -1: expected a number above 0"),
        ({"train.lrr": 1}, r"train.lrr: no such setting"),
    ],
)
def test_wrong_run_configs_are_said_in_words(given: dict[str, Any], words: str) -> None:
    def read() -> None:
        settings, _ = split({"model": "digits", **given})
        prepare.choose(settings, None, None, None, None)

    with pytest.raises(SettingsError, match=words):
        read()


def test_a_deployed_run_says_where_its_models_are(tmp_path: Path) -> None:
    from fedspu import load_global, load_personal, resume

    house = House(tmp_path, {**GIVEN, "rounds": 1})
    house.start(0, 1, 2)
    house.serve()
    with pytest.raises(FedSPUError, match="client 0 is on its own device"):
        load_personal(tmp_path / "run", 0)
    with pytest.raises(FedSPUError, match="run on devices"):
        resume(tmp_path / "run")
    assert not load_global(tmp_path / "run").training  # the server has its own
    assert json.loads((tmp_path / "run/devices.json").read_text())["2"] == "kitchen"
