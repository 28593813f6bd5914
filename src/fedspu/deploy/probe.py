"""Try the connection to the server, and say in words what is wrong with it."""

import http.client
import socket
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from fedspu.deploy.keys import Certificate, read_certificate
from fedspu.deploy.layout import address
from fedspu.deploy.superlink import HEALTH, VERSIONS
from fedspu.errors import DeploymentError

TIME = 10.0
"""Seconds to wait for an answer."""

# OpenSSL's numbers for what is wrong with a certificate.
NOT_YET_VALID, EXPIRED = 9, 10
OTHER_NAME = (62, 64)


@dataclass(frozen=True)
class Answer:
    """What a server said: its time, and the versions it has, as far as it says so."""

    ahead: float | None = None  # seconds by which our clock is ahead of its clock
    versions: dict[str, str] = field(default_factory=dict)


def reach(host: str, port: int, authority: Path, name: str | None = None) -> Answer:
    """Ask the server for its health; a DeploymentError says why it cannot be reached.

    ``name`` is the name that its certificate must have; ``host`` if None.
    """
    where = address(host, port)
    plain = _connect(host, port, where)
    with plain:
        tls = _handshake(plain, host, port, authority, name or host, where)
        with tls:
            return _health(tls, name or host, where)


def _connect(host: str, port: int, where: str) -> socket.socket:
    try:
        return socket.create_connection((host, port), TIME)
    except socket.gaierror:
        raise DeploymentError(
            f"{host}: this name does not resolve; check the spelling, or use the "
            "server's IP address (--host of `fedspu deploy init`)"
        ) from None
    except ConnectionRefusedError:
        raise DeploymentError(
            f"{where}: the port is closed; start the server there with "
            "`fedspu deploy server`, or check the address"
        ) from None
    except TimeoutError:
        raise DeploymentError(
            f"{where}: no answer in {TIME:.0f} seconds; check the address, and that no "
            f"firewall keeps port {port} closed"
        ) from None
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DeploymentError(
            f"{where}: cannot be reached ({reason}); check this machine's network"
        ) from None


def _handshake(
    plain: socket.socket, host: str, port: int, authority: Path, name: str, where: str
) -> ssl.SSLSocket:
    try:
        context = ssl.create_default_context(cafile=str(authority))
    except FileNotFoundError:
        raise DeploymentError(
            f"{authority} is missing; copy it from server/ of the deployment"
        ) from None
    except (ssl.SSLError, OSError):
        raise DeploymentError(
            f"{authority} is not a certificate; copy it from server/ of the deployment"
        ) from None
    try:
        return context.wrap_socket(plain, server_hostname=name)
    except ssl.SSLCertVerificationError as error:
        raise DeploymentError(
            _what_is_wrong(error, _shown(host, port), name, where)
        ) from None
    except (ssl.SSLError, OSError):
        raise DeploymentError(
            f"{where}: no TLS there; something other than a fedspu server answers, or "
            "a proxy in between"
        ) from None


def _what_is_wrong(
    error: ssl.SSLCertVerificationError,
    shown: Certificate | None,
    name: str,
    where: str,
) -> str:
    """What is wrong with a certificate, in words."""
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    if error.verify_code == EXPIRED:
        when = f" on {shown.period.end:%Y-%m-%d}" if shown else ""
        return (
            f"{where}: the server's certificate has expired{when}; make a new one on "
            "its machine with `fedspu deploy renew`. (If this machine's clock is "
            f"wrong, set it: it says {now})"
        )
    if error.verify_code == NOT_YET_VALID:
        when = f" before {shown.period.start:%Y-%m-%d %H:%M} UTC" if shown else " yet"
        return (
            f"{where}: the server's certificate is not valid{when}; the clock of this "
            f"machine is wrong, or was wrong where the certificate was made: it says "
            f"{now}"
        )
    if error.verify_code in OTHER_NAME:
        names = f"; it is for {', '.join(shown.names)}" if shown else ""
        return (
            f"{where}: the server's certificate is not for the name {name}{names}; use "
            "one of its names, or make a new deployment with --host " + name
        )
    return (
        f"{where}: the server's certificate is of another authority; is this the right "
        "server? If so, copy ca.crt from its folder server/ to this one"
    )


def _shown(host: str, port: int) -> Certificate | None:
    """The certificate that a server shows, only to say what is wrong with it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), TIME) as plain,
            context.wrap_socket(plain) as tls,
        ):
            return read_certificate(tls.getpeercert(binary_form=True) or b"", "it")
    except (OSError, DeploymentError):
        return None


def _health(tls: ssl.SSLSocket, name: str, where: str) -> Answer:
    connection = http.client.HTTPConnection(name, timeout=TIME)
    connection.sock = tls
    try:
        connection.request("GET", HEALTH, headers={"Host": where})
        reply = connection.getresponse()
        reply.read()
    except (OSError, http.client.HTTPException):
        raise DeploymentError(
            f"{where}: the connection was made, but nothing was answered; look at the "
            "server's messages"
        ) from None
    if reply.status != 200:
        raise DeploymentError(
            f"{where}: something other than a fedspu server answers (status "
            f"{reply.status} for {HEALTH})"
        )
    return Answer(_ahead(reply.getheader("date")), _read(reply.getheader(VERSIONS)))


def _ahead(date: str | None) -> float | None:
    if date is None:
        return None
    try:
        there = parsedate_to_datetime(date)
        return (datetime.now(UTC) - there).total_seconds()
    except (TypeError, ValueError):
        return None


def _read(header: str | None) -> dict[str, str]:
    parts = (word.partition("=") for word in (header or "").split())
    return {name: value for name, _, value in parts}
