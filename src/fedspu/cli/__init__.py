"""The ``fedspu`` command, one file for each of its own commands."""

from fedspu.cli.main import main

__all__ = ["main"]
