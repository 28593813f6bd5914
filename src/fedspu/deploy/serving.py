"""The server in the foreground: ``fedspu deploy server``."""

import errno
import socket
import subprocess
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from fedspu.deploy import control, keys
from fedspu.deploy.layout import Server, address, check_private_key, names_of_keys
from fedspu.deploy.processes import (
    end,
    start,
    superlink_command,
    until_told_to_end,
    write_connection,
)
from fedspu.errors import DeploymentError
from fedspu.files import read_file

START = 120.0
"""Seconds that the SuperLink may take until it answers."""

Say = Callable[[str], None]


def serve(server: Server, say: Say) -> None:
    """Run the server until it is told to end; refuses what cannot work in one line."""
    check_files(server)
    check_port_is_free(server)
    write_connection(server)
    with until_told_to_end() as told:
        process = start(superlink_command(server), server.home, server.folder)
        try:
            _wait_until_it_answers(server, process, told)
            _register(server, told, say)
            while process.poll() is None and not told.wait(0.5):
                pass
        finally:
            end(process)
    if not told.is_set():
        raise DeploymentError(why_it_ended(server, process.returncode))
    say("ended")


def why_it_ended(server: Server, code: int) -> str:
    """Why the SuperLink ended by itself, and how the run goes on."""
    why = f"by itself (exit code {code}): the lines above say why."
    if code < 0:
        why = f"by signal {-code}: was it killed, or is there too little memory?"
    return (
        f"the SuperLink was ended {why} Start this server again, and carry on from the "
        f"last saved round with `fedspu deploy start {server.root}`"
    )


def _register(server: Server, told: threading.Event, say: Say) -> None:
    """Register the devices' keys, and say that the server is ready."""
    if told.is_set():
        return
    for line in control.register(server):
        say(line)
        if told.is_set():
            return
    where = address(server.bind, server.port)
    number = len(server.capacities)
    say(f"ready: listening on {where} for {number} devices; Ctrl-C ends it")


def _wait_until_it_answers(
    server: Server, process: subprocess.Popen[bytes], told: threading.Event
) -> None:
    until = datetime.now(UTC).timestamp() + START
    while not told.wait(0.5):
        if process.poll() is not None:
            raise DeploymentError(
                f"the SuperLink did not start (exit code {process.returncode}); its "
                "messages above say why"
            )
        if control.is_running(server):
            return
        if datetime.now(UTC).timestamp() > until:
            control.reach_server(server)  # says what is wrong
            return


def check_files(server: Server) -> keys.Certificate:
    """Refuse a server whose key or certificate cannot be used."""
    how = f"make a new one with `fedspu deploy renew {server.root}`"
    check_private_key(server.key, how)
    for file in (server.certificate, server.authority, server.app / "pyproject.toml"):
        if not file.is_file():
            raise DeploymentError(f"{file} is missing; {how}")
    certificate = read_file(server.certificate)
    found = keys.read_certificate(certificate, str(server.certificate))
    _check_period(found, server.certificate, how)
    authority = read_file(server.authority)
    issuer = keys.read_certificate(authority, str(server.authority))
    _check_period(issuer, server.authority, "make a new deployment")
    if not keys.is_signed_by(certificate, authority):
        raise DeploymentError(
            f"{server.certificate} is not signed by the authority in "
            f"{server.authority}; {how}"
        )
    if not keys.belong_together(read_file(server.key), certificate, str(server.key)):
        raise DeploymentError(
            f"{server.certificate} is not for the key {server.key}; {how}"
        )
    for host in server.hosts:
        if not found.is_for(host):
            raise DeploymentError(
                f"{server.certificate} is not for {host}, which server.toml names; "
                f"{how}"
            )
    control.known(server)
    if not list(names_of_keys(server)):
        raise DeploymentError(
            f"{server.public_keys} holds no keys; add a device with "
            f"`fedspu deploy add {server.root} NAME`"
        )
    return found


def _check_period(found: keys.Certificate, file: Path, how: str) -> None:
    now = datetime.now(UTC)
    if now > found.period.end:
        raise DeploymentError(f"{file} expired on {found.period.end:%Y-%m-%d}; {how}")
    if now < found.period.start:
        raise DeploymentError(
            f"{file} is not valid before {found.period.start:%Y-%m-%d %H:%M} UTC; set "
            f"this machine's clock, or {how}"
        )


def check_port_is_free(server: Server) -> None:
    """Refuse a port that something else uses, and an address of another machine."""
    where = address(server.bind, server.port)
    try:
        family = socket.getaddrinfo(server.bind, server.port)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((server.bind, server.port))
    except socket.gaierror:
        raise DeploymentError(
            f"{server.bind}: not an address to listen on; expected one of this "
            "machine, like 0.0.0.0"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise DeploymentError(
                f"{where}: the port is in use; {_by_whom(server)}"
            ) from None
        raise DeploymentError(
            f"{where}: cannot listen there ({error.strerror})"
        ) from None


def _by_whom(server: Server) -> str:
    if control.is_running(server):
        return "this server runs already"
    file = server.folder / "server.toml"
    return (
        "another program listens there; end it, or change the port in "
        f"{file} and in every device.toml"
    )
