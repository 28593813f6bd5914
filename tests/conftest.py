"""What every test stands on: the same examples each time, one thread."""

import torch
from hypothesis import settings

# Named in pyproject.toml. A busy machine is no failure, so there is no deadline.
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=30)

torch.set_num_threads(1)
