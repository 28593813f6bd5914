"""Find the object that a user names as ``package.module:attribute``."""

import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from fedspu.errors import FedSPUError, SettingsError
from fedspu.settings_text import nearest


def is_place(name: str) -> bool:
    """Whether a name has the form package.module:attribute, and so names code."""
    module, colon, attribute = name.partition(":")
    parts = [*module.split("."), attribute]
    is_folder = module == "hf"  # hf:FOLDER
    return bool(colon) and not is_folder and all(p.isidentifier() for p in parts)


def find_object(
    place: str, setting: str, refuse: type[FedSPUError] = SettingsError
) -> Any:
    """The object at ``package.module:attribute``; the working folder is searched first.

    ``setting`` is the setting that has this value, for messages.
    """
    module_name, _, attribute = place.partition(":")
    module = _module(module_name, f"{setting} = {place!r}", refuse)
    if not hasattr(module, attribute):
        known = [name for name in vars(module) if not name.startswith("_")]
        raise refuse(
            f"{setting} = {place!r}: {module.__file__ or module_name} has no "
            f"{attribute}{nearest(attribute, known)}"
        )
    return getattr(module, attribute)


def _module(name: str, given: str, refuse: type[FedSPUError]) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        # As `python -m` does; it stays, for what the module imports later.
        sys.path.insert(0, here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        # The module itself or a package around it, not something that it imports.
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise refuse(
                f"{given}: no module named {error.name} is installed or in {here}"
            ) from None
        raise refuse(f"{given}: cannot be imported ({error})") from error
    except ImportError as error:
        raise refuse(f"{given}: cannot be imported ({error})") from error
    except FedSPUError as error:  # a record that cannot be right
        raise refuse(f"{given}: {error}") from error
    except (Exception, SystemExit) as error:  # the user's own code
        raise refuse(f"{given}: importing {name} raised {raised(error)}") from error


def call(
    function: Callable[..., Any], given: str, refuse: type[FedSPUError], *args: Any
) -> Any:
    """What a user's function returns; an exception of it becomes one clear line."""
    try:
        return function(*args)
    except FedSPUError:
        raise
    except (Exception, SystemExit) as error:  # the user's own code
        raise refuse(f"{given}: it raised {raised(error)}") from error


def raised(error: BaseException) -> str:
    """An exception in one line: its kind, its message, and where it was raised."""
    text = str(error).strip()
    message = f": {text.splitlines()[0]}" if text else ""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}{message}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if "site-packages" not in frame.filename]
    place = ""
    if theirs:
        last = theirs[-1]
        place = f" ({Path(last.filename).name}, line {last.lineno})"
    return f"{type(error).__name__}{message}{place}"
