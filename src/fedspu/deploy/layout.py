"""Which file of a deployment is where, and what its two TOML files say."""

import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import tomli_w

from fedspu.errors import DeploymentError, SettingsError
from fedspu.files import write_whole
from fedspu.settings_text import nearest, one_line, read_toml

NAME = re.compile(r"[A-Za-z0-9_-]{1,63}")
LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


# Names, hosts and ports ---------------------------------------------------------------


def check_names(text: str, option: str) -> list[str]:
    """Names of devices separated by commas."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        check_name(name, option)
    # On some disks Attic and attic are the same folder.
    folded = [name.lower() for name in names]
    for number, name in enumerate(names):
        if name.lower() in folded[:number]:
            raise SettingsError(f"{option}: {name} is there twice; names must differ")
    return names


def check_name(name: str, option: str) -> str:
    """The name of a device, if it can be one."""
    if not NAME.fullmatch(name):
        raise SettingsError(
            f"{option} {one_line(name)!r}: expected a name of at most 63 letters, "
            "digits, - and _, like kitchen"
        )
    return name


def check_host(host: str) -> str:
    """A host's name or IP address, if it can be one."""
    try:
        return str(ip_address(host))
    except ValueError:
        pass
    labels = host.rstrip(".").split(".")
    is_number = labels[-1].isdigit()  # 10.0.0.256 is meant as an address
    if len(host) > 253 or is_number or not all(map(LABEL.fullmatch, labels)):
        raise SettingsError(
            f"--host {one_line(host)!r}: expected a name or an IP address, like "
            "fl.example.org or 192.168.1.10, without a port"
        )
    return host.rstrip(".").lower()


def check_port(port: int, option: str = "--port") -> int:
    """A port that a server can listen on."""
    if not 1 <= port <= 65535:
        raise SettingsError(f"{option} {port}: expected a number from 1 to 65535")
    return port


def address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str, where: str) -> tuple[str, int]:
    """The host and the port of an address like fl.example.org:8000."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise DeploymentError(
            f"{where}: server = {text!r}: expected an address with its port, like "
            "fl.example.org:8000"
        )
    return host, int(port)


# The server's part --------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """The server's part of a deployment, in the folder ``root``."""

    root: Path
    port: int
    bind: str  # the address of this machine to listen on
    hosts: tuple[str, ...]  # by which devices reach it; they use the first
    data: str  # where a device finds its examples, if it says nothing else
    task: str
    capacities: Mapping[str, float]  # of each device, in the order of clients

    @property
    def folder(self) -> Path:
        """All that the server needs; nothing else has to be on its machine."""
        return self.root / "server"

    @property
    def authority(self) -> Path:
        """The authority's certificate, which is no secret."""
        return self.folder / "ca.crt"

    @property
    def certificate(self) -> Path:
        """The server's certificate."""
        return self.folder / "server.crt"

    @property
    def key(self) -> Path:
        """The server's private key."""
        return self.folder / "server.key"

    @property
    def app(self) -> Path:
        """The folder of the app that `flwr run` starts."""
        return self.folder / "app"

    @property
    def public_keys(self) -> Path:
        """The folder with the public key of each device."""
        return self.folder / "public-keys"

    @property
    def registered(self) -> Path:
        """Which keys the SuperLink has been told, and its number for each."""
        return self.folder / "registered.json"

    @property
    def home(self) -> Path:
        """Flower's own folder (FLWR_HOME)."""
        return self.folder / "flwr"

    @property
    def database(self) -> Path:
        """The SuperLink's database: runs, registered keys, messages under way."""
        return self.folder / "state.db"

    @property
    def run(self) -> Path:
        """The run folder: records, the global model, checkpoints."""
        return self.folder / "run"

    @property
    def local_host(self) -> str:
        """The address at which this machine itself reaches the server."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.bind, self.bind)

    @property
    def public_address(self) -> str:
        """The address that devices use."""
        return address(self.hosts[0], self.port)

    def to_toml(self) -> str:
        """Its file, server.toml."""
        return tomli_w.dumps(
            {
                "port": self.port,
                "bind": self.bind,
                "hosts": list(self.hosts),
                "data": self.data,
                "task": self.task,
                "capacities": dict(self.capacities),
            }
        )

    def write(self) -> None:
        """Write server.toml."""
        write_whole(self.folder / "server.toml", self.to_toml().encode(), durable=True)

    @staticmethod
    def read(root: Path) -> "Server":
        """The server's part of the deployment in a folder."""
        file = root / "server" / "server.toml"
        if not file.is_file():
            raise DeploymentError(
                f"{one_line(root)}: no deployment is there (server/server.toml is "
                "missing); make one with `fedspu deploy init`"
            )
        values = _values(file, SERVER)
        if not values["hosts"] or not all(isinstance(h, str) for h in values["hosts"]):
            raise DeploymentError(f"{file}: hosts: expected a list of names")
        for name, p in values["capacities"].items():
            _check_capacity(file, f"capacities.{name}", p)
        check_port(values["port"], f"{file}: port")
        hosts = tuple(values.pop("hosts"))
        return Server(root=root.absolute(), hosts=hosts, **values)


SERVER = {
    "port": int,
    "bind": str,
    "hosts": list,
    "data": str,
    "task": str,
    "capacities": dict,
}


# A device's part ----------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """A device's part of a deployment, in the folder ``root``."""

    root: Path
    name: str
    server: str  # host:port
    capacity: float
    data: str  # as --data of `fedspu run`; files are looked up in ``root``
    folder: str  # where its models are kept
    task: str  # what is learned; only to check the data

    @property
    def key(self) -> Path:
        """Its private key."""
        return self.root / "key"

    @property
    def authority(self) -> Path:
        """The certificate of the authority that signed the server's."""
        return self.root / "ca.crt"

    @property
    def home(self) -> Path:
        """Flower's own folder (FLWR_HOME)."""
        return self.root / "flwr"

    @property
    def models(self) -> Path:
        """Where its own models are kept."""
        return self.root / Path(self.folder).expanduser()

    @property
    def absolute_data(self) -> str:
        """Its data, with the full path of its file, if it is one."""
        from fedspu.data import DATASETS

        kind, _, file = self.data.partition(":")
        if kind in DATASETS and file:
            return f"{kind}:{self.root / Path(file).expanduser()}"
        return self.data

    @property
    def node_config(self) -> dict[str, Any]:
        """What the app on this device is told about it."""
        return {
            "name": self.name,
            "capacity": float(self.capacity),
            "data": self.absolute_data,
            "folder": str(self.models),
        }

    def to_toml(self) -> str:
        """Its file, device.toml."""
        values = asdict(self)
        del values["root"]
        return tomli_w.dumps(values)

    @staticmethod
    def read(root: Path) -> "Device":
        """The device whose folder this is."""
        file = root / "device.toml"
        if not file.is_file():
            raise DeploymentError(
                f"{one_line(root)}: no device's folder (device.toml is missing); "
                "expected a folder of devices/ that `fedspu deploy init` made"
            )
        values = _values(file, DEVICE)
        check_name(values["name"], f"{file}: name")
        split_address(values["server"], str(file))
        _check_capacity(file, "capacity", values["capacity"])
        return Device(root=root.absolute(), **values)


DEVICE = {
    "name": str,
    "server": str,
    "capacity": (int, float),
    "data": str,
    "folder": str,
    "task": str,
}


# Files --------------------------------------------------------------------------------


def _values(file: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    values = read_toml(file)
    for name in values:
        if name not in wanted:
            raise DeploymentError(
                f"{file}: {one_line(name)}: no such entry{nearest(name, list(wanted))}"
            )
    for name, kind in wanted.items():
        if name not in values:
            raise DeploymentError(f"{file}: {name} is missing")
        if not isinstance(values[name], kind) or isinstance(values[name], bool):
            words = {int: "a whole number", str: "a text", list: "a list"}.get(
                kind, "a table" if kind is dict else "a number"
            )
            raise DeploymentError(
                f"{file}: {name} = {one_line(values[name])}: expected {words}"
            )
    return values


def _check_capacity(file: Path, name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 1:
        raise DeploymentError(
            f"{file}: {name} = {one_line(value)}: expected a number in (0, 1]"
        )


def is_private(file: Path) -> bool:
    """Whether only its owner can read a file."""
    return not stat.S_IMODE(file.stat().st_mode) & 0o077


def check_private_key(file: Path, how_to_get: str) -> None:
    """Refuse a private key that is missing, or that others can read."""
    if not file.is_file():
        raise DeploymentError(f"{file} is missing; {how_to_get}")
    if not is_private(file):
        raise DeploymentError(f"{file} can be read by others; run `chmod 600 {file}`")


def names_of_keys(server: Server) -> Iterable[str]:
    """The devices whose keys the server should know, sorted."""
    return sorted(file.stem for file in server.public_keys.glob("*.pub"))
