"""The same bits in a simulation by Flower, on Ray."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedspu.engines.flower import QUIET
from fedspu.engines.flower.simulation import FlowerSimulation
from fedspu.errors import FedSPUError
from fedspu.runs import simulate
from tests.engines.fresh import environment
from tests.flower.fleet import SETTINGS, complete
from tests.flower.play_simulation import digest_of
from tests.flower.test_rounds import METHODS


def test_a_flower_simulation_reaches_the_same_bits(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    methods = METHODS if pytestconfig.getoption("--whole") else ["ditto"]
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.flower.play_simulation", str(out), *methods]
    said = subprocess.run(
        command,
        env={**environment(), **QUIET},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout == ""
    assert said.stderr == ""  # neither Flower nor Ray spoils the display
    found = json.loads(out.read_text())
    for method in methods:
        wanted = digest_of(simulate({**SETTINGS, "method.name": method}))
        assert found[method] == json.loads(json.dumps(wanted)), method


def test_a_simulation_that_does_not_begin_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(**given: object) -> None:
        # As Flower does it.
        raise RuntimeError("An error was encountered") from OSError("no more memory")

    monkeypatch.setattr("flwr.simulation.run_simulation", fail)
    ready = complete({})
    from fedspu.federation.client_memory import Shelf

    with pytest.raises(FedSPUError, match=r"did not begin \(no more memory\)"):
        FlowerSimulation(ready.plan, ready.examples, Shelf(None), 2)
