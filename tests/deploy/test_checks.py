"""What ``fedspu deploy check`` finds; the server is a stand-in."""

import re
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspu.deploy import control, fleet, keys
from fedspu.deploy.checks import Finding, check_device, check_server
from fedspu.deploy.layout import Device, Server
from fedspu.deploy.processes import free_port
from fedspu.deploy.superlink import versions
from tests.deploy.stand_ins import VALID, https_server, made


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return made(tmp_path / "lab", "a", port=free_port())


@pytest.fixture
def device(server: Server) -> Device:
    return Device.read(server.root / "devices" / "a")


def pair_of(server: Server) -> keys.Pair:
    return keys.Pair(server.key.read_bytes(), server.certificate.read_bytes())


def by_name(findings: Any) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


def found_on(
    device: Device,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    knows: fleet.Knows = fleet.Knows.YES,
    **said: Any,
) -> dict[str, Finding]:
    """What is found on a device while a server says this."""
    monkeypatch.setattr(fleet, "ask", lambda device: knows)
    with https_server(server.root, pair_of(server), **said) as port:
        return by_name(check_device(replace(device, server=f"localhost:{port}")))


def test_all_is_well_on_a_device(
    device: Device, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = found_on(device, server, monkeypatch)
    assert list(found) == [
        "key",
        "folder",
        "data",
        "server",
        "clock",
        "version of fedspu",
        "version of flwr",
        "version of torch",
        "registration",
    ]
    assert {finding.state for finding in found.values()} == {"ok"}
    assert found["data"].text == "digits: 1,797 examples"


def test_a_server_that_cannot_be_reached(device: Device) -> None:
    found = by_name(check_device(device))
    assert "the port is closed" in found["server"].text
    assert found["server"].is_wrong
    assert "clock" not in found


@pytest.mark.parametrize(
    ("ahead", "state", "words"),
    [
        (20, "wrong", r"2\d seconds \(this machine is ahead\): the server refuses"),
        (-600, "wrong", r"10 minutes \(this machine is behind\)"),
        (-90, "warning", "more than a minute apart"),
        (-20, "ok", "as the server's"),
        (86400 * 30, "wrong", "30 days"),
    ],
)
def test_clocks(
    device: Device,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    ahead: float,
    state: str,
    words: str,
) -> None:
    found = found_on(device, server, monkeypatch, ahead=ahead)
    assert found["clock"].state == state
    assert re.search(words, found["clock"].text)


def test_another_version(
    device: Device, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"fedspu": "9.9", "flwr": versions()["flwr"], "torch": "1.0"}
    found = found_on(device, server, monkeypatch, found=others)
    assert found["version of fedspu"].is_wrong
    assert "the server has 9.9; install the same" in found["version of fedspu"].text
    assert found["version of flwr"].state == "ok"
    assert found["version of torch"].state == "warning"
    found = found_on(device, server, monkeypatch, found={})
    assert found["version of fedspu"].state == "warning"


@pytest.mark.parametrize(
    ("knows", "words"),
    [
        (fleet.Knows.NO, "does not know the key of a; if it has only just started"),
        (fleet.Knows.CLOCK, "their clocks differ by"),
    ],
)
def test_a_key_that_is_refused(
    device: Device,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    knows: fleet.Knows,
    words: str,
) -> None:
    found = found_on(device, server, monkeypatch, knows)
    assert found["registration"].is_wrong
    assert words in found["registration"].text


def test_a_key_that_others_can_read(device: Device) -> None:
    device.key.chmod(0o640)
    found = by_name(check_device(device))
    assert "can be read by others; run `chmod 600" in found["key"].text
    device.key.unlink()
    found = by_name(check_device(device))
    assert "is missing; copy the device's folder again" in found["key"].text


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("arrays:none.npz", "none.npz"),
        ("digitz", "expected one of"),
        ("no_such_module:load", "no module named no_such_module"),
        ("loading:fails", "it raised ValueError: no disk"),
        ("loading:one", "it returned a int; expected a tuple (x, y)"),
        ("cifar10", "cifar10"),
    ],
)
def test_data_that_cannot_be_loaded(device: Device, data: str, words: str) -> None:
    (device.root / "loading.py").write_text(
        "def fails(): raise ValueError('no disk')\ndef one(): return 1\n"
    )
    found = by_name(check_device(replace(device, data=data)))
    assert found["data"].is_wrong
    assert words in found["data"].text
    assert "device.toml" in found["data"].text


def test_data_of_the_device_s_own(device: Device) -> None:
    x, y = np.zeros((7, 1, 8, 8), np.float32), np.arange(7) % 2
    np.savez(device.root / "mine.npz", x=x, y=y)
    (device.root / "own_loader.py").write_text(
        "import numpy as np\n"
        "def load(): return np.zeros((5, 1, 8, 8), np.float32), np.arange(5) % 2\n"
    )
    found = by_name(check_device(replace(device, data="arrays:mine.npz")))
    assert found["data"].text == "arrays:mine.npz: 7 examples"
    found = by_name(check_device(replace(device, data="own_loader:load")))
    assert found["data"].text == "own_loader:load: 5 examples"


def test_too_few_examples(device: Device) -> None:
    x, y = np.zeros((2, 1, 8, 8), np.float32), np.arange(2)
    np.savez(device.root / "few.npz", x=x, y=y)
    found = by_name(check_device(replace(device, data="arrays:few.npz")))
    assert found["data"].is_wrong
    assert "2 examples; expected at least 3" in found["data"].text


def test_a_disk_that_is_nearly_full(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**7))
    found = by_name(check_device(device))
    assert found["folder"].is_wrong
    assert "only 10 MB are free" in found["folder"].text


def test_a_folder_that_cannot_be_written(device: Device) -> None:
    (device.root / "models").touch()
    found = by_name(check_device(device))
    assert "models is not a folder" in found["folder"].text
    found = by_name(check_device(replace(device, folder="/proc/models")))
    assert "/proc cannot be written" in found["folder"].text


# On the server's machine --------------------------------------------------------------


def test_a_server_that_does_not_run(server: Server) -> None:
    found = by_name(check_server(server))
    assert found["certificate"].state == "ok"
    assert "does not run; start it with `fedspu deploy server" in found["server"].text


def test_a_port_that_something_else_uses(server: Server) -> None:
    with https_server(server.root, None) as port:
        found = by_name(check_server(replace(server, port=port)))
    assert "the port is in use; another program listens there" in found["server"].text


def test_the_server_and_its_devices(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {"a": "online", "b": "offline", "c": "not registered"}
    monkeypatch.setattr(control, "device_states", lambda server: states)
    with https_server(server.root, pair_of(server)) as port:
        found = by_name(check_server(replace(server, port=port)))
    assert found["server"].state == found["name localhost"].state == "ok"
    assert found["device a"].state == "ok"
    assert found["device b"].state == "warning"
    assert found["device c"].is_wrong


def test_a_name_that_leads_nowhere(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "device_states", lambda server: {})
    with https_server(server.root, pair_of(server)) as port:
        here = replace(server, port=port, hosts=("127.0.0.2",))
        found = by_name(check_server(here))
    assert found["certificate"].is_wrong
    assert "it listens only on 127.0.0.1" in found["name 127.0.0.2"].text


def test_a_certificate_that_expires_soon(server: Server) -> None:
    ca = server.root / "ca"
    authority = keys.Pair((ca / "ca.key").read_bytes(), (ca / "ca.crt").read_bytes())
    pair = keys.make_server_certificate(authority, [], VALID)
    server.key.write_bytes(pair.private)
    server.certificate.write_bytes(pair.public)
    found = by_name(check_server(server))["certificate"]
    assert found.state == "warning"
    assert "expires soon" in found.text
