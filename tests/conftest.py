"""What every test stands on: the same examples each time, one thread."""

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
