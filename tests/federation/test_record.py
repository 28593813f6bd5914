import json
from dataclasses import replace
from typing import Any

import pytest

from fedspu.engines.machine import peak_rss_bytes
from fedspu.federation.engine import Facts
from fedspu.federation.plan import Plan
from fedspu.federation.record import (
    COSTS,
    label,
    record_round,
    summarise,
    what_was_lost,
)
from fedspu.federation.rounds import Round, Scores
from fedspu.federation.server import Federation
from fedspu.settings import MethodSettings
from tests.oracles.federation import Played, plan_for, play_all, prepared_for

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
            assert turn["accuracy"] == done.judged[turn["client"]]
            for name in COSTS:
                assert turn[name] == getattr(answer.cost, name)


def test_the_slowest_client_is_the_critical_one() -> None:
    played, recorded = lines()
    for done, record in zip(played.rounds, recorded, strict=True):
        seconds = [a.cost.train_seconds for a in done.answers.values()]
        (times,) = record["times.jsonl"]
        assert times["critical_seconds"] == max(seconds)
        assert times["train_seconds"] == pytest.approx(sum(seconds))
        assert times["wall_seconds"] == 9.0


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
    assert not list(what_was_lost(summary_of(plan, last, recorded)))
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
    said = list(what_was_lost(found))
    assert [text.split()[0] for text in said] == ["4", "2", "10", "6"]


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
    done = Round(Federation(0, plan.initial), {}, scores=Scores({0: 0.25, 5: 0.75}))
    found = summary_of(plan, done, [])
    assert found["rounds_played"] == found["bytes_up"] == 0
    assert found["personal_accuracy"] == 0.5
    assert found["participating_accuracy"] is None
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
