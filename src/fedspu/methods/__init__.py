"""The federated methods by name; each has a file of its own, imported when needed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import ValidationError

from fedspu.errors import SettingsError
from fedspu.expected import wanted
from fedspu.imports import call, find_object, is_place
from fedspu.methods.options import (
    APFLOptions,
    DittoOptions,
    FedALAOptions,
    FedAvgOptions,
    FedRepOptions,
    FedSPUOptions,
    FjordOptions,
    HeadOptions,
    Options,
)
from fedspu.settings import MethodSettings
from fedspu.settings_text import nearest, one_line

if TYPE_CHECKING:
    from fedspu.methods.method import Method


@dataclass(frozen=True)
class Entry:
    """A method in one reading: where its record is, and what can be set for it.

    ``place`` is ``module:attribute``: a Method, or a function from options to one.
    ``suggests`` are settings that it is meant to be used with, by dotted name.
    """

    name: str
    place: str
    reading: str = "paper"
    options: type[Options] = Options
    suggests: Mapping[str, Any] = field(default_factory=dict, hash=False)


CATALOGUE: tuple[Entry, ...] = (
    Entry("fedspu", "fedspu.methods.fedspu:make_fedspu", options=FedSPUOptions),
    Entry(
        "fedspu-plus",
        "fedspu.methods.fedspu:fedspu_plus",
        reading="original",
        suggests={
            "method.finish_last": 40,
            "train.adjust_logits": True,
            "server.average": "ema",
            "wire.down": "bfloat16",
        },
    ),
    Entry("fjord", "fedspu.methods.sub_model.fjord:fjord"),
    Entry("hermes", "fedspu.methods.sub_model.hermes:hermes"),
    Entry("fedmp", "fedspu.methods.sub_model.fedmp:fedmp"),
    Entry("prunefl", "fedspu.methods.sub_model.prunefl:prunefl"),
    Entry("fedselect", "fedspu.methods.sub_model.fedselect:fedselect"),
    Entry("feddrop", "fedspu.methods.sub_model.feddrop:feddrop"),
    Entry("fedavg", "fedspu.methods.whole_model.fedavg:fedavg", options=FedAvgOptions),
    Entry("local", "fedspu.methods.whole_model.local:local"),
    Entry("small", "fedspu.methods.sub_model.small:small"),
    Entry(
        "fjord",
        "fedspu.methods.sub_model.fjord_original:fjord_original",
        reading="original",
        options=FjordOptions,
    ),
    Entry("heterofl", "fedspu.methods.sub_model.heterofl:heterofl", reading="original"),
    Entry("fedrolex", "fedspu.methods.sub_model.fedrolex:fedrolex", reading="original"),
    Entry("ditto", "fedspu.methods.whole_model.ditto:ditto", "original", DittoOptions),
    Entry("apfl", "fedspu.methods.whole_model.apfl:apfl", "original", APFLOptions),
    Entry(
        "fedper", "fedspu.methods.whole_model.fedper:fedper", "original", HeadOptions
    ),
    Entry(
        "fedrep", "fedspu.methods.whole_model.fedrep:fedrep", "original", FedRepOptions
    ),
    Entry("fedbn", "fedspu.methods.whole_model.fedbn:fedbn", reading="original"),
    Entry(
        "fedala", "fedspu.methods.whole_model.fedala:fedala", "original", FedALAOptions
    ),
)
"""All methods; where one has two readings, the default comes first."""

METHODS = tuple(dict.fromkeys(entry.name for entry in CATALOGUE))


def suggested_by(method: str) -> Mapping[str, Any]:
    """The settings that one of our methods is meant to be used with."""
    known = {entry.name: entry.suggests for entry in CATALOGUE if entry.suggests}
    return known.get(method, {})


def find_entry(name: str, reading: str | None = None) -> Entry:
    """The method of this name, or at ``package.module:name``; in this reading if given.

    Without a reading it is ``paper``, where that exists.
    """
    if is_place(name):
        known = [_own_entry(name)]
    else:
        known = [entry for entry in CATALOGUE if entry.name == name]
    if not known:
        raise SettingsError(
            f"method = {name!r}: expected one of {', '.join(METHODS)}, or "
            f"package.module:method{nearest(name, list(METHODS))}"
        )
    fitting = [entry for entry in known if reading in (None, entry.reading)]
    if not fitting:
        raise SettingsError(
            f"method.reading = {reading!r}: {name} has only "
            f"{' and '.join(entry.reading for entry in known)} here; `fedspu methods` "
            "lists them all"
        )
    return fitting[0]


def check_options(chosen: MethodSettings) -> MethodSettings:
    """The same settings, with the method's own options checked and converted."""
    entry = find_entry(chosen.name, chosen.reading)
    options = _options(entry, chosen.options)
    given = {name: getattr(options, name) for name in chosen.options}
    return chosen.model_copy(update=given)


def make_method(chosen: MethodSettings) -> "Method":
    """The record of the method that settings name."""
    entry = find_entry(chosen.name, chosen.reading)
    return _make(entry, _options(entry, chosen.options))


def all_methods() -> dict[Entry, "Method"]:
    """The record of every method, with its default options."""
    return {entry: _make(entry, entry.options()) for entry in CATALOGUE}


def _make(entry: Entry, options: Options) -> "Method":
    from fedspu.methods.method import Method

    found = find_object(entry.place, "method")
    method = found
    if not isinstance(found, Method):
        method = call(found, f"method = {entry.place!r}", SettingsError, options)
    if not isinstance(method, Method):
        raise SettingsError(
            f"method = {entry.place!r}: returned a {type(method).__name__}; expected a "
            "fedspu.methods.method.Method"
        )
    return method


def _options(entry: Entry, given: dict[str, Any]) -> Options:
    known = list(entry.options.model_fields)
    for name, value in given.items():
        if name not in known:
            raise SettingsError(_no_such_option(entry, name, value))
    try:
        return entry.options.model_validate(given)
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0])
        expected = wanted(entry.options.model_fields[name], problem)
        raise SettingsError(
            f"method.{name} = {given.get(name)!r}: expected {expected}"
        ) from None


def _no_such_option(entry: Entry, name: str, value: Any) -> str:
    given = f"method.{name} = {one_line(value)}"
    text = f"{given}: {entry.name} ({entry.reading}) has no such option"
    have = [f"{e.name} ({e.reading})" for e in CATALOGUE if name in _fields(e)]
    if have:
        return f"{text}; {', '.join(have)} {'has' if len(have) == 1 else 'have'} it"
    known = [option for e in CATALOGUE for option in _fields(e)]
    return f"{text}{nearest(name, known)}; `fedspu methods` lists them"


def _fields(entry: Entry) -> list[str]:
    return list(entry.options.model_fields)


@cache
def _own_entry(place: str) -> Entry:
    """A method of the user's own, at ``package.module:name``."""
    from fedspu.methods.method import Method

    found = find_object(place, "method")
    if isinstance(found, Method):
        return Entry(place, place, found.reading)
    options = _taken_by(found)
    if options is None:
        raise SettingsError(
            f"method = {place!r}: it is a {type(found).__name__}; expected a "
            "fedspu.methods.method.Method, or a function from an Options class to one"
        )
    reading = _make(Entry(place, place), options()).reading
    return Entry(place, place, reading, options)


def _taken_by(function: Any) -> type[Options] | None:
    """The Options class that a function takes, by its type hints; else None."""
    try:
        kinds = [k for n, k in get_type_hints(function).items() if n != "return"]
    except (TypeError, NameError):
        return None
    is_one = len(kinds) == 1 and isinstance(kinds[0], type)
    return kinds[0] if is_one and issubclass(kinds[0], Options) else None
