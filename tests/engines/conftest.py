"""One Ray cluster for all tests that need one."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.ray_cluster import add_node, small_cluster, wait_until


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A head with one CPU."""
    pytest.importorskip("ray")
    with small_cluster() as found:
        yield found


@pytest.fixture
def second_node(cluster: Any) -> Any:
    """Another node of the cluster with one CPU; a test may kill it."""
    import ray

    nodes = list(cluster.worker_nodes) or [add_node(cluster)]
    # A node that an earlier test has killed is counted until Ray notices it.
    resources: Any = ray.cluster_resources
    wait_until(lambda: resources().get("CPU") == 1 + len(nodes))
    return nodes[0]
