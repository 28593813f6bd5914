"""What every method computed when it was last looked at closely, bit for bit.

A change of ``golden.json`` is a change of results: its commit says why.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.golden.play import ENVIRONMENT, METHODS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GOLDEN: dict[str, Any] = json.loads((HERE / "golden.json").read_text(encoding="utf-8"))


def played() -> dict[str, Any]:
    """What is computed now, in a process that keeps to common instructions."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.play"],
        env={**os.environ, **ENVIRONMENT},
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_method_computes_what_it_did(subtests: pytest.Subtests) -> None:
    found = played()
    bits = found["bits"]
    for method in METHODS:
        if f"{method}, two workers" in bits:
            with subtests.test("workers reach the same bits", method=method):
                assert bits[f"{method}, one worker"] == bits[f"{method}, two workers"]
        with subtests.test("the same numbers as before", method=method):
            assert found["values"][method] == pytest.approx(
                GOLDEN["values"][method], rel=1e-9, abs=1e-12
            )
    if found["machine"] != GOLDEN["machine"]:
        pytest.skip("this machine rounds unlike the one that made golden.json")
    for name, digest in bits.items():
        with subtests.test("the same bits as before", run=name):
            assert digest == GOLDEN["bits"][name]
