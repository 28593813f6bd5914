"""The order a model's neurons have while a part of them trains.

Where reordering is proved to be a symmetry, active neurons come first: the active
block of a tensor is then a leading slice of it, a view, and needs no copying. Elsewhere
neurons keep their places and blocks are index vectors. Both compute the same; they only
differ in speed.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedspu.neurons.calls import all_tensors
from fedspu.neurons.table import Active, Neurons
from fedspu.partial.memory_format import is_last

Layout = Literal["auto", "index"]

Span = None | int | Tensor
"""Active positions along one axis: all (None), the first n, or those in a tensor."""

Spans = tuple[Span, ...]


@dataclass(frozen=True)
class Arrangement:
    """Where everything is while a part of the model trains.

    ``spans`` has the active positions of each of the model's tensors, ``orders`` the
    current order of each axis that is not in the model's own order.
    """

    spans: dict[str, Spans]
    orders: dict[tuple[str, int], Tensor]

    def enter(self, model: nn.Module) -> None:
        """Put the model's neurons into this order, in place."""
        self._reorder(model, self.orders)

    def leave(self, model: nn.Module) -> None:
        """Put the model's neurons back into the model's own order, in place."""
        back = {where: order.argsort() for where, order in self.orders.items()}
        self._reorder(model, back)

    def own_order(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of one tensor in the model's own order."""
        for dim in range(tensor.dim()):
            if (name, dim) in self.orders:
                back = self.orders[name, dim].argsort().to(tensor.device)
                tensor = tensor.index_select(dim, back)
        return tensor

    @staticmethod
    def _reorder(model: nn.Module, orders: dict[tuple[str, int], Tensor]) -> None:
        tensors = dict(all_tensors(model))
        with torch.no_grad():
            for (name, dim), order in orders.items():
                tensor = tensors[name]
                tensor.copy_(tensor.index_select(dim, order.to(tensor.device)))


def arrange(
    model: nn.Module, neurons: Neurons, active: Active, layout: Layout
) -> Arrangement:
    """An arrangement with active neurons first where that is a symmetry.

    Neurons keep their places if ``layout`` is ``index``, or if the model has dropout:
    in another order, the same mask would drop other neurons.
    """
    shapes = {name: tensor.shape for name, tensor in all_tensors(model)}
    orders: dict[tuple[str, int], Tensor] = {}
    may_move = layout == "auto" and not has_dropout(model)
    for group in neurons.groups:
        chosen = active[group.name]
        if not may_move or not group.permutable or len(chosen) == group.size:
            continue
        is_frozen = torch.ones(group.size, dtype=torch.bool)
        is_frozen[chosen] = False
        first = torch.cat([chosen, is_frozen.nonzero().flatten()])
        for axis in group.axes:
            where, rows = (axis.tensor, axis.dim), axis.positions(group.size)
            if where not in orders:
                orders[where] = torch.arange(shapes[axis.tensor][axis.dim])
            orders[where][rows.flatten()] = rows[first].flatten()
    spans = {
        name: tuple(
            _span(
                neurons.active_along(active, name, dim, size), orders.get((name, dim))
            )
            for dim, size in enumerate(shape)
        )
        for name, shape in shapes.items()
    }
    return Arrangement(spans, orders)


def has_dropout(model: nn.Module) -> bool:
    """Whether some layer of the model draws dropout masks in training."""
    return any(
        (isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0)
        or (isinstance(layer, nn.MultiheadAttention | nn.RNNBase) and layer.dropout > 0)
        for layer in model.modules()
    )


def _span(positions: Tensor | None, order: Tensor | None) -> Span:
    """Active positions in the model's own order, as a span of the current order."""
    if positions is None:
        return None
    if order is not None:
        positions = order.argsort()[positions].sort().values
    is_leading = int(positions[-1]) == len(positions) - 1
    return len(positions) if is_leading else positions


def take_span(tensor: Tensor, dim: int, span: Span) -> Tensor:
    """The active part along one axis: a view if it comes first there, else a copy."""
    if span is None:
        return tensor
    if isinstance(span, int):
        return tensor.narrow(dim, 0, span)
    dim, where = dim % tensor.dim(), span.to(tensor.device)
    # PyTorch takes columns of a matrix several times as fast as channels of maps.
    if tensor.dim() > 2 and dim == tensor.dim() - 1 and tensor.is_contiguous():
        rows = tensor.view(-1, tensor.shape[-1])
        return rows.index_select(1, where).view(*tensor.shape[:-1], len(where))
    if dim == 1 and is_last(tensor):
        places = tensor.permute(0, 2, 3, 1)
        return take_span(places, 3, span).permute(0, 3, 1, 2)
    return tensor.index_select(dim, where)


def take_spans(tensor: Tensor, spans: Spans) -> Tensor:
    """The active block: a view if it comes first along every axis, else a copy."""
    for dim, span in enumerate(spans):
        tensor = take_span(tensor, dim, span)
    return tensor


def positions_of(span: Span) -> Tensor | None:
    """The same positions as an index vector."""
    return torch.arange(span) if isinstance(span, int) else span


def num_in(span: Span, size: int) -> int:
    """How many positions a span has, of an axis of this size."""
    if span is None:
        return size
    return span if isinstance(span, int) else len(span)


def spread(span: Span, width: int) -> Span:
    """The same span where each position has become ``width`` neighbouring ones."""
    if span is None or isinstance(span, int):
        return None if span is None else span * width
    return (span[:, None] * width + torch.arange(width)).flatten()


def is_same(a: Span, b: Span) -> bool:
    """Whether two spans are equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)
