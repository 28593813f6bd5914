"""Neurons that a slim copy stores without, and runs with, as zeros.

Some models have the number of their neurons where it cannot be changed: in a config, in
a line that splits, in a check of sizes. A slim copy of such a model stores its kept
neurons alone, and computes in full width with zeros in the place of the others. Where
these would count, they are left out (``uncounted.py``). That the copy is right is
proved like all else (``proof.py``).
"""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fedspu.neurons.slimming.uncounted import Kept, Uncounting, settled
from fedspu.neurons.table import Along, Call, Uncounted

ZERO, CUT = -1, -2
"""Instead of a stored position: a zero stands there; the place is gone."""

Where = tuple[Tensor | None, ...]
"""Positions along each axis; None means all of them."""

Places = dict[int, Tensor]
"""Axis -> for each position in full width, its position in what is stored, or ZERO."""


def moved(old: Places, shape: tuple[int, ...], wide: Where, kept: Where) -> Places:
    """Where the stored entries of a tensor lie in full width, once fewer are kept.

    ``old`` is where they lay before, ``shape`` what was stored. Of that, ``wide`` has a
    place in full width from now on, and ``kept`` is stored.
    """
    found = {}
    for dim, size in enumerate(shape):
        now = torch.full((size,), CUT)
        now[_all(wide[dim], size)] = ZERO
        stored = _all(kept[dim], size)
        now[stored] = torch.arange(len(stored))
        before = old.get(dim)
        at = now if before is None else torch.where(before < 0, before, now[before])
        at = at[at != CUT]
        if not torch.equal(at, torch.arange(len(stored))):
            found[dim] = at
    return found


def _all(positions: Tensor | None, size: int) -> Tensor:
    return torch.arange(size) if positions is None else positions


def padded(stored: Tensor, places: Places) -> Tensor:
    """The tensor in full width."""
    for dim, at in places.items():
        zeros = stored.new_zeros(
            [1 if d == dim else n for d, n in enumerate(stored.shape)]
        )
        at = torch.where(at < 0, stored.shape[dim], at).to(stored.device)
        stored = torch.cat([stored, zeros], dim).index_select(dim, at)
    return stored


Owner = tuple[str, str]
"""The path of a layer, and the name under which it holds a tensor."""


class Padding:
    """Stored tensors have full width while a model runs.

    ``places`` has the padded axes of each tensor, ``owners`` all who hold it, and
    ``calls`` in which operations which zeros do not count.
    """

    def __init__(self) -> None:
        self.places: dict[str, Places] = {}
        self.owners: dict[str, list[Owner]] = {}
        self.calls: dict[Call, Kept] = {}
        self._stored: dict[str, Tensor] = {}  # while the model runs
        self._modes: list[Uncounting] = []  # likewise
        self._depth = 0

    def masks(self, model: nn.Module) -> dict[Along, Tensor]:
        """Which channels are zeros that stand for neurons, along all axes with any.

        Also along each axis and all behind it as one.
        """
        found = {}
        for name, places in self.places.items():
            table, key = _holder(model, self.owners[name][0])
            shape = padded(table[key].detach(), places).shape
            for dim, at in places.items():
                for repeat in (1, prod(shape[dim + 1 :])):
                    along = Along(name, dim, repeat)
                    found[along] = (at < 0).repeat_interleave(repeat)
        return found

    def watch(self, model: nn.Module, uncounted: Uncounted) -> None:
        """Run a model in full width from now on, if any of it is padded.

        In the calls of ``uncounted``, zeros that stand for neurons do not count.
        """
        self.calls = settled(uncounted, self.masks(model)) if uncounted else {}
        if self.places and padding_of(model) is not self:
            model.register_forward_pre_hook(self.enter)
            model.register_forward_hook(self.leave, always_call=True)

    def enter(self, model: nn.Module, given: Any) -> None:
        """Before the model runs."""
        self._depth += 1
        if self._depth > 1:  # it calls itself
            return
        for name, places in self.places.items():
            table, key = _holder(model, self.owners[name][0])
            self._stored[name] = table[key]
            hold(model, self.owners[name], padded(table[key], places))
        if self.calls:
            self._modes.append(Uncounting(model, self.calls))
            self._modes[-1].__enter__()  # type: ignore[no-untyped-call]  # PyTorch's

    def leave(self, model: nn.Module, given: Any, out: Any) -> None:
        """After it, also if it failed."""
        self._depth -= 1
        if self._depth:
            return
        while self._modes:
            self._modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for name, stored in self._stored.items():
            table, key = _holder(model, self.owners[name][0])
            if not isinstance(stored, nn.Parameter):  # statistics may be new
                stored.detach().copy_(_kept(table[key].detach(), self.places[name]))
            hold(model, self.owners[name], stored)
        self._stored = {}


def _kept(full: Tensor, places: Places) -> Tensor:
    for dim, at in places.items():
        full = full.index_select(dim, (at >= 0).nonzero()[:, 0].to(full.device))
    return full


def padding_of(model: nn.Module) -> Padding:
    """The padding with which a slim copy runs; a new one, with nothing, if none."""
    for hook in model._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Padding):
            return owner
    return Padding()


def owners_of(model: nn.Module) -> dict[int, list[Owner]]:
    """For each tensor, by its id, all who hold it: several hold a shared one."""
    owners: dict[int, list[Owner]] = {}
    for path, layer in model.named_modules():
        for table in (layer._parameters, layer._buffers, vars(layer)):
            for key, value in table.items():
                if isinstance(value, Tensor):
                    owners.setdefault(id(value), []).append((path, key))
    return owners


def hold(model: nn.Module, owners: list[Owner], tensor: Tensor) -> None:
    """Let all owners of a tensor hold another one instead."""
    for owner in owners:
        table, key = _holder(model, owner)
        table[key] = tensor


def _holder(model: nn.Module, owner: Owner) -> tuple[dict[str, Any], str]:
    path, key = owner
    layer = model.get_submodule(path)
    tables = (layer._parameters, layer._buffers)
    return next((table for table in tables if key in table), vars(layer)), key
