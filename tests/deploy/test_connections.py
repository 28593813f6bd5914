"""A real SuperLink with TLS and keys, and a real SuperNode, on this machine alone."""

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedspu.deploy import control, making, serving
from fedspu.deploy.layout import Server
from fedspu.deploy.processes import free_port
from fedspu.errors import DeploymentError
from tests.deploy.stand_ins import made

ROOT = Path(__file__).parents[2]
PYTHONPATH = f"{ROOT / 'src'}{os.pathsep}{ROOT}"


class Command:
    """A ``fedspu deploy`` command in a process of its own, and what it says."""

    def __init__(self, folder: Path, *words: object) -> None:
        self.log = folder / f"{words[0]}-{len(list(folder.glob('*.log')))}.log"
        env = {**os.environ, "PYTHONPATH": PYTHONPATH}
        command = [sys.executable, "-m", "fedspu.cli", "deploy", *map(str, words)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=env
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, text: str) -> None:
        for _ in range(600):
            if text in self.said:
                return
            assert self.process.poll() is None, self.said
            time.sleep(0.1)
        raise AssertionError(f"{text!r} is not in:\n{self.said}")

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deployment")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """A running server that knows the device hall, and calls the tiny app."""
    found = made(folder / "lab", "hall", port=free_port())
    project = found.app / "pyproject.toml"
    text = project.read_text()
    text = text.replace("fedspu.flower.server_app:app", "tests.deploy.tiny_app:server")
    text = text.replace("fedspu.flower.client_app:app", "tests.deploy.tiny_app:client")
    project.write_text(text)
    command = Command(folder, "server", found.root)
    try:
        command.wait_for("ready: listening on 127.0.0.1")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", PYTHONPATH)  # `flwr run` looks for the app
            yield found
    finally:
        code = command.end()
    assert code == 0, command.said
    assert command.said.endswith("ended\n")
    with socket.socket() as probe:  # nothing of it is left
        probe.bind(("127.0.0.1", found.port))


def test_the_server_is_not_started_twice(server: Server) -> None:
    with pytest.raises(DeploymentError, match="in use; this server runs already"):
        serving.check_port_is_free(server)


def test_another_machine_can_only_do_what_devices_do(server: Server) -> None:
    """Here, a proxy on this machine says that it asks for somebody else."""
    context = ssl.create_default_context(cafile=str(server.authority))
    codes = {}
    for path in ("/v1/control/list-nodes", "/v1/runtime/x", "/v1/fleet/x", "/health"):
        for who in ("203.0.113.9", "127.0.0.1"):
            connection = http.client.HTTPSConnection(
                "localhost", server.port, context=context, timeout=20
            )
            connection.request("GET", path, headers={"X-Forwarded-For": who})
            codes[path, who] = connection.getresponse().status
            connection.close()
    assert codes["/health", "203.0.113.9"] == 200
    assert codes["/v1/control/list-nodes", "203.0.113.9"] == 403
    assert codes["/v1/runtime/x", "203.0.113.9"] == 403
    assert codes["/v1/fleet/x", "203.0.113.9"] != 403
    assert 403 not in (codes[path, "127.0.0.1"] for path, _ in codes)


def test_a_device_connects_takes_part_and_is_removed(
    server: Server, folder: Path
) -> None:
    """One test, as each step takes seconds: it follows a device through its life."""
    place = server.root / "devices" / "hall"
    checked = Command(folder, "check", place)
    assert checked.process.wait(60) == 0, checked.said
    assert "✓ registration: the server knows this device's key" in checked.said

    device = Command(folder, "device", place)
    try:
        device.wait_for("connected; waiting for a run")
        assert control.device_states(server) == {"hall": "online"}

        run = control.start_run(server)
        with pytest.raises(DeploymentError, match=f"run {run} is going on already"):
            control.start_run(server)
        assert said_by_devices(server) == [
            {
                "name": "hall",
                "capacity": 0.5,
                "data": "digits",
                "folder": str(place / "models"),
                "seed": 0,
                "here": str(place),
            }
        ]
        assert [one.id for one in control.runs(server)] == [run]

        # A new key, which the device does not have: the old one is refused.
        old = (place / "key").read_bytes()
        making.rotate(server.root, "hall")
        (place / "key").write_bytes(old)
        assert list(control.register(server)) == [
            "hall: its old key is no longer accepted",
            "hall: its key is registered",
        ]
        device.process.send_signal(signal.SIGTERM)
        assert device.process.wait(40) == 0
        device = Command(folder, "device", place)
        device.wait_for("the server does not know the key of hall; if it has only")
        device.wait_for("trying again in 4 seconds")
        assert "connected;" not in device.said
    finally:
        assert device.end() == 0
    assert device.said.endswith("ended\n")


def said_by_devices(server: Server) -> Any:
    file = server.run / "said.json"
    for _ in range(900):
        if file.exists() and file.read_text():
            return json.loads(file.read_text())
        time.sleep(0.1)
    raise AssertionError(control.runs(server))
