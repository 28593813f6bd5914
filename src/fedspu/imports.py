"""Find the object that a user names as ``package.module:attribute``."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from fedspu.errors import FedSPUError, SettingsError
from fedspu.settings import nearest


def is_place(name: str) -> bool:
    """Whether a name has the form package.module:attribute."""
    module, colon, attribute = name.partition(":")
    parts = [*module.split("."), attribute]
    return bool(colon) and all(part.isidentifier() for part in parts)


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
