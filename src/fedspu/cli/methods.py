"""``fedspu methods``: what each method does, and whether one obeys the laws."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fedspu.cli.flags import Json
from fedspu.cli.results import print_json
from fedspu.errors import MethodError


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
        print_json(rows)
        return
    Console().print(method_table(rows))


def _check(method: str, as_json: bool) -> None:
    """Print what each law found; exit code 2 if one is broken."""
    from fedspu.methods import make_method
    from fedspu.settings import MethodSettings

    make_method(MethodSettings(name=method))  # a wrong name is told at once

    from fedspu import conformance

    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(
            f"trying {len(conformance.LAWS)} laws on {method} …", markup=False
        )
    with console.status(f"trying the laws on {method} …") as status:

        def watch(law: str, model: str, number: int, of: int) -> None:
            status.update(escape(f"{number} of {of}, on {model}: {law}"))

        found = []
        for finding in conformance.examine(method, watch=watch):
            if finding.why_unchecked is not None:
                raise MethodError(
                    f"{method} cannot be checked: its run on {finding.model} ended "
                    f"with {finding.why_unchecked}"
                )
            found.append(finding)
    broken = [finding for finding in found if finding.violation is not None]
    if as_json:
        print_json([vars(finding) for finding in found])
    else:
        for law in dict.fromkeys(finding.law for finding in found):
            is_broken = any(finding.law == law for finding in broken)
            typer.echo(f"{'broken' if is_broken else 'holds '}  {law}")
        for finding in broken:
            typer.echo(f"\n{finding.law}, on {finding.model}: {finding.violation}")
    if broken:
        sys.exit(2)
