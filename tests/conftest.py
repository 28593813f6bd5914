"""What every test stands on: the same examples each time, one thread."""

import pytest
import torch
from hypothesis import HealthCheck, settings

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that wait, so that others use the cores meanwhile."""
    items.sort(key=lambda item: not item.nodeid.startswith(WAITING))
