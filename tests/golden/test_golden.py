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

pytestmark = pytest.mark.xdist_group("golden")  # one process plays for all of them

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GOLDEN: dict[str, Any] = json.loads((HERE / "golden.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def played() -> dict[str, Any]:
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


def test_every_method_has_the_same_bits_as_before(played: dict[str, Any]) -> None:
    if played["machine"] != GOLDEN["machine"]:
        pytest.skip("this machine rounds unlike the one that made golden.json")

    assert played["bits"] == GOLDEN["bits"]


@pytest.mark.parametrize("method", METHODS)
def test_one_and_two_workers_reach_the_same_bits(
    played: dict[str, Any], method: str
) -> None:
    bits = played["bits"]

    assert bits[f"{method}, one worker"] == bits[f"{method}, two workers"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_computes_the_same_numbers_as_before(
    played: dict[str, Any], method: str
) -> None:
    assert played["values"][method] == pytest.approx(
        GOLDEN["values"][method], rel=1e-9, abs=1e-12
    )
