"""A comparison for other programs and for papers: flat records, CSV and LaTeX."""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from fedspu.reports.comparison.blocks import gap, heading, value
from fedspu.reports.comparison.statistics import Case, Estimate, Row
from fedspu.units import duration, size, titled


def records(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """One flat record for each case and method: numbers as they are, no text."""
    return [_record(case, row) for case in cases for row in case.rows]


def _record(case: Case, row: Row) -> dict[str, Any]:
    metric = case.metric
    found: dict[str, Any] = {"dataset": case.dataset, **case.settings}
    found |= {"method": row.method, "seeds": len(row.seeds), "is_best": row.gap is None}
    for name, estimate in {
        f"personal_{metric}": row.personal,
        f"personal_val_{metric}": row.personal_val,
        f"worst_tenth_{metric}": row.worst_tenth,
        f"global_{metric}": row.global_,
        "against_the_best": None if row.gap is None else row.gap.estimate,
        "rounds": row.rounds,
        "exchanged_bytes": row.num_bytes,
        "train_cpu_seconds": row.cpu_seconds,
        "finish_bytes_down": row.finish_bytes,
        "finish_train_cpu_seconds": row.finish_cpu_seconds,
        **{
            f"personal_{metric}_at_p_{p}": found_there
            for p, found_there in row.by_capacity.items()
        },
    }.items():
        found |= _numbers(name, estimate)
    found["is_distinguishable_from_the_best"] = row.gap and row.gap.is_clear
    found |= {f"step_bytes_at_p_{p}": n for p, n in row.step_bytes.items()}
    return found | {f"picked_{name}": v for name, v in row.tuned.items()}


def _numbers(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    return {
        name: None if estimate is None else estimate.mean,
        f"{name}_half_interval": None if estimate is None else estimate.half,
    }


def as_csv(cases: Sequence[Case]) -> str:
    """The records as CSV; a column that some records lack is empty there."""
    listed = records(cases)
    names = list(dict.fromkeys(name for record in listed for name in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    for record in listed:
        writer.writerow({name: _written(v) for name, v in record.items()})
    return text.getvalue()


def _written(found: Any) -> Any:
    if isinstance(found, list | tuple):
        return " ".join(map(str, found))
    return "" if found is None else found


# LaTeX --------------------------------------------------------------------------------


def latex(cases: Sequence[Case]) -> str:
    r"""Tables for a paper that has \usepackage{booktabs}: an overview, then each case.

    Bold: the best method, and those that cannot be told from it.
    """
    tables = [_overview(cases)] if len(cases) > 1 else []
    tables += [_table(case) for case in cases]
    note = (
        "% needs \\usepackage{booktabs}; +- is the 95 % interval of the mean over "
        "seeds;\n% bold: the best, and methods that cannot be told from it\n"
    )
    return note + "\n".join(tables)


def _overview(cases: Sequence[Case]) -> str:
    methods = list(dict.fromkeys(row.method for case in cases for row in case.rows))
    rows = []
    for method in methods:
        found = [
            next((row for row in case.rows if row.method == method), None)
            for case in cases
        ]
        rows.append(
            [
                escaped(method),
                *(
                    "--" if row is None else _personal(case, row)
                    for case, row in zip(cases, found, strict=True)
                ),
            ]
        )
    return _tabular(["method", *(escaped(heading(case)) for case in cases)], rows)


def _table(case: Case) -> str:
    share = case.is_share
    unit = f"{titled(case.metric)}, %" if share else titled(case.metric)
    titles = [
        "method",
        f"personal {unit}",
        "against the best",
        "worst tenth",
        "global",
        "exchanged",
        "CPU time",
    ]
    rows = [
        [
            escaped(row.method),
            _personal(case, row),
            _math("best" if row.gap is None else gap(row.gap, share)),
            _math(value(row.worst_tenth, share)),
            _math(value(row.global_, share)),
            escaped(size(row.num_bytes.mean)),
            escaped(duration(row.cpu_seconds.mean)),
        ]
        for row in case.rows
    ]
    return f"% {heading(case)}\n" + _tabular(list(map(escaped, titles)), rows)


def _personal(case: Case, row: Row) -> str:
    text = _math(value(row.personal, case.is_share))
    is_top = row.gap is None or row.gap.is_clear is False
    return f"\\textbf{{{text}}}" if is_top else text


def _math(text: str) -> str:
    """A value as LaTeX sets it."""
    if text == "-":
        return "--"
    marks = {"±": "$\\pm$", "≈": "$\\approx$"}
    found = "".join(marks.get(letter, letter) for letter in text)
    return f"$-${found[1:]}" if found.startswith("-") else found


def _tabular(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def lines() -> Iterator[str]:
        yield f"\\begin{{tabular}}{{l{'r' * (len(titles) - 1)}}}"
        yield "\\toprule"
        yield f"{' & '.join(titles)} \\\\"
        yield "\\midrule"
        yield from (f"{' & '.join(row)} \\\\" for row in rows)
        yield "\\bottomrule"
        yield "\\end{tabular}"

    return "\n".join(lines()) + "\n"


_SPECIAL = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "\\": "\\textbackslash{}",
}


def escaped(text: str) -> str:
    """Text that LaTeX shows as it is."""
    return "".join(_SPECIAL.get(letter, letter) for letter in text)
