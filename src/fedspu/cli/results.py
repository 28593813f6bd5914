"""Results that a program reads: nothing else is on stdout, whatever users' code prints.

Once ``for_programs`` was asked for, all that is printed goes to stderr, also by other
processes; only the two functions here still write to stdout.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from fedspu.cli.console import PLAIN

_kept: list[TextIO] = []
"""The real stdout, while something else is in its place."""


def for_programs(is_asked: bool) -> bool:
    """Keep stdout for the result alone, if that is asked for."""
    if is_asked and not _kept:
        _kept.append(sys.stdout)
        with suppress(OSError, ValueError, AttributeError):  # a test's own stream
            if sys.stdout.fileno() == 1:
                sys.stdout.flush()
                kept, encoding = os.dup(1), sys.stdout.encoding
                _kept.append(open(kept, "w", encoding=encoding, errors=PLAIN))  # noqa: SIM115  # closed by restored_output
                os.dup2(2, 1)
        sys.stdout = sys.stderr
    return is_asked


@contextmanager
def restored_output() -> Iterator[None]:
    """Afterwards, stdout is again what it was."""
    try:
        yield
    finally:
        if len(_kept) > 1:
            os.dup2(_kept[1].fileno(), 1)
            with suppress(OSError):
                _kept[1].close()
        if _kept:
            sys.stdout = _kept[0]
            _kept.clear()


def print_text(text: str) -> None:
    """Print a result as it is."""
    out = _kept[-1] if _kept else sys.stdout
    out.write(text)
    out.flush()


def print_json(value: Any) -> None:
    """Print a result as JSON."""
    print_text(f"{json.dumps(value, indent=2)}\n")
