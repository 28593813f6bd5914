"""Everything of Flower that is started: commands, environment, and how they end."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomli_w

from fedspu.deploy.layout import Device, Server, address
from fedspu.errors import DeploymentError, how_to_install
from fedspu.files import write_whole
from fedspu.lifetimes import end_with_parent

CONNECTION = "deployment"
"""The name of the server in Flower's own configuration."""

TIME = 60.0
"""Seconds that a command of Flower may take."""

GRACE = 20.0
"""Seconds that a process may take to end before it is killed."""

REST = 5.0
"""Seconds that those which it started may take to end after it."""


# What is started ----------------------------------------------------------------------


def script(name: str) -> str:
    """The full path of a command that was installed with this Python."""
    place = Path(sys.executable).parent / name
    if not place.exists():
        raise DeploymentError(
            f"fedspu deploy needs Flower, but {place} is missing: "
            f"{how_to_install('flower')}"
        )
    return str(place)


def environment(home: Path) -> dict[str, str]:
    """The environment of every process of Flower: nothing is sent or fetched."""
    here = str(Path(sys.executable).parent)
    return {
        **os.environ,
        # Flower starts other commands of its own by their names.
        "PATH": os.pathsep.join([here, os.environ.get("PATH", os.defpath)]),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_LOG_LEVEL": os.environ.get("FLWR_LOG_LEVEL", "ERROR"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Nobody else may say that a request comes from this machine (superlink.py).
        "FORWARDED_ALLOW_IPS": "127.0.0.1",
        "PYTHONUNBUFFERED": "1",
    }


def superlink_command(server: Server) -> list[str]:
    """The SuperLink, with TLS and devices' keys; see ``superlink.py``."""
    return [
        *_own("superlink"),
        *("--host", server.bind, "--port", str(server.port)),
        *("--ssl-ca-certfile", str(server.authority)),
        *("--ssl-certfile", str(server.certificate)),
        *("--ssl-keyfile", str(server.key)),
        "--enable-supernode-auth",
        *("--database", str(server.database)),
    ]


def supernode_command(device: Device) -> list[str]:
    """The SuperNode of a device; ``write_node_config`` must have been called."""
    return [
        *_own("supernode"),
        *("--superlink", device.server),
        *("--root-certificates", str(device.authority)),
        *("--auth-supernode-private-key", str(device.key)),
        # What the app on this device talks to; nobody else can reach it.
        *("--host", "127.0.0.1", "--port", str(free_port())),
        *("--node-config", str(_node_config(device))),
    ]


def _own(name: str) -> list[str]:
    """The command of one of our modules that start a process of Flower."""
    if find_spec("flwr") is None:
        script(f"flower-{name}")  # says what is missing
    return [sys.executable, "-m", f"fedspu.deploy.{name}"]


def write_node_config(device: Device, anew: bool = False) -> None:
    """Write what the app on this device is told about it."""
    device.home.mkdir(mode=0o700, exist_ok=True)
    more = {"anew": True} if anew else {}
    text = tomli_w.dumps({**device.node_config, **more})
    write_whole(_node_config(device), text.encode())


def _node_config(device: Device) -> Path:
    return device.home / "node.toml"


def free_port() -> int:
    """A port of this machine that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command: list[str], home: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Start a process of Flower; Ctrl-C does not reach it by itself."""
    return subprocess.Popen(
        command,
        env=environment(home),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # If this process is killed, nobody is left to restart or to end it.
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that ``start`` started, by its own pid."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _end_rest(process.pid)


def _end_rest(group: int) -> None:
    """Kill what is left of a process's group: Flower's apps may hang as they end."""
    until = time.monotonic() + REST
    with suppress(ProcessLookupError):  # nothing is left
        while time.monotonic() < until:
            os.killpg(group, 0)
            time.sleep(0.1)
        os.killpg(group, signal.SIGKILL)


@contextmanager
def until_told_to_end() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, instead of ending this process."""
    told = threading.Event()

    def tell(*_: object) -> None:
        # In a thread: the main one may hold the event's lock while it is interrupted.
        threading.Thread(target=told.set).start()

    before = {
        number: signal.signal(number, tell)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Flower's own command -----------------------------------------------------------------


def write_connection(server: Server, authority: Path | None = None) -> None:
    """Write where Flower's own command finds the server."""
    entry = {
        "address": address(server.local_host, server.port),
        "root-certificates": str(authority or server.authority),
    }
    text = tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: entry}})
    server.home.mkdir(mode=0o700, exist_ok=True)
    write_whole(server.home / "config.toml", text.encode())


def flwr(server: Server, *words: str) -> dict[str, Any]:
    """What `flwr WORDS --format json` says; its complaint as a DeploymentError."""
    write_connection(server)
    command = [script("flwr"), *words, "--format", "json"]
    try:
        done = subprocess.run(
            command,
            env=environment(server.home),
            cwd=server.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIME,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeploymentError(
            f"`flwr {words[0]}` gave no answer in {TIME:.0f} seconds; is the server "
            f"very busy? Try again, or look at `fedspu deploy check {server.root}`"
        ) from None
    said = done.stdout.decode("utf-8", "replace").strip()
    answer = _answer(said)
    if answer.get("success") is not True:
        text = (
            answer.get("error-message") or said or done.stderr.decode(errors="replace")
        )
        raise DeploymentError(f"`flwr {words[0]}` failed: {_last_line(str(text))}")
    return answer


def _answer(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _last_line(text: str) -> str:
    lines = [line.strip(" │╭╰─╮╯") for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing")


def flwr_logs(server: Server, run: str, follow: bool) -> list[str]:
    """The command that shows what a run has logged."""
    write_connection(server)
    how = "--stream" if follow else "--show"
    return [script("flwr"), "log", run, CONNECTION, how]
