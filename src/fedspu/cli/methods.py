"""``fedspu methods``: what each method does."""

import json

import typer
from rich.console import Console

from fedspu.cli.flags import Json


def methods(as_json: Json = False) -> None:
    """List the methods: what each sends, trains, keeps and is judged by.

    A reading is the version that the FedSPU paper compares with (paper), or the one of
    the method's own paper (original): --set method.reading=original.
    """
    from fedspu.methods import all_methods
    from fedspu.reports.methods import method_rows, method_table

    rows = method_rows(all_methods())
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    Console().print(method_table(rows))
