"""``fedspu settings`` as a user types it."""

import json

from fedspu.methods import CATALOGUE
from fedspu.settings import known_names
from tests.cli.commands import Command


def test_every_setting_is_listed_with_its_meaning(command: Command) -> None:
    result = command("settings", "--json")
    assert (result.code, result.err) == (0, "")
    rows = json.loads(result.out)
    assert all(row["about"] for row in rows)
    named = {row["name"] for row in rows}
    options = {f"method.{o}" for entry in CATALOGUE for o in entry.options.model_fields}
    assert named == {*known_names(), *options}
    by_name = {row["name"]: row for row in rows}
    assert by_name["train.lr"]["flag"] == "--lr"
    assert by_name["train.momentum"]["flag"] is None
    assert by_name["rounds"]["default"] == 500
    assert by_name["method.reading"]["values"] == ["paper", "original"]
    assert by_name["method.finetune"]["method"] == "fedavg (paper)"


def test_the_list_is_for_people(command: Command) -> None:
    result = command("settings")
    assert (result.code, result.err) == (0, "")
    for name in (*known_names(), "method.finetune", "--early-stopping"):
        assert name in result.out
    assert max(map(len, result.out.splitlines())) <= 80
