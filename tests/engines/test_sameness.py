"""One law for all engines: they differ in nothing but the time they take."""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fedspu.engines.local import LocalEngine
from fedspu.engines.workers import WorkersEngine, can_fork
from fedspu.federation.client_memory import Shelf, pack_memory
from fedspu.federation.engine import Engine
from fedspu.federation.record import record_round
from fedspu.federation.rounds import Scores, play
from fedspu.federation.server import Federation
from fedspu.methods import CATALOGUE, Entry
from fedspu.prepare import Prepared
from fedspu.runs import ready_model
from tests.engines.fresh import FreshEngine
from tests.engines.ray_cluster import hide_folder
from tests.oracles.federation import bits, mlp, play_all, prepared_for, same_bits

METHODS = ("fedspu", "fedspu-plus", "hermes", "feddrop", "ditto", "apfl")
"""Random neurons, a last turn for everyone, chosen neurons, slim models, a second
model, memory besides."""


@dataclass
class Reached:
    """What a run came to, bit by bit."""

    records: list[Any]
    global_model: dict[str, bytes]
    personal_models: list[dict[str, bytes]]
    memories: list[dict[str, bytes]]


ShelfOf = Callable[[int], Shelf]
"""Where a client's memories are."""

Begin = Callable[[Prepared, Path], tuple[Engine, ShelfOf]]


def local(ready: Prepared, folder: Path) -> tuple[Engine, ShelfOf]:
    engine = LocalEngine(ready.plan, ready.examples)
    return engine, lambda client: engine.shelf


def two_workers(ready: Prepared, folder: Path) -> tuple[Engine, ShelfOf]:
    shelf = Shelf(folder)
    return WorkersEngine(ready.plan, ready.examples, shelf, 2), lambda client: shelf


def four_workers(ready: Prepared, folder: Path) -> tuple[Engine, ShelfOf]:
    shelf = Shelf(folder)
    return WorkersEngine(ready.plan, ready.examples, shelf, 4), lambda client: shelf


def fresh_processes(ready: Prepared, folder: Path) -> tuple[Engine, ShelfOf]:
    engine = FreshEngine(ready.plan, ready.examples, folder)
    return engine, lambda client: Shelf(folder / f"{client}/shelf")


def ray_actors(ready: Prepared, folder: Path) -> tuple[Engine, ShelfOf]:
    from fedspu.engines.ray.engine import RayEngine

    shelf = Shelf(folder)
    return RayEngine(ready.plan, ready.examples, shelf), lambda client: shelf


def ray_actors_elsewhere(ready: Prepared, folder: Path) -> tuple[Engine, ShelfOf]:
    """As if they were on other machines: they do not see the folder."""
    with pytest.MonkeyPatch.context() as patch:
        hide_folder(patch)
        return ray_actors(ready, folder)


@cache
def ready_for(method: str) -> Prepared:
    return prepared_for(
        mlp,
        method=method,
        clients__number=4,
        clients__per_round=2,
        rounds=2,
        judge__clients=1,
        early_stopping=True,
        train__momentum=0.5,
        train__lr=0.3,
        train__epochs=1,
        seed=32,
    )


def reached(method: str, begin: Begin, folder: Path) -> Reached:
    ready = ready_for(method)
    plan = ready.plan
    engine, shelf_of = begin(ready, folder)
    try:
        played = list(play(plan, engine, Federation(0, plan.initial), Scores()))
    finally:
        engine.close()
    seconds = {"server": 0.0, "clients": 0.0, "judging": 0.0}
    lines = [record_round(plan, report, seconds) for report in played]
    last = played[-1].federation
    memories = [shelf_of(k).get(k, last.last.get(k, 0)) for k in range(4)]
    models = [
        ready_model(
            plan, ready.examples, last.round, k, memory, last.global_state, "personal"
        )
        for k, memory in enumerate(memories)
    ]
    return Reached(
        [(line["rounds.jsonl"], line["clients.jsonl"]) for line in lines],
        bits_of(last.global_state),
        [bits_of(model.state_dict()) for model in models],
        [bits_of(pack_memory(memory)) for memory in memories],
    )


def bits_of(state: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in state.items()}


@cache
def expected(method: str) -> Reached:
    return reached(method, local, Path())


needs_fork = pytest.mark.skipif(not can_fork(), reason="workers are forked")

# A fresh process takes seconds to begin: one method is enough to show that a client
# needs nothing but its messages and what it keeps.
ENGINES = [
    *(pytest.param(m, two_workers, marks=needs_fork) for m in METHODS),
    *(pytest.param(m, four_workers, marks=needs_fork) for m in METHODS),
    pytest.param("fedspu", fresh_processes, marks=pytest.mark.slow),
]


ON_RAY = [
    ("fedspu", ray_actors),
    ("feddrop", ray_actors_elsewhere),  # apfl and ditto elsewhere: see test_ray.py
]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("method", "begin"), ON_RAY)
def test_ray_gives_the_same_models_and_records(
    method: str, begin: Begin, tmp_path: Path
) -> None:
    found = reached(method, begin, tmp_path)
    assert found == expected(method)


@pytest.mark.parametrize(("method", "begin"), ENGINES)
def test_every_engine_gives_the_same_models_and_records(
    method: str, begin: Begin, tmp_path: Path
) -> None:
    found = reached(method, begin, tmp_path)
    assert found == expected(method)


@pytest.mark.parametrize("method", METHODS)
def test_what_the_engines_play_shows_something(method: str) -> None:
    """A client takes part twice, the one that is judged takes part, the model moves."""
    found, plan = expected(method), ready_for(method).plan
    cohorts = [set(rounds[0]["clients"]) for rounds, _ in found.records]
    assert len(cohorts) == 2 + plan.finishes
    assert cohorts[0] & cohorts[1]
    assert set(plan.judged_clients) <= cohorts[0] | cohorts[1]
    assert found.global_model != bits_of(plan.initial)


def test_a_client_stops_in_what_the_engines_play() -> None:
    rounds, _ = expected("fedspu").records[-1]
    assert rounds[0]["stopped_clients"] == 1


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda e: f"{e.name} {e.reading}")
def test_a_plan_that_was_pickled_gives_the_same_run(entry: Entry) -> None:
    ready = prepared_for(
        mlp, method=entry.name, method__reading=entry.reading, rounds=1
    )
    arrived = replace(ready, plan=pickle.loads(pickle.dumps(ready.plan)))
    found, wanted = play_all(arrived), play_all(ready)
    assert same_bits(found.federation.global_state, wanted.federation.global_state)
    assert found.rounds[-1].scores == wanted.rounds[-1].scores
