"""What a run was played with: versions and the machine, for its summary."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from fedspu.compiled.library import processor


def environment() -> dict[str, Any]:
    """Versions, system and processor; nothing that names the machine or its user."""
    try:
        own = version("fedspu")
    except PackageNotFoundError:  # used from a source tree
        own = "of a source tree"
    return {
        "fedspu": own,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": " ".join(processor().splitlines()[1:2]),
        "cores": os.cpu_count(),
    }
