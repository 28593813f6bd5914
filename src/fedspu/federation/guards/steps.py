"""Updates as steps from the server's own values: how long they are, and how alike."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor

from fedspu.neurons.average import Update
from fedspu.neurons.blocks import mesh, put, take
from fedspu.neurons.table import Payload, State

Names = Sequence[str]


def step(state: State, update: Update, name: str) -> Tensor:
    """How far a client moved its block of one tensor, in float64."""
    before = take(state[name], update.where[name])
    return update.payload[name].double() - before.double()


def length(state: State, update: Update, names: Names) -> float:
    """The Euclidean norm of a client's step over its blocks of these tensors."""
    squares = [
        float(step(state, update, name).square().sum())
        for name in names
        if name in update.where
    ]
    return sqrt(sum(squares))


def scaled(state: State, update: Update, names: Names, factor: float) -> Update:
    """The same update with its steps in these tensors ``factor`` times as long."""
    if factor == 1:
        return update
    payload = dict(update.payload)
    for name in names:
        if name in update.where:
            before = take(state[name], update.where[name])
            moved = before.double() + factor * step(state, update, name)
            payload[name] = moved.to(before.dtype)
    return replace(update, payload=payload)


def rows(
    state: State, updates: Sequence[Update], name: str
) -> tuple[Tensor, Tensor] | None:
    """The steps in one tensor, one row per client, and where it trained.

    Only clients that trained the tensor have a row; None if there are none.
    """
    those = [update for update in updates if name in update.where]
    if not those:
        return None
    whole = state[name]
    steps = torch.zeros(len(those), *whole.shape, dtype=torch.float64)
    trained = torch.zeros(steps.shape, dtype=torch.bool)
    for i, update in enumerate(those):
        where = update.where[name]
        put(steps[i], where, step(state, update, name).cpu())
        trained[i][mesh(trained[i], where)] = True
    return steps.flatten(1), trained.flatten(1)


def moved_alike(
    state: State,
    updates: Sequence[Update],
    middle: Callable[[Tensor, Tensor], Tensor],
) -> list[Update]:
    """The same updates, each of whose entries moved by the ``middle`` of all steps.

    However they are averaged, the result is then the middle.
    """
    payloads: list[Payload] = [dict(update.payload) for update in updates]
    for name, before in state.items():
        found = rows(state, updates, name)
        if found is None:
            continue
        agreed = middle(*found).view(before.shape).to(before.device)
        values = (before.double() + agreed).to(before.dtype)
        for payload, update in zip(payloads, updates, strict=True):
            if name in update.where:
                payload[name] = take(values, update.where[name])
    return [
        replace(update, payload=payload)
        for update, payload in zip(updates, payloads, strict=True)
    ]


def distances(state: State, updates: Sequence[Update], names: Names) -> Tensor:
    """How unlike the steps of every two clients are, on the entries both trained.

    It is ``|a - b|^2 / (|a|^2 + |b|^2)``: 0 if they are the same, 1 if they have
    nothing in common, 2 if they are opposite. Two clients that share no entry, or moved
    none of those they share, count as 1.
    """
    number = len(updates)
    products = torch.zeros(number, number, dtype=torch.float64)
    squares = torch.zeros_like(products)  # [i, j]: of j's steps where i trained too
    for name in names:
        found = rows(state, updates, name)
        if found is None:
            continue
        those = torch.tensor([i for i, u in enumerate(updates) if name in u.where])
        steps, trained = found
        square = (those[:, None], those[None, :])
        products[square] += steps @ steps.T
        squares[square] += trained.double() @ steps.square().T
    both = squares + squares.T
    apart = (both - 2 * products).clamp(min=0) / both
    # Steps so long that their squares overflow are unlike any other.
    return torch.where(both > 0, apart, 1.0).nan_to_num(nan=2.0)
