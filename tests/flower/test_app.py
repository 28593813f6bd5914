"""The app in apps/flower is one that Flower and fedspu understand."""

import tomllib
from pathlib import Path

from fedspu import prepare
from fedspu.flower.config import split
from fedspu.imports import find_object
from fedspu.settings_text import flatten

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
