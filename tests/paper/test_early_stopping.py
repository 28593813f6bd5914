"""Algorithm 2 on real data: clients leave, and the run ends before its last round."""

import json
from pathlib import Path

import fedspu


def test_early_stopping_on_digits_stops_clients_and_ends_early(tmp_path: Path) -> None:
    settings = {
        "early_stopping": True,
        "rounds": 100,
        "clients.number": 6,
        "clients.per_round": 4,
        "train.epochs": 2,
        "train.lr": 0.2,
        "train.batch_size": 64,
        "out": tmp_path / "run",
    }
    run = fedspu.simulate(settings)
    assert run.summary["stopped_clients"] == 6
    assert run.summary["rounds_played"] < 100
    assert run.summary["personal_accuracy"] > 0.8

    # A client stops where its blended loss rises, at once, and never comes back.
    losses: dict[int, list[float]] = {}
    stopped: set[int] = set()
    for text in (tmp_path / "run/clients.jsonl").read_text().splitlines():
        line = json.loads(text)
        before = losses.setdefault(line["client"], [])
        loss = 0.7 * line["train_loss"] + 0.3 * line["val_loss"]
        assert line["client"] not in stopped
        assert line["has_stopped"] == (bool(before) and loss > before[-1])
        before.append(loss)
        if line["has_stopped"]:
            stopped.add(line["client"])
    assert stopped == set(range(6))
    # With fewer than four left, all of them play.
    left = 6
    for round_line in run.rounds:
        assert len(round_line["clients"]) == min(4, left)
        left = 6 - round_line["stopped_clients"]
