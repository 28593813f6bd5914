import io
import re
from typing import Any

import pytest
from rich.console import Console

import fedspu
from fedspu.reports import display
from fedspu.reports.display import Display
from tests.oracles.federation import examples, mlp, named


def watched(label: str = "", is_quiet: bool = False, **given: Any) -> fedspu.Run:
    with Display(label, is_quiet) as shown:
        return fedspu.simulate(
            named(**given), model=mlp, data=examples(), watch=shown.watch
        )


def test_in_a_pipe_a_round_is_a_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    run = watched("mine", rounds=2, judge__every=2)
    captured = capsys.readouterr()
    assert captured.out == ""
    preparing, first, second = captured.err.splitlines()
    assert preparing == "mine preparing: data, model"
    assert first.startswith("mine round 1/2  personal ")
    assert "global -" in first
    assert second.startswith("mine round 2/2")
    assert f"global {100 * run.summary['global_accuracy']:.1f} %" in second
    assert "clients 6 on, 0 stopped" in second
    sent = run.summary["bytes_down"] + run.summary["bytes_up"]
    assert second.endswith(f"{sent / 1000:.2f} kB")


def test_a_quiet_display_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    watched(is_quiet=True)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()

    def console(**kwargs: Any) -> Console:
        return Console(file=screen, force_terminal=True, width=160)

    monkeypatch.setattr(display, "Console", console)
    watched("mine", rounds=2)
    shown = screen.getvalue()
    assert "mine round" in shown
    assert "2/2" in shown
    assert "━" in shown
    assert "6 on, 0 stopped" in shown
    assert shown.endswith("\x1b[?25h")  # the cursor is there again


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_time_left_is_shown_at_any_width(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        display,
        "Console",
        lambda **_: Console(file=screen, force_terminal=True, width=width),
    )
    watched(rounds=2)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    last = re.split(r"[\r\n]+", shown.rstrip())[-1]
    assert re.search(r"2/2 personal .* 0:00:00\s*$", last)
    assert ("6 on, 0 stopped" in last) == (width == 120)
    assert ("kB" in last) == (width > 60)


def test_a_quiet_display_has_no_bar_on_a_terminal_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        display, "Console", lambda **_: Console(file=screen, force_terminal=True)
    )
    watched(is_quiet=True, rounds=1)
    assert screen.getvalue() == ""
