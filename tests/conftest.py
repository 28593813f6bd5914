"""What every test stands on: the same examples each time, one thread.

Large grids of parameters are sampled, always the same points; ``pytest --whole``
(``make whole``) runs every point.
"""

import gc
from collections import Counter
from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, settings

from fedspu.conformance.nets import MODELS

# "ci" is named in pyproject.toml; --whole takes more examples. A busy machine is no
# failure: no deadline, no check of speed.
for name, number in {"ci": 15, "whole": 30}.items():
    settings.register_profile(
        name,
        derandomize=True,
        deadline=None,
        max_examples=number,
        suppress_health_check=[HealthCheck.too_slow],
    )

torch.set_num_threads(1)


WAITING = (
    "tests/flower/",
    "tests/deploy/",
    "tests/engines/test_ray.py",
    "tests/engines/test_deadline.py",
    "tests/engines/test_sameness.py",
    "tests/test_lifetimes.py",
)
"""Tests that mostly wait for other processes."""


LARGE = 30
"""A test with more parameters than this is sampled: one point in ``ONE_IN``."""
ONE_IN = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let ``--whole`` run every point of large grids."""
    parser.addoption("--whole", action="store_true", help="sample no large grid")


def pytest_configure(config: pytest.Config) -> None:
    """Take more examples if all is wanted."""
    if config.getoption("--whole"):
        settings.load_profile("whole")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Sample large grids; begin with tests that wait, so that others use the cores."""
    if not config.getoption("--whole"):
        sizes = Counter(_function(item) for item in items)
        items[:] = [
            item
            for item in items
            if sizes[_function(item)] <= LARGE or _is_chosen(item)
        ]
    items.sort(key=lambda item: not item.nodeid.startswith(WAITING))
    # What is loaded by now is not looked at in every collection of garbage.
    gc.collect()
    gc.freeze()


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _is_chosen(item: pytest.Item) -> bool:
    given = item.callspec.params if isinstance(item, pytest.Function) else {}
    if given.keys() == {"model", "method", "law"}:
        # All laws of a case share its runs. FedSPU on all models, others on one each.
        method, models = str(given["method"]), list(MODELS)
        mine = models[crc32(method.encode()) % len(models)]
        return method.startswith("fedspu") or given["model"] == mine
    return crc32(item.nodeid.encode()) % ONE_IN == 0
