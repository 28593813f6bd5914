"""Try everything that a server or a device needs, one finding for each."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedspu.deploy import control, fleet, keys, serving, supervising
from fedspu.deploy.layout import Device, Server, address, split_address
from fedspu.deploy.probe import Answer, reach
from fedspu.deploy.superlink import versions
from fedspu.errors import DeploymentError, FedSPUError
from fedspu.files import read_file

LEAST_DISK = 200 * 10**6
"""Bytes that must be free where models are kept."""

SOON = timedelta(days=14)
"""A certificate that expires within this time is worth a warning."""

AHEAD, BEHIND, APART = 5.0, 305.0, 60.0
"""Seconds by which clocks may differ: Flower's limits, and when to warn."""


@dataclass(frozen=True)
class Finding:
    """One thing that was tried: ok, warning or wrong, and what to do next."""

    what: str
    state: str
    text: str

    @property
    def is_wrong(self) -> bool:
        """Whether it keeps the deployment from working."""
        return self.state == "wrong"


def ok(what: str, text: str) -> Finding:
    """All is well."""
    return Finding(what, "ok", text)


def warning(what: str, text: str) -> Finding:
    """It works, but may not for long."""
    return Finding(what, "warning", text)


def wrong(what: str, text: object) -> Finding:
    """It does not work."""
    return Finding(what, "wrong", str(text))


# On the server's machine --------------------------------------------------------------


def check_server(server: Server) -> Iterator[Finding]:
    """Try all that the server needs, and every device that it should know."""
    yield _server_files(server)
    yield from _folder("run folder", server.run)
    try:
        control.reach_server(server)
    except DeploymentError as error:
        yield _not_running(server, error)
        return
    yield ok("server", f"answers at {address(server.local_host, server.port)}")
    for host in server.hosts:
        yield _name(server, host)
    try:
        states = control.device_states(server)
    except DeploymentError as error:
        yield wrong("devices", error)
        return
    for name, state in states.items():
        yield _device_state(server, name, state)


def _server_files(server: Server) -> Finding:
    try:
        found = serving.check_files(server)
    except DeploymentError as error:
        return wrong("certificate", error)
    end = f"{found.period.end:%Y-%m-%d}"
    if found.period.end - datetime.now(UTC) < SOON:
        how = f"`fedspu deploy renew {server.root}`"
        return warning("certificate", f"expires soon, on {end}; {how}")
    return ok("certificate", f"for {', '.join(found.names)}; valid until {end}")


def _not_running(server: Server, why: DeploymentError) -> Finding:
    try:
        serving.check_port_is_free(server)
    except DeploymentError as error:
        return wrong("server", f"{error} ({why})")
    return wrong(
        "server", f"does not run; start it with `fedspu deploy server {server.root}`"
    )


def _name(server: Server, host: str) -> Finding:
    """Whether devices that use this name reach this server."""
    try:
        reach(host, server.port, server.authority)
    except DeploymentError as error:
        if server.bind == server.local_host and host != server.local_host:
            more = f"; it listens only on {server.bind} (bind in server.toml)"
            return wrong(f"name {host}", f"{error}{more}")
        return wrong(f"name {host}", error)
    return ok(f"name {host}", "leads to this server")


def _device_state(server: Server, name: str, state: str) -> Finding:
    if state == "not registered":
        how = f"restart the server, or `fedspu deploy rotate {server.root} {name}`"
        return wrong(f"device {name}", f"its key is not registered; {how}")
    if state != "online":
        how = "on the device, run `fedspu deploy device` with its folder"
        return warning(f"device {name}", f"registered, {state}; {how}")
    return ok(f"device {name}", "registered, online")


# On a device --------------------------------------------------------------------------


def check_device(device: Device) -> Iterator[Finding]:
    """Try all that a device needs."""
    has_key = True
    try:
        supervising.check_device_files(device)
        yield ok("key", f"{device.key} is there, and only its owner can read it")
    except FedSPUError as error:
        has_key = False
        yield wrong("key", error)
    yield from _folder("folder", device.models)
    yield _data(device)
    try:
        answer = reach(*split_address(device.server, device.name), device.authority)
    except DeploymentError as error:
        yield wrong("server", error)
        return
    yield ok("server", f"answers at {device.server}, with the right certificate")
    yield _clock(answer)
    yield from _versions(answer)
    if has_key:
        yield _key(device, answer)


def _data(device: Device) -> Finding:
    from fedspu.data import load
    from fedspu.data.splits import MIN_EXAMPLES
    from fedspu.tasks import find_task

    try:
        with chdir(device.root):  # as the app; own modules are looked up there
            found = load(device.absolute_data, None, find_task(device.task))
    except FedSPUError as error:
        return wrong("data", f"{error}; change data in {device.root / 'device.toml'}")
    text = f"{device.data}: {len(found.x):,} examples"
    if len(found.x) < MIN_EXAMPLES:
        how = f"expected at least {MIN_EXAMPLES}, to train, validate and test"
        return wrong("data", f"{text}; {how}")
    return ok("data", text)


def _clock(answer: Answer) -> Finding:
    if answer.ahead is None:
        return warning("clock", "the server does not say its time; nothing to compare")
    text = supervising.describe_ahead(answer.ahead)
    # The server says whole seconds, and its answer takes time.
    if answer.ahead > AHEAD + 2 or answer.ahead < -BEHIND:
        return wrong(
            "clock",
            f"{text}: the server refuses what this device signs; set the clock",
        )
    if abs(answer.ahead) > APART:
        return warning("clock", f"{text}: more than a minute apart; set the clock")
    return ok("clock", "as the server's, to a few seconds")


def _versions(answer: Answer) -> Iterator[Finding]:
    for name, here in versions().items():
        there = answer.versions.get(name)
        what = f"version of {name}"
        if there is None:
            yield warning(what, f"{here}; the server does not say which it has")
        elif there == here:
            yield ok(what, here)
        elif name == "torch":
            text = f"{here}, the server has {there}; results may differ in last digits"
            yield warning(what, text)
        else:
            yield wrong(what, f"{here}, but the server has {there}; install the same")


def _key(device: Device, answer: Answer) -> Finding:
    try:
        problem = supervising.key_in_words(device, fleet.ask(device), answer)
    except DeploymentError as error:
        problem = str(error)
    if problem:
        return wrong("registration", problem)
    public = keys.public_part(read_file(device.key), str(device.key))
    mark = keys.mark_of_key(public)[:12]
    return ok("registration", f"the server knows this device's key ({mark})")


# Both ---------------------------------------------------------------------------------


def _folder(what: str, folder: Path) -> Iterator[Finding]:
    """Whether a folder can be written, or made, and whether the disk has room."""
    place = folder
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        yield wrong(what, f"{place} is not a folder")
        return
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield wrong(what, f"{place} cannot be written ({error.strerror}); who owns it?")
        return
    free = shutil.disk_usage(place).free
    if free < LEAST_DISK:
        yield wrong(
            what,
            f"only {free / 1e6:.0f} MB are free in {place}; make room for at least "
            f"{LEAST_DISK / 1e6:.0f} MB",
        )
    else:
        yield ok(what, f"{folder} can be written, {free / 1e9:.1f} GB are free")
