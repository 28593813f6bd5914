"""Ctrl-C on a terminal: one line, a clean screen, a command to copy."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedspu.cli import console
from fedspu.cli.console import one_interrupt

MAIN = "from fedspu.cli import main; main()"
LONG = "a-rather-long-name-of-a-folder-for-a-run-so-that-a-line-is-full"


def typed(words: Sequence[str], until: bytes, times: int) -> tuple[int, str]:
    """The exit code and the screen of a command; Ctrl-C once a pattern is shown."""
    child, screen = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ |= {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
        os.execv(sys.executable, [sys.executable, "-c", MAIN, *words])
    shown, left, end = b"", times, time.monotonic() + 120
    while time.monotonic() < end:
        if not select.select([screen], [], [], 0.1)[0]:
            continue
        try:
            shown += os.read(screen, 65536)
        except OSError:  # the other side has ended
            break
        if left and re.search(until, shown):
            for _ in range(left):
                os.write(screen, b"\x03")
                time.sleep(0.03)  # so that the next comes while the command ends
            left = 0
    os.close(screen)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), shown.decode()


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize("times", [1, 12])
def test_an_interrupted_run_leaves_one_bar_and_a_command_on_one_line(
    times: int,
) -> None:
    words = ("run", "small.toml", "--rounds", "100000", "--out", LONG)
    code, shown = typed(words, rb" ([2-9]|\d\d+)/100000", times)
    assert code == 130
    assert "Traceback" not in shown
    after = shown.rsplit("\x1b[?25h", 1)[1].replace("\x1b[0m", "").splitlines()
    lines = [line for line in after if line.replace("^C", "").strip()]
    assert re.search(r"interrupted; rounds up to \d+ are saved. Resume with$", lines[0])
    assert lines[1] == f"  fedspu run --resume {LONG} --trust"
    assert len(lines) == 2
    # The bar is drawn over and over on its line, which ends once.
    assert len(re.findall(r"round [^\r\n]*\r\n", shown)) == 1


@pytest.mark.usefixtures("nets")
def test_a_comparison_interrupted_while_it_starts_says_nothing_else() -> None:
    words = ("compare", "small.toml", "--rounds", "1000", "--out", "both")
    code, shown = typed(words, b"known after some rounds", 2)
    assert code == 130
    assert "is no comparison" not in shown
    assert "Traceback" not in shown
    assert shown.count("error: ") + shown.count("error:\x1b[0m ") == 1


def test_the_package_imports_nothing_before_it_is_ready_for_ctrl_c() -> None:
    source = (Path(__file__).parents[2] / "src/fedspu/__init__.py").read_text("utf-8")
    names = re.findall(r"^(?:from|import) .*", source, re.M)
    assert names == []


def interrupted_twice(ended: list[str]) -> None:
    with one_interrupt():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            ended.append("as usual")


@pytest.mark.parametrize(("patience", "ends"), [(3.0, ["as usual"]), (-1.0, [])])
def test_only_the_first_ctrl_c_counts_while_a_command_ends(
    monkeypatch: pytest.MonkeyPatch, patience: float, ends: list[str]
) -> None:
    monkeypatch.setattr(console, "PATIENCE", patience)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    ended: list[str] = []
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted_twice(ended)
        assert ended == ends
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # Python itself ends
    finally:
        signal.signal(signal.SIGINT, before)


LOST = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
from fedspu.cli.console import one_interrupt

def interrupt():
    signal.raise_signal(signal.SIGINT)

class Dying:
    def __del__(self):
        interrupt()

def forking():
    os.register_at_fork(after_in_parent=interrupt)
    if os.fork() == 0:
        os._exit(0)

with one_interrupt():
    try:
        {how}()
        print("lost")
        time.sleep(10)
        print("for good")
    except KeyboardInterrupt:
        print("found again")
"""


@pytest.mark.parametrize("how", ["Dying", "forking"])
def test_an_interrupt_that_python_ignores_is_tried_again(how: str) -> None:
    words = [sys.executable, "-c", LOST.format(how=how)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n") == ["lost", "found again", ""]
    assert done.stderr == ""


LOADED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
from fedspu.cli import console
from fedspu.cli.console import one_interrupt
sys.path.insert(0, sys.argv[1])
with one_interrupt():
    try:
        import slow
    except Exception as error:
        print("lost:", error)
"""


def test_an_interrupt_is_not_lost_while_modules_are_loaded(tmp_path: Path) -> None:
    """Compiled modules turn it into another error, or into none."""
    (tmp_path / "slow.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    for _ in range(10**7): pass\n"
        "except BaseException:\n"
        "    raise ImportError('as numpy does') from None\n"
    )
    words = [sys.executable, "-c", LOADED, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "\nerror: interrupted\n"
