import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedspu import Axis, NeuronGroup, Neurons
from fedspu.errors import ModelError
from fedspu.federation.plan import Build, Plan, Remodelled
from fedspu.federation.plan_file import describe_plan, restore_plan
from fedspu.methods import Entry, all_methods
from fedspu.neurons.blocks import load_state
from fedspu.neurons.table import Along, Call, Fixed
from fedspu.prepare import Prepared, prepare
from tests.oracles.federation import (
    CLASSES,
    ConvNet,
    mlp,
    named,
    prepared_for,
    same_bits,
)


class Grouped(nn.Module):
    """Normalised by groups, joined from two branches and flattened: a longer table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 1), nn.GroupNorm(2, 4)
        self.left, self.right = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 6, 3)
        self.last, self.fc = nn.Conv2d(10, 5, 1), nn.Linear(5 * 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        joined = torch.cat([self.left(x), self.right(x)], dim=1).relu()
        scores: Tensor = self.fc(self.last(joined).flatten(1))
        return scores


MODELS: dict[str, Build] = {"convnet": ConvNet, "mlp": mlp, "grouped": Grouped}
ENTRIES = {f"{entry.name}-{entry.reading}": entry for entry in all_methods()}


def ready_for(model: str, entry: Entry, **given: Any) -> Prepared:
    name = {"method__name": entry.name, "method__reading": entry.reading}
    return prepared_for(MODELS[model], **name, **given)


def restored(ready: Prepared, build: Build | None) -> Plan:
    """The plan again, from what is saved of it."""
    plan = ready.plan
    return restore_plan(
        Path("run"),
        describe_plan(plan, ready.sample),
        plan.settings,
        plan.method,
        plan.task,
        build,
        plan.initial,
    )


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in model.state_dict().items()}


def assert_same_plan(found: Plan, plan: Plan, x: Tensor) -> None:
    """Equal in all that is known of it, and in the models that it builds."""
    for name in ("settings", "method", "task", "neurons", "capacities"):
        assert getattr(found, name) == getattr(plan, name)
    for name in ("num_clients", "distinct_capacities", "judged_clients"):
        assert getattr(found, name) == getattr(plan, name)
    for name in ("stays", "has_global", "uses_global"):
        assert getattr(found, name) == getattr(plan, name)
    assert list(found.neurons.shapes) == list(plan.neurons.shapes)  # values' order
    assert same_bits(found.initial, plan.initial)
    assert isinstance(found.build, Remodelled) == isinstance(plan.build, Remodelled)
    if isinstance(found.build, Remodelled) and isinstance(plan.build, Remodelled):
        assert found.build.neurons == plan.build.neurons
        assert found.build.capacities == plan.build.capacities

    built, model = found.build(), plan.build()
    assert shapes(built) == shapes(model)
    assert shapes(built) == {n: tuple(t.shape) for n, t in plan.initial.items()}
    for module in (built, model):
        load_state(module.eval(), plan.initial)
    with torch.no_grad():
        assert torch.equal(built(x), model(x))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_plan_is_read_again_as_it_was(entry: str, model: str) -> None:
    ready = ready_for(model, ENTRIES[entry])
    assert_same_plan(restored(ready, MODELS[model]), ready.plan, ready.sample.x)


@pytest.mark.parametrize("entry", ["fedspu-paper", "small-paper", "fjord-original"])
def test_a_built_in_model_is_built_by_its_name(entry: str) -> None:
    chosen = ENTRIES[entry]
    given = named(
        method__name=chosen.name,
        method__reading=chosen.reading,
        model="digits",
        data__name="digits",
    )
    ready = prepare(given)
    assert_same_plan(restored(ready, None), ready.plan, ready.sample.x)


def test_under_the_local_norm_policy_the_same_tensors_stay() -> None:
    ready = prepared_for(norm__policy="local", judge__clients=2, seed=3)
    found = restored(ready, ConvNet)
    assert found.stays
    assert_same_plan(found, ready.plan, ready.sample.x)


@cache
def plain() -> Prepared:
    return prepared_for(mlp)


def test_every_entry_of_a_table_is_read_again() -> None:
    table = Neurons(
        groups=(
            NeuronGroup(
                "lstm",
                2,
                (
                    Axis("lstm.weight", 0, copies=4, stride=2),
                    Axis("fc.weight", 1, repeat=3, offset=1),
                ),
                permutable=True,
                slim=False,
            ),
            NeuronGroup("empty", 5, ()),
        ),
        shapes={"lstm.weight": (8, 1), "fc.weight": (1, 7), "scale": ()},
        statistics=frozenset({"scale"}),
        norm_tensors=frozenset({"scale", "norm.count"}),
        fixed=(Fixed(("a", "b"), "they are tied"), Fixed((), "none")),
        unreached=("lost.weight", "lost.bias"),
        resized={"model.forward:3": (None, 1)},
        uncounted={
            Call("block.norm", "model.forward:4", "mean"): (
                (-1, Along("fc.weight", 1)),
                (-2, Along("lstm.weight", 0, 3)),
            )
        },
    )
    ready = plain()
    plan = replace(ready.plan, neurons=table)
    found = restored(replace(ready, plan=plan), mlp)
    assert found.neurons == table
    assert str(found.neurons) == str(table)


@pytest.mark.parametrize("fact", ["resized", "uncounted"])
def test_a_plan_made_with_other_code_of_the_model_is_refused(fact: str) -> None:
    place = f"{json.__name__}.{json.loads.__qualname__}:"
    number = json.loads.__code__.co_firstlineno
    ready = plain()
    line = f"{place}{number}"
    change: Any = {
        "resized": {line: (None, 1)},
        "uncounted": {Call("", line, "add"): ()},
    }
    table = replace(ready.plan.neurons, **{fact: change[fact]})
    plan = replace(ready.plan, neurons=table)
    assert restored(replace(ready, plan=plan), mlp).neurons == table
    text = describe_plan(plan, ready.sample)
    changed = text.replace("def loads(", "def reads(")
    assert changed != text
    with pytest.raises(ModelError, match=r"here the line is 'def loads\(.*reads"):
        restore_plan(
            *(Path("run"), changed, plan.settings, plan.method, plan.task),
            *(mlp, plan.initial),
        )


def test_what_is_saved_is_strict_json() -> None:
    ready = plain()
    text = describe_plan(ready.plan, ready.sample)
    assert json.dumps(json.loads(text), allow_nan=False) == text


def test_what_is_saved_does_not_grow_with_examples_or_clients() -> None:
    few, many = (
        prepared_for(mlp, clients__number=n, data__min_examples=3) for n in (10, 20)
    )
    texts = [describe_plan(ready.plan, ready.sample) for ready in (few, many)]
    assert len(texts[0]) == len(texts[1])
