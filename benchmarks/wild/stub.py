"""A stand-in for torchvision, of which there may be no build for this machine.

Other people's model libraries import it for image transforms and box operations, none
of which a forward pass on random images needs.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


class _Nothing(metaclass=_Anything):
    """An object that can be called, subclassed and asked for anything."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else self


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012  # a package, to the import system
    __version__ = "0.28.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (_Nothing,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def install() -> None:
    """Let ``import torchvision`` succeed, if it would not."""
    if importlib.machinery.PathFinder.find_spec("torchvision") is None:
        sys.meta_path.insert(0, _Finder())
