"""The ``fedspu`` command: which commands there are, and how they end.

Exit codes: 0 for success; 1 for our own mistake, with a traceback; 2 for the user's
mistake, with one clear line; 130 if interrupted.
"""

import io
import re
import sys
from typing import Annotated

import click
import typer

from fedspu.cli import (
    check,
    compare,
    data,
    deploy,
    device,
    doctor,
    export,
    methods,
    neurons,
    profile,
    report,
    reproduce,
    run,
    settings,
)
from fedspu.cli.console import (
    INTERRUPTED,
    complain,
    plain_warnings,
    saying_what_loads,
    whole_output,
)
from fedspu.errors import FedSPUError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("compare")(compare.compare)
app.command("report")(report.report)
app.command("reproduce")(reproduce.reproduce)
app.command("check")(check.check)
app.command("neurons")(neurons.neurons)
app.command("profile")(profile.profile)
app.command("device")(device.device)
app.command("export")(export.export)
app.command("methods")(methods.methods)
app.command("settings")(settings.settings)
app.command("doctor")(doctor.doctor)
app.add_typer(data.app, name="data")
app.add_typer(deploy.app, name="deploy")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"fedspu {version('fedspu')}")
        raise typer.Exit


@app.callback()
def fedspu(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_version,
            help="Print fedspu's version.",
        ),
    ] = False,
) -> None:
    """Personalized federated learning for devices of unequal strength.

    Start with [bold]fedspu run[/bold]: FedSPU on handwritten digits, in under a minute.
    """


def run_command() -> None:
    """Run the command, and end with the right exit code."""
    try:
        with whole_output(), plain_warnings(), saying_what_loads():
            code = app(standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
    except FedSPUError as error:
        complain(str(error))
        sys.exit(2)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        # Both click and typer suggest the same.
        text = re.sub(r"( Did you mean [^?]*\?)\1+", r"\1", shown.getvalue())
        click.echo(text, err=True, nl=False)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        complain("interrupted")
        sys.exit(INTERRUPTED)
