"""``fedspu methods`` as a user types it."""

import json

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
