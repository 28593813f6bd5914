"""``fedspu methods``: what each method does, and whether one obeys the laws."""

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from fedspu.cli.flags import Json


def methods(
    check: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="Try the laws that every method obeys on this one: a name, or "
            "package.module:record. It takes a minute or two.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the methods: what each sends, trains, keeps and is judged by.

    A reading is the version that the FedSPU paper compares with (paper), or the one of
    the method's own paper (original): --set method.reading=original.

    [bold]Examples[/bold]

    fedspu methods

    fedspu methods --check mylab.lazy:lazy
    """
    if check is not None:
        _check(check, as_json)
        return

    from fedspu.methods import all_methods
    from fedspu.reports.methods import method_rows, method_table

    rows = method_rows(all_methods())
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    Console().print(method_table(rows))


def _check(method: str, as_json: bool) -> None:
    """Print what each law found; exit code 2 if one is broken."""
    from fedspu import conformance

    with Console(stderr=True).status(f"trying the laws on {method} …"):
        found = conformance.examine(method)
    broken = [finding for finding in found if finding.violation is not None]
    if as_json:
        typer.echo(json.dumps([vars(finding) for finding in found], indent=2))
    else:
        for law in dict.fromkeys(finding.law for finding in found):
            is_broken = any(finding.law == law for finding in broken)
            typer.echo(f"{'broken' if is_broken else 'holds '}  {law}")
        for finding in broken:
            typer.echo(f"\n{finding.law}, on {finding.model}: {finding.violation}")
    if broken:
        sys.exit(2)
