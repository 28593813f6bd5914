from collections.abc import Iterator

import pytest

from tests.oracles.masked_training import WAYS, Way


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """One way to compute, taken however small the model."""
    with request.param.forced():
        yield request.param
