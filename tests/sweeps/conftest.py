"""A small experiment that takes a moment."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracles.federation import examples, named


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """Settings of a small experiment on a file of made examples."""
    x, y = examples()
    np.savez(tmp_path / "f.npz", x=x, y=y)
    return {
        **named(rounds=2),
        "model": "tests.oracles.federation:mlp",
        "data.name": f"arrays:{tmp_path / 'f.npz'}",
    }
