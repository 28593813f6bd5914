"""This machine: cores and threads, the memory a run will need, its peak so far."""

import ctypes
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from fedspu.errors import SettingsError
from fedspu.federation.plan import Plan, first_line
from fedspu.training.epochs import make_optimizer

# Devices, cores and threads -----------------------------------------------------------


def find_device(name: str) -> torch.device:
    """The device of this name; ``auto`` is the best one here."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SettingsError(
            f"device = {name!r}: cannot be used here ({first_line(error)}); try cpu"
        ) from None
    return device


def num_cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for each client turn: results must not depend on the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def warm_up(plan: Plan) -> None:
    """Do slow work now that would otherwise count as the first client's time."""
    # Torch loads seconds' worth of modules with the first optimizer. Compiled epochs
    # need none, though a method may still have one of its own.
    train = plan.settings.train
    if train.kernels != "native" or train.optimizer != "sgd":
        make_optimizer([torch.zeros(1, requires_grad=True)], train).zero_grad()
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Let glibc keep freed memory: giving it back costs page faults each time."""
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3

MOST_KEPT = 128 * 10**6
"""Bytes by which a process may grow before it gives freed memory back."""


class FreedMemory:
    """Gives freed memory back once it is much; to be asked after each turn.

    Clients need tensors of many sizes, and leave holes that the next one cannot use: a
    process would grow to several times of what it needs.
    """

    def __init__(self) -> None:
        self._held = 0  # bytes, after memory was last given back

    def give_back(self) -> None:
        """Give it back if this process has grown by more than ``MOST_KEPT``."""
        with suppress(OSError, AttributeError):  # another system, or C library
            self._held = min(self._held, _rss_bytes())
            if _rss_bytes() > self._held + MOST_KEPT:
                ctypes.CDLL("libc.so.6").malloc_trim(0)
                self._held = _rss_bytes()


def _rss_bytes() -> int:
    """The memory that this process holds now."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


# RAM and disk -------------------------------------------------------------------------


@dataclass(frozen=True)
class Space:
    """Bytes of RAM and disk."""

    ram: float
    disk: float


def memory_needed(
    model: int,
    num_kept: int,
    per_round: int,
    num_workers: int,
    cache: float,
    waiting: int,
) -> Space:
    """The RAM and disk a run needs, besides its data and its training steps.

    ``model`` is the size of one model in bytes, ``num_kept`` how many clients may keep
    one in the end, ``cache`` how many bytes of those a process may hold, ``waiting``
    how many replies of a round may wait for their turn. The server holds these replies,
    the global model twice, and sums and weights in float64. A worker holds a model to
    work in, its gradients, and three states in transit.
    """
    server = 6 * model + waiting * model
    worker = 6 * model + min(cache, num_kept * model)
    return Space(
        ram=server + num_workers * worker,
        disk=(num_kept + per_round + 3) * model,
    )


def memory_here(folder: Path | None) -> Space:
    """What is free: RAM, and disk where ``folder`` will be; infinite if unknown."""
    ram = disk = float("inf")
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        ram = int(line.split()[1]) * 1024
    if folder is not None:
        with suppress(OSError, ValueError):  # it may be too long, or forbidden
            there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
            disk = shutil.disk_usage(there).free
    return Space(min(ram, free_in_container()), disk)


def free_in_container(root: Path = Path("/")) -> float:
    """Bytes that this process's container may still take; infinite without a limit."""
    free = float("inf")
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text("utf-8").splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds == "":
                names = CGROUP_2
            elif "memory" in kinds.split(","):
                names = CGROUP_1
            else:
                continue
            # Inside of a container its own folder is the top, whatever its path says.
            own = root / names[0] / path.lstrip("/")
            top = root / names[0]
            for group in (own, *own.parents):
                if group == top or top in group.parents:
                    free = min(free, _free_in_group(group, *names[1:]))
    return free


CGROUP_2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
CGROUP_1 = (
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)
"""The folder, the limit, what is used, and what of that is only a cache of files."""


def _free_in_group(group: Path, limit: str, used: str, cache: str) -> float:
    try:
        most = int((group / limit).read_text("utf-8"))  # "max" is no number
        taken = int((group / used).read_text("utf-8"))
    except (OSError, ValueError):
        return float("inf")
    with suppress(OSError, ValueError):
        lines = (group / "memory.stat").read_text("utf-8").splitlines()
        taken -= sum(int(n) for k, n in map(str.split, lines) if k == cache)
    return float(max(0, most - max(0, taken)))


def forget_peak() -> None:
    """Reset the peak that ``peak_rss_bytes`` reports, where the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    """The most memory this process has held since ``forget_peak``, or ever."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024
