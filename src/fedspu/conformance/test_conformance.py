"""The laws as tests: ``pytest --pyargs fedspu.conformance``.

They test all methods of fedspu, or only the one in FEDSPU_METHOD. It is named as in
settings; ``fjord@original`` is another reading of one of our methods::

    FEDSPU_METHOD=package.module:record pytest --pyargs fedspu.conformance
    FEDSPU_METHOD=... FEDSPU_LEAVE_OUT=law,law pytest --pyargs fedspu.conformance
"""

import os
from collections.abc import Iterator
from functools import cache

import pytest

from fedspu.conformance import LAWS, MODELS, Case, Setup, Violation, laws_for
from fedspu.conformance.nets import made_examples
from fedspu.methods import all_methods, make_method
from fedspu.methods.method import Method
from fedspu.settings import MethodSettings


def methods_on_trial() -> dict[str, Method]:
    """The method that FEDSPU_METHOD names, or all of ours."""
    if named := os.environ.get("FEDSPU_METHOD"):
        name, _, reading = named.partition("@")
        chosen = MethodSettings.model_validate(
            {"name": name, "reading": reading or None}
        )
        return {named: make_method(chosen)}
    return {f"{entry.name}-{entry.reading}": m for entry, m in all_methods().items()}


METHODS = methods_on_trial()


def cases() -> Iterator[tuple[str, str, str]]:
    """Every model, method and law, one case after the other."""
    leave_out = [n for n in os.environ.get("FEDSPU_LEAVE_OUT", "").split(",") if n]
    for model in MODELS:
        for name, method in METHODS.items():
            for law in laws_for(method, leave_out):
                yield model, name, law


@cache
def setup(model: str) -> Setup:
    """One setup for all methods, so that FedAvg is played once."""
    return Setup(model, MODELS[model], made_examples())


@cache
def case(model: str, method: str) -> Case:
    """One case for all laws, so that its runs are played once."""
    return Case(METHODS[method], setup(model))


@pytest.mark.parametrize(("model", "method", "law"), list(cases()))
def test_a_method_obeys_the_law(model: str, method: str, law: str) -> None:
    """A violation is reported in one paragraph, an error with its traceback."""
    violation = None
    try:
        LAWS[law](case(model, method))
    except Violation as found:
        if found.__cause__ is not None:
            raise
        violation = str(found)
    if violation is not None:
        pytest.fail(violation, pytrace=False)
