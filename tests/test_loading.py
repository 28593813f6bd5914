"""What PyTorch loads with a process's first optimizer is no client's time."""

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
