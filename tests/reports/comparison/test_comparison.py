"""Statistics of runs, and their forms for people and programs."""

import csv
import io
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspu.reports.comparison.blocks import SAME, heading, markdown, notes, plain
from fedspu.reports.comparison.files import as_csv, escaped, latex, records
from fedspu.reports.comparison.statistics import Case, Gap, RunOfMethod, make_case


def a_run(
    method: str, seed: int, score: float, higher: bool = True, **more: Any
) -> RunOfMethod:
    summary = {
        "metric": "accuracy",
        "is_share": True,
        "higher_is_better": higher,
        "dataset": "digits",
        "seed": seed,
        "rounds_played": 10,
        "personal_accuracy": score,
        "personal_val_accuracy": score / 2,
        "personal_accuracy_by_capacity": {"0.2": score, "1.0": score},
        "worst_tenth_accuracy": score / 4,
        "global_accuracy": None,
        "bytes_down": 500_000,
        "bytes_up": 500_000,
        "train_cpu_seconds": 61.0,
        "kernels": "native",
        **more,
    }
    return RunOfMethod(method, summary, {"0.2": 1000, "1.0": 2000}, False, {})


def a_case(scores: dict[str, list[float]], **more: Any) -> Case:
    runs = [
        a_run(method, seed, score, **more)
        for method, listed in scores.items()
        for seed, score in enumerate(listed)
    ]
    return make_case({"data.alpha": 0.1}, runs)


shares = st.floats(0, 1)


@given(st.lists(st.tuples(shares, shares), min_size=2, max_size=8))
def test_intervals_are_student_s_and_differences_are_paired(
    pairs: list[tuple[float, float]],
) -> None:
    a, b = map(np.array, zip(*pairs, strict=True))
    case = a_case({"a": a.tolist(), "b": b.tolist()})
    best, other = (a, b) if a.mean() >= b.mean() else (b, a)
    worse = next(row for row in case.rows if row is not case.best)
    assert worse.gap is not None
    assert case.best.personal.mean == pytest.approx(best.mean())
    t = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
    for found, values in (
        (worse.personal, other),
        (worse.gap.estimate, other - best),
    ):
        half = t[len(pairs)] * values.std(ddof=1) / len(pairs) ** 0.5
        assert found.half == pytest.approx(half, rel=1e-3, abs=1e-12)
        assert found.mean == pytest.approx(values.mean())


def test_a_small_gap_that_is_always_there_is_clear_and_a_large_one_may_not_be() -> None:
    # The same clients: pairing finds what the intervals of the means would hide.
    steady = a_case({"a": [0.2, 0.5, 0.8], "b": [0.19, 0.488, 0.791]})
    noisy = a_case({"a": [0.9, 0.1, 0.9], "b": [0.1, 0.9, 0.1]})
    assert [case.rows[1].gap.is_clear for case in (steady, noisy)] == [True, False]  # type: ignore[union-attr]  # b is not the best
    assert SAME not in plain([steady]).split("±")[0]
    assert f"-26.7 ± 229.5 {SAME}" in plain([noisy])


def test_one_seed_tells_nothing_apart() -> None:
    case = a_case({"a": [0.5], "b": [0.4]})
    assert case.rows[1].gap is not None
    assert case.rows[1].gap.is_clear is None
    assert "One seed gives no interval" in " ".join(notes([case]))
    assert "±" not in plain([case])


def test_runs_without_a_common_seed_have_a_gap_without_an_interval() -> None:
    runs = [a_run("a", 0, 0.5), a_run("a", 1, 0.5), a_run("b", 2, 0.4)]
    gap = make_case({}, runs).rows[1].gap
    assert isinstance(gap, Gap)
    assert gap.is_clear is None
    assert gap.estimate.num == 0


def test_methods_with_fewer_seeds_are_named_and_the_best_is_of_common_seeds() -> None:
    """A method's other seeds may be luckier ones."""
    case = a_case({"a": [0.6, 0.2, 0.2], "b": [0.5]})
    assert case.best.method == "a"
    assert heading(case) == "digits, alpha 0.1, 1 to 3 seeds"
    assert "not all methods have 3 seeds: b (1)." in " ".join(notes([case]))
    whole = a_case({"a": [0.6, 0.2, 0.2], "b": [0.5, 0.4, 0.4]})
    assert whole.best.method == "b"
    assert heading(whole) == "digits, alpha 0.1, 3 seeds"
    assert "not all methods" not in " ".join(notes([whole]))


@pytest.mark.parametrize("name", ["fedspu@train.lr=0.05", "fedspu@train.lr=0.0123456"])
def test_a_name_is_never_broken_so_that_it_reads_as_another(name: str) -> None:
    scores = {f"0.{i}": 0.5 for i in range(2, 10)}
    runs = [
        a_run(method, 0, 0.5, personal_accuracy_by_capacity=scores)
        for method in ("fedspu", name)
    ]
    text = plain([make_case({"data.alpha": 0.1}, runs)])
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("train.lr=") == text.count(name.partition("@")[2]) == 3


def test_the_lowest_is_best_where_lower_is_better() -> None:
    assert a_case({"a": [0.5], "b": [0.4]}, higher=False).best.method == "b"


def test_a_table_fits_eighty_columns_whatever_methods_are_called() -> None:
    long = "my.laboratory.of.methods:the_record_that_never_ends@option=1@other=2"
    case = a_case({"fedspu": [0.7, 0.8], long: [0.65, 0.79]})
    text = plain([case])
    assert max(map(len, text.splitlines())) <= 80
    assert long in text.replace("\n", "").replace(" ", "") or "my.laboratory" in text
    assert heading(case) == "digits, alpha 0.1, 2 seeds"


def test_a_long_name_of_a_method_is_broken_at_its_options() -> None:
    name = "fedspu@train.lr=0.05@train.momentum=0.9"
    lines = plain([a_case({name: [0.5], "local": [0.4]})]).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("fedspu "))
    assert lines[at + 1 : at + 3] == ["  @train.lr=0.05", "  @train.momentum=0.9"]


def test_compiled_and_plain_runs_in_one_table_are_pointed_out() -> None:
    runs = [a_run("a", 0, 0.5), a_run("b", 0, 0.4, kernels="torch")]
    assert any(
        "Some runs used compiled" in note for note in notes([make_case({}, runs)])
    )


def test_what_last_models_cost_is_said_below_the_table() -> None:
    plus = a_run(
        "fedspu-plus",
        0,
        0.5,
        finish_bytes_down=2_000_000,
        finish_train_cpu_seconds=65.0,
    )
    case = make_case({}, [plus, a_run("fedspu", 0, 0.4)])
    said = "the last models of fedspu-plus: 2.00 MB sent to all clients together, and "
    found = [note for note in notes([case]) if "last models" in note]
    assert found == [f"Besides, {said}1:05 min of CPU time."]
    first, second = records([case])
    assert first["finish_bytes_down"] == 2_000_000
    assert second["finish_bytes_down"] is None


@pytest.mark.parametrize(
    ("weakest", "strongest", "said"),
    [(1000, 2000, ""), (1900, 2000, "takes 95% of what"), (2000, 2000, "")],
)
def test_it_is_said_if_freezing_saves_little_memory(
    weakest: int, strongest: int, said: str
) -> None:
    """Not of a method whose clients all train the same."""
    run = replace(
        a_run("fedspu", 0, 0.5), step_bytes={"0.2": weakest, "1.0": strongest}
    )
    local = replace(a_run("local", 0, 0.6), step_bytes={"0.2": 3000, "1.0": 3000})
    found = " ".join(notes([make_case({}, [local, run])]))
    assert ("Freezing saves little memory" in found) == bool(said)
    assert said in found


def test_records_hold_numbers_and_csv_can_be_read_again() -> None:
    case = a_case({"a": [0.5, 0.6], 'b,c\n"d': [0.4, 0.4]})
    found = records([case])
    assert found[0]["personal_accuracy"] == pytest.approx(0.55)
    assert found[0]["is_best"] is True
    assert found[1]["against_the_best"] == pytest.approx(-0.15)
    assert found[1]["step_bytes_at_p_0.2"] == 1000
    again = list(csv.DictReader(io.StringIO(as_csv([case]))))
    assert [row["method"] for row in again] == ["a", 'b,c\n"d']
    assert float(again[1]["personal_accuracy"]) == found[1]["personal_accuracy"]


ODD = "a_b%c&d#e$f{g}~h^i\\j"


def test_odd_names_are_escaped_in_latex() -> None:
    assert escaped(ODD) == (
        r"a\_b\%c\&d\#e\$f\{g\}\textasciitilde{}h\textasciicircum{}i\textbackslash{}j"
    )
    text = latex([a_case({"fedspu": [0.5, 0.6], ODD: [0.1, 0.2]})])
    assert escaped(ODD) in text
    assert ODD not in text


def test_latex_has_an_overview_of_several_cases_and_marks_the_best() -> None:
    cases = [a_case({"a": [0.5, 0.6], "b": [0.1, 0.2]}) for _ in range(2)]
    text = latex(cases)
    assert text.count("\\begin{tabular}") == text.count("\\end{tabular}") == 3
    for table in re.findall(r"\\begin\{tabular\}\{(l r*|lr*)\}(.*?)\\end", text, re.S):
        columns, body = table
        for line in body.splitlines():
            if "&" in line:
                assert line.count("&") == len(columns) - 1
    assert text.count("\\textbf{55.0 $\\pm$") == 4
    assert "\\textbf{15.0" not in text
    assert "$-$40.0" in text


def test_markdown_survives_bars_and_stars_in_names() -> None:
    text = markdown([a_case({"a|b*": [0.5]})])
    assert "a\\|b\\*" in text
