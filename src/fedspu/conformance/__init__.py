"""Laws that every method must obey, ours and yours.

``check`` tries them all on one method and raises a Violation that lists those broken::

    from fedspu.conformance import check

    check(my_method)  # a Method record, or "package.module:record"

To run them as tests, from a shell::

    FEDSPU_METHOD=package.module:record pytest --pyargs fedspu.conformance
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from fedspu.conformance.cases import ENGINES, Case, MakeEngine, Setup
from fedspu.conformance.laws import LAWS, Law, Violation
from fedspu.conformance.laws.law import in_words
from fedspu.conformance.nets import MODELS, made_examples
from fedspu.errors import SettingsError
from fedspu.federation.plan import Build
from fedspu.methods import make_method
from fedspu.methods.method import Method
from fedspu.settings import MethodSettings
from fedspu.settings_text import nearest

__all__ = [
    "ENGINES",
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


Watch = Callable[[str, str, int, int], None]


@dataclass(frozen=True)
class Finding:
    """The result of one law on one model; ``violation`` is None if the law holds.

    ``why_unchecked``: the error that ended the law's run, so that nobody knows whether
    the law holds; it then counts as a violation too.
    """

    law: str
    model: str
    violation: str | None
    seconds: float
    why_unchecked: str | None = None


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

    ``model`` builds a model for ``data``, a pair of arrays (x, y). Without them, the
    method is tried on several small models and made-up data. ``leave_out`` names laws
    that do not apply to the method. ``engines`` make further engines, whose runs must
    equal those of ``simulate``. ``settings``, by name, replace the settings of the runs
    here.
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
    watch: Watch = lambda law, model, number, of: None,
) -> Iterator[Finding]:
    """The result of every law on every model, as soon as each is known.

    Takes the arguments of ``check``; ``watch`` is called before each law, with its
    name, the model, and how far it is.
    """
    record = _record(method, reading) if isinstance(method, str) else method
    if (model is None) != (data is None):
        raise SettingsError(
            "check: expected a model and data for it, or neither; only one was given"
        )
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
        _ = case.prepared  # an unusable model or data raises the same error as in a run
    tries = [(case, name) for case in cases for name in laws]
    for number, (case, name) in enumerate(tries, 1):
        watch(name, case.setup.name, number, len(tries))
        yield _try(laws[name], name, case)


def _record(name: str, reading: str | None) -> Method:
    chosen = {"name": name, "reading": reading}
    return make_method(MethodSettings.model_validate(chosen))


def laws_for(method: Method, leave_out: Iterable[str] = ()) -> dict[str, Law]:
    """The laws that apply to a method, by name: those it does not depart from."""
    omitted = {*leave_out, *method.departs}
    for name in sorted(omitted - LAWS.keys()):
        raise SettingsError(
            f"leave_out = {name!r}: no such law; expected names from {', '.join(LAWS)}"
            f"{nearest(name, list(LAWS))}"
        )
    return {name: law for name, law in LAWS.items() if name not in omitted}


def _try(law: Law, name: str, case: Case) -> Finding:
    start, violation, why = perf_counter(), None, None
    try:
        law(case)
    except Violation as found:
        violation = str(found)
        why = None if found.__cause__ is None else in_words(found.__cause__)
    return Finding(name, case.setup.name, violation, perf_counter() - start, why)
