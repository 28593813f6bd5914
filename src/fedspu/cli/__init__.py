"""The ``fedspu`` command, with one file for each subcommand."""

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command; Ctrl-C is one line at any moment, also while it is loading."""
    try:
        if sys.argv[1:] == ["--version"]:  # this is all that it takes
            print_version()
            return
        from fedspu.cli.app import run_command
    except KeyboardInterrupt:
        sys.stderr.write("\nerror: interrupted\n")
        sys.stderr.flush()
        os._exit(130)
    run_command()


def print_version() -> None:
    """Print which fedspu this is."""
    from importlib.metadata import version

    sys.stdout.write(f"fedspu {version('fedspu')}\n")
