"""Models by name: built-in ones, and the user's own as ``package.module:build``."""

import sys
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import ModuleType

from torch import nn

from fedspu.errors import ModelError
from fedspu.models.audio import AudioNet
from fedspu.models.mlp import MLP
from fedspu.models.mobilenet import MobileNet
from fedspu.models.paper import CIFARNet, DigitsNet, EMNISTNet, SpeechNet
from fedspu.models.resnet import ResNet18
from fedspu.models.transformer import Transformer
from fedspu.settings import nearest

__all__ = [
    "MLP",
    "MODELS",
    "AudioNet",
    "CIFARNet",
    "DigitsNet",
    "EMNISTNet",
    "MobileNet",
    "ResNet18",
    "SpeechNet",
    "Transformer",
    "build",
    "find",
]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "digits": DigitsNet,
    "emnist": EMNISTNet,
    "cifar10": CIFARNet,
    "speech": SpeechNet,
    # Not in the paper: to start from.
    "audio": AudioNet,
    "mlp": MLP,
    "mobilenet": MobileNet,
    "resnet18": ResNet18,
    "transformer": Transformer,
}
"""Built-in name -> what makes the model for a number of classes."""


def build(name: str, num_classes: int | None = None) -> nn.Module:
    """A new model; a user's own is built without arguments, and knows its classes."""
    maker = find(name)
    if name in MODELS and num_classes is not None:
        return maker(num_classes)
    model = _call_bare(maker, name)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model = {name!r}: it returned a {type(model).__name__}; "
            "expected a torch.nn.Module"
        )
    return model


def find(name: str) -> Callable[..., nn.Module]:
    """What makes the model called ``name``; the working folder is searched first."""
    if name in MODELS:
        return MODELS[name]
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise ModelError(
            f"model = {name!r}: expected one of {', '.join(sorted(MODELS))}, or your "
            f"own as package.module:build{nearest(name, list(MODELS))}"
        )

    module = _import(module_name, name)
    if not hasattr(module, attribute):
        raise ModelError(
            f"model = {name!r}: {module.__file__ or module_name} has no {attribute}"
        )
    maker = getattr(module, attribute)
    if not callable(maker):
        raise ModelError(
            f"model = {name!r}: {attribute} is a {type(maker).__name__}; expected a "
            "function that returns the model"
        )
    return maker  # type: ignore[no-any-return]  # what it returns, build() checks


def _import(module_name: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        # As `python -m` does; it stays, for what the model imports later.
        sys.path.insert(0, here)
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        # The module itself or a package around it, not something that it imports.
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ModelError(
                f"model = {name!r}: no module named {error.name} is installed or in "
                f"{here}"
            ) from None
        raise ModelError(f"model = {name!r}: cannot import it: {error}") from error


def _call_bare(maker: Callable[..., nn.Module], name: str) -> nn.Module:
    try:
        signature(maker).bind()
    except TypeError as error:
        raise ModelError(
            f"model = {name!r}: expected a function without arguments; {error}"
        ) from None
    except ValueError:
        pass  # some callables have no signature to ask; calling them tells
    return maker()
