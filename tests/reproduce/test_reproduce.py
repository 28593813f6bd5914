"""The paper's tables: printed numbers, our numbers, and what is said about both."""

import io
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import pytest
import torch
from rich.console import Console

import fedspu
from fedspu.errors import DataError
from fedspu.reproduce import experiments, printed
from fedspu.reproduce.claims import claims_table
from fedspu.reproduce.experiments import Extent, Series, extent_for, series_for
from fedspu.reproduce.printed import Dataset
from fedspu.reproduce.quirks import leaking, local_head
from fedspu.reproduce.report import markdown, terminal
from fedspu.reproduce.tables import (
    Result,
    accuracy_table,
    cost_table,
    rounds_table,
)
from tests.oracles.federation import ConvNet, examples, named


def result(method: str, alpha: float, score: float, **more: Any) -> Result:
    summary = {
        "personal_accuracy": score,
        "bytes_down": 500 * 2**20,
        "bytes_up": 500 * 2**20,
        "train_cpu_seconds": 3600.0,
        "stopped_clients": 0,
        "rounds_played": 100,
        **more,
    }
    return Result("cifar10", method, alpha, 0, "rounds_es" in more, 500, summary)


# What the paper prints ----------------------------------------------------------------


def test_what_the_text_says_follows_from_the_tables() -> None:
    """+4.45 over the best rival, 5.11 with early stopping; 25 to 71 % of the rounds."""
    for table, gain in ((printed.TABLE_1, 4.45), (printed.TABLE_2, 5.11)):
        gaps = []
        for row in table.values():
            rivals = [value for name, (value, _) in row.items() if name != "fedspu"]
            gaps.append(row["fedspu"][0] - max(rivals))
        assert mean(gaps) == pytest.approx(gain, abs=0.01)
    saved = [1 - t / 500 for row in printed.TABLE_4.values() for t in row.values()]
    assert (round(100 * min(saved)), round(100 * max(saved))) == (25, 71)


def test_every_table_has_every_data_set_and_method() -> None:
    for table in (printed.TABLE_1, printed.TABLE_2):
        assert list(table) == list(get_args(Dataset))
        assert all(list(row) == list(printed.METHODS) for row in table.values())
    assert printed.TABLE_3_GB["cifar10"]["fedspu+es"] == 6.37
    assert printed.TABLE_3_HOURS["speech"]["fedspu"] == 8.71


# Ours beside it -----------------------------------------------------------------------


def test_accuracy_is_the_mean_over_alphas_and_its_spread() -> None:
    listed = [result("fedspu", a, s) for a, s in ((0.1, 0.5), (0.5, 0.6), (1.0, 0.7))]
    table = accuracy_table("table1", listed, "cut")
    ours, paper = table.rows
    assert ours[:2] == ("CIFAR10", "ours")
    assert ours[-1] == "60.0±8.2"
    assert ours[2] == "-"  # PruneFL was not played
    assert paper[-1] == "51.81±1.5"
    assert table.notes[0] == "cut"
    assert "| CIFAR10 | ours |" in markdown(table)


def test_costs_have_bytes_and_the_paper_s_unit() -> None:
    listed = [result("fedspu", 0.1, 0.5), result("hermes", 0.1, 0.5)]
    slow = result("hermes", 0.1, 0.5, train_cpu_seconds=7200.0)
    table = cost_table([listed[0], slow], "cut")
    rows = {row[1]: row[2:] for row in table.rows}
    # In Mi x 1000 bits: 1000 * 2^20 bytes are 8 of them.
    assert rows["its unit, ours"][5] == "8.000"
    assert rows["GB sent, ours"][5] == "1.049"
    assert (rows["/ fastest, ours"][5], rows["/ fastest, ours"][2]) == ("1.00", "2.00")
    assert rows["its unit, paper"][5] == "18.04"


def test_times_may_come_from_other_runs() -> None:
    listed = [result("fedspu", 0.1, 0.5), result("hermes", 0.1, 0.5)]
    timed = [
        replace(result(method, 0.5, 0.4, train_cpu_seconds=seconds), rounds=20)
        for method, seconds in (("fedspu", 3.0), ("hermes", 2.0))
    ]
    table = cost_table(listed, "cut", timed)
    rows = {row[1]: row[2:] for row in table.rows}
    assert (rows["/ fastest, ours"][5], rows["/ fastest, ours"][2]) == ("1.50", "1.00")
    assert rows["/ fastest, ours"][6] == "-"  # with early stopping, nothing was timed
    assert rows["GB sent, ours"][5] == "1.049"
    assert any("of 20 rounds each" in note for note in table.notes)
    assert cost_table(listed, "cut", []).rows[0][2:] == ("-",) * 7


def test_rounds_are_shown_by_alpha() -> None:
    played = Result("cifar10", "fedspu", 0.5, 0, True, 500, {"rounds_played": 216})
    (row,) = rounds_table([played], "cut").rows
    assert row == ("CIFAR10, alpha 0.5", "216 of 500", "216 of 500", "57 %", "57 %")


def test_rounds_that_are_saved_are_shares_of_the_paper_s() -> None:
    ended, cut = (
        Result("speech", "fedspu", alpha, 0, True, 200, {"rounds_played": rounds})
        for alpha, rounds in ((0.1, 128), (0.5, 200))
    )
    table = rounds_table([ended, cut], "cut")
    assert "the share of the paper's 500 rounds" in table.notes[1]
    assert [row[1::2] for row in table.rows] == [
        ("128 of 200", "74 %"),
        ("200 of 200", "-"),
    ]
    assert any("at most 60 % of 500" in note for note in table.notes)
    notes = rounds_table([ended], "cut").notes
    assert not any("at most" in note for note in notes)


def test_a_table_says_if_its_cells_have_unequal_numbers_of_seeds() -> None:
    one = [result("fedspu", 0.1, 0.5), result("hermes", 0.1, 0.5)]
    assert "seeds" not in " ".join(accuracy_table("table1", one, "cut").notes)
    more = [*one, *(replace(one[0], seed=seed) for seed in (1, 2))]
    notes = accuracy_table("table1", more, "cut").notes
    assert notes[1].startswith("Cells are means over 1 to 3 seeds")


@pytest.mark.parametrize("width", [80, 200])
def test_nothing_of_a_table_is_cut_on_a_terminal(width: int) -> None:
    hour = 12 * 3600.0
    listed = [
        replace(
            result(method, 0.1, 0.5, train_cpu_seconds=seconds),
            dataset=dataset,
            with_stopping=stops,
        )
        for dataset in get_args(Dataset)
        for method, seconds in zip(printed.METHODS, (hour, 59, 650), strict=False)
        for stops in (False, True)
    ]
    for table in (
        cost_table(listed, "cut"),
        accuracy_table("table1", listed, "cut"),
        rounds_table(listed, "cut"),
        claims_table(listed, "cut"),
    ):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(terminal(table, width))
        shown = console.export_text()
        assert "…" not in shown.replace("… at a price", "")
        cells = " ".join(" ".join(row) for row in (table.columns, *table.rows))
        assert [word for word in cells.split() if word.rstrip(",") not in shown] == []


# What is played -----------------------------------------------------------------------


def test_only_what_a_table_needs_is_played() -> None:
    def of(*tables: str) -> list[tuple[bool, int]]:
        found = series_for(tables, ["cifar10"])
        return [(s.with_stopping, len(s.methods)) for s in found]

    assert of("table1") == [(False, 6)]
    assert of("table2") == [(True, 6)]
    assert of("table3") == [(False, 6), (True, 1)]
    assert of("table4") == [(True, 1)]
    assert of("table1", "table2", "table3", "table4") == [(False, 6), (True, 6)]


@pytest.mark.parametrize(
    ("pace", "rounds", "alphas"),
    [(0.001, 500, (0.1, 0.5, 1.0)), (1.0, 66, (0.1, 0.5, 1.0)), (10.0, 20, (0.1,))],
)
def test_a_budget_cuts_rounds_and_then_alphas_and_stays_as_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pace: float,
    rounds: int,
    alphas: tuple[float, ...],
) -> None:
    monkeypatch.setattr(experiments, "_seconds_per_round", lambda settings: pace)
    monkeypatch.setattr(experiments, "num_cores", lambda: 2)
    planned = series_for(["table1"], ["cifar10"])
    given: Any = {"cifar10": {}}
    found = extent_for("10min", planned, given, tmp_path)
    assert (found.rounds, found.alphas, found.seeds) == (rounds, alphas, (0,))
    assert ("Cut to fit 10min" in found.what_cut) is (rounds < 500)
    monkeypatch.setattr(experiments, "_seconds_per_round", lambda settings: 99.0)
    assert extent_for("10min", planned, given, tmp_path) == found


@pytest.mark.parametrize(
    ("budget", "tables", "datasets", "faults", "source"),
    [
        ("1h", ["table1"], ["cifar10"], [], {}),
        ("10min", ["table4"], ["cifar10"], [], {}),
        ("10min", ["table1"], ["cifar10", "speech"], [], {}),
        ("10min", ["table1"], ["cifar10"], ["leak"], {}),
        ("10min", ["table1"], ["cifar10"], [], {"data.name": "arrays:mine.npz"}),
    ],
)
def test_another_request_in_the_same_folder_is_measured_anew(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    budget: str,
    tables: list[str],
    datasets: list[Dataset],
    faults: list[str],
    source: dict[str, Any],
) -> None:
    measured: list[float] = []

    def measure(settings: Any) -> float:
        measured.append(1.0)
        return 1.0

    monkeypatch.setattr(experiments, "_seconds_per_round", measure)
    said: list[str] = []

    def ask(budget: str, planned: list[Series], given: Any) -> Extent:
        return extent_for(budget, planned, given, tmp_path, say=said.append)

    planned = series_for(["table1"], ["cifar10"])
    others = series_for(tables, datasets, faults)
    given = dict.fromkeys(datasets, source)
    extents = ask("10min", planned, {"cifar10": {}}), ask(budget, others, given)
    assert len(measured) == 1 + len(datasets)
    assert said == ["measuring how long a round takes here …"] * 2
    # Both are known from now on.
    again = ask("10min", planned, {"cifar10": {}}), ask(budget, others, given)
    assert again == extents
    assert len(measured) == 1 + len(datasets)
    assert len(said) == 2


def test_runs_of_other_numbers_of_rounds_are_in_other_folders() -> None:
    (plain,) = series_for(["table1"], ["cifar10"])
    (stopping,) = series_for(["table4"], ["cifar10"])
    (fault,) = series_for([], ["cifar10"], ["leak"])
    assert plain.folder(66) == "cifar10-66-rounds"
    assert [s.folder(500) for s in (plain, stopping, fault)] == [
        "cifar10",
        "cifar10-early-stopping",
        "cifar10-quirk-leak",
    ]


def test_fewer_runs_at_once_mean_fewer_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiments, "_seconds_per_round", lambda settings: 1.0)
    monkeypatch.setattr(experiments, "num_cores", lambda: 2)
    planned = series_for(["table1"], ["cifar10"])
    given: Any = {"cifar10": {}}
    rounds = [
        extent_for("10min", planned, given, tmp_path / str(parallel), parallel).rounds
        for parallel in (1, 2, 8)
    ]
    assert rounds == [33, 66, 66]


def test_runs_of_other_requests_are_not_in_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [replace(result("fedspu", 0.1, 0.5), seed=seed) for seed in (0, 1, 2)]
    there += [result("fedspu", 1.0, 0.5), result("hermes", 0.1, 0.5)]
    monkeypatch.setattr(experiments, "compare", lambda *args, **more: None)
    monkeypatch.setattr(experiments, "results_in", lambda *args: there)
    series = Series("cifar10", False, ("fedspu",))
    extent = Extent("10min", 500, (0.1,), (0,))
    given: Any = {"cifar10": {}}
    ((_, found),) = experiments.play([series], extent, given, tmp_path, None, None)
    assert found == there[:1]


def test_later_parts_are_counted_in_rounds_of_this_one(tmp_path: Path) -> None:
    planned = series_for(["table1", "table4"], ["emnist", "speech"], ["leak"])
    pace: dict[Dataset, float] = {"emnist": 2.0, "speech": 1.0}
    extent = Extent("10min", 10, (0.1, 0.5), (0,), pace)
    # Each method has two alphas of ten rounds; a round of Speech is half as long.
    runs = {"emnist": 1 + 2, "speech": 6 + 1 + 2}  # early stopping and the leak last
    expected = 20 * (runs["emnist"] + runs["speech"] / 2)
    assert experiments.rounds_later(planned, extent, tmp_path) == expected
    assert experiments.rounds_later(planned[-1:], extent, tmp_path) == 0


def test_the_full_budget_is_the_paper_s_with_three_seeds(tmp_path: Path) -> None:
    found = extent_for("full", [], {}, tmp_path)
    assert found == Extent("full", 500, (0.1, 0.5, 1.0), (0, 1, 2))
    assert "3 seeds" in found.what_cut


def test_without_data_nothing_is_played() -> None:
    given: Any = {"speech": {"data.name": "speech", "data.dir": "/nowhere"}}
    with pytest.raises(DataError, match="no data to play with: speech"):
        experiments.available(given)


# Faults of the released code ----------------------------------------------------------


def test_a_leak_moves_norm_statistics_and_nothing_else() -> None:
    settings = {**named(rounds=1), "data.split": "paper", "train.kernels": "torch"}
    clean, leaked = (
        fedspu.simulate(settings, model=ConvNet, data=examples(), method=method)
        for method in (None, leaking)
    )
    (client, *_) = clean.rounds[0]["clients"]
    own, other = (run.personal_model(client).state_dict() for run in (clean, leaked))
    moved = {name for name in own if not torch.equal(own[name], other[name])}
    assert moved == {
        f"{norm}.{name}"
        for norm in ("bn1", "bn2")
        for name in ("running_mean", "running_var", "num_batches_tracked")
    }


def test_a_local_head_never_travels() -> None:
    whole, kept = (
        fedspu.simulate(named(rounds=1), model=ConvNet, data=examples(), method=method)
        for method in (None, local_head)
    )
    assert kept.summary["bytes_up"] < whole.summary["bytes_up"]
    initial = kept.plan.initial
    state = kept.last.federation.global_state
    assert torch.equal(state["fc.weight"], initial["fc.weight"])
