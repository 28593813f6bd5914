"""What PyTorch loads with a process's first optimizer is no client's time."""

import subprocess
import sys
from time import sleep
from types import ModuleType

import pytest

from fedspu.federation.client import Client
from fedspu.training import loading


def test_loading_is_timed_once_and_no_turn_pays_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "import_module", lambda name: sleep(0.5))
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    before, began = loading.seconds_of_loading()[0], Client._clocks()[0]
    loading.load_optimizers()
    spent = loading.seconds_of_loading()[0] - before
    assert spent >= 0.5
    assert Client._clocks()[0] - began < spent
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("it is there"))
    loading.load_optimizers()
    assert loading.seconds_of_loading()[0] - before == spent


MAP = """
import sys, torch, fedspu
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
neurons = fedspu.map_neurons(net, torch.ones(2, 3))
assert [group.size for group in neurons.groups] == [4]
sys.exit("torch._dynamo" in sys.modules)
"""


def test_a_model_is_mapped_without_loading_the_compiler_of_pytorch() -> None:
    """It takes longer to load than most models take to be mapped."""
    assert subprocess.run([sys.executable, "-c", MAP], check=False).returncode == 0
