"""Making a deployment and changing it: files only, no connections."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from fedspu.deploy import keys, templates
from fedspu.deploy.app import app_config, with_devices, write_app
from fedspu.deploy.layout import Device, Server, address, check_private_key
from fedspu.deploy.processes import write_connection
from fedspu.errors import DeploymentError
from fedspu.files import read_file, sync_folder, write_whole
from fedspu.settings import Settings

AUTHORITY_DAYS = 3650
"""Days that the authority is valid; the server's certificate is renewed in between."""

MODELS = "models"
"""Where a device keeps its models, in its own folder."""


def make(
    root: Path,
    settings: Settings,
    capacities: Mapping[str, float],
    *,
    hosts: Sequence[str] = (),
    port: int = 8000,
    days: int = 365,
) -> Server:
    """Make a whole deployment in a new folder, or nothing at all."""
    root = root.expanduser().absolute()
    hosts = tuple(dict.fromkeys(hosts)) or ("localhost",)
    is_local = all(host in keys.ALWAYS for host in hosts)
    bind = "127.0.0.1" if is_local else "0.0.0.0"
    data, task = settings.data.name, settings.task
    server = Server(root, port, bind, hosts, data, task, capacities)
    with _new_folder(root) as made:
        authority = keys.make_authority(keys.Period.of_days(AUTHORITY_DAYS))
        _folder(made / "ca")
        _write(made / "ca" / "ca.key", authority.private, private=True)
        _write(made / "ca" / "ca.crt", authority.public)
        at_first = replace(server, root=made)
        pair = keys.make_server_certificate(authority, hosts, keys.Period.of_days(days))
        _write_server(at_first, server, pair, authority.public)
        config = app_config(settings, server.run, len(capacities))
        write_app(at_first.app, config, version("fedspu"))
        _folder(made / "devices")
        for name, capacity in capacities.items():
            key = keys.make_device_key()
            device = _device(at_first, name, capacity)
            _write_device(device, key, authority.public)
            _write(at_first.public_keys / f"{name}.pub", key.public)
        _write(made / "README.md", templates.readme(server).encode())
    return server


def add(root: Path, name: str, capacity: float, data: str | None) -> Device:
    """Make a folder and a key for one more device, and let the server know it."""
    server = Server.read(root)
    if name.lower() in {known.lower() for known in server.capacities}:
        raise DeploymentError(
            f"{name} is one of the devices already; for a new key use "
            f"`fedspu deploy rotate {root} {name}`"
        )
    changed = replace(server, capacities={**server.capacities, name: capacity})
    app = with_devices(server.app, server.run, changed.capacities)
    key = keys.make_device_key()
    device = _device(server, name, capacity, data)
    (server.root / "devices").mkdir(mode=0o700, exist_ok=True)
    with _new_folder(device.root) as made:
        # The folder is made elsewhere first, but says where it will be.
        _write_device(replace(device, root=made), key, read_file(server.authority))
    _change(changed, app)
    _write(server.public_keys / f"{name}.pub", key.public)
    return device


def remove(root: Path, name: str) -> None:
    """Take a device's public key away from the server; its folder stays as it is."""
    server = Server.read(root)
    check_known(server, name)
    if len(server.capacities) == 1:
        raise DeploymentError(
            f"{name} is the only device; add another one first, with "
            f"`fedspu deploy add {root} NAME`"
        )
    left = {other: p for other, p in server.capacities.items() if other != name}
    changed = replace(server, capacities=left)
    app = with_devices(server.app, server.run, left)
    # The key first: if this is interrupted, the device is out, and it can be repeated.
    (server.public_keys / f"{name}.pub").unlink(missing_ok=True)
    _change(changed, app)


def rotate(root: Path, name: str) -> Device:
    """Make a new key for a device; its other files are made again if they are gone."""
    server = Server.read(root)
    check_known(server, name)
    key = keys.make_device_key()
    device = _device(server, name, server.capacities[name])
    if (device.root / "device.toml").is_file():
        _write(device.root / "key", key.private, private=True)
        _write(device.root / "key.pub", key.public)
    else:
        (server.root / "devices").mkdir(mode=0o700, exist_ok=True)
        with _new_folder(device.root) as made:
            _write_device(replace(device, root=made), key, read_file(server.authority))
    _write(server.public_keys / f"{name}.pub", key.public)
    return device


def renew(root: Path, days: int) -> keys.Certificate:
    """Make a new key and certificate for the server, by the same authority."""
    server = Server.read(root)
    signing = root / "ca" / "ca.key"
    check_private_key(signing, "put the folder ca/ back that was made with this one")
    authority = keys.Pair(read_file(signing), read_file(root / "ca" / "ca.crt"))
    if authority.public != read_file(server.authority):
        raise DeploymentError(
            f"{root / 'ca'} is of another deployment: devices would refuse a "
            "certificate that it signs"
        )
    pair = keys.make_server_certificate(
        authority, server.hosts, keys.Period.of_days(days)
    )
    _write(server.key, pair.private, private=True)
    _write(server.certificate, pair.public)
    sync_folder(server.folder)
    return keys.read_certificate(pair.public, str(server.certificate))


def check_known(server: Server, name: str) -> None:
    """Refuse the name of a device that is not there."""
    if name not in server.capacities:
        raise DeploymentError(
            f"{name!r}: no such device; expected one of {', '.join(server.capacities)}"
        )


# Parts --------------------------------------------------------------------------------


def _device(
    server: Server, name: str, capacity: float, data: str | None = None
) -> Device:
    return Device(
        root=server.root / "devices" / name,
        name=name,
        server=address(server.hosts[0], server.port),
        capacity=capacity,
        data=data or server.data,
        folder=MODELS,
        task=server.task,
    )


def _change(server: Server, app: bytes) -> None:
    _write(server.app / "pyproject.toml", app)
    server.write()
    sync_folder(server.folder)


def _write_server(
    made: Server, final: Server, pair: keys.Pair, authority: bytes
) -> None:
    """Write the server's part; texts name the folder in which it will be."""
    _folder(made.folder)
    for folder in (made.public_keys, made.home):
        _folder(folder)
    made.write()
    _write(made.authority, authority)
    _write(made.certificate, pair.public)
    _write(made.key, pair.private, private=True)
    write_connection(made, final.authority)
    unit, compose = templates.server_unit(final), templates.server_compose(final)
    _write(made.folder / "superlink.service", unit.encode())
    _write(made.folder / "compose.yaml", compose.encode())


def _write_device(made: Device, key: keys.Pair, authority: bytes) -> None:
    made.root.mkdir(mode=0o700, exist_ok=True)
    _write(made.key, key.private, private=True)
    _write(made.root / "key.pub", key.public)
    _write(made.authority, authority)
    _write(made.root / "device.toml", made.to_toml().encode())
    _write(made.root / "supernode.service", templates.device_unit(made).encode())
    _write(made.root / "compose.yaml", templates.device_compose(made).encode())


def _write(path: Path, content: bytes, private: bool = False) -> None:
    write_whole(path, content, durable=True, private=private)


def _folder(path: Path) -> None:
    path.mkdir(mode=0o700)


@contextmanager
def _new_folder(final: Path) -> Iterator[Path]:
    """A folder that gets its name once it is whole; on an error nothing is left."""
    if final.is_symlink() or (final.exists() and not final.is_dir()):
        raise DeploymentError(f"{final} is not a folder; choose another name")
    if final == Path.cwd():
        raise DeploymentError(f"{final} is where you are; choose a new folder in it")
    if final.is_dir() and any(final.iterdir()):
        raise DeploymentError(f"{final} is not empty; choose another folder")
    made = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
        yield made
        os.rename(made, final)
        sync_folder(final.parent)
    except OSError as error:
        _drop(made)
        raise DeploymentError(
            f"{final} cannot be made ({error.strerror or error})"
        ) from None
    except BaseException:
        _drop(made)
        raise


def _drop(made: Path | None) -> None:
    if made is not None:
        shutil.rmtree(made, ignore_errors=True)
