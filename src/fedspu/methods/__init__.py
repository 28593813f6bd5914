"""The federated methods, by name; one file each."""

from importlib import import_module

from fedspu.errors import SettingsError
from fedspu.methods.fedavg import fedavg
from fedspu.methods.feddrop import feddrop
from fedspu.methods.fedmp import fedmp
from fedspu.methods.fedselect import fedselect
from fedspu.methods.fedspu import fedspu
from fedspu.methods.fjord import fjord, fjord_original
from fedspu.methods.hermes import hermes
from fedspu.methods.heterofl import heterofl
from fedspu.methods.local import local
from fedspu.methods.method import Method
from fedspu.methods.prunefl import prunefl
from fedspu.methods.small import small
from fedspu.settings import MethodSettings, nearest

READINGS: tuple[Method, ...] = (
    *(fedspu, fjord, hermes, fedmp, prunefl, fedselect, feddrop),
    *(fedavg, local, small),
    *(fjord_original, heterofl),
)
"""All methods; of those with two readings, the one that is meant by the name first."""

METHODS: dict[str, Method] = {}
for _method in READINGS:
    METHODS.setdefault(_method.name, _method)


def find_method(name: str, reading: str | None = None) -> Method:
    """The method of this name, or at ``package.module:name``; in this reading if given.

    Without a reading: ``paper``, where there is one.
    """
    if ":" in name:
        known = [_imported(name)]
    else:
        known = [method for method in READINGS if method.name == name]
    if not known:
        raise SettingsError(
            f"method = {name!r}: expected one of {', '.join(METHODS)}, or "
            f"package.module:method{nearest(name, list(METHODS))}"
        )
    fitting = [m for m in known if reading in (None, m.reading)]
    if not fitting:
        raise SettingsError(
            f"method.reading = {reading!r}: {name} has "
            f"{' and '.join(m.reading for m in known)} here; `fedspu methods` lists "
            "them all"
        )
    return fitting[0]


def choose_method(options: MethodSettings) -> Method:
    """The method that settings name; refuses options it does not have."""
    method = find_method(options.name, options.reading)
    defaults = MethodSettings()
    for option in OPTIONS:
        if option in method.options or getattr(options, option) == getattr(
            defaults, option
        ):
            continue
        who = [f"{m.name} ({m.reading})" for m in READINGS if option in m.options]
        raise SettingsError(
            f"method.{option} = {getattr(options, option)}: {method.name} "
            f"({method.reading}) has no such option; {', '.join(who)} has"
        )
    return method


OPTIONS = tuple(o for o in MethodSettings.model_fields if o not in ("name", "reading"))


def _imported(place: str) -> Method:
    module, _, name = place.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"method = {place!r}: cannot be imported ({error})"
        ) from None
    if not isinstance(found, Method):
        raise SettingsError(
            f"method = {place!r}: is a {type(found).__name__}; expected a "
            "fedspu.methods.method.Method"
        )
    return found
