"""``fedspu compare``: many runs, one table."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedspu.cli.console import INTERRUPTED, complain
from fedspu.cli.flags import Json, numbers, whole_numbers, with_settings

if TYPE_CHECKING:
    from fedspu.reports.display import Display
    from fedspu.runs import Watch
    from fedspu.sweeps import Cell


@with_settings(
    *("--method", "--alpha", "--seed", "--out"),
    instead={"method.name": "--methods", "seed": "--seeds", "out": "--out"},
)
def compare(
    given: dict[str, Any],
    methods: Annotated[
        str,
        typer.Option(
            help="Names separated by commas: see fedspu methods. A reading or option "
            "goes after an @: fjord@original, fedavg@finetune=5."
        ),
    ] = "fedspu,local",
    alphas: Annotated[
        str | None, typer.Option(help="Like 0.1,0.5,1; default: the experiment's own.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Like 0,1,2.")] = "0,1,2",
    out: Annotated[Path, typer.Option(help="A folder for all the runs.")] = Path(
        "runs/compare"
    ),
    as_json: Json = False,
) -> None:
    """Play several methods on the same clients, and print one table.

    Every run gets a folder in --out. The same command plays only runs that are missing.

    [bold]Examples[/bold]

    fedspu compare --methods fedspu,local --seeds 0,1,2 --out runs/first

    fedspu compare experiment.toml --methods fedspu,hermes,local --alphas 0.1,1

    fedspu compare --methods fjord,fjord@original,fedavg,fedavg@finetune=1
    """
    from fedspu.resolve import resolve

    listed = (
        [resolve(given).data.alpha] if alphas is None else numbers(alphas, "--alphas")
    )
    named = [name.strip() for name in methods.split(",")]
    numbered = whole_numbers(seeds, "--seeds")

    from fedspu import sweeps
    from fedspu.reports.tables import compare_rows, rich_table

    display = Displays(is_quiet=as_json)
    try:
        summaries = sweeps.compare(
            given, named, listed, numbered, out, begin=display.begin
        )
    except KeyboardInterrupt:
        complain("interrupted; the same command resumes where it stopped")
        sys.exit(INTERRUPTED)
    finally:
        display.end()
    if as_json:
        typer.echo(json.dumps(summaries, indent=2))
        return
    # A pipe has no width, and its reader wants whole names.
    width = None if sys.stdout.isatty() else 160
    console = Console(soft_wrap=True, width=width)
    console.print(rich_table(compare_rows(summaries)))
    console.print(
        "± is the 95 % interval of the mean over seeds (Student's t); differences are "
        "taken seed by seed, on the same clients."
    )
    console.print(f"Runs, comparison.md and comparison.json: {out}", markup=False)


class Displays:
    """Shows the progress of one run after another."""

    def __init__(self, is_quiet: bool) -> None:
        self.is_quiet = is_quiet
        self._shown: Display | None = None

    def begin(self, cell: "Cell", is_done: bool) -> "Watch":
        """Show the next run instead of the one before."""
        from fedspu.reports.display import Display

        self.end()
        self._shown = Display(cell.name, is_quiet=self.is_quiet or is_done)
        return self._shown.__enter__().watch

    def end(self) -> None:
        """Stop showing the last run."""
        if self._shown is not None:
            self._shown.__exit__(None, None, None)
            self._shown = None
