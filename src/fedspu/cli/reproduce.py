"""``fedspu reproduce``: the paper's tables, ours beside the printed values."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedspu.cli.console import INTERRUPTED, complain
from fedspu.cli.results import for_programs, print_text
from fedspu.errors import SettingsError, StorageError
from fedspu.federation.storage.finding import refuse_single_run

WHAT = ("table1", "table2", "table3", "table4", "memory", "all")
QUIRKS = ("leak", "head", "rates")
FORMS = ("table", "md", "json")


def reproduce(
    what: Annotated[str, typer.Argument(help=f"One of {', '.join(WHAT)}.")],
    budget: Annotated[
        str,
        typer.Option(
            help="About how long it may take: 10min, 1h or full. It decides on rounds, "
            "alphas and seeds; what is cut is said."
        ),
    ] = "10min",
    datasets: Annotated[
        str, typer.Option(help="Which of the paper's data sets.")
    ] = "emnist,cifar10,speech",
    use: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATASET=DATA",
            help="Other data instead, as in --use emnist=arrays:femnist.npz; may be "
            "repeated.",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the data sets are.")
    ] = None,
    released_quirks: Annotated[
        str | None,
        typer.Option(
            help="Also play faults of the authors' released code, one at a time: "
            "leak (norms learn from test examples), head (the last layer stays local), "
            "rates (methods have different learning rates)."
        ),
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(help="Play so many runs at once.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for all the runs; default: runs/reproduce-BUDGET."),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", help=f"Print it as: {', '.join(FORMS)}.")
    ] = "table",
) -> None:
    """Play the paper's experiments, and print its tables with ours beside them.

    The same command resumes where it was interrupted.

    [bold]Examples[/bold]

    fedspu reproduce memory

    fedspu reproduce table1 --datasets cifar10 --budget 10min

    fedspu reproduce all --budget full --use emnist=arrays:femnist.npz
    """
    if what not in WHAT:
        raise SettingsError(f"{what}: no such table; expected one of {', '.join(WHAT)}")
    if form not in FORMS:
        raise SettingsError(f"--format {form}: expected one of {', '.join(FORMS)}")
    for_programs(form != "table")
    tables = list(WHAT[:-1]) if what == "all" else [what]
    chosen = _listed(datasets, "--datasets", ("emnist", "cifar10", "speech"))
    quirks = (
        _listed(released_quirks, "--released-quirks", QUIRKS) if released_quirks else []
    )
    if quirks and tables == ["memory"]:
        raise SettingsError(
            "--released-quirks: they have no effect on memory; leave them out"
        )
    sources = _sources(use or [], chosen)
    if parallel is not None and parallel < 1:
        raise SettingsError(f"--parallel {parallel}: expected at least 1")
    folder = out or Path(f"runs/reproduce-{budget}")
    _check_folder(folder)

    from fedspu.reports.profile import progress
    from fedspu.reproduce import report
    from fedspu.reproduce.tables import PaperTable
    from fedspu.sweeps.display import SweepDisplay

    made: dict[str, PaperTable] = {}
    results: list[Any] = []
    try:
        with SweepDisplay(is_quiet=form != "table") as display:
            if tables != ["memory"]:
                made, results = _played(
                    *(tables, chosen, sources, data_dir, budget),
                    *(quirks, folder, parallel, display),
                )
        if "memory" in tables:
            from fedspu.reproduce.memory import memory_table

            with progress() as say:
                say("measuring the memory of a step at each p …")
                made["memory"] = memory_table()
    except KeyboardInterrupt:
        complain("interrupted; the same command resumes where it stopped")
        sys.exit(INTERRUPTED)
    report.write(folder, made, results)
    if form == "json":
        print_text((folder / "results.json").read_text("utf-8"))
    elif form == "md":
        print_text("\n".join(map(report.markdown, made.values())))
    else:
        # A pipe has no width.
        console = Console(width=None if sys.stdout.isatty() else 80)
        for table in made.values():
            console.print(report.terminal(table, console.width))
        typer.echo(f"Runs, tables as md, and results.json: {folder}")


def _played(
    tables: list[str],
    chosen: list[Any],
    sources: dict[str, str],
    data_dir: Path | None,
    budget: str,
    quirks: list[str],
    folder: Path,
    parallel: int | None,
    display: Any,
) -> tuple[dict[str, Any], list[Any]]:
    from fedspu.reports.profile import progress
    from fedspu.reproduce import experiments as ex
    from fedspu.reproduce import report
    from fedspu.reproduce import tables as tb
    from fedspu.reproduce.claims import claims_table

    ex.check_budget(budget)
    given = {name: ex.settings_of(name, sources.get(name)) for name in chosen}
    if data_dir is not None:
        for settings in given.values():
            settings["data.dir"] = data_dir.absolute()
    found, missing = ex.available(given)
    given = {name: given[name] for name in found}
    planned = ex.series_for(tables, found, quirks)
    with progress() as say:
        extent = ex.extent_for(budget, planned, given, folder, parallel, say)
    played = ex.play(planned, extent, given, folder, parallel, display)
    results = [r for series, rs in played if not series.fault for r in rs]
    cut = " ".join([extent.what_cut, *ex.titles(missing), *ex.stand_ins(sources)])
    make = {
        "table1": lambda: tb.accuracy_table("table1", results, cut),
        "table2": lambda: tb.accuracy_table("table2", results, cut),
        "table3": lambda: tb.cost_table(results, cut),
        "table4": lambda: tb.rounds_table(results, cut),
    }
    made = {name: make[name]() for name in tables if name in make}
    if set(make) <= set(tables):
        made["claims"] = claims_table(results, cut)
    if quirks:
        of_faults = [(series, rs) for series, rs in played if series.fault]
        made["quirks"] = report.quirks_table(of_faults, cut)
    return made, results


def _listed(text: str, flag: str, known: tuple[str, ...]) -> list[str]:
    found = [part.strip() for part in text.split(",")]
    for part in found:
        if part not in known:
            raise SettingsError(f"{flag} {part}: expected one of {', '.join(known)}")
        if found.count(part) > 1:
            raise SettingsError(f"{flag}: {part} is given twice; leave one out")
    return found


def _check_folder(path: Path) -> None:
    """Refuse a place where no folder can be, before anything is measured."""
    refuse_single_run(path)
    there = next(
        place for place in (path, *path.absolute().parents) if os.path.lexists(place)
    )
    if not there.is_dir():
        raise StorageError(f"{there} is no folder; choose another --out")
    if not os.access(there, os.W_OK):
        raise StorageError(f"{there} cannot be written to; choose another --out")


def _sources(use: list[str], chosen: list[str]) -> dict[str, str]:
    found = {}
    for text in use:
        name, equals, source = text.partition("=")
        if not equals or name not in chosen or not source:
            raise SettingsError(
                f"--use {text}: expected a data set and what to use instead, as in "
                f"{chosen[0]}=arrays:FILE.npz"
            )
        found[name] = source
    return found
