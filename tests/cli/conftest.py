import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspu import cli
from fedspu.federation.client import Client
from fedspu.federation.messages import TrainRequest
from fedspu.methods.method import Memory
from tests.cli.commands import CONFIG, NETS, Command, Result
from tests.oracles.federation import examples


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Type a command in this process."""

    def run(*words: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["fedspu", *map(str, words)])
        capsys.readouterr()
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A working folder with a user's own models and data; the models' module."""
    name = f"nets_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(NETS)
    (tmp_path / "small.toml").write_text(CONFIG.replace("NETS", name))
    x, y = examples()
    np.savez(tmp_path / "f.npz", x=x, y=y)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clients whose turns have been played so far."""
    original = Client.take_turn
    clients: list[int] = []

    def turn(client: Client, request: TrainRequest, memory: Memory) -> Any:
        clients.append(request.client)
        return original(client, request, memory)

    monkeypatch.setattr(Client, "take_turn", turn)
    return clients
