"""Keys, clocks, ports and certificates: days on which nobody gets in."""

import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from benchmarks.bad_days.lab import (
    GOOD,
    SETTINGS,
    Day,
    Lab,
    play_one,
    prepared,
    start_all,
)
from fedspu.deploy import control, keys
from fedspu.deploy.processes import free_port
from fedspu.prepare import prepare
from tests.engines.fresh import environment


def play_gate(folder: Path, names: list[str]) -> list[Day]:
    """Keys, clocks, ports, certificates: no run is needed."""
    ready = prepare(SETTINGS)
    days = []
    with prepared(folder / "lab", ready) as made:
        lab = Lab(made, ready)
        if not names or "port_in_use" in names:
            days.append(play_one(port_in_use, lab))
        start_all(lab)
        made.wait_online()
        for name in made.names:
            made.stop(name)
        for play in GATE:
            if names and play.__name__ not in names:
                continue
            days.append(play_one(play, lab))
    return days


def port_in_use(lab: Lab, day: Day) -> None:
    """Another program listens on the server's port."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", lab.server.port))
        other.listen()
        code, text = lab.cli("deploy", "server", lab.server.root)
    day.happened = f"the server does not start (exit code {code})"
    day.said = [("server", text)]


def expired(lab: Lab, day: Day) -> None:
    """The server's certificate has expired: before it starts, and while it runs."""
    root = lab.server.root
    authority = keys.Pair(
        (root / "ca/ca.key").read_bytes(), (root / "ca/ca.crt").read_bytes()
    )
    now = datetime.now(UTC)
    end = now + timedelta(seconds=100)  # the server must start before
    period = keys.Period(now - timedelta(days=2), end)
    pair = keys.make_server_certificate(authority, lab.server.hosts, period)
    lab.server.key.write_bytes(pair.private)
    lab.server.certificate.write_bytes(pair.public)
    _restart_server(lab)
    lab.wait(lambda: datetime.now(UTC) > end, "time stands still")
    mark = len(lab.said(GOOD))
    lab.deployment.start(GOOD)
    day.said = [("device", lab.wait_line(GOOD, "expired", mark))]
    day.said += [("check", _last(lab.cli("deploy", "check", lab.folder(GOOD))[1]))]
    lab.deployment.stop("server")
    code, text = lab.cli("deploy", "server", root)
    day.said += [(f"server, exit code {code}", text)]
    lab.cli("deploy", "renew", root)
    _restart_server(lab)
    seconds = lab.wait(
        lambda: "connected; waiting" in lab.said(GOOD)[mark:], "not connected"
    )
    day.happened = (
        "devices refuse it, the server does not start with it; after `fedspu deploy "
        f"renew` the device connected by itself, {seconds:.0f} s later"
    )
    lab.deployment.stop(GOOD)


def _restart_server(lab: Lab) -> None:
    if "server" in lab.deployment.processes:
        lab.deployment.stop("server")
    mark = len(lab.said("server")) if lab.deployment.log("server").exists() else 0
    lab.deployment.start("server")
    lab.wait_line("server", "ready: listening", mark)


def _last(text: str) -> str:
    return next(line for line in reversed(text.splitlines()) if "✗" in line)


def supernode_port_in_use(lab: Lab, day: Day) -> None:
    """The port that a SuperNode chose is taken before it listens there."""
    port = free_port()
    code = (
        "import fedspu.deploy.processes as p, itertools, sys\n"
        f"ports = itertools.chain([{port}], iter(p.free_port, None))\n"
        "p.free_port = lambda: next(ports)\n"
        "from fedspu.cli import main; main()\n"
    )
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        place = str(lab.folder(GOOD))
        _device_with(lab, code, place)
        mark = len(lab.said(GOOD))
        line = lab.wait_line(GOOD, "trying again", 0)
        seconds = lab.wait(
            lambda: "connected; waiting" in lab.said(GOOD)[mark:], "it does not connect"
        )
    day.happened = f"it took another port, and was connected {seconds:.0f} s later"
    lines = lab.said(GOOD).splitlines()
    above = next(text for text in lines if "in use" in text or "bind" in text)
    day.said = [("device", above.strip()), ("device", line)]
    lab.deployment.stop(GOOD)


def _device_with(lab: Lab, code: str, place: str) -> None:
    lab.deployment.log(GOOD).write_text("")
    with lab.deployment.log(GOOD).open("ab") as log:
        lab.deployment.processes[GOOD] = subprocess.Popen(
            [sys.executable, "-c", code, "deploy", "device", place],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
        )


def unregistered_key(lab: Lab, day: Day) -> None:
    """A device has a key that the server does not know."""
    file = lab.folder(GOOD) / "key"
    own = file.read_bytes()
    file.write_bytes(keys.make_device_key().private)
    mark = len(lab.said(GOOD))
    lab.deployment.start(GOOD)
    day.said = [("device", lab.wait_line(GOOD, "does not know the key", mark))]
    lab.deployment.stop(GOOD)
    file.write_bytes(own)
    day.happened = "it is refused before it connects, and keeps trying"


def wrong_clock(lab: Lab, day: Day) -> None:
    """A device's clock is an hour ahead: it signs another time."""
    code = (
        "import datetime, flwr.supercore.date as d\n"
        "import flwr.supernode.node_auth_http_interceptor as i\n"
        "import fedspu.deploy.probe as p\n"
        "hour = datetime.timedelta(hours=1)\n"
        "i.now = lambda now=d.now: now() + hour\n"
        "class Ahead(datetime.datetime):\n"
        "    @classmethod\n"
        "    def now(cls, tz=None): return datetime.datetime.now(tz) + hour\n"
        "p.datetime = Ahead\n"
        "from fedspu.cli import main; main()\n"
    )
    _device_with(lab, code, str(lab.folder(GOOD)))
    day.said = [("device", lab.wait_line(GOOD, "clocks differ", 0))]
    lab.deployment.stop(GOOD)
    day.happened = "it is refused before it connects, and keeps trying"


def killed_commands(lab: Lab, day: Day) -> None:
    """`fedspu deploy device` and `fedspu deploy server` themselves are killed."""
    mark = len(lab.said(GOOD))
    lab.deployment.start(GOOD)
    lab.wait_line(GOOD, "connected; waiting", mark)
    _kill_command(lab, GOOD)
    mark = len(lab.said(GOOD))
    lab.deployment.start(GOOD)
    seconds = lab.wait(
        lambda: "connected; waiting" in lab.said(GOOD)[mark:], "not back"
    )
    _kill_command(lab, "server")
    lab.wait(lambda: not control.is_running(lab.server), "its SuperLink still runs", 30)
    mark = len(lab.said("server"))
    lab.deployment.start("server")
    lab.wait_line("server", "ready: listening", mark)
    day.happened = (
        "what they had started ended with them; both could be started again (the "
        f"device was connected {seconds:.0f} s later)"
    )
    lab.deployment.stop(GOOD)
    day.lost = "nothing"


def _kill_command(lab: Lab, name: str) -> None:
    process = lab.deployment.processes.pop(name)
    process.kill()
    process.wait()


GATE = (supernode_port_in_use, unregistered_key, wrong_clock, killed_commands, expired)
