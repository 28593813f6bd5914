import io
from math import exp, lgamma, pi, sqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

import fedspu
from fedspu.reports.intervals import half_interval
from fedspu.reports.tables import (
    rich_table,
    run_table,
    time_table,
)
from fedspu.units import duration, paper_gb, percent, size
from tests.oracles.federation import examples, named, run_for


def printed(*parts: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    for part in parts:
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.0, "0.0 %"), (0.5, "50.0 %"), (1.0, "100.0 %")]
)
def test_a_share_is_a_percentage(value: float | None, text: str) -> None:
    assert percent(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (123_456, "123.46 kB"),
        (7_540_000, "7.54 MB"),
        (1_533_200_000, "1.53 GB"),
    ],
)
def test_bytes_are_readable(value: int, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.04, "0.0 s"),
        (12.34, "12.3 s"),
        (61, "1:01 min"),
        (3600, "1:00:00"),
        (3725.4, "1:02:05"),
    ],
)
def test_a_time_span_is_readable(value: float, text: str) -> None:
    assert duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1.5332e9, "11.70"), (572.2e6, "4.366"), (2.30534e9, "17.59")]
)
def test_the_paper_s_unit_is_a_thousand_times_2_to_the_20_bits(
    value: float, text: str
) -> None:
    assert paper_gb(value) == text


# Intervals ---------------------------------------------------------------------------


def student_tail(t: float, freedom: int) -> float:
    """The probability beyond t on both sides, by Simpson's rule on the density."""
    scale = exp(lgamma((freedom + 1) / 2) - lgamma(freedom / 2)) / sqrt(freedom * pi)
    steps = 2000
    width = t / steps
    total: float = sum(
        (1 if i in (0, steps) else 4 if i % 2 else 2)
        * (1 + (i * width) ** 2 / freedom) ** (-(freedom + 1) / 2)
        for i in range(steps + 1)
    )
    return 1 - 2 * scale * total * width / 3


@pytest.mark.parametrize("n", [2, 3, 4, 5, 10, 11, 12, 13, 16, 21, 31, 101])
def test_the_interval_is_student_s_with_95_percent(n: int) -> None:
    values = [float(i % 2) for i in range(n)]
    half = half_interval(values)
    assert half is not None
    middle = sum(values) / n
    spread = sqrt(sum((v - middle) ** 2 for v in values) / (n - 1))
    assert student_tail(half / (spread / sqrt(n)), n - 1) == pytest.approx(
        0.05, abs=3e-4
    )


def test_an_interval_worked_out_by_hand() -> None:
    # Mean 2, standard deviation 1, three values: 4.303 / sqrt(3).
    assert half_interval([1.0, 2.0, 3.0]) == pytest.approx(2.484, abs=1e-3)


def test_one_value_has_no_interval() -> None:
    assert half_interval([0.5]) is None


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.floats(-5, 5))
def test_an_interval_does_not_depend_on_where_the_values_lie(
    values: list[float], shift: float
) -> None:
    half, moved = half_interval(values), half_interval([v + shift for v in values])
    assert half == pytest.approx(moved, abs=1e-6)


def test_rows_become_a_table_for_a_terminal() -> None:
    text = printed(rich_table([{"method": "a", "n": "1"}, {"method": "b", "n": "2"}]))
    lines = [line.split() for line in text.splitlines() if line.strip()]
    assert lines[0] == ["method", "n"]
    assert lines[-1] == ["b", "2"]


def test_the_table_of_a_run_shows_its_summary() -> None:
    run = run_for(rounds=1, early_stopping=True, data__split="paper")
    text = printed(run_table(run.summary))
    assert percent(run.summary["personal_accuracy"]) in text
    assert percent(run.summary["global_accuracy"]) in text
    assert "clients with p = 0.3" in text
    assert f"{run.summary['bytes_down'] + run.summary['bytes_up']:,} bytes" in text
    assert "validation and test examples are the same" in text
    assert "personal accuracy" in text
    assert "lower is better" not in text


def number() -> nn.Module:
    """A net with one output."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 1))


def test_the_table_of_a_regression_says_that_lower_is_better() -> None:
    x, y = examples()
    found = fedspu.simulate(
        named(rounds=1, task="regression"), model=number, data=(x, y / 2)
    ).summary
    text = printed(run_table(found))
    assert "personal mae" in text
    assert f" {found['personal_mae']:.4g} " in text
    assert "lower is better" in text
    assert "accuracy" not in text
    assert "%" not in text


def test_turns_that_were_lost_have_a_row() -> None:
    summary = run_for(rounds=1).summary
    assert "turns lost" not in printed(run_table(summary))
    text = printed(run_table({**summary, "missing_turns": 5, "refused_turns": 7}))
    row = next(line for line in text.splitlines() if "turns lost" in line)
    assert "12" in row
    assert "5 missing, 7 refused; rounds.jsonl says why" in row


def test_the_table_of_local_training_shows_no_global_accuracy() -> None:
    text = printed(run_table(run_for(rounds=1, method="local").summary))
    assert "global accuracy" not in text
    assert "are the same" not in text


def test_where_the_time_went_adds_up() -> None:
    line = {"training": 2.0, "clients": 3.0, "judging": 1.0, "server": 0.5}
    times = [{**line, "other": 0.5, "wall_seconds": 5.0}] * 2

    text = printed(time_table(times, workers=2))

    # The workers waited for what clients took and training did not.
    shares = {"clients' turns": "40.0 %", "waiting": "20.0 %", "judging": "20.0 %"}
    for title, share in shares.items():
        assert any(title in row and share in row for row in text.splitlines())
    assert "all, on 2 workers" in text
    assert "10.0 s" in text
