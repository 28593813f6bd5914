"""Thousands of accidents: kills, errors of the disk, power cuts, damage.

    python -m benchmarks.reliability [KIND ...] [--part 1/2]

Each trial disturbs a small run and takes it up again; it must end with the same bits as
an undisturbed one, or, if a folder was damaged by hand, be refused in one line. KIND is
one or several of the names in ``KINDS``; ``--part`` makes every second trial, so that
two processes can share the work. ``image`` needs root, as it mounts a file system.
"""

import argparse
import errno
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.oracles.federation import folder_content
from tests.reliability.power_cut import Disk as Left
from tests.reliability.power_cut import after_a_cut
from tests.reliability.small_run import compare_two, play, take_up
from tests.reliability.trials import (
    cut_power,
    damage,
    fail_at,
    fill_up_at,
    finish,
    flip,
    kill_after,
    kill_at,
    open_damaged,
    recorded,
    resume_damaged,
)

Content = dict[str, bytes]
Trial = Callable[[], Any]


def kills(work: Path, expected: Content, workers: int) -> Iterator[Trial]:
    """Kill everything before each operation on a file."""
    for number in range(_count(work)):
        path = work / f"kill-{workers}-{number}"
        yield lambda n=number, p=path: kill_at(
            p,
            n,
            lambda: play(p, workers=workers),
            lambda: finish(p, expected, workers=workers),
        )


def kills_of_compare(work: Path, expected: Content) -> Iterator[Trial]:
    """The same for two runs of a comparison."""
    compare_two(work / "compared")
    wanted = folder_content(work / "compared")

    def again(path: Path) -> None:
        compare_two(path)
        assert folder_content(path) == wanted

    for number in range(170):
        path = work / f"compare-{number}"
        yield lambda n=number, p=path: kill_at(
            p, n, lambda: compare_two(p), lambda: again(p)
        )


def random_kills(work: Path, expected: Content) -> Iterator[Trial]:
    """Kill everything at a random moment, two workers."""
    rng = random.Random(1)
    for number in range(200):
        path, moment = work / f"random-{number}", rng.uniform(0, 1.5)
        yield lambda p=path, s=moment: kill_after(
            s, lambda: play(p, workers=2), lambda: finish(p, expected, workers=2)
        )


def disk_errors(work: Path, expected: Content) -> Iterator[Trial]:
    """Each operation fails once; each write is cut short by a full disk."""
    count = _count(work)
    for error in (errno.ENOSPC, errno.EIO):
        for number in range(count):
            yield lambda e=error, n=number: fail_at(work / "fail", n, e, expected)
    for number in range(count):
        yield lambda n=number: fill_up_at(work / "full", n, expected)


def power_cuts(work: Path, expected: Content) -> Iterator[Trial]:
    """Power fails at a random moment: while a run plays, and while it is resumed."""
    root, name = work / "disk", Path("runs/run")
    root.mkdir()
    start = Left.of(root)
    log = recorded(root, lambda watch: play(root / name, watch))
    for number in range(1500):
        moment = number % (len(log) + 1)
        yield lambda m=moment, s=number: cut_power(
            root, name, start, log, m, random.Random(s), work / "after", expected
        )
    for number in range(500):
        yield lambda s=number: _second_cut(
            root, name, start, log, random.Random(10**6 + s), work, expected
        )


def _second_cut(
    root: Path,
    name: Path,
    start: Left,
    log: list[Any],
    rng: random.Random,
    work: Path,
    expected: Content,
) -> None:
    """Power fails again while a run is taken up after a power cut."""
    disk, _ = after_a_cut(start, log, rng.randrange(len(log) + 1), rng)
    second = work / "second"
    disk.write_out(root, second)
    before = Left.of(second)
    again = recorded(second, lambda _: take_up(second / name))
    moment = rng.randrange(len(again) + 1)
    again = [op for op in again[:moment] if op.kind != "note"]
    cut_power(
        second, name, before, again, len(again), rng, work / "after-second", expected
    )


def damages(work: Path, expected: Content) -> Iterator[Trial]:
    """One bit of each byte of an interrupted run is flipped; each file is cut anywhere.

    One in sixteen or so is played to its end, the others are only opened.
    """
    half, rng = work / "half", random.Random(3)

    def watch(plan: Any, played: Any) -> None:
        if played.federation.round == 2:
            shutil.copytree(work / "interrupted", half)

    play(work / "interrupted", watch)
    path = work / "damaged"

    def trial(name: str, change: Callable[[bytes], bytes], is_played: bool) -> str:
        damage(half, path, name, change)
        if not is_played:
            return open_damaged(half, path)
        return "played, " + resume_damaged(path, expected)

    files = sorted(str(f.relative_to(half)) for f in half.rglob("*") if f.is_file())
    for name in files:
        length = (half / name).stat().st_size
        for place in range(length):
            change, is_played = flip(place, rng.randrange(8)), place % 16 == 7
            yield lambda n=name, c=change, p=is_played: trial(n, c, p)
        for end in range(length):
            is_played = end % 32 == 9
            yield lambda n=name, e=end, p=is_played: trial(
                n, lambda content: content[:e], p
            )


def image(work: Path, expected: Content) -> Iterator[Trial]:
    """The image of an ext4 file system is copied while a run goes on, and mounted."""
    for number in range(40):
        yield lambda s=number: _image(work, random.Random(s), expected)


def _image(work: Path, rng: random.Random, expected: Content) -> None:
    mount, disk, copy = work / "mount", work / "disk.img", work / "copy.img"
    mount.mkdir(exist_ok=True)
    with disk.open("wb") as file:
        file.truncate(64 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-F", disk], check=True)
    subprocess.run(["mount", "-o", "loop", disk, mount], check=True)
    rounds: list[int] = []
    wanted = rng.randrange(4)  # after how many rounds power fails

    def watch(plan: Any, played: Any) -> None:
        rounds.append(played.federation.round)
        if rounds[-1] == wanted:
            time.sleep(rng.uniform(0, 0.05))
            shutil.copyfile(disk, copy)

    try:
        play(mount / "run", watch)
        if not wanted:  # right after the end
            shutil.copyfile(disk, copy)
    finally:
        subprocess.run(["umount", mount], check=True)
    subprocess.run(["mount", "-o", "loop", copy, mount], check=True)
    try:
        from fedspu.federation.storage.saved_run import SavedRun

        saved = SavedRun(mount / "run")
        saved.check()
        assert saved.round >= (wanted or 3), (saved.round, wanted)
        finish(mount / "run", expected)
    finally:
        subprocess.run(["umount", mount], check=True)


def _count(work: Path) -> int:
    shutil.rmtree(work / "counted", ignore_errors=True)
    return len(recorded(work, lambda _: play(work / "counted")))


KINDS: dict[str, Callable[[Path, Content], Iterator[Trial]]] = {
    "kill, 1 worker": lambda w, e: kills(w, e, 1),
    "kill, 2 workers": lambda w, e: kills(w, e, 2),
    "kill, compare": kills_of_compare,
    "kill, random": random_kills,
    "disk error": disk_errors,
    "power cut": power_cuts,
    "image": image,
    "damage": damages,
}


def main() -> None:
    """Make the trials that are asked for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--part", default="1/1")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    torch.set_num_threads(1)
    print("| trial | number | results | seconds |\n|---|---|---|---|", flush=True)
    for kind, make in KINDS.items():
        if given.kinds and kind not in given.kinds:
            continue
        with tempfile.TemporaryDirectory() as folder:
            work, began = Path(folder), time.time()
            play(work / "whole")
            results: Counter[str] = Counter()
            for number, trial in enumerate(make(work, folder_content(work / "whole"))):
                if number % parts != part - 1:
                    continue
                try:
                    found = trial()
                    results[found if isinstance(found, str) else "same"] += 1
                except Exception as error:  # each is one lost run
                    results["LOST"] += 1
                    print(f"{kind} {number}: {error!r}", flush=True)
            said = ", ".join(f"{n} {name}" for name, n in sorted(results.items()))
            seconds = round(time.time() - began)
            print(f"| {kind} | {results.total()} | {said} | {seconds} |", flush=True)


if __name__ == "__main__":
    main()
