"""The runs of a comparison: methods, any other settings, and seeds."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import product
from typing import Any

from fedspu.errors import SettingsError
from fedspu.settings import known_names
from fedspu.settings_text import SHORT_FORMS, parse_override, parse_value

READINGS = ("paper", "original")

LONGEST_NAME = 120
"""A folder's name is cut to this; the systems we know allow 255 bytes."""


@dataclass(frozen=True)
class Cell:
    """One run of a comparison.

    ``method`` is a name; a reading, options or settings may follow, each after an @:
    ``fjord@original``, ``fedavg@finetune=5``, ``fedspu@train.lr=0.05``. ``case`` has
    the values of all other settings that vary, by dotted name; ``tuned`` what was
    picked for this method.
    """

    method: str
    case: tuple[tuple[str, Any], ...]
    seed: int
    tuned: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def name(self) -> str:
        """Its folder's name, which no other run shares."""
        words = [self.method]
        for name, value in (*self.case, *self.tuned):
            words += [_short(name), _written(value)]
        whole = "-".join([*words, "seed", str(self.seed)])
        name = re.sub(r"[^\w.=@,+-]+", "-", whole)
        # A module's colon is the one character that may be lost without a mark.
        if name != whole.replace(":", "-") or len(name) > LONGEST_NAME:
            mark = sha256(whole.encode(errors="replace")).hexdigest()[:8]
            name = f"{name[: LONGEST_NAME - 9]}-{mark}"
        return name

    @property
    def title(self) -> str:
        """The run in words."""
        case = ", ".join(f"{_short(name)} {_written(v)}" for name, v in self.case)
        return f"{self.method}, {case}, seed {self.seed}"

    def settings(self) -> dict[str, Any]:
        """What it sets, by dotted name."""
        # What was asked for one method takes precedence over what holds for all.
        chosen = {**dict(self.case), "seed": self.seed, **dict(self.tuned)}
        return {**chosen, **method_settings(self.method)}


def _short(name: str) -> str:
    return "alpha" if name == "data.alpha" else name


def _written(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_written, value))
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(value)


def method_settings(text: str) -> dict[str, Any]:
    """What a method with readings, options and settings sets, by dotted name."""
    name, *options = text.split("@")
    chosen: dict[str, Any] = {"method.name": name}
    for option in options:
        if option in READINGS:
            chosen["method.reading"] = option
        elif "=" in option:
            key, value = parse_override(option)
            # An option of the method, or any setting by its dotted name.
            chosen[key if "." in key else f"method.{key}"] = value
        else:
            raise SettingsError(
                f"{text}: expected a reading (paper, original), option=value or "
                f"setting=value after the @, like fedavg@finetune=5 or "
                f"fedspu@train.lr=0.05; got {option!r}"
            )
    for key, flag in {"seed": "--seeds", "out": "--out"}.items():
        if key in chosen or f"method.{key}" in chosen:
            raise SettingsError(f"{text}: {key} has no effect there; use {flag}")
    return chosen


@dataclass(frozen=True)
class Sweep:
    """Which runs to compare: every method with every value of every axis and seed."""

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    axes: Mapping[str, tuple[Any, ...]]  # dotted name -> values; data.alpha is one

    def cells(self) -> Iterator[Cell]:
        """All runs: case by case, in each the methods in turn, in each the seeds."""
        for values in product(*self.axes.values()):
            case = tuple(zip(self.axes, values, strict=True))
            for method, seed in product(self.methods, self.seeds):
                yield Cell(method, case, seed)


def make_sweep(
    methods: Sequence[str], seeds: Sequence[int], axes: Mapping[str, Sequence[Any]]
) -> Sweep:
    """A sweep, checked; refuses values that are given twice."""
    for name in axes:
        _check_axis(name)
    for what, values in {"methods": methods, "seeds": seeds, **axes}.items():
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise SettingsError(f"{what} = {values!r}: expected a list of values")
        if not values:
            raise SettingsError(f"{what}: expected at least one value, got none")
        twice = [value for i, value in enumerate(values) if value in values[:i]]
        if twice:
            raise SettingsError(
                f"{what}: {_written(twice[0])} is given twice; leave one out"
            )
    for method in methods:
        if not isinstance(method, str) or not method:
            raise SettingsError(
                f"methods: expected names, like fedspu; got {method!r}; "
                "`fedspu methods` lists them"
            )
        both = method_settings(method).keys() & {
            SHORT_FORMS.get(name, name) for name in axes
        }
        if both:
            raise SettingsError(
                f"{method}: {sorted(both)[0]} is set for this method, and it varies "
                "for all; leave one of the two out"
            )
    for seed in seeds:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise SettingsError(f"seeds: expected whole numbers, got {seed!r}")
    return Sweep(
        tuple(methods),
        tuple(seeds),
        {SHORT_FORMS.get(name, name): frozen(values) for name, values in axes.items()},
    )


def frozen(value: Any) -> Any:
    """Lists as tuples, inside of others too, so that a run can be looked up by them."""
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def _check_axis(name: str) -> None:
    name = SHORT_FORMS.get(name, name)
    own = {
        "method.name": "methods",
        "seed": "seeds",
        "out": "one folder for all: --out",
    }
    if name in own:
        raise SettingsError(f"{name} cannot vary by itself; use {own[name]}")
    if name.startswith("method.") and name not in known_names():
        raise SettingsError(
            f"{name} cannot vary by itself, because only some methods have it; write "
            f"it after the method, as in fedavg@{name.removeprefix('method.')}=…"
        )


# As text ------------------------------------------------------------------------------


def parse_methods(text: str) -> list[str]:
    """Methods separated by commas; a comma in brackets belongs to a value."""
    return [part.strip() for part in _split(text)]


def parse_axis(text: str, flag: str) -> tuple[str, list[Any]]:
    """A setting and its values, as in ``train.lr=0.01,0.1``."""
    name, equals, values = text.partition("=")
    if not (equals and name.strip() and values.strip()):
        raise SettingsError(
            f"{flag} {text}: expected a setting and its values, as in {flag} "
            "train.lr=0.01,0.03,0.1"
        )
    name = name.strip()
    listed = [parse_value(part.strip()) for part in _split(values)]
    return SHORT_FORMS.get(name, name), listed


def _split(text: str) -> list[str]:
    """The parts between commas that are not inside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
