"""Accidents, one function each: it raises AssertionError if anything was lost.

``expected`` is what the folder of an undisturbed run holds. The tests make some trials
of each kind, ``benchmarks/reliability.py`` makes thousands.
"""

import errno
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fedspu
from fedspu.errors import FedSPUError
from fedspu.federation.plan_file import read_settings
from fedspu.federation.storage.run_folder import RunFolder
from fedspu.federation.storage.saved_run import SavedRun
from tests.oracles.federation import examples, mlp
from tests.reliability.disk import Disk, Operation
from tests.reliability.power_cut import Disk as Left
from tests.reliability.power_cut import after_a_cut
from tests.reliability.small_run import ends_alike, in_a_process, play, take_up

Content = dict[str, bytes]


def recorded(root: Path, work: Callable[[Any], None]) -> list[Operation]:
    """All that some work does to a folder; rounds are noted once they are saved."""
    disk = Disk(root)
    with disk.watching():
        work(lambda plan, played: disk.note(played.federation.round))
        disk.note("end")
    return disk.log


# Kills --------------------------------------------------------------------------------


def kill_at(
    path: Path, number: int, work: Callable[[], None], after: Callable[[], None]
) -> bool:
    """Kill all processes before a given operation; False if there are fewer.

    Then ``after`` goes on with the work, in a process of its own.
    """

    def killed() -> None:
        def before(count: int, kind: str, file: Path) -> None:
            if count == number:
                os.killpg(0, signal.SIGKILL)

        with Disk(path, before).watching():
            work()

    code = in_a_process(killed)
    assert code in (0, -signal.SIGKILL), f"operation {number}: exit code {code}"
    assert in_a_process(after) == 0, f"after a kill before operation {number}"
    return code != 0


def kill_after(
    seconds: float, work: Callable[[], None], after: Callable[[], None]
) -> bool:
    """Kill all processes at a random moment; False if they had ended."""
    child = os.fork()
    if child == 0:
        os._exit(in_a_process(work) & 0xFF)
    time.sleep(seconds)
    # The grandchild leads a group of its own.
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == child:
                os.killpg(int(entry.name), signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert in_a_process(after) == 0, f"after a kill after {seconds} seconds"
    return code != 0


def finish(path: Path, expected: Content, **given: Any) -> None:
    """Go on after an accident; the end must be that of an undisturbed run."""
    take_up(path, **given)
    assert ends_alike(path, expected)


# Errors of the disk -------------------------------------------------------------------


def fail_at(path: Path, number: int, error: int, expected: Content) -> bool:
    """An operation fails, once; False if there are fewer."""
    shutil.rmtree(path, ignore_errors=True)
    is_reached = False

    def before(count: int, kind: str, file: Path) -> None:
        nonlocal is_reached
        if count == number:
            is_reached = True
            raise OSError(error, os.strerror(error), str(file))

    with Disk(path, before).watching():
        said = _refusal(lambda: play(path))
    assert not said or os.strerror(error) in said
    if is_reached:
        finish(path, expected)
    return is_reached


def fill_up_at(path: Path, number: int, expected: Content) -> bool:
    """A write is cut short, and from then on the disk is full."""
    shutil.rmtree(path, ignore_errors=True)
    disk, real, count = Disk(path), os.write, iter(range(10**6))
    is_full = False

    def write(opened: int, content: Any) -> int:
        nonlocal is_full
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if opened in disk._opened and next(count) == number:
            is_full = True
            return real(opened, content[: len(content) // 2])
        return real(opened, content)

    disk._real["write"] = write
    with disk.watching():
        said = _refusal(lambda: play(path))
    assert not said or "No space left" in said
    if is_full:
        finish(path, expected)
    return is_full


# Power cuts ---------------------------------------------------------------------------


def cut_power(
    root: Path,
    name: Path,
    start: Left,
    log: list[Operation],
    moment: int,
    rng: random.Random,
    to: Path,
    expected: Content,
) -> None:
    """Power fails after so many operations; what was reported as saved must be there.

    ``log`` is what a run in ``root / name`` did to a disk that held ``start``.
    """
    disk, notes = after_a_cut(start, log, moment, rng)
    disk.write_out(root, to)
    path = to / name
    rounds = [note for note in notes if note != "end"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if rounds:
            folder = RunFolder.open(path)
            folder.close()
            assert folder.round >= rounds[-1], (folder.round, rounds)
        if "end" in notes:
            assert SavedRun(path).is_finished
    finish(path, expected)


# Damage -------------------------------------------------------------------------------


def damage(
    whole: Path, path: Path, name: str, change: Callable[[bytes], bytes]
) -> None:
    """Copy a folder, and change one of its files."""
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(whole, path)
    file = path / name
    file.write_bytes(change(file.read_bytes()))


def flip(place: int, bit: int) -> Callable[[bytes], bytes]:
    """One bit of a file is another."""

    def change(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        return bytes(changed)

    return change


def resume_damaged(path: Path, expected: Content) -> str:
    """Resume refuses a damaged folder in one line, or ends as if it were whole."""
    said = _refusal(lambda: finish(path, expected))
    if not said:
        return "same"
    assert str(path) in said, said
    assert len(said.splitlines()) == 1
    return "refused"


def open_damaged(whole: Path, path: Path) -> str:
    """The same, but nothing is played: a save is opened whose index nobody changed.

    Everything else of that save has been compared with the marks in its index, and its
    settings with the copy in it.
    """
    taken: list[str] = []

    def open_it() -> None:
        folder = RunFolder.open(path)
        folder.close()
        name = f"checkpoint/save-round-{folder.round}.json"
        assert (path / name).read_bytes() == (whole / name).read_bytes()
        read_settings(folder.saved)  # refuses edited ones
        taken.append(f"round {folder.round}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        said = _refusal(open_it)
    if not said:
        return f"taken up from {taken[0]}"
    assert str(path) in said, said
    assert len(said.splitlines()) == 1
    return "refused"


def load_damaged(path: Path, client: int, states: list[dict[str, Any]]) -> str:
    """A personal model is refused, or is one of those that were saved."""
    found: dict[str, Any] = {}

    def load() -> None:
        model = fedspu.load_personal(path, client, mlp, examples())
        found.update(model.state_dict())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        said = _refusal(load)
    if said:
        assert str(path) in said, said
        return "refused"
    assert any(
        all(found[name].equal(values) for name, values in state.items())
        for state in states
    ), "other weights"
    return "same"


def _refusal(work: Callable[[], None]) -> str:
    """The one line that a user would read; empty if all went well."""
    try:
        work()
    except FedSPUError as problem:
        return str(problem)
    return ""
