"""``fedspu compare``: many runs, one table."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedspu.cli.console import INTERRUPTED, complain, saying_where
from fedspu.cli.flags import numbers, whole_numbers, with_settings
from fedspu.cli.results import for_programs, print_text
from fedspu.cli.run import default_rounds
from fedspu.errors import SettingsError

FORMS = ("table", "md", "csv", "tex", "json")


@with_settings(
    *("--method", "--alpha", "--seed", "--out"),
    instead={"method.name": "--methods", "seed": "--seeds", "out": "--out"},
    extra="sweep",
)
def compare(
    given: dict[str, Any],
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            "--method",
            help="Names separated by commas: see fedspu methods. A reading, an option "
            "or any setting goes after an @: fjord@original, fedavg@finetune=5, "
            "fedspu@train.lr=0.05.  [default: fedspu,local]",
        ),
    ] = None,
    alphas: Annotated[
        str | None,
        typer.Option(
            "--alphas",
            "--alpha",
            help="Like 0.1,0.5,1; default: the experiment's own.",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", "--seed", help="Like 0,1,2, the default.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="Compare for each of these values of any setting, as in --vary "
            "train.lr=0.01,0.1 or --vary data.name=digits,cifar10; may be repeated.",
        ),
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="Pick the best of these values for each method first, on validation "
            "examples, as in --tune train.lr=0.01,0.03,0.1; may be repeated.",
        ),
    ] = None,
    tune_rounds: Annotated[
        int | None, typer.Option(help="Rounds of each run of --tune.  [default: 50]")
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option(
            help="Play so many runs at once; default: one on each core, if several are "
            "missing."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="A folder for all the runs.")] = Path(
        "runs/compare"
    ),
    form: Annotated[
        str, typer.Option("--format", help=f"Print it as: {', '.join(FORMS)}.")
    ] = "table",
    as_json: Annotated[
        bool, typer.Option("--json", help="The same as --format json.")
    ] = False,
) -> None:
    """Play several methods on the same clients, and print one table.

    Every run gets a folder in --out; so does the table, in every form. The same command
    plays only runs that are missing. `fedspu report --watch` shows from another
    terminal how far it is.

    [bold]Examples[/bold]

    fedspu compare --methods fedspu,local --seeds 0,1,2 --out runs/first

    fedspu compare experiment.toml --methods fedspu,hermes,local --alphas 0.1,1

    fedspu compare --methods fjord,fjord@original,fedavg,fedavg@finetune=1

    fedspu compare --vary clients.capacities=[0.2,1],[1] --tune train.lr=0.03,0.1,0.3
    """
    chosen = check_form("json" if as_json else form)
    sweep = _sweep(given.pop("sweep", {}), methods, alphas, seeds, vary, tune)

    from fedspu.federation.storage.finding import refuse_single_run
    from fedspu.resolve import resolve
    from fedspu.sweeps.cells import method_settings
    from fedspu.sweeps.playing import refuse_played

    refuse_single_run(out)
    refuse_played(out)
    if tune_rounds is None:
        tune_rounds = 50
    elif not sweep["tune"]:
        raise SettingsError(
            f"--tune-rounds {tune_rounds}: has no effect without --tune, like --tune "
            "train.lr=0.01,0.1"
        )
    # Wrong settings are refused before PyTorch is imported.
    first = {name: values[0] for name, values in sweep["vary"].items()}
    for method in sweep.get("methods", ["fedspu"]):
        settings = resolve({**given, **first, **method_settings(method)})
    if "rounds" not in {*given, *sweep["vary"]} and chosen == "table":
        typer.echo(default_rounds(settings), err=True)

    from fedspu.sweeps.compare import compare as play
    from fedspu.sweeps.display import SweepDisplay

    try:
        with SweepDisplay(is_quiet=chosen != "table") as display:
            found = play(
                **sweep,
                settings=given,
                out=out,
                tune_rounds=tune_rounds,
                parallel=parallel,
                watcher=display,
            )
    except KeyboardInterrupt:
        complain("interrupted; the same command resumes where it stopped")
        sys.exit(INTERRUPTED)
    with saying_where(f"the results are in {out}"):
        print_comparison(found, chosen)
        if chosen == "table":
            typer.echo(f"Runs, and this table as txt, md, csv, tex and json: {out}")
            typer.echo(f"Report, with curves and every client: {out / 'report.html'}")


def check_form(form: str) -> str:
    """One of ``FORMS``."""
    if form not in FORMS:
        raise SettingsError(f"--format {form}: expected one of {', '.join(FORMS)}")
    for_programs(form != "table")
    return form


def print_comparison(found: Any, form: str) -> None:
    """A comparison in one of ``FORMS``."""
    if form != "table":
        text = {
            "md": found.to_markdown,
            "csv": found.to_csv,
            "tex": found.to_latex,
            "json": found.to_json,
        }[form]()
        print_text(text)
        return
    from fedspu.reports.comparison.blocks import terminal

    # A pipe has no width.
    width = None if sys.stdout.isatty() else 80
    Console(width=width).print(terminal(found.cases))


def _sweep(
    table: Mapping[str, Any],
    methods: str | None,
    alphas: str | None,
    seeds: str | None,
    vary: list[str] | None,
    tune: list[str] | None,
) -> dict[str, Any]:
    """What to compare: the file's [sweep], overridden by the flags."""
    from fedspu.sweeps.cells import make_sweep, parse_axis, parse_methods

    found: dict[str, Any] = {"vary": {}, "tune": {}}
    for name, values in table.items():
        if name in ("methods", "seeds"):
            found[name] = values
        elif name.startswith("tune."):
            found["tune"][name.removeprefix("tune.")] = values
        else:
            found["vary"][name] = values
    if methods is not None:
        found["methods"] = parse_methods(methods)
    if seeds is not None:
        found["seeds"] = whole_numbers(seeds, "--seeds")
    if alphas is not None:
        found["vary"]["data.alpha"] = numbers(alphas, "--alphas")
    found["vary"] |= dict(parse_axis(text, "--vary") for text in vary or [])
    found["tune"] |= dict(parse_axis(text, "--tune") for text in tune or [])
    make_sweep(found.get("methods", ["fedspu"]), found.get("seeds", [0]), found["vary"])
    return found
