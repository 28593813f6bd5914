"""What Flower's processes show, and when they end."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedspu.deploy import processes
from fedspu.deploy.processes import environment
from fedspu.deploy.quiet import Quiet
from tests.engines.fresh import environment as with_tests


def record(text: str, *values: object, level: int = logging.ERROR) -> logging.LogRecord:
    return logging.LogRecord("flwr", level, "", 0, text, values, None)


def test_a_connection_is_said_in_our_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert not Quiet().filter(record("SuperNode ID: %s", 7, level=logging.INFO))
    assert capsys.readouterr().out == "connected; waiting for a run\n"


def test_our_own_question_is_no_error_and_all_others_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours = record("[%s][ApiError:2003] Attempted", "/v1/fleet/activate-node")
    assert not Quiet().filter(ours)
    assert not capsys.readouterr().out
    assert Quiet().filter(record("[%s][ApiError:2001] Attempted", "/v1"))


def test_a_device_that_seems_to_be_connected_is_refused_in_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not Quiet().filter(record("Exit Code: 305\n[code: 2004] Failed to activate"))
    assert "still takes this device for connected" in capsys.readouterr().out
    refused = record("[%s][ApiError:2004] with public key: %s", "/v1", b"-----BEGIN")
    assert not Quiet().filter(refused)
    assert capsys.readouterr().out.startswith("a device was refused: its key is not")


def test_flower_logs_errors_only_unless_someone_asks_for_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FLWR_LOG_LEVEL", raising=False)
    assert environment(Path("home"))["FLWR_LOG_LEVEL"] == "ERROR"
    monkeypatch.setenv("FLWR_LOG_LEVEL", "DEBUG")
    assert environment(Path("home"))["FLWR_LOG_LEVEL"] == "DEBUG"


CHILD = """
import time
from fedspu.deploy.quiet import end_with_parent
end_with_parent()
print("ready", flush=True)
time.sleep(60)
"""
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_what_a_killed_command_started_ends_with_it() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=with_tests()
    )
    assert parent.stdout
    said = {parent.stdout.readline().strip() for _ in range(2)}
    assert b"ready" in said
    (child,) = (int(line) for line in said - {b"ready"})
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        pytest.fail("the child is still there")
    parent.stdout.close()


STUBBORN = """
import signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(60)
"""
ENDS = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}, sys.argv[1]])
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
open(sys.argv[1], "w").write(str(child.pid))
"""


def test_what_hangs_after_its_process_has_ended_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "REST", 0.2)
    file = tmp_path / "pid"
    command = [sys.executable, "-c", ENDS, str(file)]
    process = processes.start(command, tmp_path, tmp_path)
    process.wait(60)
    child = Path(f"/proc/{file.read_text()}/stat")
    assert child.exists()
    processes.end(process)
    for _ in range(100):  # nobody may have noticed yet that it is dead
        if not child.exists() or child.read_text().rpartition(") ")[2][0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the child is still there")
