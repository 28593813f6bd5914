"""The layer that makes a model's output."""

import torch
from torch import Tensor, nn


def output_layer(model: nn.Module, x: Tensor) -> str | None:
    """The path of the linear layer whose output is the model's own; None if none is.

    Nor is there one if that layer is also used elsewhere in the model.
    """
    found: dict[str, list[Tensor]] = {}
    hooks = [
        layer.register_forward_hook(
            lambda _, inputs, output, path=path: found.setdefault(path, []).append(
                output
            )
        )
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    modes = {layer: layer.training for layer in model.modules()}
    try:
        with torch.no_grad():
            scores = model.eval()(x)
    finally:
        for hook in hooks:
            hook.remove()
        for layer, mode in modes.items():
            layer.training = mode
    paths = (p for p, calls in found.items() if len(calls) == 1 and calls[0] is scores)
    return next(paths, None)
