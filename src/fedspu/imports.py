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
    is_path = module == "hf" or module.endswith(".py")  # hf:FOLDER, or a file
    return bool(colon) and not is_path and all(p.isidentifier() for p in parts)


def place_of(name: str) -> str:
    """Where the code may be that a user names by a file, or by a module in a folder.

    Empty if there is nothing like it in the working folder or the folders in it.
    """
    path, _, attribute = name.partition(":")
    wanted = [p for p in path.removesuffix(".py").split("/") if p not in ("", ".")]
    if not wanted:
        return ""
    here = [*Path().glob("*.py"), *Path().glob("*/*.py")]
    known = {".".join(file.with_suffix("").parts): file.stem for file in here}
    dotted = ".".join(wanted)
    if dotted not in known:
        last = wanted[-1].rpartition(".")[2].casefold()
        same = [module for module, stem in known.items() if stem.casefold() == last]
        if not same and not path.endswith(".py"):
            return ""
        dotted = min(same, key=len) if same else dotted
    place = f"{dotted}:{attribute or 'build'}"
    return place if is_place(place) else ""


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


def _meant(given: str) -> str:
    """What was probably meant by ``setting = 'place'``."""
    place = place_of(given.partition(" = ")[2].strip("'"))
    return f" (did you mean {place}?)" if place else ""


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
                f"{_meant(given)}"
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
