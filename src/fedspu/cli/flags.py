"""Flags that commands share; those for settings are made from ``Settings``."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.models import ArgumentInfo

from fedspu.cli.results import for_programs
from fedspu.errors import SettingsError
from fedspu.expected import plain_type
from fedspu.settings import known_fields
from fedspu.settings_text import (
    flatten,
    nearest,
    parse_override,
    parse_value,
    read_toml,
)

Config = Annotated[
    Path | None,
    typer.Argument(metavar="[CONFIG.toml]", help="A whole experiment, as TOML."),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print the result as JSON.", callback=for_programs),
]
Model = Annotated[str, typer.Argument(help="A built-in name, or package.module:build.")]
Input = Annotated[
    str | None, typer.Option("--input", help="Shape of one example, like 3,32,32.")
]
Examples = Annotated[
    str | None,
    typer.Option("--data", help="Take examples from this data set instead."),
]

FLAGS = {
    entry.json_schema_extra["flag"]: (name, entry)
    for name, entry in known_fields()
    if entry.json_schema_extra and entry.json_schema_extra["flag"]
}
"""Flag -> the dotted name of its setting, and pydantic's description of it."""

Task = Annotated[
    str,
    typer.Option("--task", help=f"What is learned: {FLAGS['--task'][1].description}"),
]
"""For commands that take a task but no other settings."""

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting by its dotted name, as in --set train.momentum=0.9; may be "
        "repeated. `fedspu settings` lists them all.",
    ),
]


def with_settings(
    *leave_out: str,
    instead: Mapping[str, str] = MappingProxyType({}),
    extra: str | None = None,
    as_given: Collection[str] = (),
) -> Callable[[Callable[..., None]], Any]:
    """Give a command CONFIG.toml, --set and a flag for every setting that has one.

    The command's first argument is what was given, by dotted name: the file's values,
    overridden by those of --set, and these by the flags. ``leave_out`` lists the flags
    that the command defines itself; ``instead`` says which of the command's own flags
    replace a setting, so that --set cannot give it. ``extra`` is a table that the file
    may have besides settings: it is passed on under its name, flat. Paths become whole,
    except those of ``as_given``, which are looked up elsewhere. The command's own
    arguments come before CONFIG.toml.
    """

    def decorate(command: Callable[..., None]) -> Any:
        chosen = {flag: f for flag, f in FLAGS.items() if flag not in leave_out}
        own = list(signature(command).parameters.values())[1:]
        shared = [
            Parameter(
                "config", Parameter.KEYWORD_ONLY, default=None, annotation=Config
            ),
            Parameter("set_", Parameter.KEYWORD_ONLY, default=None, annotation=Set),
            *(_parameter(flag, entry) for flag, (_, entry) in chosen.items()),
        ]
        names = {_name(flag): setting for flag, (setting, _) in chosen.items()}
        kinds = {setting: plain_type(e.annotation) for setting, e in chosen.values()}

        @wraps(command)
        def wrapped(**values: Any) -> None:
            config, overrides = values.pop("config"), values.pop("set_")
            given = _read(config, overrides, instead, extra, as_given)
            of_file = set(given) if config and not overrides else set()
            for name, setting in names.items():
                value = values.pop(name)
                if value is not None:
                    given[setting] = _value(value, setting, kinds[setting])
                    of_file.discard(setting)
            with _naming(config, of_file):
                command(with_whole_paths(given, Path(), as_given), **values)

        arguments = [p for p in own if _is_argument(p)]
        options = [p for p in own if not _is_argument(p)]
        parameters = [
            p.replace(kind=Parameter.KEYWORD_ONLY)
            for p in (*arguments, *shared, *options)
        ]
        made: Any = wrapped
        made.__signature__ = signature(command).replace(parameters=parameters)
        made.__annotations__ = {p.name: p.annotation for p in parameters}
        return made

    return decorate


@contextmanager
def _naming(config: Path | None, names: Collection[str]) -> Iterator[None]:
    """Name the file in an error about one of its settings."""
    try:
        yield
    except SettingsError as error:
        text = str(error)
        if any(re.search(rf"(?<![\w.]){re.escape(n)}(:| =)", text) for n in names):
            raise type(error)(f"{text} (in {config})") from error
        raise


def _is_argument(parameter: Parameter) -> bool:
    described = getattr(parameter.annotation, "__metadata__", ())
    return any(isinstance(one, ArgumentInfo) for one in described)


def _read(
    config: Path | None,
    overrides: list[str] | None,
    instead: Mapping[str, str],
    extra: str | None,
    as_given: Collection[str],
) -> dict[str, Any]:
    given = _of_file(config, as_given) if config else {}
    if extra is not None:
        start = f"{extra}."
        found = {n: v for n, v in given.items() if n.startswith(start)}
        given = {n: v for n, v in given.items() if n not in found}
        given[extra] = {n.removeprefix(start): v for n, v in found.items()}
    for text in overrides or []:
        name, value = parse_override(text)
        if name in instead:
            raise SettingsError(
                f"--set {text}: has no effect in this command; use {instead[name]}"
            )
        given[name] = value
    return given


def _of_file(config: Path, as_given: Collection[str]) -> dict[str, Any]:
    """The values of a file; its paths of data and models are relative to it."""
    if config.suffix in DATA_SUFFIXES and ":" not in str(config):
        raise SettingsError(
            f"{config}: expected a TOML file with settings; for data, use --data "
            f"{DATA_SUFFIXES[config.suffix]}{config}"
        )
    if not config.exists():
        raise SettingsError(f"{config}: no such configuration file{_meant(config)}")
    if config.is_dir() and (config / SETTINGS).is_file():
        raise SettingsError(
            f"{config}: is a run folder; resume it with --resume {config}, or play it "
            f"again with {config / SETTINGS}"
        )
    given = dict(flatten(read_toml(config)))
    if config.name == SETTINGS and (config.parent / CHECKPOINT).is_dir():
        given.pop("out", None)  # of the run that wrote it: this is another one
    return with_whole_paths(given, config.parent, as_given)


def _meant(config: Path) -> str:
    """The flag that a word without one was probably meant for."""
    from fedspu.data import DATASETS
    from fedspu.methods import METHODS
    from fedspu.models import MODELS

    word = str(config)
    known = {"--data": DATASETS, "--method": METHODS, "--model": MODELS}
    for flag, names in known.items():
        if word.partition(":")[0] in names:
            return f" (did you mean {flag} {word}?)"
    found = [str(path) for path in Path(config.parent).glob("*.toml")]
    return nearest(word, sorted(found))


DATA_SUFFIXES = {".npz": "arrays:"}
"""Files of data that may be taken for an experiment, and what --data wants before."""

SETTINGS, CHECKPOINT, SWEEP = "settings.toml", "checkpoint", "sweep.json"
"""What folders of runs and comparisons have; see federation/storage."""


def with_whole_paths(
    given: dict[str, Any], folder: Path, as_given: Collection[str] = ()
) -> dict[str, Any]:
    """The same with whole paths of data and models, to be found from anywhere."""
    from fedspu.data import DATASETS
    from fedspu.models import is_hugging_face

    changed: dict[str, Any] = {}
    kind, colon, path = str(given.get("data.name", "")).partition(":")
    if colon and path and kind in DATASETS and DATASETS[kind].file:
        changed["data.name"] = f"{kind}:{_whole(path, folder)}"
    model = str(given.get("model", ""))
    if is_hugging_face(model):
        changed["model"] = f"hf:{_whole(model.removeprefix('hf:'), folder)}"
    if given.get("data.dir"):
        changed["data.dir"] = _whole(str(given["data.dir"]), folder)
    return {**given, **changed, **{n: given[n] for n in as_given if n in given}}


def _whole(path: str, folder: Path) -> str:
    found = Path(path)
    if path.startswith("~") or "\0" in path or found.is_absolute():
        return path
    return os.path.abspath(folder / found)


def _parameter(flag: str, entry: Any) -> Parameter:
    kind = plain_type(entry.annotation)
    option = typer.Option(flag, help=entry.description, metavar=METAVARS.get(kind))
    if kind is bool:
        option = typer.Option(help=entry.description)
    # Always text, whatever the type: the settings say what is wrong with it.
    annotation = Annotated[(bool if kind is bool else str) | None, option]  # type: ignore[valid-type]  # made here
    return Parameter(
        _name(flag), Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


METAVARS = {int: "NUMBER", float: "NUMBER", tuple: "NUMBERS", Path: "PATH"}


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _value(value: Any, setting: str, kind: Any) -> Any:
    """A flag's text as a value; numbers separated by commas as a list."""
    if kind in (bool, str, Path):
        return value
    if setting == "clients.capacities":
        return numbers(value, "--capacities")
    return parse_value(value)


# Values of other flags ----------------------------------------------------------------


def numbers(text: str, name: str) -> list[float]:
    """Numbers separated by commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise SettingsError(
            f"{name} {text}: expected numbers separated by commas, like 0.2,0.4,1"
        ) from None


def whole_numbers(text: str, name: str) -> list[int]:
    """Whole numbers separated by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SettingsError(
            f"{name} {text}: expected whole numbers, like 0,1,2"
        ) from None


def check_model(name: str, shape: str | None, task: str) -> None:
    """Refuse a model, a shape or a task that cannot be meant; PyTorch is not needed."""
    from fedspu import models, tasks

    models.check_name(name)
    tasks.check_name(task)
    if shape is not None:
        sizes(shape)


def sizes(shape: str) -> list[int]:
    """The shape of one example, like 3,32,32."""
    try:
        found = [int(part) for part in shape.split(",")]
    except ValueError:
        found = [-1]
    if min(found) < 0:
        raise SettingsError(
            f"--input {shape}: expected sizes separated by commas, like 3,32,32"
        )
    return found


def shares(text: str, name: str) -> list[float]:
    """Shares of neurons separated by commas."""
    found = numbers(text, name)
    for p in found:
        if not 0 < p <= 1:
            raise SettingsError(
                f"{name} {p:g}: expected numbers in (0, 1], like 0.2,0.4,1"
            )
    return found


def choices(text: str, name: str, known: tuple[Any, ...]) -> list[Any]:
    """One or several of a few words, separated by commas."""
    found = [part.strip() for part in text.split(",")]
    for part in found:
        if part not in known:
            raise SettingsError(
                f"{name} {text}: expected {' or '.join(known)}, or both as "
                f"{','.join(known)}"
            )
    return list(dict.fromkeys(found))


_BYTES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9}
_BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}


def num_bytes(text: str | None, name: str) -> float | None:
    """A size such as 4MB."""
    wanted = "expected a size with its unit, like 500kB, 4MB or 2GiB"
    return None if text is None else _measure(text, name, _BYTES, wanted)


def seconds(text: str | None, name: str) -> float | None:
    """A time span such as 10ms."""
    wanted = "expected a time above 0, like 0.01 or 10ms"
    return None if text is None else _measure(text, name, _SECONDS, wanted)


def _measure(text: str, name: str, units: dict[str, float], wanted: str) -> float:
    found = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*([a-z]*)\s*", text.lower())
    try:
        value = float(found[1]) * units[found[2]] if found else 0.0
    except (KeyError, ValueError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise SettingsError(f"{name} {text}: {wanted}")
    return value
