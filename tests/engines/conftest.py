"""One Ray cluster for all tests that need one."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.ray_cluster import add_node, small_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A head with one CPU."""
    pytest.importorskip("ray")
    with small_cluster() as found:
        yield found


@pytest.fixture
def second_node(cluster: Any) -> Any:
    """Another node of the cluster with one CPU; a test may kill it."""
    for node in cluster.worker_nodes:
        return node
    return add_node(cluster)
