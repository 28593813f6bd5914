import json

import numpy as np
import pytest

from fedspu.data.partition import LabelCounts
from fedspu.reports.label_counts import (
    LEGEND,
    as_json,
    label_lines,
    label_table,
    picture,
    sample,
)

NAMES = ("cat", "dog", "bird")
SHARES = LabelCounts(np.array([[80, 15, 5], [96, 4, 0], [10, 5, 5], [0, 0, 20]]))


def drawn(shares: LabelCounts, names: tuple[str, ...], width: int) -> list[str]:
    return [line.plain for line in picture(shares, names, width)]


def test_a_picture_by_hand() -> None:
    assert drawn(SHARES, NAMES, 46) == [
        "client  cat   dog   bird    examples",
        "     0  █████ ░░░░░ ░░░░░        100 █████████",
        "     1  █████ ·····              100 █████████",
        "     2  ▓▓▓▓▓ ▒▒▒▒▒ ▒▒▒▒▒         20 █▊",
        "     3              █████         20 █▊",
        LEGEND,
    ]


def test_names_that_do_not_fit_are_told_below() -> None:
    lines = drawn(SHARES, ("cat", "dog", "hippopotamus"), 46)
    assert lines[0].split() == ["client", "0", "1", "2", "examples"]
    assert lines[-1] == "0 cat, 1 dog, 2 hippopotamus"


def test_classes_without_names_have_numbers() -> None:
    lines = drawn(SHARES, (), 46)
    assert lines[0].split() == ["client", "0", "1", "2", "examples"]
    assert lines[-1] == LEGEND


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("num_classes", [1, 2, 10, 35, 62, 100, 1000])
@pytest.mark.parametrize("num_clients", [1, 100, 10_000])
def test_no_line_is_longer_than_the_terminal(
    num_clients: int, num_classes: int, width: int
) -> None:
    counts = np.random.default_rng(0).integers(0, 99, (num_clients, num_classes))
    lines = drawn(LabelCounts(counts), (), width)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 1 + 30 + 3


def test_many_classes_share_a_column() -> None:
    counts = np.zeros((1, 600), dtype=np.int64)
    counts[0, 599] = 5
    lines = drawn(LabelCounts(counts), (), 80)
    assert "10 neighbouring classes in one column" in lines
    assert lines[0].split() == ["client", *map(str, range(0, 600, 100)), "examples"]
    assert lines[1].index("█") == len("client  ") + 59  # the last of 60 columns


def test_of_many_clients_a_sample_is_drawn() -> None:
    lines = drawn(LabelCounts(np.ones((1000, 2), dtype=np.int64)), (), 80)
    assert lines[1].split()[0] == "0"
    assert lines[30].split()[0] == "999"
    assert lines[-1] == "30 of 1,000 clients, evenly spaced"


def test_a_sample_is_all_or_evenly_spaced() -> None:
    assert sample(3, 5) == [0, 1, 2]
    assert sample(9, 5) == [0, 2, 4, 6, 8]


def test_the_table_has_least_median_and_most() -> None:
    table = label_table(SHARES)
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns["min"] == ["20", "1", "0.00"]
    assert columns["max"] == ["100", "3", "1.50"]
    assert columns["median"][0] in ("20", "100")


def test_what_is_said_below() -> None:
    # 186, 24 and 30 of 240.
    assert label_lines(SHARES) == [
        "Clients with one class: 1 of 4",
        "Entropy if every client had the whole mix: 0.99 bits",
    ]


def test_as_json_there_is_a_row_for_each_client() -> None:
    found = json.loads(json.dumps(as_json(SHARES)))
    assert found["examples"] == 240
    assert found["clients_with_one_class"] == 1
    assert found["clients"][2] == {
        "client": 2,
        "examples": 20,
        "classes": 3,
        "entropy_bits": 1.5,
        "by_class": [10, 5, 5],
    }
