"""Laws that every method obeys; to be run on ours, and on anybody's.

``check`` runs them all on one method and raises a Violation that lists what it found::

    from fedspu.conformance import check

    check(my_method)  # a Method record, or "package.module:record"

The same from a shell, as tests::

    FEDSPU_METHOD=package.module:record pytest --pyargs fedspu.conformance
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from fedspu.conformance.cases import ENGINES, Case, MakeEngine, Setup
from fedspu.conformance.laws import LAWS, Law, Violation
from fedspu.conformance.nets import MODELS, made_examples
from fedspu.errors import SettingsError
from fedspu.federation.plan import Build
from fedspu.methods import make_method
from fedspu.methods.method import Method
from fedspu.settings import MethodSettings, nearest

__all__ = [
    "ENGINES",
    "EXEMPT",
    "LAWS",
    "MODELS",
    "Case",
    "Finding",
    "Law",
    "MakeEngine",
    "Setup",
    "Violation",
    "check",
    "examine",
    "laws_for",
]

FEDAVG = "at_full_capacity_it_is_fedavg"

EXEMPT: Mapping[str, tuple[str, ...]] = {
    "fedselect": (FEDAVG,),  # no client has more than half
    "fedrep": (FEDAVG,),  # head and body train one after the other
    "fedala": (FEDAVG,),  # clients mix what came with what they had
}
"""Laws that are not meant for a method of ours."""


@dataclass(frozen=True)
class Finding:
    """What came of one law on one model: ``violation`` is None if it holds."""

    law: str
    model: str
    violation: str | None
    seconds: float


def check(
    method: Method | str,
    model: Build | None = None,
    data: tuple[Any, Any] | None = None,
    *,
    reading: str | None = None,
    leave_out: Iterable[str] = (),
    engines: tuple[MakeEngine, ...] = ENGINES,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Raise one Violation that lists every law the method does not obey.

    ``model`` builds a model for ``data``, arrays (x, y); both are made here if left
    out, models of several kinds. ``leave_out`` names laws that are not meant for the
    method, ``engines`` make engines that must not differ from the one ``simulate`` has,
    ``settings`` are those of a run, by name, where they should not be as they are here.
    """
    findings = examine(
        method,
        model,
        data,
        reading=reading,
        leave_out=leave_out,
        engines=engines,
        settings=settings,
    )
    broken = [finding for finding in findings if finding.violation is not None]
    if broken:
        raise Violation(
            "\n\n".join(str(finding.violation) for finding in broken),
            tuple(dict.fromkeys(finding.law for finding in broken)),
        )


def examine(
    method: Method | str,
    model: Build | None = None,
    data: tuple[Any, Any] | None = None,
    *,
    reading: str | None = None,
    leave_out: Iterable[str] = (),
    engines: tuple[MakeEngine, ...] = ENGINES,
    settings: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """What comes of every law on every model; arguments as in ``check``."""
    record = _record(method, reading) if isinstance(method, str) else method
    if (model is None) != (data is None):
        raise SettingsError("check: expected a model and data for it, or neither")
    laws = laws_for(record, leave_out)
    given = settings or {}
    setups = [
        Setup(n, build, made_examples(), engines, given) for n, build in MODELS.items()
    ]
    if model is not None and data is not None:
        name = getattr(model, "__qualname__", type(model).__name__)
        setups = [Setup(name, model, data, engines, given)]
    cases = [Case(record, setup) for setup in setups]
    for case in cases:
        _ = case.prepared  # a model or data that will not do is refused as in any run
    return [_try(law, name, case) for case in cases for name, law in laws.items()]


def _record(name: str, reading: str | None) -> Method:
    chosen = {"name": name, "reading": reading}
    return make_method(MethodSettings.model_validate(chosen))


def laws_for(method: Method, leave_out: Iterable[str] = ()) -> dict[str, Law]:
    """The laws that are meant for a method, by name."""
    omitted = {*leave_out, *EXEMPT.get(method.name, ())}
    for name in sorted(omitted - LAWS.keys()):
        raise SettingsError(
            f"leave_out = {name!r}: expected names of {', '.join(LAWS)}"
            f"{nearest(name, list(LAWS))}"
        )
    return {name: law for name, law in LAWS.items() if name not in omitted}


def _try(law: Law, name: str, case: Case) -> Finding:
    start, violation = perf_counter(), None
    try:
        law(case)
    except Violation as found:
        violation = str(found)
    return Finding(name, case.setup.name, violation, perf_counter() - start)
