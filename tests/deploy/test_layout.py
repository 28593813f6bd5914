"""Names, addresses, and the two TOML files."""

from pathlib import Path
from typing import Any

import pytest

from fedspu.deploy.layout import (
    Device,
    Server,
    address,
    check_host,
    check_names,
    split_address,
)
from fedspu.errors import DeploymentError, SettingsError
from tests.deploy.stand_ins import made


def test_good_names() -> None:
    names = f"kitchen, hall_2,A-1,{'x' * 63}"
    assert check_names(names, "--devices")[:3] == ["kitchen", "hall_2", "A-1"]


@pytest.mark.parametrize(
    "names", ["", "a,,b", "a b", "a/b", "..", "x" * 64, "küche", "a\nb", "a.b"]
)
def test_names_that_no_device_can_have(names: str) -> None:
    with pytest.raises(SettingsError, match="expected a name of at most 63 letters"):
        check_names(names, "--devices")


@pytest.mark.parametrize("names", ["a,b,a", "Attic,attic"])
def test_names_that_are_there_twice(names: str) -> None:
    with pytest.raises(SettingsError, match="twice"):
        check_names(names, "--devices")


def test_good_hosts() -> None:
    assert check_host("FL.example.org.") == "fl.example.org"
    assert check_host("192.168.1.10") == "192.168.1.10"
    assert check_host("0:0:0:0:0:0:0:1") == "::1"


@pytest.mark.parametrize(
    "host",
    ["", "a:8000", "https://a", "10.0.0.256", "a b", "-a", "a..b", "a" * 300, "*.a"],
)
def test_what_is_no_host(host: str) -> None:
    with pytest.raises(SettingsError, match="expected a name or an IP address"):
        check_host(host)


@pytest.mark.parametrize("host", ["lab.example", "10.0.0.7", "::1"])
def test_an_address_is_split_as_it_was_joined(host: str) -> None:
    assert split_address(address(host, 8000), "here") == (host, 8000)


@pytest.mark.parametrize(
    "text", ["", "lab", "lab:", ":8000", "lab:x", "lab:0", "a:1e5"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(DeploymentError, match="expected an address with its port"):
        split_address(text, "here")


def test_both_parts_are_read_as_they_were_written(tmp_path: Path) -> None:
    server = made(tmp_path / "lab", "a", "b")
    assert Server.read(tmp_path / "lab") == server
    device = Device.read(tmp_path / "lab" / "devices" / "a")
    assert (device.name, device.server, device.capacity) == ("a", "localhost:8000", 0.5)
    assert (device.data, device.task) == ("digits", "classification")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("capacity = 0.5", "capacity = 2", r"capacity = 2: expected a number in \(0"),
        ("capacity = 0.5", "capacity = true", "capacity = True: expected a number"),
        ("capacity = 0.5", "", "capacity is missing"),
        ("capacity", "capaciti", r"capaciti: no such entry \(did you mean capacity"),
        ('"localhost:8000"', '"localhost"', "expected an address with its port"),
        ('"a"', '"../a"', "expected a name of at most 63"),
        ('"digits"', "3", "data = 3: expected a text"),
        ('"digits"', "", "not valid TOML"),
    ],
)
def test_a_wrong_device_file(
    tmp_path: Path, before: str, after: str, words: str
) -> None:
    made(tmp_path / "lab", "a")
    file = tmp_path / "lab" / "devices" / "a" / "device.toml"
    file.write_text(file.read_text().replace(before, after))
    with pytest.raises((DeploymentError, SettingsError), match=words):
        Device.read(file.parent)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("port = 8000", "port = 0", "expected a number from 1 to 65535"),
        ("port = 8000", 'port = "x"', "port = x: expected a whole number"),
        ("a = 0.5", "a = 0", r"capacities\.a = 0: expected a number in \(0"),
        ('"localhost"', "1", "hosts: expected a list of names"),
        ("[capacities]", "[capacitys]", "no such entry"),
    ],
)
def test_a_wrong_server_file(
    tmp_path: Path, before: str, after: str, words: str
) -> None:
    server = made(tmp_path / "lab", "a")
    file = server.folder / "server.toml"
    file.write_text(file.read_text().replace(before, after))
    with pytest.raises((DeploymentError, SettingsError), match=words):
        Server.read(server.root)


def test_a_relative_file_is_in_the_device_s_own_folder(tmp_path: Path) -> None:
    given: dict[str, Any] = {"data.name": "arrays:x.npz", "model": "m:b"}
    server = made(tmp_path / "lab", "a", **given)
    device = Device.read(server.root / "devices" / "a")
    assert device.node_config == {
        "name": "a",
        "capacity": 0.5,
        "data": f"arrays:{device.root}/x.npz",
        "folder": f"{device.root}/models",
    }
