"""``fedspu report`` as a user types it; mistakes come last."""

import re
import sys
from pathlib import Path

import pytest

from fedspu.sweeps.playing import alone_in
from fedspu.sweeps.step_costs import StepCosts
from tests.cli.commands import Command, interrupt_at_turn

COMPARE = (
    *("compare", "small.toml", "--seeds", "0,1", "--parallel", "1", "--out", "both"),
)


@pytest.fixture(autouse=True)
def quick_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring steps takes seconds; tests/sweeps/test_step_costs.py does it."""
    monkeypatch.setattr(StepCosts, "_measured", lambda self, plan, active: 1000)


@pytest.mark.usefixtures("nets")
def test_a_comparison_says_where_its_report_is(command: Command) -> None:
    said = command(*COMPARE).out
    assert "every client: both/report.html\n" in said
    before = Path("both/report.html").read_text()
    again = command("report", "both")
    assert again.out.endswith("Report: both/report.html\n")
    assert Path("both/report.html").read_text() == before


@pytest.mark.usefixtures("nets")
def test_a_page_of_somebody_else_is_not_written_over(command: Command) -> None:
    for method in ("fedspu", "local"):
        command("run", "small.toml", "--method", method, "--out", method)
    Path("report.html").write_text("<!doctype html>my own page")
    refused = command("report", "fedspu", "local")
    assert refused.code == 2
    assert "report.html is there already, and is no report of fedspu; --html" in (
        refused.err
    )
    assert Path("report.html").read_text() == "<!doctype html>my own page"
    assert command("report", "fedspu", "local", "--html", "report.html").code == 0
    assert command("report", "fedspu", "local").code == 0  # it is ours now


@pytest.mark.usefixtures("nets")
def test_single_runs_are_reported_where_one_says(command: Command) -> None:
    for method in ("fedspu", "local"):
        command("run", "small.toml", "--method", method, "--out", method)
    assert command("report", "fedspu").out.endswith("Report: fedspu/report.html\n")
    assert command("check", "fedspu").code == 0  # it does not mind the page
    both = command("report", "fedspu", "local")
    assert both.out.endswith("Report: report.html\n")
    command("report", "fedspu", "local", "--html", "ours.html", "--format", "csv")
    assert Path("ours.html").read_text() == Path("report.html").read_text()


@pytest.mark.usefixtures("nets")
def test_other_forms_write_no_page_unless_asked(command: Command) -> None:
    command("run", "small.toml", "--out", "one")
    assert command("report", "one", "--format", "tex").out.startswith("% needs")
    assert not Path("one/report.html").exists()


@pytest.mark.usefixtures("nets")
def test_plots_are_files_for_a_paper(command: Command) -> None:
    command("run", "small.toml", "--out", "one")
    said = command("report", "one", "--plots", "new/figures").out
    files = sorted(path.name for path in Path("new/figures").iterdir())
    assert "score-over-rounds.png" in files
    assert "clients-fedspu.svg" in files
    assert f"Plots: {len(files) // 2} as .png and .svg in new/figures\n" in said
    svg = Path("new/figures/score-over-rounds.svg").read_text()
    assert "personal accuracy, %" in svg


@pytest.mark.usefixtures("nets")
def test_a_half_finished_comparison_has_a_report(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at_turn(patch, 9 + 7)  # in the last round of the second run
        command(*COMPARE)
    result = command("report", "both")
    assert result.code == 0
    dead = "1 of 4 runs finished; nobody is playing it: the same command"
    assert f"both: {dead} resumes it\n" in result.out
    assert command("report", "both", "--watch").out == result.out
    assert "3 runs are not finished and are left out." in result.out
    page = Path("both/report.html").read_text()
    assert "Not finished yet" in page
    assert "2 of 3" in page


@pytest.mark.usefixtures("nets")
def test_a_comparison_that_was_interrupted_while_tuning_says_how_to_go_on(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at_turn(patch, 7)
        command(*COMPARE, "--tune", "train.lr=0.1,0.2", "--tune-rounds", "2")
    for words in ([], ["--watch"], ["--format", "csv"]):
        result = command("report", "both", *words)
        assert result.code == 2
        assert result.error == (
            "both has no results yet: tuning, 1 of 4 runs finished; nobody is playing "
            "it: the same command resumes it"
        )


@pytest.mark.usefixtures("nets")
def test_of_several_comparisons_the_one_that_is_played_is_named(
    command: Command,
) -> None:
    for part in ("one", "two"):
        words = ("--rounds", "1", "--seeds", "0", "--methods", "local")
        command("compare", "small.toml", *words, "--out", f"all/{part}")
    with alone_in(Path("all/two")):
        refused = command("report", "all", "--watch")
    assert refused.code == 2
    assert refused.error == (
        "all holds several comparisons; all/two is the one that is being played now: "
        "name that"
    )
    assert "name all/one, all/two" in command("report", "all", "--watch").error


@pytest.mark.usefixtures("nets")
def test_a_run_with_no_finished_round_but_one_is_shown_as_far_as_it_is(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at_turn(patch, 4)  # in the second round
        command("run", "small.toml", "--out", "half")
    result = command("report", "half")
    assert result.code == 0
    assert result.out == (
        "1 run is not finished and is left out.\nReport: half/report.html\n"
    )
    assert "No run has finished yet" in Path("half/report.html").read_text()
    assert command("report", "half", "--format", "csv").code == 2


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "^none: no such folder; did you mean one\\?$"),
        (
            ["."],
            r"^\. is not a run folder: .*, but holds some: name one$",
        ),
        (["one", "one"], "are the same run"),
        (["one", "--html", "."], r"^--html \.: is a folder; expected a file"),
        (["one", "--html", "no/x.html"], "there is no folder no; make it first$"),
        (["one", "--plots", "small.toml"], "is a file; expected a folder$"),
        (["one", "--format", "pdf"], "^--format pdf: expected one of table, md"),
    ],
)
def test_what_cannot_be_reported_is_one_clear_line(
    command: Command, words: list[str], message: str
) -> None:
    command("run", "small.toml", "--set", "rounds=1", "--out", "one")
    result = command("report", *words)
    assert result.code == 2
    assert re.search(message, result.error)
    assert not list(Path().rglob("report.html"))


@pytest.mark.usefixtures("nets")
def test_plots_without_matplotlib_say_how_to_get_it(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("run", "small.toml", "--set", "rounds=1", "--out", "one")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("fedspu.reports.plots.find_spec", lambda name: None)
    result = command("report", "one", "--plots", "figures")
    assert result.code == 2
    assert "matplotlib is not installed; install it with" in result.error
    assert not Path("figures").exists()


@pytest.mark.usefixtures("nets")
def test_a_folder_that_cannot_be_written_is_said(command: Command) -> None:
    command("run", "small.toml", "--set", "rounds=1", "--out", "one")
    Path("one/report.html").mkdir()
    result = command("report", "one")
    assert result.code == 2
    assert "--html one/report.html: is a folder" in result.error
