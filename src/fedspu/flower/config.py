"""What Flower hands to our apps: the run's settings, and a device's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedspu.engines.flower.wire import Capacity, Name
from fedspu.errors import SettingsError
from fedspu.expected import wanted
from fedspu.settings_text import nearest, parse_value

PREFIX = "deploy."
"""Settings of the deployment begin like this; all others are fedspu's."""

FOLLOWS = ("clients.number", "clients.capacities", "clients.per_round")
"""Settings that follow from the devices that take part."""

MOST_DEVICES = 10_000_000


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DeploySettings(_Table):
    """How a server runs: in the run config, with ``deploy.`` before each name.

    ``devices``: how many to wait for before the first round, for up to ``wait``
    seconds. ``out`` is the run folder, on the server. ``resume``: go on with the run in
    that folder, if there is one. ``outputs``: of the model; 0: as many as any device
    needs for its own data.
    """

    out: Path | None = None
    devices: Annotated[int, Field(ge=1)] = 2
    wait: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    resume: bool = True
    outputs: Annotated[int, Field(ge=0)] = 0


class NodeSettings(_Table):
    """What a device brings: the node config of its SuperNode.

    ``folder`` is where it keeps its personal models; without one, Flower keeps them in
    memory, as in a simulation. ``data`` is its own data, by its name as for ``--data``.
    ``anew``: if its personal model is lost, it begins with a new one.
    """

    name: Name
    capacity: Capacity
    data: str
    folder: Path | None = None
    anew: bool = False


def split(
    run_config: Mapping[str, Any],
) -> tuple[dict[str, Any], DeploySettings]:
    """The settings of fedspu in a run config, and those of the deployment.

    Flower has no lists, so numbers are in a text, with commas between them. An empty
    text stands for a setting that is not given.
    """
    given = {name: v for name, v in run_config.items() if v != ""}
    if isinstance(numbers := given.get("clients.capacities"), str):
        given["clients.capacities"] = tuple(map(parse_value, numbers.split(",")))
    own = {n.removeprefix(PREFIX): v for n, v in given.items() if n.startswith(PREFIX)}
    others = {name: v for name, v in given.items() if not name.startswith(PREFIX)}
    return others, _checked(DeploySettings, own, PREFIX)


def for_any_number(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run whose devices are not known yet."""
    others = {name: v for name, v in given.items() if name not in FOLLOWS[:2]}
    return {**others, "clients.number": MOST_DEVICES}


def node_settings(node_config: Mapping[str, Any]) -> NodeSettings:
    """What a device's node config says."""
    known = {n: v for n, v in node_config.items() if n in NodeSettings.model_fields}
    return _checked(NodeSettings, known, "node config: ")


T = TypeVar("T", bound=_Table)


def _checked(table: type[T], given: Mapping[str, Any], prefix: str) -> T:
    try:
        return table.model_validate(dict(given))
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        known = list(table.model_fields)
        if problem["type"] == "extra_forbidden":
            raise SettingsError(
                f"{prefix}{name}: no such setting{nearest(name, known)}; expected "
                f"{', '.join(known)}"
            ) from None
        if problem["type"] == "missing":
            raise SettingsError(f"{prefix}{name}: not given") from None
        expected = wanted(table.model_fields[name], problem)
        raise SettingsError(
            f"{prefix}{name} = {given[name]!r}: expected {expected}"
        ) from None
