"""The settings of one experiment, and how to read them from TOML and ``key=value``.

Defaults are the paper's. ``resolve.py`` turns what a user gives into complete settings;
it also looks at the data set and the method.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedspu.settings_text import flatten

Fraction01 = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Momentum = Annotated[float, Field(ge=0, lt=1)]


def setting(default: Any, about: str, flag: str | None = None) -> Any:
    """A setting: its default, its meaning, and its command-line flag, if any."""
    return Field(default, description=about, json_schema_extra={"flag": flag})


class Table(BaseModel):
    """One table of the TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _refuse_changed(
    table: Table, prefix: str, names: tuple[str, ...], needs: str
) -> None:
    """Refuse values other than the defaults for settings that have no effect."""
    for name in names:
        value = getattr(table, name)
        if value != type(table).model_fields[name].default:
            full = f"{prefix}.{name}".removeprefix(".")
            raise ValueError(f"{full} = {value}: has no effect with {needs}")


class MethodSettings(Table):
    """Which algorithm runs; anything else in this table is one of its own options."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = setting(
        "fedspu", "fedspu, hermes, local …: see `fedspu methods`.", "--method"
    )
    reading: Literal["paper", "original"] | None = setting(
        None,
        "The version that the FedSPU paper compares with, or the one of the method's "
        "own paper; default: paper if there is one, else original.",
    )
    finish: Annotated[int, Field(ge=0)] = setting(
        0,
        "Epochs that every client trains the server's model for when the run ends, "
        "within its capacity; it keeps the mean of the three models that do best on "
        "its validation examples, or its own if that does better. 0: as in the paper.",
    )
    finish_last: Annotated[int, Field(ge=0)] = setting(
        0, "The same for the last layer alone, the whole of it. 0: as in the paper."
    )

    @property
    def finishes(self) -> bool:
        """Whether clients make a last model once all rounds are played."""
        return self.finish > 0 or self.finish_last > 0

    @property
    def options(self) -> dict[str, Any]:
        """The method's own settings that were given, by name."""
        return dict(self.model_extra or {})


PARTITIONS = (
    "dirichlet",
    "dirichlet-client",
    "iid",
    "natural",
    "quantity",
    "shards",
)
"""Ways to divide examples among clients: see data/partition.py."""


class DataSettings(Table):
    """Which data, and how it is divided among the clients."""

    name: str = setting(
        "digits",
        "A data set (see `fedspu data list`), or your own: arrays:FILE.npz, or a "
        "function that returns arrays x and y: package.module:load.",
        "--data",
    )
    dir: Path | None = setting(None, "The folder with the data files.", "--data-dir")
    partition: str = setting(
        "dirichlet", f"How examples are divided: {', '.join(PARTITIONS)}."
    )
    alpha: Positive = setting(
        0.1,
        "Lower values make clients differ more. Only used by dirichlet, "
        "dirichlet-client and quantity.",
        "--alpha",
    )
    shards: Count = setting(2, "How many shards each client gets; only used by shards.")
    split: Literal["three-way", "paper"] = setting(
        "three-way",
        "Train, validate and test on 70, 15 and 15 %; or, as in the paper, validate "
        "and test on the same 30 %.",
    )
    min_examples: Count = setting(10, "Every client gets at least this many examples.")


class ClientsSettings(Table):
    """Who takes part, and how strong each is."""

    number: Annotated[int, Field(ge=1, le=10_000_000)] = setting(
        100, "How many clients there are.", "--clients"
    )
    per_round: Count = setting(10, "How many take part in a round.", "--per-round")
    capacities: Annotated[tuple[Fraction01, ...], Field(min_length=1)] = setting(
        (0.2, 0.4, 0.6, 0.8, 1.0),
        "The share p of neurons that clients can train, one number for each of several "
        "equal groups of clients, in client order, or one for each client.",
        "--capacities",
    )
    max_examples: Count = setting(
        10_000_000, "Refuse a reply that claims to be from more examples than this."
    )
    deadline: NotNegative | None = setting(
        None,
        "Seconds that a worker may take for one client; then it is replaced, and the "
        "client is asked once more. Default: 20 times as long as others took, at least "
        "a minute, an hour for the first; 0: no limit. There is none if one process "
        "plays all clients.",
    )

    @model_validator(mode="after")
    def _fits(self) -> "ClientsSettings":
        if self.per_round > self.number:
            raise ValueError(
                f"clients.per_round = {self.per_round}: expected at most "
                f"clients.number = {self.number}; set it too, like --per-round "
                f"{self.number}"
            )
        if len(self.capacities) > self.number:
            raise ValueError(
                f"clients.capacities has {len(self.capacities)} numbers: expected at "
                f"most clients.number = {self.number}; set fewer too, like "
                "--capacities 1"
            )
        return self


class TrainSettings(Table):
    """How a client trains in one round; lr and batch_size depend on the data set."""

    epochs: Count = setting(5, "Passes over a client's own examples.", "--epochs")
    batch_size: Count = setting(128, "Examples in a step.", "--batch-size")
    lr: NotNegative = setting(0.1, "Learning rate.", "--lr")
    optimizer: Literal["sgd", "adam", "adamw"] = setting(
        "sgd", "The clients' optimizer."
    )
    momentum: Momentum = setting(0.0, "Momentum of sgd.")
    weight_decay: NotNegative = setting(0.0, "Weight decay of every optimizer.")
    schedule: Literal["constant", "cosine", "step"] = setting(
        "constant", "How the learning rate changes from round to round."
    )
    schedule_rounds: Count | None = setting(
        None,
        "cosine: rounds until the learning rate is 0 (default: all rounds); step: "
        "rounds between two steps.",
    )
    schedule_factor: Fraction01 = setting(
        0.1, "step: what the learning rate is multiplied by at each step."
    )
    clip: NotNegative = setting(
        0.0, "A batch's gradient is scaled down to at most this norm; 0: no limit."
    )
    class_weights: Literal["none", "balanced"] = setting(
        "none",
        "balanced: in a client's training loss, rare classes among its own examples "
        "weigh more.",
    )
    adjust_logits: bool = setting(
        False,
        "In a client's training loss, each class's score gets the logarithm of the "
        "class's share among the client's own examples (logit adjustment). So the "
        "server's model need not learn the shares; a client's own model has them in "
        "its last bias.",
    )
    augment: tuple[Literal["flip", "crop"], ...] = setting(
        (), "Random changes to training images: flip, crop."
    )
    gradient: Literal["exact", "truncated"] = setting(
        "exact",
        "The true gradient of active neurons, or one that stops at frozen ones.",
    )
    saves: Literal["fast", "lean"] = setting(
        "fast", "Save time, or save memory, in a training step."
    )
    kernels: Literal["auto", "native", "torch"] = setting(
        "auto",
        "What runs small networks that are a chain of layers, and norms of others: "
        "compiled code, if there is a compiler (auto), always (native), or PyTorch "
        "(torch).",
        "--kernels",
    )

    @field_validator("augment", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """Also accept words separated by commas: flip,crop."""
        return value.split(",") if isinstance(value, str) else value

    @model_validator(mode="after")
    def _rare_classes_are_raised_once(self) -> "TrainSettings":
        if self.adjust_logits and self.class_weights != "none":
            raise ValueError(
                f"train.adjust_logits = true with train.class_weights = "
                f"{self.class_weights!r}: both make up for rare classes; switch one off"
            )
        return self

    @model_validator(mode="after")
    def _schedule_has_its_length(self) -> "TrainSettings":
        if self.schedule == "step" and self.schedule_rounds is None:
            raise ValueError(
                "train.schedule = 'step' needs a length: set train.schedule_rounds, "
                "the rounds between two steps"
            )
        if self.schedule == "constant" and self.schedule_rounds is not None:
            raise ValueError(
                f"train.schedule_rounds = {self.schedule_rounds}: has no effect with "
                "train.schedule = 'constant'; set train.schedule to cosine or step"
            )
        if self.schedule != "step":
            needs = f"train.schedule = {self.schedule!r}; set train.schedule to step"
            _refuse_changed(self, "train", ("schedule_factor",), needs)
        return self


class ServerSettings(Table):
    """What the server does with the clients' average."""

    optimizer: Literal["none", "momentum", "adam"] = setting(
        "none",
        "none: the average is the next model; momentum (FedAvgM) and adam (FedAdam) "
        "use the step towards it as a gradient.",
    )
    lr: Positive = setting(1.0, "Learning rate of the server's optimizer.")
    momentum: Momentum = setting(0.9, "Momentum of momentum, or beta 1 of adam.")
    beta2: Momentum = setting(0.99, "Beta 2 of adam.")
    epsilon: Positive = setting(1e-3, "Added to the denominator of adam.")
    average: Literal["last", "ema"] = setting(
        "last",
        "The server's model that is judged, handed out and finished from: the last, or "
        "a running mean of all (ema). Rounds always go on from the last.",
    )
    decay: Momentum = setting(0.9, "ema: the share of the mean before each round.")

    @model_validator(mode="after")
    def _has_an_effect(self) -> "ServerSettings":
        if self.optimizer == "none":
            needs = "server.optimizer = 'none'; set it to momentum or adam"
            _refuse_changed(self, "server", ("lr", "momentum"), needs)
        if self.optimizer != "adam":
            needs = f"server.optimizer = {self.optimizer!r}; set it to adam"
            _refuse_changed(self, "server", ("beta2", "epsilon"), needs)
        if self.average == "last":
            needs = "server.average = 'last'; set it to ema"
            _refuse_changed(self, "server", ("decay",), needs)
        return self


class GuardSettings(Table):
    """How the server limits what one client can do to the model; off by default."""

    rule: Literal["none", "clip", "trimmed-mean", "median", "krum"] = setting(
        "none",
        "Against hostile clients. clip: no update is longer than the median one; the "
        "others clip too: trimmed-mean and median of each entry; krum leaves out the "
        "updates that are least like the others. All clients weigh the same.",
    )
    share: Annotated[float, Field(gt=0, lt=0.5)] = setting(
        0.2, "trimmed-mean, krum: the share of hostile clients to withstand."
    )
    noise: NotNegative = setting(
        0.0,
        "For differential privacy: the noise on the sum of a round's updates has "
        "guard.noise times guard.clip as its standard deviation; 0: no noise. Else "
        "0.001 to 1000000.",
    )
    clip: NotNegative = setting(
        0.0,
        "With noise: a client's update is scaled down to at most this norm, 0.000001 "
        "to 1000000.",
    )
    delta: Annotated[float, Field(gt=0, lt=1)] = setting(
        1e-5, "With noise: the delta for which the run's epsilon is computed."
    )

    @model_validator(mode="after")
    def _has_an_effect(self) -> "GuardSettings":
        if self.rule not in ("trimmed-mean", "krum"):
            needs = f"guard.rule = {self.rule!r}; set it to trimmed-mean or krum"
            _refuse_changed(self, "guard", ("share",), needs)
        if not self.noise:
            needs = "guard.noise = 0; set guard.noise"
            _refuse_changed(self, "guard", ("clip", "delta"), needs)
        if self.noise and not self.clip:
            raise ValueError(
                f"guard.noise = {self.noise} needs a limit: set guard.clip, the "
                "largest norm of a client's update"
            )
        if self.noise and not 1e-3 <= self.noise <= 1e6:
            raise ValueError(
                f"guard.noise = {self.noise}: expected 0, or a number from 0.001 to "
                "1000000"
            )
        if self.noise and not 1e-6 <= self.clip <= 1e6:
            raise ValueError(
                f"guard.clip = {self.clip}: expected a number from 0.000001 to 1000000"
            )
        if self.noise and self.rule != "none":
            raise ValueError(
                f"guard.noise = {self.noise} with guard.rule = {self.rule!r}: only a "
                "plain sum of updates has a known epsilon; leave one of the two out"
            )
        return self


class EarlyStoppingSettings(Table):
    """Algorithm 2 of the paper; if off, Algorithm 1."""

    on: bool = setting(
        False,
        "A client leaves once it no longer improves (Algorithm 2).",
        "--early-stopping",
    )
    blend: Annotated[float, Field(gt=0, lt=1)] = setting(
        0.7, "The share of the training loss in the loss that must fall: the paper's λ."
    )
    patience: Count = setting(
        1, "A client leaves after that loss has risen this many times in a row."
    )


class NormSettings(Table):
    """What happens to normalisation layers."""

    policy: Literal["aggregate", "local"] = setting(
        "aggregate", "They travel like all others, or stay with the client (FedBN)."
    )


class WireSettings(Table):
    """In which form server and clients send each other values."""

    values: Literal["float32", "float16", "bfloat16"] = setting(
        "float32",
        "How weights travel, both ways: as they are, or rounded to half the bytes. "
        "float16 is finer, but holds at most 65504; bfloat16 has the range of float32.",
    )
    down: Literal["float32", "float16", "bfloat16"] | None = setting(
        None, "How weights travel to clients, if not as wire.values says."
    )


class StoreSettings(Table):
    """Where clients' own models are between rounds: on disk, the latest also in RAM."""

    cache: NotNegative = setting(
        200.0, "Megabytes of RAM for clients' own models, in each process."
    )
    durable: bool = setting(
        True,
        "Wait after each round until the disk has it. false: do not wait; a power cut "
        "may then cost the whole run (a killed process does not).",
    )


class JudgeSettings(Table):
    """How often all clients are judged (evaluated), or only a sample of them."""

    every: Count = setting(10, "Judge (evaluate) all clients every this many rounds.")
    clients: Count | None = setting(
        None, "Judge only a random sample of this many clients; default: all."
    )


class Settings(Table):
    """One federated run."""

    model: str = setting(
        ..., "A built-in name, hf:FOLDER, or package.module:build.", "--model"
    )
    task: str = setting(
        "classification",
        "classification, regression, language-model, segmentation, or your own: "
        "package.module:task.",
        "--task",
    )
    rounds: Count = setting(500, "Play at most this many rounds.", "--rounds")
    seed: Annotated[int, Field(ge=0)] = setting(
        0, "The same seed gives the same bits.", "--seed"
    )
    device: str = setting("cpu", "auto, cpu, cuda or mps.", "--device")
    workers: Count | None = setting(
        None,
        "Processes that play clients; default: as many as there are cores. Their "
        "number does not change a bit of the result.",
        "--workers",
    )
    engine: Literal["here", "ray", "flower"] = setting(
        "here",
        "What plays the clients: processes of this machine, a Ray cluster, or a "
        "simulation by Flower. It does not change a bit of the result.",
        "--engine",
    )
    ray_address: str | None = setting(
        None,
        "The Ray cluster, like 10.0.0.1:6379 or auto; default: one on this machine, "
        "for this run.",
        "--ray-address",
    )
    out: Path | None = setting(
        None, "The run folder; default: a new one in runs/.", "--out"
    )
    method: MethodSettings = MethodSettings()
    data: DataSettings = DataSettings()
    clients: ClientsSettings = ClientsSettings()
    train: TrainSettings = TrainSettings()
    server: ServerSettings = ServerSettings()
    guard: GuardSettings = GuardSettings()
    early_stopping: EarlyStoppingSettings = EarlyStoppingSettings()
    norm: NormSettings = NormSettings()
    wire: WireSettings = WireSettings()
    judge: JudgeSettings = JudgeSettings()
    store: StoreSettings = StoreSettings()

    @model_validator(mode="after")
    def _can_be_written(self) -> "Settings":
        """Refuse texts that no file can hold, or that are no name of a file."""
        for name, value in flatten(self.model_dump()):
            text = str(value)
            if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
                raise ValueError(f"{name} = {text!r}: expected text in UTF-8")
        return self

    @field_validator("device")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if not re.fullmatch(r"auto|(cpu|cuda|mps)(:\d+)?", value):
            raise ValueError(f"device = {value!r}: expected auto, cpu, cuda or mps")
        return value

    @field_validator("ray_address")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        found = re.fullmatch(r"([\w.-]+|\[[0-9a-fA-F:]+\]):(\d{1,5})", value or "")
        is_port = found is not None and 0 < int(found[2]) < 2**16
        if value in (None, "auto") or is_port:
            return value
        here = ""
        if value.startswith("ray://"):
            here = "; run fedspu on a node of the cluster"
        raise ValueError(
            f"ray_address = {value!r}: expected auto or host:port, like "
            f"10.0.0.1:6379{here}"
        )

    @model_validator(mode="after")
    def _address_has_an_effect(self) -> "Settings":
        if self.engine != "ray":
            needs = f"engine = {self.engine!r}; set it to ray (--engine ray)"
            _refuse_changed(self, "", ("ray_address",), needs)
        return self

    def to_toml(self) -> str:
        """All settings, as a file that `fedspu run` takes."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


SAME_BITS = frozenset(
    {
        "out",
        "workers",
        "engine",
        "ray_address",
        "store.cache",
        "store.durable",
        "clients.deadline",
    }
)
"""Settings that change nothing about a run's results, unless a client's turn is lost.

Whether one is depends on the machine as well, and records show it.
"""


# Names --------------------------------------------------------------------------------


def known_names(table: type[BaseModel] = Settings, prefix: str = "") -> Iterator[str]:
    """The dotted name of every setting."""
    for name, _ in known_fields(table, prefix):
        yield name


def known_fields(
    table: type[BaseModel] = Settings, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """The dotted name of every setting, and pydantic's description of it."""
    for name, entry in table.model_fields.items():
        kind = entry.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from known_fields(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", entry
