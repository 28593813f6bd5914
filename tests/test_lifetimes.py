"""A process that is told to ends with its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engines.fresh import environment

PARENT = """
import os, subprocess, sys, time
from functools import partial
from fedspu.lifetimes import end_with_parent
child = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(60)"],
    preexec_fn=partial(end_with_parent, os.getpid()),
)
print(child.pid, flush=True)
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can do this")
def test_a_process_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment()
    )
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    assert is_alive(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    for _ in range(100):
        if not is_alive(child):
            return
        time.sleep(0.05)
    raise AssertionError("it outlives its parent")


INTERRUPTED = """
import multiprocessing, os, signal, time
from fedspu.lifetimes import leave_interrupts_to_parent, starting_a_process

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it

def child():
    os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C comes at once, too soon to be ignored
    leave_interrupts_to_parent()
    os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=child)
    with starting_a_process():
        process.start()
    process.join()
    print(process.exitcode)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_ctrl_c_right_after_a_fork_is_the_parents() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True
    )
    assert done.stdout == "0\ninterrupted\n"
    assert "Traceback" not in done.stderr
