"""``fedspu methods`` as a user types it."""

import json

import pytest

from fedspu import conformance
from fedspu.conformance import Finding
from tests.cli.commands import (
    Command,
)


def test_the_methods_are_listed(command: Command) -> None:
    result = command("methods", "--json")
    assert result.code == 0
    rows = {(row["method"], row["reading"]): row for row in json.loads(result.out)}
    assert len(rows) == len(json.loads(result.out))
    assert rows.keys() >= {("fedspu", "paper"), ("fedavg", "paper"), ("local", "paper")}
    assert rows.keys() >= {("fjord", "paper"), ("fjord", "original")}
    # Name, reading, four answers, options, reference.
    assert len(rows["local", "paper"]) == 8
    assert rows["fedavg", "paper"]["options"].startswith("method.finetune (default 0)")
    assert rows["local", "paper"]["options"] == ""
    plain = command("methods")
    assert plain.code == 0
    assert all(name in plain.out for name, _ in rows)
    assert "original reading" in plain.out


def test_the_laws_are_tried_without_pytest(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def examine(method: str) -> list[Finding]:
        asked.append(method)
        bad = None if method == "fedspu" else "it sent what it did not train"
        return [Finding("sent", "mlp", bad, 0.1), Finding("order", "mlp", None, 0.1)]

    monkeypatch.setattr(conformance, "examine", examine)
    right = command("methods", "--check", "fedspu")
    assert (right.code, right.out) == (0, "holds   sent\nholds   order\n")
    wrong = command("methods", "--check", "mine:record")
    assert wrong.code == 2
    assert "broken  sent\nholds   order\n" in wrong.out
    assert "sent, on mlp: it sent what it did not train" in wrong.out
    as_json = command("methods", "--check", "mine:record", "--json")
    assert [f["law"] for f in json.loads(as_json.out)] == ["sent", "order"]
    assert asked == ["fedspu", "mine:record", "mine:record"]


def test_a_method_that_is_not_there_is_one_line(command: Command) -> None:
    assert "no module named nowhere" in command("methods", "--check", "nowhere:m").error
