"""Making a deployment, and adding, removing and renewing what is in it."""

import os
import shutil
import stat
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedspu.deploy import keys, making, serving, templates
from fedspu.deploy.layout import Device, Server
from fedspu.errors import DeploymentError
from tests.deploy.stand_ins import OVER, made


def files(root: Path) -> list[str]:
    found = sorted(path for path in root.rglob("*") if path.is_file())
    return [str(path.relative_to(root)) for path in found]


def config(server: Server) -> dict[str, Any]:
    project = tomllib.loads((server.app / "pyproject.toml").read_text())
    found: dict[str, Any] = project["tool"]["flwr"]["app"]["config"]
    return found


DEVICE_FILES = [
    "ca.crt",
    "compose.yaml",
    "device.toml",
    "key",
    "key.pub",
    "supernode.service",
]


def test_what_is_made(tmp_path: Path) -> None:
    root = tmp_path / "lab"
    made(root, "hall", "attic")
    assert files(root) == [
        "README.md",
        "ca/ca.crt",
        "ca/ca.key",
        *(f"devices/attic/{name}" for name in DEVICE_FILES),
        *(f"devices/hall/{name}" for name in DEVICE_FILES),
        "server/app/pyproject.toml",
        "server/ca.crt",
        "server/compose.yaml",
        "server/flwr/config.toml",
        "server/public-keys/attic.pub",
        "server/public-keys/hall.pub",
        "server/server.crt",
        "server/server.key",
        "server/server.toml",
        "server/superlink.service",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["lab"]


def test_only_their_owner_can_read_keys(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        root = tmp_path / "lab"
        made(root, "a")
    finally:
        os.umask(before)
    for name in ("ca/ca.key", "server/server.key", "devices/a/key"):
        assert stat.S_IMODE((root / name).stat().st_mode) == 0o600
    for name in (".", "ca", "server", "devices", "devices/a"):
        assert stat.S_IMODE((root / name).stat().st_mode) == 0o700


def test_no_private_key_is_in_two_places(tmp_path: Path) -> None:
    root = tmp_path / "lab"
    made(root, "a", "b")
    private = [(root / name).read_bytes() for name in files(root)]
    held = [content for content in private if b"PRIVATE KEY" in content]
    assert len(held) == len(set(held)) == 4


def test_the_app_is_told_every_setting_as_plain_values(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "train.augment": ["flip", "crop"],
        "clients.deadline": 30,
    }
    server = made(tmp_path / "lab", "a", "b", **settings)
    found = config(server)
    assert found["deploy"] == {
        "out": str(server.root / "server" / "run"),
        "devices": 2,
        "wait": 600,
        "resume": True,
        "outputs": 10,
    }
    assert found["clients"]["deadline"] == 30.0
    assert found["train"]["augment"] == "flip,crop"
    assert found["clients"]["capacities"] == "1.0"
    assert "engine" not in found
    for table in found.values():
        for value in table.values() if isinstance(table, dict) else [table]:
            assert isinstance(value, str | int | float | bool)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_folder_is_taken_only_if_it_is_empty(tmp_path: Path, is_full: bool) -> None:
    root = tmp_path / "lab"
    root.mkdir()
    if not is_full:
        made(root, "a")
        return
    (root / "mine").touch()
    with pytest.raises(DeploymentError, match="is not empty; choose another folder"):
        made(root, "a")
    assert files(root) == ["mine"]


def test_a_file_or_link_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(DeploymentError, match="is not a folder"):
            made(tmp_path / name, "a")


def test_if_it_fails_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(templates, "readme", fails)
    with pytest.raises(DeploymentError, match=r"cannot be made .*No space left"):
        made(tmp_path / "lab", "a")
    assert list(tmp_path.iterdir()) == []


def test_a_device_is_added(tmp_path: Path) -> None:
    made(tmp_path / "lab", "a", "b")
    device = making.add(tmp_path / "lab", "c", 0.2, None)
    server = Server.read(tmp_path / "lab")
    assert dict(server.capacities) == {"a": 0.5, "b": 0.5, "c": 0.2}
    assert files(device.root) == DEVICE_FILES
    assert (server.public_keys / "c.pub").read_bytes() == (
        device.root / "key.pub"
    ).read_bytes()
    assert Device.read(device.root) == device
    found = config(server)
    assert found["clients"]["number"] == found["deploy"]["devices"] == 3
    assert found["clients"]["per_round"] == 3
    assert found["clients"]["capacities"] == "0.5,0.5,0.2"


@pytest.mark.parametrize("name", ["a", "A"])
def test_a_device_is_not_added_twice(tmp_path: Path, name: str) -> None:
    made(tmp_path / "lab", "a")
    with pytest.raises(DeploymentError, match="one of the devices already"):
        making.add(tmp_path / "lab", name, 1.0, None)


def test_a_device_is_removed_and_its_folder_stays(tmp_path: Path) -> None:
    made(tmp_path / "lab", "a", "b")
    making.remove(tmp_path / "lab", "a")
    server = Server.read(tmp_path / "lab")
    assert list(server.capacities) == ["b"]
    assert not (server.public_keys / "a.pub").exists()
    assert files(server.root / "devices" / "a") == DEVICE_FILES
    assert config(server)["clients"]["number"] == 1
    with pytest.raises(DeploymentError, match="b is the only device"):
        making.remove(tmp_path / "lab", "b")
    with pytest.raises(DeploymentError, match="'a': no such device; expected one of b"):
        making.remove(tmp_path / "lab", "a")


def test_if_the_app_is_damaged_nothing_changes(tmp_path: Path) -> None:
    server = made(tmp_path / "lab", "a", "b")
    (server.app / "pyproject.toml").write_text("garbage")
    before = files(server.root)
    with pytest.raises(DeploymentError, match="is not as `fedspu deploy init` makes"):
        making.add(server.root, "c", 1.0, None)
    with pytest.raises(DeploymentError, match="is not as `fedspu deploy init` makes"):
        making.remove(server.root, "a")
    assert files(server.root) == before
    assert Server.read(server.root) == server


@pytest.mark.parametrize("is_here", [True, False])
def test_a_device_gets_a_new_key(tmp_path: Path, is_here: bool) -> None:
    server = made(tmp_path / "lab", "a")
    before = (server.public_keys / "a.pub").read_bytes()
    folder = server.root / "devices" / "a"
    if is_here:
        (folder / "mine.npz").touch()
    else:
        shutil.rmtree(folder)
    device = making.rotate(tmp_path / "lab", "a")
    after = (server.public_keys / "a.pub").read_bytes()
    assert after != before
    assert keys.public_part(device.key.read_bytes(), "key") == after
    assert stat.S_IMODE(device.key.stat().st_mode) == 0o600
    assert files(folder) == sorted([*DEVICE_FILES, *["mine.npz"] * is_here])


def test_the_server_gets_a_new_certificate(tmp_path: Path) -> None:
    server = made(tmp_path / "lab", "a")
    before = serving.check_files(server)
    found = making.renew(tmp_path / "lab", 10)
    assert serving.check_files(server) == found
    assert found.fingerprint != before.fingerprint
    assert found.names == before.names


def test_without_the_authority_there_is_no_new_certificate(tmp_path: Path) -> None:
    made(tmp_path / "lab", "a")
    made(tmp_path / "other", "a")
    shutil.rmtree(tmp_path / "lab" / "ca")
    with pytest.raises(DeploymentError, match=r"ca\.key is missing; put the folder"):
        making.renew(tmp_path / "lab", 10)
    shutil.copytree(tmp_path / "other" / "ca", tmp_path / "lab" / "ca")
    with pytest.raises(DeploymentError, match="of another deployment"):
        making.renew(tmp_path / "lab", 10)


# What the server refuses to start with ------------------------------------------------


def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    server = made(tmp_path / "lab", "a")
    ca = server.root / "ca"
    authority = keys.Pair((ca / "ca.key").read_bytes(), (ca / "ca.crt").read_bytes())
    pair = keys.make_server_certificate(authority, [], OVER)
    server.certificate.write_bytes(pair.public)
    words = rf"server\.crt expired on {OVER.end:%Y-%m-%d}; make a new one with .*renew"
    with pytest.raises(DeploymentError, match=words):
        serving.check_files(server)


def test_keys_and_certificates_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    server = made(tmp_path / "lab", "a")
    other = made(tmp_path / "other", "a")
    good = server.certificate.read_bytes()
    server.certificate.write_bytes(other.certificate.read_bytes())
    with pytest.raises(DeploymentError, match="not signed by the authority"):
        serving.check_files(server)
    server.certificate.write_bytes(good)
    server.key.write_bytes(other.key.read_bytes())
    with pytest.raises(DeploymentError, match="is not for the key"):
        serving.check_files(server)
    server.key.chmod(0o644)
    with pytest.raises(DeploymentError, match="can be read by others; run `chmod 600"):
        serving.check_files(server)
    server.key.unlink()
    with pytest.raises(DeploymentError, match=r"server\.key is missing"):
        serving.check_files(server)


def test_a_host_that_the_certificate_is_not_for_is_refused(tmp_path: Path) -> None:
    server = made(tmp_path / "lab", "a")
    with pytest.raises(DeploymentError, match=r"is not for lab\.example, which server"):
        serving.check_files(replace(server, hosts=("lab.example",)))


# Text files ---------------------------------------------------------------------------


def test_units_are_as_systemd_wants_them(tmp_path: Path) -> None:
    server = made(tmp_path / "my lab", "a")
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not on this machine")
    units = tmp_path / "units"
    units.mkdir()
    command = tmp_path / "fedspu"
    command.touch(0o700)
    for name, unit in {
        "server": (server.folder / "superlink.service").read_text(),
        "device": (server.root / "devices/a/supernode.service").read_text(),
    }.items():
        text = unit.replace(str(templates._fedspu()), str(command))
        text = text.replace("/opt/fedspu/bin/fedspu", str(command))
        text = text.replace("User=fedspu", "User=root")
        (units / f"{name}.service").write_text(text)
        found = subprocess.run(
            ["systemd-analyze", "verify", f"{units}/{name}.service"],
            capture_output=True,
            text=True,
            check=False,
        )
        ours = [line for line in found.stderr.splitlines() if f"{name}.service" in line]
        assert ours == []


def test_compose_files_are_yaml_and_call_fedspu(tmp_path: Path) -> None:
    server = made(tmp_path / "lab", "A_1")
    read = yaml.safe_load((server.folder / "compose.yaml").read_text())
    service = read["services"]["server"]
    assert service["command"][:3] == ["fedspu", "deploy", "server"]
    assert service["ports"] == ["8000:8000"]
    assert service["volumes"] == [".:/deployment/server"]
    read = yaml.safe_load((server.root / "devices/A_1/compose.yaml").read_text())
    service = read["services"]["device-a_1"]
    assert service["command"] == ["fedspu", "deploy", "device", "/device"]
    assert service["read_only"] is True
    assert "ports" not in service
