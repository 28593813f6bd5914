"""What the command prints besides its results: errors and warnings."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from fedspu.settings_text import one_line

INTERRUPTED = 130
"""The exit code of a command ended by Ctrl-C."""


def complain(text: str) -> None:
    """Say in one line what went wrong."""
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escaped(text)}")


def escaped(text: str) -> str:
    """Text on one line, with its brackets escaped: rich takes them for markup."""
    return one_line(text).replace("[", "\\[")


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Show a warning as one line, without the place in the code."""

    def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        console = Console(stderr=True, soft_wrap=True)
        console.print(f"[yellow]warning:[/] {escaped(str(message))}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
