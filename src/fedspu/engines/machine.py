"""What a run will need of RAM and disk, and what is there; both are estimates."""

import resource
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Room:
    """Bytes of RAM and disk."""

    ram: float
    disk: float


def room_needed(
    model: int,
    num_kept: int,
    per_round: int,
    num_workers: int,
    cache: float,
    waiting: int,
) -> Room:
    """What a run needs, beside its data and what training steps hold.

    ``model`` are the bytes of one model, ``num_kept`` the clients that may come to keep
    one, ``cache`` the bytes of them that a process may hold, ``waiting`` the replies of
    a round that may wait for their turn. The server has those, the global model twice,
    sums and weights in float64; a worker a model to work in, its gradients, and three
    states on the way.
    """
    server = 6 * model + waiting * model
    worker = 6 * model + min(cache, num_kept * model)
    return Room(
        ram=server + num_workers * worker,
        disk=(num_kept + per_round + 3) * model,
    )


def room_here(folder: Path | None) -> Room:
    """What is free: RAM, and disk where ``folder`` will be; infinite if unknown."""
    ram = disk = float("inf")
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        ram = int(line.split()[1]) * 1024
    if folder is not None:
        there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        with suppress(OSError):
            disk = shutil.disk_usage(there).free
    return Room(ram, disk)


def forget_peak() -> None:
    """Begin to measure the peak anew, where the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    """The most memory this process has held, since ``forget_peak`` where it can."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024
