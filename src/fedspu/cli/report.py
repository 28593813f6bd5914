"""``fedspu report``: runs that are there already, as a table and as a page."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedspu.cli.compare import FORMS, check_form, print_comparison
from fedspu.cli.console import escaped
from fedspu.cli.flags import SWEEP
from fedspu.errors import SettingsError, StorageError


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
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where to write the page; default: report.html in the folder, or "
            "here if there are several. With another --format, it is written only if "
            "asked for.",
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Also write every picture as .png and .svg, for a paper.",
        ),
    ] = None,
) -> None:
    """Show runs that are there already: a table here, and a page with pictures.

    The page is one HTML file that needs no network and no other file. Runs of one table
    must have the same clients: the same data, divided alike.

    [bold]Examples[/bold]

    fedspu report runs/first

    fedspu report runs/first --watch

    fedspu report runs/one runs/other --html ours.html --plots figures

    fedspu report runs/one runs/other --format tex
    """
    from fedspu.federation.storage.finding import check_is_run
    from fedspu.sweeps.playing import is_comparison

    check_form(form)
    for path in paths:
        if not is_comparison(path):
            _refuse_several(path)
            check_is_run(path)
    if html is None and form == "table":
        html = _default_file(paths)
        if len(paths) > 1:  # in a folder that may hold anything
            _refuse_other(html)
    if html is not None:
        _check_file(html)

    from fedspu.sweeps.compare import compare_saved
    from fedspu.sweeps.display import headline, watch_folder
    from fedspu.sweeps.progress import Watched

    if plots is not None:
        from fedspu.reports.plots import check_folder

        check_folder(plots)
    if watch:
        for path in paths:
            watch_folder(path)
    told = {
        path: headline(Watched(path).read()) for path in paths if is_comparison(path)
    }
    for path in told:
        if not (path / SWEEP).exists():
            said = escaped(f"{path} has no results yet: {told[path]}")
            raise StorageError(said)
    found = compare_saved(paths)
    if not found.cases and (form != "table" or not found.has_begun):
        where = ", ".join(map(str, paths))
        said = "; ".join([where, *(f"{path}: {line}" for path, line in told.items())])
        raise StorageError(f"no finished run in {escaped(said)}")
    if found.cases:
        print_comparison(found, form)
    shows = watch or found.unfinished
    far = [f"{path}: {line}" for path, line in told.items() if shows]
    _write(found, html, plots, form, far)


def _refuse_several(path: Path) -> None:
    """Refuse a folder of comparisons, like that of reproduce; name the one to watch."""
    from fedspu.federation.storage.finding import runs_in
    from fedspu.sweeps.playing import is_comparison, is_played

    for part in runs_in(path):
        if is_comparison(Path(part)) and is_played(Path(part)):
            raise StorageError(
                f"{path} holds several comparisons; {part} is the one that is being "
                "played now: name that"
            )


def _default_file(paths: list[Path]) -> Path:
    return (paths[0] if len(paths) == 1 else Path()) / "report.html"


def _refuse_other(html: Path) -> None:
    """Refuse to write over a page that is no report."""
    if html.is_file() and MADE_BY not in html.read_bytes()[:4096]:
        raise SettingsError(
            f"{html} is there already, and is no report of fedspu; --html says where "
            "to write this one"
        )


MADE_BY = b'<meta name="generator" content="fedspu">'
"""What every report begins with; see reports/page/html.py."""


def _check_file(html: Path) -> None:
    if html.is_dir():
        raise SettingsError(f"--html {html}: is a folder; expected a file to write to")
    if not html.parent.is_dir():
        raise SettingsError(
            f"--html {html}: there is no folder {html.parent}; make it first"
        )


def _write(
    found: Any, html: Path | None, plots: Path | None, form: str, far: list[str]
) -> None:
    """Write what was asked for; say how far comparisons are, and where it is."""
    said = far
    if found.unfinished:
        number = len(found.unfinished)
        are = "s are not finished and are" if number > 1 else " is not finished and is"
        said.append(f"{number} run{are} left out.")
    if html is not None:
        found.write_html(html)
        said.append(f"Report: {html}")
    if plots is not None:
        number = found.write_plots(plots)
        said.append(f"Plots: {number} as .png and .svg in {plots}")
    if form == "table":
        for line in said:
            typer.echo(line)
