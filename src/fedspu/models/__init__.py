"""Models by name: built-in ones, and the user's own as ``package.module:build``."""

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

from fedspu.errors import ModelError
from fedspu.imports import call, find_object, is_place
from fedspu.settings_text import nearest

if TYPE_CHECKING:
    from torch import nn

MODELS = {
    "digits": "paper:DigitsNet",
    "emnist": "paper:EMNISTNet",
    "cifar10": "paper:CIFARNet",
    "speech": "paper:SpeechNet",
    # Not in the paper; meant as starting points.
    "audio": "audio:AudioNet",
    "mlp": "mlp:MLP",
    "mobilenet": "mobilenet:MobileNet",
    "resnet18": "resnet:ResNet18",
    "transformer": "transformer:Transformer",
}
"""Built-in name -> its module here and its class, which takes the number of outputs."""


def check_name(name: str) -> None:
    """Refuse a name that no model can have."""
    if name not in MODELS and not is_place(name):
        raise ModelError(
            f"model = {name!r}: expected one of {', '.join(sorted(MODELS))}, or your "
            f"own as package.module:build{nearest(name, list(MODELS))}"
        )


def build(name: str, num_outputs: int | None = None) -> "nn.Module":
    """A new model; a user's own is built without arguments and sets its own outputs."""
    from torch import nn

    maker = find(name)
    if name in MODELS and num_outputs is not None:
        made: nn.Module = maker(num_outputs)
        return made
    model = _call_bare(maker, name)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model = {name!r}: it returned a {type(model).__name__}; "
            "expected a torch.nn.Module"
        )
    return model


def find(name: str) -> Callable[..., Any]:
    """The maker of the model called ``name``; the working folder is searched first."""
    check_name(name)
    if name in MODELS:
        module, _, attribute = MODELS[name].partition(":")
        maker = getattr(import_module(f"{__name__}.{module}"), attribute)
    else:
        maker = find_object(name, "model", ModelError)
    if not callable(maker):
        raise ModelError(
            f"model = {name!r}: it is a {type(maker).__name__}; expected a function "
            "that returns the model"
        )
    return maker  # type: ignore[no-any-return]  # build() checks what it returns


def _call_bare(maker: Callable[..., Any], name: str) -> Any:
    try:
        signature(maker).bind()
    except TypeError as error:
        raise ModelError(
            f"model = {name!r}: expected a function without arguments; {error}"
        ) from None
    except ValueError:
        pass  # some callables have no signature; then the call itself is the test
    return call(maker, f"model = {name!r}", ModelError)
