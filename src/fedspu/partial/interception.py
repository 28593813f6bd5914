"""How calls of a model are caught while a part of it trains.

``partial_training`` intercepts calls of the model (it replaces ``forward`` to run a
chain, or to keep less for the backward pass) and operations on the model's weights
(``weight.py``). This file handles what concerns the model as a whole: copies, saved and
loaded states, calls with other weights. Seen from outside, neurons are in the model's
own order, although they may be in another one inside.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fedspu.errors import ModelError
from fedspu.neurons.calls import all_tensors
from fedspu.partial.spans import Arrangement
from fedspu.partial.weight import PartialWeight


@contextmanager
def replaced_forward(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, calling the model runs ``forward``."""
    own = vars(model).get("forward")
    vars(model)["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del vars(model)["forward"]
        else:
            vars(model)["forward"] = own


class Order:
    """Shows the model in its own order to code that looks at it from outside.

    Neurons may be in another order inside a forward pass. A weight that is used outside
    of one (a penalty, a proximal term by name) and every ``state_dict()`` are in the
    model's own order; loading a state is refused.
    """

    def __init__(self, arrangement: Arrangement) -> None:
        self.arrangement = arrangement
        self.depth = 0  # of nested forward passes under way

    def shown(self, name: str, value: Tensor) -> Tensor:
        """A weight's value, in the order that the caller sees."""
        is_inside = self.depth or torch._C._current_graph_task_id() != -1
        return value if is_inside else self.arrangement.own_order(name, value)

    @contextmanager
    def kept(
        self, model: nn.Module, weights: Mapping[int, PartialWeight]
    ) -> Iterator[None]:
        """Inside, every layer of the model is watched."""
        names = {id(tensor): name for name, tensor in all_tensors(model)}
        self.places = [
            (layer, name, weight)
            for layer in model.modules()
            for name, weight in layer._parameters.items()
            if isinstance(weight, PartialWeight)
        ]
        for layer in model.modules():
            vars(layer)["__deepcopy__"] = _refuse_to_copy

        def write_back(*_: Any) -> None:
            for weight in weights.values():
                weight.write_back()

        def show(layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            for key, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                if prefix + key in state and id(tensor) in names:
                    value = state[prefix + key]
                    if isinstance(tensor, PartialWeight):
                        value = tensor.now()
                    own = self.arrangement.own_order(names[id(tensor)], value)
                    state[prefix + key] = own

        hooks = [model.register_load_state_dict_pre_hook(_refuse_to_load)]
        for layer in model.modules():
            hooks.append(layer.register_state_dict_pre_hook(write_back))
            if self.arrangement.orders:
                hooks.append(layer.register_state_dict_post_hook(show))
                hooks.append(layer.register_forward_pre_hook(self.enter))
                hooks.append(layer.register_forward_hook(self.leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for layer in model.modules():
                vars(layer).pop("__deepcopy__", None)

    def enter(self, *_: Any) -> None:
        """A forward pass begins."""
        if self.depth == 0 and any(
            layer._parameters[name] is not weight for layer, name, weight in self.places
        ):
            raise ModelError(
                "a model in partial training cannot be called with other weights while "
                "its neurons are reordered; use layout='index'"
            )
        self.depth += 1

    def leave(self, *_: Any) -> None:
        """A forward pass ends."""
        self.depth = max(0, self.depth - 1)  # a hook before ours may have raised


def _refuse_to_copy(memo: Any) -> NoReturn:
    raise ModelError(
        "a model in partial training cannot be copied; leave the context first, or "
        "copy its state_dict()"
    )


def _refuse_to_load(*_: Any) -> NoReturn:
    raise ModelError(
        "a model in partial training cannot load a state; leave the context first"
    )
