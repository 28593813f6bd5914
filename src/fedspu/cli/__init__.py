"""The ``fedspu`` command, with one file for each subcommand."""

from fedspu.cli.main import main

__all__ = ["main"]
