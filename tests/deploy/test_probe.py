"""Every way in which a connection fails, in words; with real handshakes."""

import socket
from pathlib import Path

import pytest

from fedspu.deploy import keys
from fedspu.deploy.probe import reach
from fedspu.deploy.processes import free_port
from fedspu.errors import DeploymentError
from tests.deploy.stand_ins import NOW, OVER, TO_COME, VALID, https_server


@pytest.fixture(scope="module")
def authority() -> keys.Pair:
    return keys.make_authority(VALID)


@pytest.fixture
def ca(authority: keys.Pair, tmp_path: Path) -> Path:
    file = tmp_path / "ca.crt"
    file.write_bytes(authority.public)
    return file


def test_a_server_of_the_same_authority_is_reached(
    authority: keys.Pair, ca: Path, tmp_path: Path
) -> None:
    pair = keys.make_server_certificate(authority, ["lab.example"], VALID)
    with https_server(tmp_path, pair) as port:
        for host in ("localhost", "127.0.0.1"):
            answer = reach(host, port, ca)
            assert answer.ahead is not None
            assert abs(answer.ahead) < 10
            assert "fedspu" in answer.versions
        reach("127.0.0.1", port, ca, name="lab.example")


@pytest.mark.parametrize(
    ("period", "words"),
    [
        (OVER, rf"certificate has expired on {OVER.end:%Y-%m-%d}; .*deploy renew"),
        (TO_COME, rf"not valid before {TO_COME.start:%Y-%m-%d}.*clock of this machine"),
    ],
)
def test_a_certificate_out_of_its_time(
    authority: keys.Pair, ca: Path, tmp_path: Path, period: keys.Period, words: str
) -> None:
    pair = keys.make_server_certificate(authority, [], period)
    with (
        https_server(tmp_path, pair) as port,
        pytest.raises(DeploymentError, match=words),
    ):
        reach("localhost", port, ca)


def test_a_certificate_for_another_name(
    authority: keys.Pair, ca: Path, tmp_path: Path
) -> None:
    pair = keys.make_server_certificate(authority, ["lab.example"], VALID)
    words = r"not for the name other\.example; it is for lab\.example, localhost"
    with (
        https_server(tmp_path, pair) as port,
        pytest.raises(DeploymentError, match=words),
    ):
        reach("127.0.0.1", port, ca, name="other.example")


def test_a_certificate_of_another_authority(ca: Path, tmp_path: Path) -> None:
    pair = keys.make_server_certificate(keys.make_authority(VALID), [], VALID)
    with (
        https_server(tmp_path, pair) as port,
        pytest.raises(DeploymentError, match="of another authority; is this the right"),
    ):
        reach("localhost", port, ca)


def test_a_server_without_tls(ca: Path, tmp_path: Path) -> None:
    with (
        https_server(tmp_path, None) as port,
        pytest.raises(DeploymentError, match="no TLS there"),
    ):
        reach("localhost", port, ca)


def test_a_server_of_something_else(
    authority: keys.Pair, ca: Path, tmp_path: Path
) -> None:
    pair = keys.make_server_certificate(authority, [], VALID)
    with (
        https_server(tmp_path, pair, status=404) as port,
        pytest.raises(DeploymentError, match=r"something other .*status 404"),
    ):
        reach("localhost", port, ca)


def test_a_closed_port(ca: Path) -> None:
    with pytest.raises(
        DeploymentError, match="the port is closed; start the server there"
    ):
        reach("127.0.0.1", free_port(), ca)


def test_a_name_that_does_not_resolve(
    ca: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(DeploymentError, match=r"no-such\.invalid: .*does not resolve"):
        reach("no-such.invalid", 8000, ca)


def test_no_answer_at_all(ca: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", fails)
    with pytest.raises(DeploymentError, match=r"no answer in .*firewall"):
        reach("192.0.2.1", 8000, ca)


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_an_authority_that_cannot_be_read(
    authority: keys.Pair, tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "ca.crt"
    if content:
        file.write_bytes(content)
    pair = keys.make_server_certificate(authority, [], VALID)
    with (
        https_server(tmp_path, pair) as port,
        pytest.raises(DeploymentError, match=r"ca\.crt is .*copy it from server/"),
    ):
        reach("localhost", port, file)


def test_the_difference_of_clocks_is_told(
    authority: keys.Pair, ca: Path, tmp_path: Path
) -> None:
    pair = keys.make_server_certificate(authority, [], VALID)
    with https_server(tmp_path, pair, ahead=300) as port:
        assert reach("localhost", port, ca).ahead == pytest.approx(300, abs=10)


def test_the_certificates_of_the_tests_are_of_today() -> None:
    assert VALID.start < NOW < VALID.end
