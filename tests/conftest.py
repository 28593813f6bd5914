"""What every test stands on: the same examples each time, one thread.

Three large grids of parameters are sampled, always the same points; ``pytest --whole``
(``make whole``) runs every point.
"""

import gc
from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, settings

from fedspu.conformance.nets import MODELS

# Named in pyproject.toml. A busy machine is no failure: no deadline, no check of speed.
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=30,
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


EACH_METHOD_WITH_ONE = {
    "tests/conformance/test_all_methods.py::test_a_method_obeys_the_law": "model",
    "tests/conformance/test_wire.py::test_every_method_obeys_the_laws": "form",
}
"""Minutes of laws: FedSPU with all values of this parameter, other methods with one."""

ONE_POINT_IN = {
    "tests/partial/test_context.py::"
    "test_one_and_ten_steps_equal_masked_dense_training": 4
}
"""Grids of many hundred points that take minutes; no other test is sampled."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let ``--whole`` run every point of large grids."""
    parser.addoption("--whole", action="store_true", help="sample no large grid")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Sample large grids; begin with tests that wait, so that others use the cores."""
    if not config.getoption("--whole"):
        items[:] = [item for item in items if _is_chosen(item)]
    items.sort(key=lambda item: not item.nodeid.startswith(WAITING))
    # What is loaded by now is not looked at in every collection of garbage.
    gc.collect()
    gc.freeze()


VALUES = {"model": list(MODELS), "form": ["float16", "bfloat16"]}


def _is_chosen(item: pytest.Item) -> bool:
    function = item.nodeid.partition("[")[0]
    if not isinstance(item, pytest.Function):
        return True
    if varying := EACH_METHOD_WITH_ONE.get(function):
        method, values = str(item.callspec.params["method"]), VALUES[varying]
        mine = values[crc32(method.encode()) % len(values)]
        is_mine = item.callspec.params[varying] == mine
        return is_mine or method.startswith("fedspu")
    return crc32(item.nodeid.encode()) % ONE_POINT_IN.get(function, 1) == 0
