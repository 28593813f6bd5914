"""The multiplications that a partial training step cannot do without."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import flop_registry

from fedspu.errors import ModelError
from fedspu.neurons.blocks import mesh
from fedspu.neurons.calls import Operations, call
from fedspu.neurons.table import Active, Neurons
from fedspu.partial.weight import Mode

_aten = torch.ops.aten

_FACTORS: dict[Any, tuple[tuple[int, int], tuple[int, int]]] = {
    _aten.mm: ((0, 1), (1, 0)),
    _aten.addmm: ((1, 1), (2, 0)),
    _aten.bmm: ((0, 2), (1, 1)),
    _aten.baddbmm: ((1, 2), (2, 1)),
    _aten.convolution: ((0, 1), (1, 1)),
}
"""Product -> which arguments are its factors, and the axis along which each is read."""


def flop_limits(
    model: nn.Module, neurons: Neurons, active: Active, x: Any
) -> dict[Mode, float] | None:
    """The products of a partial step as a share of a dense step's, in each mode.

    Products are those of linear layers, convolutions and attention, also where they are
    called as functions or on bare parameters. In the forward pass, each costs F. In the
    backward pass, the gradient of a weight costs F times the share of its entries that
    are active. The gradient of an input costs F times the share of its channels that
    lead back to something that trains; in ``truncated``, F times the weight's share. A
    weight that is itself computed from others counts in full, as does a product of two
    inputs, like attention's scores. None if there are no products, or if the model
    refuses NaN.
    """
    try:
        dense = _products(model, neurons, neurons.everything(), x)
        partial = _products(model, neurons, active, x)
    except ModelError:
        return None
    if not dense:
        return None
    modes: tuple[Mode, ...] = ("exact", "truncated")
    return {mode: _step(partial, mode) / _step(dense, "exact") for mode in modes}


@dataclass(frozen=True)
class Factor:
    """One side of a product: a parameter or an input.

    ``trains`` is the share of a parameter's entries that have a gradient, ``block`` the
    share that is active. ``needed`` is the share of an input's channels that lead back
    to something that trains.
    """

    trains: float = 0.0
    block: float | None = None
    needed: float = 0.0


@dataclass(frozen=True)
class Product:
    """One product of the forward pass, and its multiplications."""

    cost: int
    factors: tuple[Factor, Factor]

    def backward(self, mode: Mode) -> float:
        """The multiplications of its gradients."""
        a, b = self.factors
        return self.cost * (_share(a, b, mode) + _share(b, a, mode))


def _share(factor: Factor, other: Factor, mode: Mode) -> float:
    """What the gradient of one factor costs, as a share of the product."""
    if factor.block is not None:
        return factor.trains
    if factor.needed == 0:
        return 0.0
    if other.block is None:
        return 1.0
    return other.block if mode == "truncated" else factor.needed


def _step(products: list[Product], mode: Mode) -> float:
    return sum(p.cost + p.backward(mode) for p in products)


def _products(
    model: nn.Module, neurons: Neurons, active: Active, x: Any
) -> list[Product]:
    """The products of a forward pass on a copy of the model.

    There, active entries that train are NaN, and so is everything that depends on
    them: this shows what leads back to them.
    """
    model = copy.deepcopy(model)
    parameters = {}
    for name, parameter in model.named_parameters():
        where = tuple(
            neurons.active_along(active, name, dim, size)
            for dim, size in enumerate(parameter.shape)
        )
        num_active = prod(
            size if along is None else len(along)
            for size, along in zip(parameter.shape, where, strict=True)
        )
        block = num_active / parameter.numel()
        trains = block if parameter.requires_grad else 0.0
        parameters[parameter.untyped_storage().data_ptr()] = Factor(trains, block)
        if parameter.requires_grad:
            with torch.no_grad():
                parameter[mesh(parameter, where)] = torch.nan
    watch = _Products(parameters)
    with torch.no_grad(), _in_plain_products(), watch:
        call(model, x)
    return watch.found


@contextmanager
def _in_plain_products() -> Iterator[None]:
    """Recurrent layers and attention run as the products they are made of."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


class _Products(Operations):
    """Records every product of a forward pass."""

    def __init__(self, parameters: dict[int, Factor]) -> None:
        super().__init__()
        self.parameters = parameters
        self.found: list[Product] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        kind = func.overloadpacket
        if kind in _FACTORS:
            cost = flop_registry[kind](*args, **kwargs, out_val=out) // 2
            a, b = (self._factor(args[i], axis) for i, axis in _FACTORS[kind])
            self.found.append(Product(cost, (a, b)))
        return out

    def _factor(self, tensor: Tensor, axis: int) -> Factor:
        found = self.parameters.get(tensor.untyped_storage().data_ptr())
        if found is not None:
            return found
        others = [dim for dim in range(tensor.dim()) if dim != axis]
        return Factor(needed=float(tensor.isnan().any(others).float().mean()))
