"""The ``fedspu`` command: which commands there are, and how they end.

Exit codes: 0 for success; 1 for our own mistake, with a traceback, and if no p fits the
limits of ``fedspu profile``; 2 for the user's mistake, with one clear line; 130 if
interrupted.
"""

import atexit
import gc
import re
import sys
from importlib import import_module
from inspect import cleandoc
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup
from typer.main import get_command

from fedspu.cli import print_version
from fedspu.cli.console import (
    INTERRUPTED,
    complain,
    one_interrupt,
    plain_warnings,
    saying_what_loads,
    whole_output,
)
from fedspu.cli.results import restored_output
from fedspu.errors import FedSPUError

COMMANDS = {
    "run": "Play one federated run: live progress, a run folder, a short table.",
    "compare": "Play several methods on the same clients, and print one table.",
    "report": "Show runs that are there already: a table here, and a page with "
    "pictures.",
    "reproduce": "Play the paper's experiments, and print its tables with ours beside "
    "them.",
    "check": "Read every file of a run folder, and say what is whole and what is "
    "damaged.",
    "neurons": "Print a model's neuron groups, and how much of it is active at each p.",
    "profile": "Measure time and memory of a training step at each p, to choose a "
    "device's p.",
    "device": "Measure how much of a model this device can train, and propose its "
    "capacity p.",
    "export": "Write a client's personal model as one file for inference, and check it "
    "first.",
    "methods": "List the methods: what each sends, trains, keeps and is judged by.",
    "settings": "List every setting: its meaning, its default (mostly the paper's) and "
    "its flag.",
    "doctor": "Say what was found on this machine, what runs where, and how fast.",
    "data": "Data sets: list them, fetch their files, check what is in them.",
    "deploy": "A real server and real devices, with Flower (extra: flower). Start with "
    "[bold]fedspu deploy init[/bold].",
}
"""Each command and what it does; its module is imported only when it is used."""

OPTIONS: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
}


class Commands(TyperGroup):
    """All commands; listing them imports none."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = {
            n: click.Command(n, help=about) for n, about in COMMANDS.items()
        }

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that was typed, imported now."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and load_command(str(found.name)), rest


def load_command(name: str) -> click.Command:
    """The command itself, from its module."""
    module = import_module(f"fedspu.cli.{name}")
    if hasattr(module, "app"):  # it has commands of its own
        command = get_command(module.app)
    else:
        alone = typer.Typer(**OPTIONS)
        alone.command(name)(getattr(module, name))
        command = get_command(alone)
    command.name = name
    for one in (command, *getattr(command, "commands", {}).values()):
        one.help = _unwrapped(one.help)
    return command


def _unwrapped(text: str | None) -> str | None:
    """A text whose paragraphs are one line each: a terminal wraps them as it needs."""
    if text is None:
        return None
    paragraphs = cleandoc(text).split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    **OPTIONS,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_version()
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
    # All memory is given back at once: looking through PyTorch's takes half a second.
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    try:
        with (
            one_interrupt(),
            whole_output(),
            restored_output(),
            plain_warnings(),
            saying_what_loads(),
        ):
            code = app(prog_name="fedspu", standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
    except FedSPUError as error:
        complain(str(error))
        sys.exit(2)
    except click.ClickException as error:
        _show(error)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        complain("interrupted")
        sys.exit(INTERRUPTED)


def _show(error: click.ClickException) -> None:
    """Say in one line what is wrong with the words that were typed."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return
    # Both click and typer suggest the same.
    text = re.sub(r"( Did you mean [^?]*\?)\1+", r"\1", error.format_message())
    context = getattr(error, "ctx", None)
    typed = [word for word in sys.argv[1:2] if word in COMMANDS]
    where = " ".join(["fedspu", *typed]) if context is None else context.command_path
    end = "" if text.endswith((".", "?", ")")) else "."
    complain(f"{text}{end} See `{where} --help`")
