"""The laws hold, and bite, in every form of ``wire.values``."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedspu import Payload
from fedspu.conformance import check
from fedspu.conformance.nets import ConvNet, made_examples, mlp
from fedspu.federation import messages
from fedspu.federation.messages import Way
from fedspu.federation.plan import Plan
from fedspu.methods import all_methods, suggested_by
from tests.conformance.catching import BYTES, IDLE, LEAVES, MEAN, MERGED, assert_caught

METHODS = {f"{entry.name}-{entry.reading}": m for entry, m in all_methods().items()}
FORMS = ["float16", "bfloat16"]
REAL = messages.rounded


@pytest.mark.parametrize(
    "form", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_obeys_the_laws(method: str, form: str) -> None:
    check(METHODS[method], mlp, made_examples(), settings={"wire.values": form})


@pytest.mark.parametrize("method", ["fedspu-paper", "hermes-paper", "fedbn-original"])
def test_methods_obey_the_laws_where_there_are_norms(method: str) -> None:
    form = "bfloat16" if method == "hermes-paper" else "float16"
    check(METHODS[method], ConvNet, made_examples(), settings={"wire.values": form})


@pytest.mark.parametrize("form", FORMS)
def test_the_laws_hold_with_a_server_s_optimizer(form: str) -> None:
    settings = {"wire.values": form, "server.optimizer": "momentum"}
    check(METHODS["fedspu-paper"], mlp, made_examples(), settings=settings)


@pytest.mark.parametrize("build", [mlp, ConvNet])
def test_fedspu_plus_obeys_the_laws_with_all_that_it_sets(build: Any) -> None:
    settings = dict(suggested_by("fedspu-plus"))
    assert settings["wire.down"] == "bfloat16"
    # A last model is made after the rounds that the laws look at.
    del settings["method.finish_last"]
    check("fedspu-plus", build, made_examples(), settings=settings)


def down(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest value of a type that is nearer to zero."""
    near = values.to(dtype)
    toward = torch.nextafter(near, torch.zeros_like(near))
    return torch.where(near.float().abs() > values.abs(), toward, near)


@pytest.mark.parametrize("law", [LEAVES, MERGED, MEAN])
def test_values_that_are_cut_instead_of_rounded_are_caught(
    law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(plan: Plan, payload: Payload, whose: str, way: Way) -> Payload:
        found = REAL(plan, payload, whose, way)
        return {name: down(v, found[name].dtype) for name, v in payload.items()}

    monkeypatch.setattr(messages, "rounded", cut)
    assert_caught(law, settings={"wire.values": "float16"})


@pytest.mark.parametrize("law", [LEAVES, BYTES])
def test_statistics_that_are_rounded_are_caught(
    law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_alike(plan: Plan, name: str, way: Way) -> torch.dtype:
        return messages.FORMS[plan.settings.wire.values]

    monkeypatch.setattr(messages, "wire_type", all_alike)
    monkeypatch.setattr("fedspu.federation.checks.wire_type", all_alike)
    assert_caught(law, settings={"wire.values": "float16"})


def test_values_that_are_rounded_twice_as_much_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def coarse(plan: Plan, payload: Payload, whose: str, way: Way) -> Payload:
        found = {n: v.bfloat16().float() for n, v in payload.items()}
        return REAL(plan, found, whose, way)

    monkeypatch.setattr(messages, "rounded", coarse)
    assert_caught(IDLE, settings={"wire.values": "float16"})
