"""The thin app that Flower runs: a pyproject.toml that names fedspu's own parts."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedspu.data import find_source
from fedspu.errors import DeploymentError
from fedspu.files import write_whole
from fedspu.settings import Settings
from fedspu.settings_text import flatten, nest

NO_EFFECT = ("out", "engine", "ray_address", "workers")
"""Settings of a run on this machine: in a deployment, devices play the clients."""

WAIT = 600
"""Seconds to wait for devices before round 1."""


def app_config(settings: Settings, run: Path, num_devices: int) -> dict[str, Any]:
    """The run's configuration: every setting, and the entries of the table deploy."""
    values = settings.model_dump(mode="json", exclude_none=True)
    for name in NO_EFFECT:
        values.pop(name, None)
    values["deploy"] = {
        "out": str(run),
        "devices": num_devices,
        "wait": WAIT,
        "resume": True,
        "outputs": find_source(settings.data.name)[0].num_classes or 0,
    }
    return nest(
        {name: text for name, value in flatten(values) for text in _flat(value)}
    )


def _flat(value: Any) -> list[Any]:
    """A value as Flower takes it: lists as text with commas, empty ones not at all."""
    if isinstance(value, list | tuple):
        return [",".join(map(str, value))] if value else []
    return [value]


def write_app(folder: Path, config: Mapping[str, Any], version: str) -> None:
    """Write the app's one file."""
    folder.mkdir(exist_ok=True)
    project = {
        "project": {
            "name": "fedspu-app",
            "version": version,
            "description": "fedspu on real devices",
            # All of it is installed with fedspu, on the server and on devices.
            "dependencies": [],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedspu",
                    "components": {
                        "serverapp": "fedspu.flower.server_app:app",
                        "clientapp": "fedspu.flower.client_app:app",
                    },
                    "config": config,
                }
            }
        },
    }
    text = tomli_w.dumps(project)
    write_whole(folder / "pyproject.toml", text.encode(), durable=True)


def with_devices(folder: Path, run: Path, capacities: Mapping[str, float]) -> bytes:
    """The app's file for these devices; what meant all devices means all of these."""
    file = folder / "pyproject.toml"
    try:
        project = tomllib.loads(file.read_text("utf-8"))
        config = project["tool"]["flwr"]["app"]["config"]
        clients, deploy = config["clients"], config["deploy"]
        before, now = clients["number"], len(capacities)

        def adapted(number: int) -> int:
            return now if number == before else min(number, now)

        clients |= {
            "number": now,
            "per_round": adapted(clients["per_round"]),
            "capacities": ",".join(map(str, capacities.values())),
        }
        deploy |= {"devices": adapted(deploy["devices"]), "out": str(run)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DeploymentError(
            f"{file} is not as `fedspu deploy init` makes it ({error})"
        ) from None
    return tomli_w.dumps(project).encode()
