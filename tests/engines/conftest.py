"""One Ray cluster for all tests that need one."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.ray_cluster import small_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A head with two CPUs; nodes can be added to it."""
    pytest.importorskip("ray")
    with small_cluster(num_cpus=2) as found:
        yield found
