"""A device exports its own model: of every kind of method, and what is refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fedspu
from fedspu.cli.export import _export
from fedspu.deploy.layout import Device
from fedspu.errors import FedSPUError, SettingsError, StorageError
from fedspu.exports.device_client import export_own
from tests.flower.fleet import NAMES, SETTINGS, House

GIVEN = {"clients.per_round": 3, "early_stopping.on": False, "rounds": 2}


def device(house: House, client: int) -> Path:
    """A device's folder as a deployment has it; its models are in the house."""
    config = house.node_config(client)
    root = house.folder / "devices" / NAMES[client]
    root.mkdir(parents=True, exist_ok=True)
    made = Device(root, server="localhost:8000", task="classification", **config)
    (root / "device.toml").write_text(made.to_toml())
    return root


def played(folder: Path, **given: Any) -> House:
    house = House(folder, {**GIVEN, **given})
    house.start(0, 1, 2)
    house.serve()
    return house


@pytest.mark.parametrize("method", ["fedspu", "hermes", "ditto", "fedrep", "fedper"])
def test_a_device_s_file_is_its_model_in_the_run(method: str, tmp_path: Path) -> None:
    given = {"method.name": method}
    house = played(tmp_path / "house", **given)
    alone = fedspu.simulate({**SETTINGS, **GIVEN, **given})
    for client in range(3):
        out = tmp_path / f"{client}.safetensors"
        found = export_own(device(house, client), out=out)
        x, _ = alone.examples.part(client, "test")
        model = fedspu.load_exported(out)
        with torch.no_grad():
            assert torch.equal(model(x), alone.personal_model(client)(x))
        metric = alone.last.scores.personal[client].test
        assert found.checked.values == pytest.approx((metric, metric))
        assert ("kept" in found.facts) == (method == "hermes")
        assert (found.facts["client"], found.facts["round"]) == (str(client), "2")


def test_the_model_of_the_last_run_is_taken(tmp_path: Path) -> None:
    house = played(tmp_path / "house")
    changes = {"deploy.out": str(tmp_path / "second"), "rounds": 1}
    house.serve(changes=changes)
    assert export_own(device(house, 0), out=tmp_path / "a").facts["round"] == "1"
    old = min((house.folder / NAMES[0]).glob("*/personal/*-round-2*"))
    os.utime(old, ns=(2**62, 2**62))  # as if it were newer
    assert export_own(device(house, 0), out=tmp_path / "b").facts["round"] == "2"


# What is refused ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return played(tmp_path_factory.mktemp("house"))


def test_a_client_is_not_given_and_a_run_needs_one(
    house: House, tmp_path: Path
) -> None:
    root = device(house, 0)
    with pytest.raises(SettingsError, match="a device has one client: leave 0 out"):
        _export(root, 0, "safetensors", tmp_path / "a", False, False)
    with pytest.raises(StorageError, match="not a run folder"):
        _export(tmp_path, None, "safetensors", tmp_path / "a", False, False)
    assert _export(root, None, "safetensors", tmp_path / "a", False, False).num_bytes


def test_a_device_that_never_took_part_has_no_model(tmp_path: Path) -> None:
    house = House(tmp_path, GIVEN)
    with pytest.raises(StorageError, match="not trained in any run so far"):
        export_own(device(house, 0), out=tmp_path / "a")


def test_clients_of_some_methods_keep_no_model(tmp_path: Path) -> None:
    house = played(tmp_path, **{"method.name": "fedavg", "rounds": 1})
    with pytest.raises(SettingsError, match="clients of fedavg keep no model"):
        export_own(device(house, 0), out=tmp_path / "a")


def test_code_that_the_run_names_is_run_only_if_trusted(tmp_path: Path) -> None:
    given = {"model": "fedspu.models.paper:DigitsNet", "rounds": 1}
    house = played(tmp_path, **given)
    with pytest.raises(SettingsError, match=r"DigitsNet\), which would .* --trust"):
        export_own(device(house, 0), out=tmp_path / "a")
    export_own(device(house, 0), out=tmp_path / "a", trust=True)


Damage = Callable[[Path], object]


def cut(name: str) -> Damage:
    def damage(run: Path) -> None:
        (file,) = run.glob(name)
        file.write_bytes(file.read_bytes()[:-40])

    return damage


def edited(name: str, old: str, new: str) -> Damage:
    def damage(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new))

    return damage


def without_a_tensor(run: Path) -> None:
    (file,) = run.glob(LAST)
    state = load_file(file)
    del state[min(state)]
    save_file(state, file)


def without_models(run: Path) -> None:
    for file in (run / "personal").iterdir():
        file.unlink()


def of_others_only(run: Path) -> None:
    for file in (run / "personal").iterdir():
        file.rename(file.with_name(file.name.replace("client-0", "client-1")))


LAST = "personal/*-round-2.safetensors"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut(LAST), r"round-2\.safetensors: cannot be read"),
        (without_a_tensor, "is not a whole model of this run"),
        (without_models, "not trained in any run"),
        (of_others_only, "there is no model of this device here"),
        (cut("initial.safetensors"), "is damaged"),
        (cut("plan.json"), r"is damaged \(plan.json is not what was written\)"),
        (edited("plan.json", '"size": 16', '"size": 15'), "not what was written"),
        (cut("done.json"), "is damaged"),
        (cut("settings.toml"), "was edited or damaged"),
        (edited("settings.toml", "seed = 0", "seed = 1"), "was edited or damaged"),
        (lambda run: (run / "settings.toml").unlink(), "settings.toml"),
    ],
)
def test_a_damaged_or_edited_folder_is_refused_in_one_line(
    damage: Damage, says: str, house: House, tmp_path: Path
) -> None:
    root = device(house, 0)
    text = (root / "device.toml").read_text()
    run = next((house.folder / NAMES[0]).glob("*/done.json")).parent
    copied = tmp_path / "models" / run.name
    (copied / "personal").mkdir(parents=True)
    for file in (*run.glob("*.*"), *run.glob("personal/*")):
        (copied / file.relative_to(run)).write_bytes(file.read_bytes())
    folder = str(house.folder / NAMES[0])
    assert folder in text
    (tmp_path / "device.toml").write_text(text.replace(folder, "models"))
    damage(copied)
    with pytest.raises(FedSPUError, match=says) as caught:
        export_own(tmp_path, out=tmp_path / "a")
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "a").exists()


def test_a_damaged_device_file_is_refused(house: House, tmp_path: Path) -> None:
    text = (device(house, 0) / "device.toml").read_text()
    (tmp_path / "device.toml").write_text(text.replace("data =", "dada ="))
    with pytest.raises(FedSPUError, match="dada: no such entry"):
        export_own(tmp_path, out=tmp_path / "a")


def test_examples_of_another_shape_are_refused(house: House, tmp_path: Path) -> None:
    text = (device(house, 0) / "device.toml").read_text()
    other = tmp_path / "other.npz"
    np.savez(other, x=np.zeros((60, 3), np.float32), y=np.arange(60) % 10)
    old = f"{house.folder / NAMES[0]}.npz"
    assert old in text
    (tmp_path / "device.toml").write_text(text.replace(old, str(other)))
    with pytest.raises(FedSPUError):
        export_own(tmp_path, out=tmp_path / "a")
