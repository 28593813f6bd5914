"""The ``fedspu`` command, with one file for each subcommand."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command; Ctrl-C is one line at any moment, also while it is loading."""
    try:
        from fedspu.cli.app import run_command
    except KeyboardInterrupt:
        sys.stderr.write("\nerror: interrupted\n")
        sys.exit(130)
    run_command()
