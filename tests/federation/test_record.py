import json
import re
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from fedspu.engines.machine import peak_rss_bytes
from fedspu.federation.engine import Facts
from fedspu.federation.plan import Plan
from fedspu.federation.record import (
    BEYOND_PAPER,
    COSTS,
    TIMES,
    label,
    record_round,
    summarise,
    what_was_lost,
)
from fedspu.federation.rounds import Round, Scores
from fedspu.federation.server import Federation
from fedspu.federation.values import Values
from fedspu.methods.options import FedSPUOptions
from fedspu.reports.tables import run_table
from fedspu.settings import MethodSettings, known_fields
from tests.oracles.federation import Played, mlp, plan_for, play_all, prepared_for

Record = dict[str, list[dict[str, Any]]]


def lines(**given: Any) -> tuple[Played, list[Record]]:
    ready = prepared_for(**given)
    played = play_all(ready)
    seconds = {"wall_seconds": 9.0}
    return played, [record_round(ready.plan, r, seconds) for r in played.rounds]


def summary_of(plan: Plan, last: Round, records: list[Record]) -> dict[str, Any]:
    rounds = [line for record in records for line in record["rounds.jsonl"]]
    times = [line for record in records for line in record["times.jsonl"]]
    facts = Facts(num_workers=3, peak_bytes=77)
    return summarise(plan, "made", last.federation, last.scores, rounds, times, facts)


def test_a_round_is_one_line_and_one_for_each_client() -> None:
    played, recorded = lines()
    for done, record in zip(played.rounds, recorded, strict=True):
        assert {name: len(found) for name, found in record.items()} == {
            "rounds.jsonl": 1,
            "clients.jsonl": 3,
            "times.jsonl": 1,
        }
        assert record["rounds.jsonl"][0]["clients"] == sorted(done.answers)
        replies = dict(done.replies())
        for turn in record["clients.jsonl"]:
            answer = done.answers[turn["client"]]
            assert turn["train_loss"] == replies[turn["client"]].train_loss
            judged = done.judged[turn["client"]]
            assert (turn["accuracy"], turn["val_accuracy"]) == judged
            for name in COSTS:
                assert turn[name] == getattr(answer.cost, name)


@pytest.mark.parametrize("method", ["fedspu", "local", "fedavg"])
def test_test_and_validation_scores_are_side_by_side(method: str) -> None:
    played, recorded = lines(method=method)
    plan, last = played.engine.plan, played.rounds[-1]
    assert any(v.test != v.val for v in last.scores.personal.values())  # or no test
    summary = summary_of(plan, last, recorded)
    for done, record in zip(played.rounds, recorded, strict=True):
        (line,) = record["rounds.jsonl"]
        scores = done.scores
        for whose, mean in (
            ("personal", scores.personal_mean),
            ("participating", scores.participating_mean),
            ("global", scores.global_ if done.is_global_judged else None),
        ):
            names = f"{whose}_accuracy", f"{whose}_val_accuracy"
            assert tuple(line[name] for name in names) == (mean or (None, None))
            if done is last:
                assert [summary[name] for name in names] == [line[n] for n in names]
    assert (summary["global_val_accuracy"] is None) == (method == "local")


def test_who_was_not_judged_has_neither_score() -> None:
    played, _ = lines(rounds=1)
    (done,) = played.rounds
    unjudged = replace(done, judged={}, scores=Scores(), is_global_judged=False)
    record = record_round(played.engine.plan, unjudged, {})
    for turn in record["clients.jsonl"]:
        assert turn["accuracy"] is turn["val_accuracy"] is None
    (line,) = record["rounds.jsonl"]
    for whose in ("personal", "participating", "global"):
        assert line[f"{whose}_accuracy"] is line[f"{whose}_val_accuracy"] is None


@pytest.mark.parametrize("is_higher_better", [True, False])
@pytest.mark.parametrize("count", [0, 1, 6, 9, 10, 19, 20, 30])
def test_the_worst_tenth_is_the_mean_of_those_that_fare_worst(
    count: int, is_higher_better: bool
) -> None:
    plan = plan_for(mlp, clients__number=30, data__min_examples=3)
    metric = replace(plan.task.metric, is_higher_better=is_higher_better)
    plan = replace(plan, task=replace(plan.task, metric=metric))
    # In no order; validation scores rank the clients the other way round.
    scores = {k: Values(7 * k % 31 / 31, 1 - 7 * k % 31 / 31) for k in range(count)}
    left = [values.test for values in scores.values()]
    worst = []
    for _ in range(max(1, count // 10) if count else 0):
        worst.append(min(left) if is_higher_better else max(left))
        left.remove(worst[-1])
    done = Round(Federation(0, plan.initial), {}, scores=Scores(scores))
    found = summary_of(plan, done, [])["worst_tenth_accuracy"]
    if not count:
        assert found is None
    else:
        assert found == pytest.approx(sum(worst) / len(worst))


def test_the_slowest_client_is_the_critical_one() -> None:
    played, recorded = lines()
    for done, record in zip(played.rounds, recorded, strict=True):
        seconds = [a.cost.train_seconds for a in done.answers.values()]
        (times,) = record["times.jsonl"]
        assert times["critical_seconds"] == max(seconds)
        assert times["train_seconds"] == pytest.approx(sum(seconds))
        assert times["wall_seconds"] == 9.0


def test_processor_time_is_recorded_beside_the_clock_s() -> None:
    played, recorded = lines()
    for done, record in zip(played.rounds, recorded, strict=True):
        seconds = [a.cost.train_cpu_seconds for a in done.answers.values()]
        assert all(spent > 0 for spent in seconds)
        (times,) = record["times.jsonl"]
        assert times["train_cpu_seconds"] == pytest.approx(sum(seconds))
        by_client = {str(k): a.cost.train_cpu_seconds for k, a in done.answers.items()}
        assert times["turn_cpu_seconds"] == by_client
    summary = summary_of(played.engine.plan, played.rounds[-1], recorded)
    for name in TIMES:
        each = [record["times.jsonl"][0][name] for record in recorded]
        assert summary[name] == pytest.approx(sum(each))


def test_who_was_missing_or_refused_is_in_the_line_of_its_round() -> None:
    plan = plan_for()
    done = Round(
        Federation(4, plan.initial),
        answers={},
        missing={5: "no network", 1: "asleep"},
        refused={3: "its training loss is nan"},
        ignored={2: 3},
        unjudged={0: "its accuracy is nan"},
    )
    (line,) = record_round(plan, done, {})["rounds.jsonl"]
    assert line["clients"] == []
    assert line["train_loss"] is None
    assert line["missing_clients"] == {"1": "asleep", "5": "no network"}
    assert list(line["missing_clients"]) == ["1", "5"]
    assert line["refused_clients"] == {"3": "its training loss is nan"}
    assert line["ignored_replies"] == {"2": 3}
    assert line["unjudged_clients"] == {"0": "its accuracy is nan"}


def test_missing_and_refused_turns_are_counted_in_the_summary() -> None:
    played, recorded = lines()
    plan, last = played.engine.plan, played.rounds[-1]
    assert summary_of(plan, last, recorded)["missing_turns"] == 0
    assert not list(what_was_lost(summary_of(plan, last, recorded), []))
    lost = replace(
        last,
        missing={0: "asleep", 1: "asleep"},
        refused={2: "why"},
        ignored={2: 3, 4: 2},
        unjudged={1: "why", 2: "why", 3: "why"},
    )
    recorded += [record_round(plan, lost, {"wall_seconds": 1.0})] * 2
    found = summary_of(plan, last, recorded)
    names = ("missing_turns", "refused_turns", "ignored_replies", "unjudged_turns")
    assert [found[name] for name in names] == [4, 2, 10, 6]
    told = [line for one in recorded for line in one["rounds.jsonl"]]
    said = list(what_was_lost(found, told))
    assert re.search(r"^2 .* used \(round \d+, client 2: why\); rounds\.jsonl", said[1])
    assert [text.split()[0] for text in said] == ["4", "2", "10", "6"]


@pytest.mark.parametrize(
    ("given", "departs"),
    [
        ({}, {}),
        ({"method": "hermes", "data__alpha": 5.0, "rounds": 2}, {}),
        ({"train__augment": ["flip"]}, {"train.augment": ["flip"]}),
        (
            {"method__context": "global", "server__average": "ema"},
            {"method.context": "global", "server.average": "ema"},
        ),
        (
            {"method": "fedspu-plus"},
            {
                "method.finish_last": 40,
                "server.average": "ema",
                "train.adjust_logits": True,
                "wire.down": "bfloat16",
            },
        ),
    ],
)
def test_a_summary_names_the_settings_that_depart_from_the_paper(
    given: dict[str, Any], departs: dict[str, Any]
) -> None:
    plan = plan_for(**given)
    done = Round(Federation(0, plan.initial), {}, scores=Scores())
    summary = summary_of(plan, done, [])
    assert summary["beyond_paper"] == departs
    table = StringIO()
    Console(file=table, width=300).print(run_table(summary))
    for name, value in departs.items():
        assert f"{name} = {json.dumps(value)}" in table.getvalue()
    assert ("beyond the paper" in table.getvalue()) == bool(departs)


def test_all_settings_that_depart_from_the_paper_are_off_by_default() -> None:
    defaults = {name: entry.default for name, entry in known_fields()}
    defaults["method.context"] = FedSPUOptions().context
    assert {name: defaults[name] for name in BEYOND_PAPER} == {
        **BEYOND_PAPER,
        "train.augment": (),
    }


def test_the_engine_s_facts_are_in_the_summary() -> None:
    played, recorded = lines(rounds=1)
    found = summary_of(played.engine.plan, played.rounds[-1], recorded)
    assert (found["workers"], found["peak_rss_bytes"]) == (3, 77)


@pytest.mark.parametrize("method", ["fedspu", "local", "fedavg"])
def test_records_and_summary_are_strict_json(method: str) -> None:
    played, recorded = lines(method=method, early_stopping=True)
    plan, last = played.engine.plan, played.rounds[-1]
    for found in (*recorded, summary_of(plan, last, recorded)):
        text = json.dumps(found, allow_nan=False)
        assert json.loads(text) == found


def test_a_run_of_no_round_has_a_summary_too() -> None:
    plan = plan_for()
    scores = {0: Values(0.25, 0.5), 5: Values(0.75, 0.25)}
    done = Round(Federation(0, plan.initial), {}, scores=Scores(scores))
    found = summary_of(plan, done, [])
    assert found["rounds_played"] == found["bytes_up"] == 0
    assert found["personal_accuracy"] == 0.5
    assert found["personal_val_accuracy"] == 0.375
    assert found["worst_tenth_accuracy"] == 0.25
    assert found["participating_accuracy"] is None
    assert found["participating_val_accuracy"] is None
    assert found["personal_accuracy_by_capacity"] == {"0.3": 0.25, "1.0": 0.75}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"name": "fedspu"}, "fedspu"),
        ({"name": "fjord", "reading": "original"}, "fjord@original"),
        ({"name": "fedavg", "finetune": 5}, "fedavg@finetune=5"),
        (
            {"name": "fjord", "reading": "original", "distill": False},
            "fjord@original@distill=false",
        ),
    ],
)
def test_a_label_says_what_was_set_beside_the_method_s_name(
    given: dict[str, Any], text: str
) -> None:
    assert label(MethodSettings(**given)) == text


def test_peak_memory_is_in_bytes() -> None:
    assert 50 * 2**20 < peak_rss_bytes() < 2**40
