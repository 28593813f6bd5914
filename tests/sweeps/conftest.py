"""A small experiment that takes a moment."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspu.sweeps.step_costs import StepCosts
from tests.oracles.federation import examples, named


@pytest.fixture(autouse=True)
def quick_steps(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Steps are measured only where a test is about that: it takes seconds."""
    if request.module.__name__.endswith("test_step_costs"):
        return
    monkeypatch.setattr(StepCosts, "_measured", lambda self, plan, active: 1000)


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
