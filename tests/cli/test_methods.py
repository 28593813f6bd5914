"""``fedspu methods`` as a user types it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.status import Status

import fedspu
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
    # Name, reading, four answers, options, settings, reference.
    assert len(rows["local", "paper"]) == 9
    assert "method.finish_last = 40" in rows["fedspu-plus", "original"]["it sets"]
    assert "adjust_logits = true" in rows["fedspu-plus", "original"]["it sets"]
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

    def examine(method: str, watch: Any) -> Iterator[Finding]:
        asked.append(method)
        watch("sent", "mlp", 1, 2)
        bad = None if method == "fedspu" else "it sent what it did not train"
        yield Finding("sent", "mlp", bad, 0.1)
        yield Finding("order", "mlp", None, 0.1)

    monkeypatch.setattr(conformance, "examine", examine)
    right = command("methods", "--check", "fedspu")
    assert (right.code, right.out) == (0, "holds   sent\nholds   order\n")
    wrong = command("methods", "--check", "local")
    assert wrong.code == 2
    assert "broken  sent\nholds   order\n" in wrong.out
    assert "sent, on mlp: it sent what it did not train" in wrong.out
    as_json = command("methods", "--check", "local", "--json")
    assert [f["law"] for f in json.loads(as_json.out)] == ["sent", "order"]
    assert asked == ["fedspu", "local", "local"]


def test_a_method_that_is_not_there_is_one_line(command: Command) -> None:
    assert "no module named nowhere" in command("methods", "--check", "nowhere:m").error


WRONG = """
from fedspu.methods.method import Method

wrong = Method(
    name="wrong",
    reference="none",
    in_words=("all", "all", "a model", "its own model"),
    judged_by="own",
    offer=lambda now: [1, 2],
)
"""


def test_a_method_that_cannot_be_played_is_one_line(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong_offer.py").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = command("methods", "--check", "wrong_offer:wrong")
    assert (result.code, result.out) == (2, "")
    said, error = result.err.splitlines()
    assert said == "trying 10 laws on wrong_offer:wrong …"
    assert error.startswith("error: wrong_offer:wrong cannot be checked: its run on ")
    assert "its offer returned a list; expected an Offer" in error


def test_a_name_that_a_module_lacks_is_told_before_the_laws_are_loaded(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong_offer2.py").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "fedspu.conformance", None)
    monkeypatch.delattr(fedspu, "conformance", raising=False)
    assert "has no wrang" in command("methods", "--check", "wrong_offer2:wrang").error


def test_on_a_terminal_the_check_says_which_law_it_tries(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Status, "update", lambda self, text: said.append(text))

    def examine(method: str, watch: Any) -> Iterator[Finding]:
        watch("order", "mlp", 3, 10)
        yield Finding("order", "mlp", None, 0.1)

    monkeypatch.setattr(conformance, "examine", examine)
    command("methods", "--check", "fedspu")
    assert said == ["3 of 10, on mlp: order"]
