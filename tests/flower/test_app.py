"""The app in apps/flower is one that Flower and fedspu understand."""

import logging
import tomllib
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fedspu import prepare
from fedspu.errors import FedSPUError
from fedspu.flower.config import split
from fedspu.flower.server_app import app as server_app
from fedspu.imports import find_object
from fedspu.settings_text import flatten
from tests.flower.grid import Nodes

APP = Path(__file__).parents[2] / "apps/flower/pyproject.toml"


def test_the_app_names_what_there_is() -> None:
    app = tomllib.loads(APP.read_text())["tool"]["flwr"]["app"]
    for place in app["components"].values():
        assert find_object(place, "app") is not None
    config = dict(flatten(app["config"]))
    assert all(isinstance(v, str | int | float | bool) for v in config.values())
    given, deploy = split(config)
    settings, method, _ = prepare.choose(given, None, None, None, None)
    assert method.name == "fedspu"
    assert settings.clients.capacities == (0.2, 0.4, 0.6, 0.8, 1.0)
    assert (deploy.devices, deploy.out) == (10, None)


def test_what_is_wrong_is_one_line_and_the_runs_end(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flower = logging.getLogger("flwr")
    monkeypatch.setattr(flower, "filters", [])
    config: dict[str, bool | float | int | str] = {
        "model": "no_such_nets:build",
        "deploy.devices": 1,
    }
    context = Context(1, 0, {}, RecordDict(), config)
    # Not SystemExit: Flower would neither hear of it nor send what was logged.
    with pytest.raises(FedSPUError, match="no_such_nets") as raised:
        server_app(Nodes({}), context)
    assert capsys.readouterr().out == f"ERROR: {raised.value}\n"
    flower.error("ServerApp raised an exception", exc_info=raised.value)
    flower.error("another line")
    assert caplog.messages == [str(raised.value), "another line"]
