"""``fedspu report``: the table of runs that are there already, or how far they are."""

from pathlib import Path
from typing import Annotated

import typer

from fedspu.cli.compare import FORMS, check_form, print_comparison
from fedspu.cli.console import escaped
from fedspu.errors import StorageError


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Folders of comparisons, or of single runs."),
    ],
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Show how far a comparison is, until it is over."),
    ] = False,
    form: Annotated[
        str, typer.Option("--format", help=f"Print it as: {', '.join(FORMS)}.")
    ] = "table",
) -> None:
    """Compare runs that are there already; nothing is played or changed.

    Runs of one table must have the same clients: the same data, divided alike.

    [bold]Examples[/bold]

    fedspu report runs/first

    fedspu report runs/first --watch

    fedspu report runs/one runs/other --format tex
    """
    check_form(form)
    for path in paths:
        if not path.is_dir():
            raise StorageError(f"{path}: no such folder")

    from fedspu.sweeps.compare import compare_saved
    from fedspu.sweeps.display import headline, watch_folder
    from fedspu.sweeps.progress import PLAN, Following

    if watch:
        for path in paths:
            watch_folder(path)
    found = compare_saved(paths)
    if form == "table":
        for path in paths:
            if (path / PLAN).exists() and found.unfinished:
                typer.echo(f"{path}: {headline(Following(path).read())}")
    if not found.cases:
        raise StorageError(
            f"no finished run in {escaped(', '.join(map(str, paths)))}; "
            "--watch shows how far they are"
        )
    print_comparison(found, form)
    if found.unfinished and form == "table":
        typer.echo(f"{len(found.unfinished)} runs are not finished and are left out.")
