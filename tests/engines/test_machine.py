import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from fedspu.engines.machine import (
    Space,
    find_device,
    free_in_container,
    memory_here,
    memory_needed,
    one_thread,
)
from fedspu.errors import SettingsError


def test_disk_is_for_the_models_of_all_clients_that_may_take_part() -> None:
    needed = memory_needed(
        model=1000, num_kept=50, per_round=10, num_workers=2, cache=1e6, waiting=10
    )
    # Fifty models, ten that are written before old ones go, w0, the global one twice.
    assert needed.disk == 63 * 1000


def test_ram_grows_with_workers_and_their_cache_and_not_with_clients() -> None:
    def ram(**given: float) -> float:
        chosen = {"model": 1000, "num_kept": 10**6, "per_round": 10, "num_workers": 2}
        chosen |= {"waiting": 10}
        return memory_needed(**{**chosen, "cache": 5000.0, **given}).ram  # type: ignore[arg-type]  # numbers

    assert ram(num_kept=10**7) == ram()
    assert ram(num_workers=4) > ram()
    assert ram(cache=50_000) == ram() + 2 * 45_000
    assert ram(per_round=10**6) == ram()
    assert ram(waiting=24) == ram() + 14 * 1000


def test_what_is_free_is_known_of_a_folder_that_is_yet_to_be_made(
    tmp_path: Path,
) -> None:
    here = memory_here(tmp_path / "a" / "b" / "run")
    assert isinstance(here, Space)
    assert 0 < here.disk < float("inf")
    assert here.ram > 0
    assert memory_here(None).disk == float("inf")


def group(folder: Path, **values: object) -> None:
    """The files of a control group; __ stands for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    group(tmp_path / "proc/self", cgroup="0::/")
    top = tmp_path / "sys/fs/cgroup"
    assert free_in_container(tmp_path) == float("inf")
    group(top, memory__max="max", memory__current=300)
    assert free_in_container(tmp_path) == float("inf")
    group(top, memory__max=1000)
    assert free_in_container(tmp_path) == 700
    # Files in the cache are given up first.
    group(top, memory__stat="anon 200\ninactive_file 100")
    assert free_in_container(tmp_path) == 800
    group(top, memory__max=100)
    assert free_in_container(tmp_path) == 0


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    group(tmp_path / "proc/self", cgroup="0::/box/job")
    top = tmp_path / "sys/fs/cgroup"
    group(top / "box", memory__max=1000, memory__current=900)
    group(top / "box/job", memory__max=500, memory__current=0)
    assert free_in_container(tmp_path) == 100


def test_older_systems_have_limits_too(tmp_path: Path) -> None:
    group(tmp_path / "proc/self", cgroup="5:cpu:/x\n4:hugetlb,memory:/docker/1\n0::/")
    # In the container, the path of the group is not there.
    group(
        tmp_path / "sys/fs/cgroup/memory",
        memory__limit_in_bytes=1000,
        memory__usage_in_bytes=400,
        memory__stat="total_inactive_file 50",
    )
    assert free_in_container(tmp_path) == 650


def test_a_strange_system_has_no_limit(tmp_path: Path) -> None:
    assert free_in_container(tmp_path) == float("inf")
    group(tmp_path / "proc/self", cgroup="nonsense")
    assert free_in_container(tmp_path) == float("inf")


def test_a_device_that_is_not_here_is_refused_by_name() -> None:
    assert find_device("cpu") == torch.device("cpu")
    with pytest.raises(SettingsError, match=r"device = 'nowhere': .*; try cpu"):
        find_device("nowhere")


def test_one_thread_is_used_inside_and_as_many_as_before_outside() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with suppress(ZeroDivisionError), one_thread():
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


HOLES = """
import torch
from fedspu.engines import machine

machine.keep_freed_memory()
freed = machine.FreedMemory()
freed.give_back()
before = machine._rss_bytes()
rows = [torch.ones(250_000) for _ in range(400)]  # 400 MB
last = torch.ones(250_000)  # holds the heap's end
del rows
assert machine._rss_bytes() > before + 300e6, "it was given back at once"
machine.MOST_KEPT = 10**9
freed.give_back()
assert machine._rss_bytes() > before + 300e6, "little is kept"
machine.MOST_KEPT = 10**8
freed.give_back()
assert machine._rss_bytes() < before + 50e6, "it is kept"
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="another system")
def test_freed_memory_is_kept_until_it_is_much() -> None:
    subprocess.run([sys.executable, "-c", HOLES], check=True)
