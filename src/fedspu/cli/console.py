"""What the command prints besides its results: errors and warnings."""

import codecs
import errno
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any, NoReturn

INTERRUPTED = 130
"""The exit code of a command ended by Ctrl-C."""


def complain(text: str, command: str = "") -> None:
    """Say in one line what went wrong.

    What to type next follows; on a line of its own where it would be broken.
    """
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    line = f"[bold red]error:[/] {escaped(text)}"
    if not command:
        console.print(line)
    elif len(f"error: {text} `{command}`") <= console.width or not console.is_terminal:
        console.print(f"{line} `{escaped(command)}`")
    else:
        console.print(line)
        console.print(f"  {escaped(command)}")


def escaped(text: str) -> str:
    """Text on one line, with its brackets escaped: rich takes them for markup."""
    from fedspu.settings_text import one_line

    return one_line(text).replace("[", "\\[")


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Show a warning as one line, without the place in the code."""

    def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        from rich.console import Console

        console = Console(stderr=True, soft_wrap=True)
        console.print(f"[yellow]warning:[/] {escaped(str(message))}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


# Ctrl-C -------------------------------------------------------------------------------

PATIENCE = 3.0
"""Seconds that a command may take to end before another Ctrl-C counts."""

SOON = 0.02
"""Seconds after which an interrupt that Python lost is tried again."""


@contextmanager
def one_interrupt() -> Iterator[None]:
    """The first Ctrl-C ends the command; more of them do not disturb its end."""
    before = signal.getsignal(signal.SIGINT)
    is_usual = before is signal.default_int_handler  # not ignored, nor somebody else's
    if not is_usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    ends = [0.0]

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _is_loading(frame):
            end_at_once()
        if time.monotonic() > ends[0]:
            ends[0] = time.monotonic() + PATIENCE
            raise KeyboardInterrupt

    def ignored(what: "sys.UnraisableHookArgs") -> None:
        if not issubclass(what.exc_type, KeyboardInterrupt):
            show_ignored(what)
            return
        # Python loses it in a __del__ or while a process forks: interrupt once more.
        ends[0] = 0.0
        again = threading.Timer(SOON, signal.raise_signal, [signal.SIGINT])
        again.daemon = True
        again.start()

    show_ignored, sys.unraisablehook = sys.unraisablehook, ignored
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN if ends[0] else before)
        sys.unraisablehook = show_ignored


def _is_loading(frame: FrameType | None) -> bool:
    """Whether a module is being imported: compiled ones lose an exception then."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def end_at_once() -> NoReturn:
    """End an interrupted command that has done nothing yet."""
    sys.stderr.write("\nerror: interrupted\n")
    sys.stderr.flush()
    os._exit(INTERRUPTED)


# Output -------------------------------------------------------------------------------


@contextmanager
def whole_output() -> Iterator[None]:
    """Print in any encoding; say in a line that output cannot be written.

    Where an encoding lacks a letter, there is a plain one, or a question mark. Who
    reads from a pipe may stop at any line.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # a stream of some other kind
            stream.reconfigure(errors=PLAIN)  # type: ignore[union-attr]
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_OUTPUT:
            raise
        _close_output()
        if error.errno != errno.EPIPE:
            where = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
            complain(f"the output cannot be written: {error.strerror}{where}")
        sys.exit(2)


@contextmanager
def saying_where(results: str) -> Iterator[None]:
    """If what is printed here cannot be written, say where the results are."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        error.add_note(results)
        raise


PLAIN = "fedspu.plain"
LETTERS = {"±": "+/-", "≈": "~", "…": "...", "λ": "lambda", "×": "x", "★": "*"}
LETTERS |= {"█": "#", "▓": "#", "▒": "+", "░": "-", "·": ".", "─": "-", "━": "-"}


def _plainly(error: UnicodeError) -> tuple[str, int]:
    """Letters that an encoding lacks, as plain ones."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(LETTERS.get(letter, "?") for letter in lacking), error.end


codecs.register_error(PLAIN, _plainly)

_OF_OUTPUT = (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF, errno.EDQUOT)


def _close_output() -> None:
    """Let what is still to be printed go nowhere, instead of failing once more."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# What takes long to load --------------------------------------------------------------

LOADING = "loading PyTorch …"


@contextmanager
def saying_what_loads() -> Iterator[None]:
    """Say that PyTorch is being loaded, as it takes seconds; but not with --quiet."""
    finder = _Announcing()
    is_quiet = not {"-q", "--quiet"}.isdisjoint(sys.argv)
    if not is_quiet and "torch" not in sys.modules:
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.meta_path.remove(finder)


class _Announcing(MetaPathFinder):
    """Finds PyTorch as usual, and makes its loading visible."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        found = PathFinder.find_spec(fullname, path)
        if found is not None and found.loader is not None:
            found.loader = _Visibly(found.loader)
        return found


class _Visibly(Loader):
    """Loads a module as another loader does, while a line says so."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self.loader
        is_terminal = sys.stderr.isatty()  # there, the line is removed afterwards
        sys.stderr.write(LOADING if is_terminal else f"{LOADING}\n")
        sys.stderr.flush()
        try:
            self.loader.exec_module(module)
        finally:
            sys.stderr.write("\r\x1b[K" if is_terminal else "")
            sys.stderr.flush()
