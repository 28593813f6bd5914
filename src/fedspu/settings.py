"""One experiment: frozen settings, read from TOML, flags and the data set's own.

Defaults are the paper's. Model, learning rate, batch size and the like depend on the
data set, which suggests them; what the user gives always wins.
"""

import ast
import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedspu.errors import SettingsError

Fraction01 = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Table(BaseModel):
    """One table of the TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class MethodSettings(Table):
    """Which algorithm is run."""

    name: str = "fedspu"
    # What the FedSPU paper compares with, or what the method's own paper says; None:
    # the first of the two that there is.
    reading: Literal["paper", "original"] | None = None
    finetune: Annotated[int, Field(ge=0)] = 0  # epochs, before fedavg is judged
    distillation: bool = False  # in fjord's original reading


class DataSettings(Table):
    """Which data, and how it is divided among the clients."""

    name: str = "digits"
    dir: Path | None = None
    partition: str = "dirichlet"
    # Lower: clients differ more. Read by dirichlet, dirichlet-client and quantity.
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    shards: Count = 2  # a client's pieces of the data sorted by class, in `shards`
    split: Literal["three-way", "paper"] = "three-way"
    min_examples: Count = 10


class ClientsSettings(Table):
    """Who takes part, and how strong each is."""

    number: Count = 100
    per_round: Count = 10
    # Equal clusters in client order; as many numbers as clients means one for each.
    capacities: Annotated[tuple[Fraction01, ...], Field(min_length=1)] = (
        *(0.2, 0.4, 0.6, 0.8, 1.0),
    )

    @model_validator(mode="after")
    def _fits(self) -> "ClientsSettings":
        if self.per_round > self.number:
            raise ValueError(
                f"clients.per_round = {self.per_round}: expected at most "
                f"clients.number = {self.number}"
            )
        if len(self.capacities) > self.number:
            raise ValueError(
                f"clients.capacities has {len(self.capacities)} numbers: expected at "
                f"most clients.number = {self.number}"
            )
        return self


class TrainSettings(Table):
    """How a client trains in one round; lr and batch_size depend on the data set."""

    epochs: Count = 5
    batch_size: Count = 128
    lr: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    gradient: Literal["exact", "truncated"] = "exact"
    saves: Literal["fast", "lean"] = "fast"


class EarlyStoppingSettings(Table):
    """Algorithm 2; off is Algorithm 1."""

    on: bool = False
    blend: Annotated[float, Field(gt=0, lt=1)] = 0.7  # the paper's λ
    patience: Count = 1


class NormSettings(Table):
    """What becomes of normalisation layers."""

    # aggregate: they travel like all else; local: they stay with the client (FedBN).
    policy: Literal["aggregate", "local"] = "aggregate"


class StoreSettings(Table):
    """Where clients' own models are between rounds: on disk, and the latest in RAM."""

    cache: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 200.0  # MB a process


class JudgeSettings(Table):
    """How often, and on how many clients, what costs every client is judged."""

    every: Count = 10
    clients: Count | None = None  # a seeded sample of so many; None: all


class Settings(Table):
    """One federated run."""

    model: str
    rounds: Count = 500
    seed: Annotated[int, Field(ge=0)] = 0
    device: str = "cpu"
    workers: Count | None = None  # processes that play clients; None: as many as cores
    out: Path | None = None
    method: MethodSettings = MethodSettings()
    data: DataSettings = DataSettings()
    clients: ClientsSettings = ClientsSettings()
    train: TrainSettings = TrainSettings()
    early_stopping: EarlyStoppingSettings = EarlyStoppingSettings()
    norm: NormSettings = NormSettings()
    judge: JudgeSettings = JudgeSettings()
    store: StoreSettings = StoreSettings()

    def to_toml(self) -> str:
        """All that was used, as a file that `fedspu run` takes."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


SHORT_FORMS = {"method": "method.name", "early_stopping": "early_stopping.on"}
"""Tables that may be given by their main value alone."""


def make_settings(
    given: Mapping[str, Any], suggested: Mapping[str, Any] | None = None
) -> Settings:
    """Settings from values by (dotted or nested) name.

    ``suggested`` is what the data set suggests; what is given goes before it.
    """
    flat = {**(suggested or {}), **dict(flatten(given))}
    _check_names(flat)
    try:
        return Settings.model_validate(_nested(flat))
    except ValidationError as error:
        raise SettingsError(_first_problem(error, flat)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """The values in a configuration file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: not valid TOML ({error})") from None


def parse_override(text: str) -> tuple[str, Any]:
    """One ``key=value`` of the command line; the value as in TOML, or plain text."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SettingsError(
            f"--set {text}: expected key=value, for example --set train.lr=0.05"
        )
    return key.strip(), _parse_value(value.strip())


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return ast.literal_eval(text)  # [.2, .4], which TOML does not allow
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as dotted names; short forms in full; None left out."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")
        elif value is not None:
            yield SHORT_FORMS.get(name, name), value


def known_names(table: type[BaseModel] = Settings, prefix: str = "") -> Iterator[str]:
    """The dotted name of every setting."""
    for name, entry in table.model_fields.items():
        kind = entry.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from known_names(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def nearest(name: str, known: list[str]) -> str:
    """`` (did you mean …?)`` for a name close to a known one, else nothing."""
    found = difflib.get_close_matches(name, known, n=1)
    if not found:  # lr for train.lr
        found = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]
    return f" (did you mean {found[0]}?)" if found else ""


def _check_names(flat: Mapping[str, Any]) -> None:
    known = list(known_names())
    for name in flat:
        if name not in known:
            raise SettingsError(
                f"{name}: no such setting{nearest(name, known)}; "
                "`fedspu run --help` lists them"
            )


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        table = nested
        for key in path:
            table = table.setdefault(key, {})
        table[last] = value
    return nested


def _first_problem(error: ValidationError, flat: Mapping[str, Any]) -> str:
    problem = error.errors()[0]
    name = ".".join(str(part) for part in problem["loc"] if not isinstance(part, int))
    if problem["type"] == "value_error":  # one of our own checks: a whole sentence
        return str(problem["ctx"]["error"])
    if problem["type"] == "missing":
        return f"{name}: not given, and the data set suggests none; set --{name}"
    wanted = problem["msg"].removeprefix("Input should be ")
    return f"{name} = {flat.get(name, problem['input'])!r}: expected {wanted}"
