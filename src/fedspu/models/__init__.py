"""Models by name: built-in, ``hf:FOLDER``, or one's own as ``package.module:build``."""

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

from fedspu.errors import DataError, ModelError
from fedspu.imports import call, find_object, is_place, place_of
from fedspu.settings_text import nearest, with_article

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
    if name not in MODELS and not is_place(name) and not is_hugging_face(name):
        raise ModelError(
            f"model = {name!r}: expected one of {', '.join(sorted(MODELS))}, a folder "
            "of Hugging Face as hf:FOLDER, or your own as package.module:build"
            f"{_meant(name) or nearest(name, list(MODELS))}"
        )


def is_hugging_face(name: str) -> bool:
    """Whether a name stands for a folder with a Hugging Face model."""
    return name.startswith("hf:") and len(name) > len("hf:")


def check_padding(name: str, padding: int | None, data: str) -> None:
    """Refuse rows of tokens that were filled with what is no padding to the model."""
    if padding is None or padding < 0 or not is_hugging_face(name):
        return
    own = import_module(f"{__name__}.hf").padding_of(name)
    if own != padding:
        raise DataError(
            f"{data}: rows of unequal lengths are filled with token {padding}, but "
            f"{name} has pad_token_id = {own}; fill them yourself with that token, or "
            f"save the model with pad_token_id = {padding}"
        )


def _meant(name: str) -> str:
    """A file or a module in the working folder, as it is to be named."""
    place = place_of(name)
    return f" (did you mean {place}?)" if place else ""


def build(name: str, num_outputs: int | None = None) -> "nn.Module":
    """A new model; a user's own is built without arguments and sets its own outputs."""
    from torch import nn

    maker = find(name)
    if is_hugging_face(name):
        return maker(name, num_outputs)  # type: ignore[no-any-return]  # models/hf.py
    if name in MODELS and num_outputs is not None:
        made: nn.Module = maker(num_outputs)
        return made
    model = _call_bare(maker, name)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model = {name!r}: it returned {with_article(type(model).__name__)}; "
            "expected a torch.nn.Module"
        )
    return model


def find(name: str) -> Callable[..., Any]:
    """The maker of the model called ``name``; the working folder is searched first."""
    check_name(name)
    if name in MODELS:
        module, _, attribute = MODELS[name].partition(":")
        maker = getattr(import_module(f"{__name__}.{module}"), attribute)
    elif is_hugging_face(name):
        maker = import_module(f"{__name__}.hf").build
    else:
        maker = find_object(name, "model", ModelError)
        _refuse_model(maker, name)
    if not callable(maker):
        raise ModelError(
            f"model = {name!r}: it is {with_article(type(maker).__name__)}; expected a "
            "function that returns the model"
        )
    return maker  # type: ignore[no-any-return]  # build() checks what it returns


def _refuse_model(maker: Any, name: str) -> None:
    """Refuse a model itself: a run needs new ones."""
    from torch import nn

    if isinstance(maker, nn.Module):
        raise ModelError(
            f"model = {name!r}: it is {with_article(type(maker).__name__)} itself; "
            "name the function that builds it, new at each call: "
            "def build(): return Net(10)"
        )


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
