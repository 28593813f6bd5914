import json
from typing import Any

import pytest

from fedspu.engines.machine import peak_rss_bytes
from fedspu.federation.record import COSTS, record_round, summarise
from tests.oracles.federation import plan_for, play_all


def lines(**given: Any) -> tuple[Any, list[dict[str, list[dict[str, Any]]]]]:
    plan = plan_for(**given)
    played = play_all(plan)
    seconds = {"wall_seconds": 9.0}
    return played, [record_round(plan, r, seconds) for r in played.reports]


def test_a_round_is_one_line_and_one_for_each_client() -> None:
    played, recorded = lines()
    for report, record in zip(played.reports, recorded, strict=True):
        assert {name: len(found) for name, found in record.items()} == {
            "rounds.jsonl": 1,
            "clients.jsonl": 3,
            "times.jsonl": 1,
        }
        assert record["rounds.jsonl"][0]["clients"] == sorted(report.answers)
        for turn in record["clients.jsonl"]:
            answer = report.answers[turn["client"]]
            assert turn["train_loss"] == answer.reply.train_loss
            assert turn["accuracy"] == report.judged[turn["client"]]
            for name in COSTS:
                assert turn[name] == getattr(answer.cost, name)


def test_the_slowest_client_is_the_critical_one() -> None:
    played, recorded = lines()
    for report, record in zip(played.reports, recorded, strict=True):
        seconds = [a.cost.train_seconds for a in report.answers.values()]
        (times,) = record["times.jsonl"]
        assert times["critical_seconds"] == max(seconds)
        assert times["train_seconds"] == pytest.approx(sum(seconds))
        assert times["wall_seconds"] == 9.0


@pytest.mark.parametrize("method", ["fedspu", "local", "fedavg"])
def test_records_and_summary_are_strict_json(method: str) -> None:
    played, recorded = lines(method=method, early_stopping=True)
    rounds = [line for record in recorded for line in record["rounds.jsonl"]]
    times = [line for record in recorded for line in record["times.jsonl"]]
    last = played.reports[-1]
    plan = played.engine.plan
    summary = summarise(plan, last.federation, last.accuracies, rounds, times)
    for found in (*recorded, summary):
        text = json.dumps(found, allow_nan=False)
        assert json.loads(text) == found


def test_peak_memory_is_in_bytes() -> None:
    assert 50 * 2**20 < peak_rss_bytes() < 2**40
