import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from fedspu.profile.measure import Budget, Profile
from fedspu.reports.profile import (
    as_json,
    choice_lines,
    how_found,
    how_measured,
    notes,
    path_lines,
    profile_table,
    progress,
)
from tests.reports.measured import DENSE, NEURONS, PATHS, PROFILE, row


def printed(profile: Profile, width: int = 80) -> list[list[str]]:
    """The words of each line of the table."""
    console = Console(file=io.StringIO(), width=width)
    console.print(profile_table(profile))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return [line.replace(" %", "%").split() for line in lines if line.strip()]


def test_the_table_has_times_limits_and_memory_beside_the_dense_step() -> None:
    *_, dense, half, whole, truncated = printed(PROFILE)
    assert " ".join(dense) == "dense 20.0 1.00 1.00 4.00 0% 5.00 0% 6.00"
    assert " ".join(half) == "0.5 exact fast 8.0 0.40 0.50 2.00 50% 2.75 45% 3.00"
    assert " ".join(whole) == "1 exact fast 16.0 0.80 1.00 4.00 0% 5.50 -10% 6.00"
    assert truncated[:3] == ["0.5", "truncated", "lean"]


def test_the_table_fits_into_80_columns() -> None:
    assert printed(PROFILE, 80) == printed(PROFILE, 200)


def test_large_models_are_shown_in_larger_units() -> None:
    costs = replace(DENSE.held, saved=2_000_000_000, peak=3_000_000_000)
    lines = printed(replace(PROFILE, dense=replace(DENSE, held=costs)))
    assert lines[1].count("GB") == 3
    assert printed(PROFILE)[1].count("MB") == 3


def test_a_limit_that_cannot_be_told_is_a_dash() -> None:
    lines = printed(replace(PROFILE, rows=(replace(row(0.5), flop_limit=None),)))
    assert lines[-1][5] == "-"


def test_the_clock_that_was_read_is_named() -> None:
    assert how_measured(PROFILE).startswith("median CPU time of 15 x 4 steps")
    assert "wall time" in how_measured(replace(PROFILE, clock="wall"))


def test_who_ran_the_steps_is_said_and_why() -> None:
    why = "no counterpart for a part of the model: norm, a LayerNorm."
    said = f"PyTorch ran all steps (but perhaps norms), as compiled code has {why}"
    assert said in path_lines(PROFILE, NEURONS)
    native = replace(PROFILE, why_not_native=None)
    assert "Compiled code ran all steps." in path_lines(native, NEURONS)
    assert as_json(PROFILE, None)["why_not_native"] == "norm, a LayerNorm"


# Paths --------------------------------------------------------------------------------


def test_paths_are_counted_and_explained() -> None:
    assert path_lines(PROFILE, NEURONS)[2:] == [
        "",
        "How gradients were computed, exact fast, truncated lean, p = 0.5:",
        "   1 only for the active block",
        "   1 in full, then cut down (small, little frozen, or without a kernel): "
        "b.weight",
        "   1 in full, with neurons that are never frozen: fc.bias (they reach the "
        "model's output)",
    ]


def test_settings_that_took_different_paths_are_told_apart() -> None:
    others = replace(row(0.2), paths=dict.fromkeys(PATHS, "chain"))
    lines = path_lines(replace(PROFILE, rows=(row(0.5), others, row(0.6))), NEURONS)
    told = [line for line in lines if line.startswith("How")]
    assert len(told) == 2
    assert "p = 0.5, 0.6:" in told[0]
    assert "p = 0.2:" in told[1]


def test_only_the_first_of_many_parameters_are_named() -> None:
    many = {f"layer{i}": "full" for i in range(9)}
    lines = path_lines(replace(PROFILE, rows=(replace(row(0.5), paths=many),)), NEURONS)
    assert lines[-1].endswith("layer0, layer1, layer2 and 6 more")


# The largest p ------------------------------------------------------------------------


def test_the_largest_share_is_told_in_a_sentence() -> None:
    fits, all_fits, none_fits = choice_lines(PROFILE.choices, Budget(4e6, 0.01))
    wanted = "4.00 MB and 10 ms"
    assert fits == (
        f"exact fast: p = 0.37 is the largest that fits {wanted} (peak 3.99 MB)"
    )
    assert all_fits == (
        f"exact lean: p = 1 fits {wanted}; nothing needs to be frozen "
        "(peak 3.00 MB, 8.1 ms)"
    )
    assert none_fits == (
        f"truncated lean: no p fits {wanted}, not even p = 0.05 (peak 4.20 MB, 12.5 ms)"
    )


def test_how_the_largest_share_was_found_is_told() -> None:
    assert "0.01" in how_found(Budget(num_bytes=4e6))
    assert "0.05" in how_found(Budget(4e6, 0.01))


def test_without_a_budget_no_share_is_looked_for() -> None:
    lines = notes(replace(PROFILE, choices=()), NEURONS, None)
    assert not any("fits" in line or "Found" in line for line in lines)
    assert any("fits" in line for line in notes(PROFILE, NEURONS, Budget(4e6)))


# For scripts --------------------------------------------------------------------------


def test_a_script_gets_all_that_was_measured() -> None:
    found = json.loads(json.dumps(as_json(PROFILE, Budget(num_bytes=4e6))))
    assert found.keys() == {
        "clock",
        "steps",
        "repetitions",
        "why_not_native",
        "dense",
        "rows",
        "budget",
        "choices",
    }
    assert found["budget"] == {"num_bytes": 4e6, "seconds": None}
    assert found["dense"] == {
        "seconds": 0.02,
        "flop_limit": 1.0,
        "bytes": {
            "weights": 1_000_000,
            "buffers": 0,
            "copies": 0,
            "gradients": 500_000,
            "saved": 2_500_000,
            "peak": 5_000_000,
            "held": 4_000_000,
        },
        "paper_bytes": 6_000_000,
    }
    half = found["rows"][0]
    assert half.keys() == found["dense"].keys() | {
        "p",
        "mode",
        "saves",
        "time_ratio",
        "paths",
    }
    assert (half["time_ratio"], half["paths"]) == (pytest.approx(0.4), PATHS)
    assert found["choices"][0] == {
        "p": 0.37,
        "mode": "exact",
        "saves": "fast",
        "fits": True,
        "peak_bytes": 3_990_000,
        "seconds": None,
    }


# Progress -----------------------------------------------------------------------------


def test_progress_is_a_line_on_a_terminal_and_a_line_for_each_part_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress() as watch:
        for text in ("at work", "time: repetition 1 of 2", "time: repetition 2 of 2"):
            watch(text)
    assert capsys.readouterr() == ("", "at work\ntime …\n")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress() as watch:
        watch("at work")
    out, err = capsys.readouterr()
    assert out == ""
    assert "at work" in err
