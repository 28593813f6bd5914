"""What fedspu has to know about a kind of layer, and the kinds it knows.

A kind is one class; ``register`` makes it known for a layer class and its subclasses::

    @register(MyLayer)
    class MyKind(LayerKind):
        def stand_in(self, layer): ...
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fedspu.neurons.table import Active, Neurons

Place = tuple[Tensor, int, int]
"""A position along one axis of one tensor."""

Channel = Callable[[int], Sequence[Place]]
"""The places that belong to channel i."""


@dataclass(frozen=True)
class Ports:
    """Where the channels of a linear layer lie in the tensors it stands for.

    ``ties`` lists places that belong to one neuron although no channel says so.
    """

    inputs: Channel
    outputs: Channel
    ties: Sequence[Sequence[Place]] = field(default=())


@dataclass(frozen=True)
class Cut:
    """How a model was made slim: a layer's path in it, and the neurons kept."""

    path: str
    neurons: Neurons
    kept: Active


class LayerKind:
    """All that fedspu asks about a kind of layer; a kind overrides what applies to it.

    ``is_norm``: it normalises, so its tensors may stay with a client, and its buffers
    are statistics. ``is_slim_by_size``: two slim layers of equal sizes differ only in
    their values.
    """

    is_norm = False
    is_slim_by_size = True

    def stand_in(self, layer: Any) -> dict[nn.Module, Ports]:
        """Give ``layer`` a forward pass that can be followed, in place of its own.

        For layers with neurons inside that are a black box, or that should stay whole.
        They may then compute something else; only which channel reaches which stays the
        same. Where the new pass uses linear layers of its own, their ports say which
        places in the layer's own tensors they stand for. Called on a throw-away copy of
        the model.
        """
        return {}

    def incoming(self, layer: Any) -> Iterable[tuple[str, int]]:
        """The parameters that make its outputs, each with the axis of the outputs."""
        return ()

    def resize(self, layer: Any, cut: Cut) -> None:
        """Update the sizes that the layer stores; its tensors were cut already.

        It may change the layer's own attributes, lists and dicts, no objects in them.
        """


KINDS: dict[type, LayerKind] = {}
"""Layer class -> its kind."""

_NOTHING = LayerKind()


def register(*classes: type) -> Callable[[type[LayerKind]], type[LayerKind]]:
    """Make a kind known for these layer classes and their subclasses."""

    def known(kind: type[LayerKind]) -> type[LayerKind]:
        for each in classes:
            KINDS[each] = kind()
        return kind

    return known


def kind_of(layer: object) -> LayerKind:
    """The kind of a layer: of its class, or of the nearest base class."""
    for each in type(layer).__mro__:
        if each in KINDS:
            return KINDS[each]
    return _NOTHING


def places(*tensors_and_dims: tuple[Tensor | None, int]) -> Channel:
    """Channel i lies at position i along these axes; tensors may be missing."""
    present = [(tensor, dim) for tensor, dim in tensors_and_dims if tensor is not None]
    return lambda i: [(tensor, dim, i) for tensor, dim in present]


def traced_linear(
    layer: nn.Module, name: str, width_in: int, width_out: int, like: Tensor
) -> nn.Linear:
    """A linear layer inside ``layer`` that stands in for a part of it."""
    linear = nn.Linear(width_in, width_out, device=like.device, dtype=like.dtype)
    layer.add_module(name, linear)
    return linear
