"""Other weights and other examples for a model, and whether its output moved."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedspu.neurons.calls import all_tensors, flat_tensors
from fedspu.neurons.layers import kind_of

POOL = 200_003
"""So many random numbers are drawn for large tensors: a prime, so that rows differ."""


def disturb(model: nn.Module, before: Mapping[str, Tensor], amount: float) -> None:
    """Set weights to a mix of what they were and random ones, by that amount."""
    norms = {id(b) for m in model.modules() if kind_of(m).is_norm for b in m.buffers()}
    known = norms | {id(parameter) for parameter in model.parameters()}
    pool = torch.randn(POOL)
    with torch.no_grad():
        for name, tensor in all_tensors(model):
            own = before[name]
            if not own.is_floating_point() or id(tensor) not in known:
                continue
            if id(tensor) in norms:  # a running variance must stay positive
                noise = 0.5 + torch.rand_like(tensor)
                tensor.copy_(own * (1 - amount) + amount * noise)
                continue
            is_flat = own.numel() == max(own.shape, default=1)  # a gain, like (1, c, 1)
            fan_in = 1 if is_flat else own.numel() // len(own)
            _fill(tensor, pool, 1 / max(1, fan_in) ** 0.5)
            if amount < 1:
                tensor.mul_(amount).add_(1).mul_(own)


def _fill(tensor: Tensor, pool: Tensor, scale: float) -> None:
    """Write normal numbers; in a large tensor they come again, but in no equal rows."""
    size = tensor.numel()
    if size < len(pool) or not tensor.is_contiguous():
        tensor.copy_(scale * torch.randn(tensor.shape))  # ten times as fast as float64
        return
    turned = scale * pool.roll(int(torch.randint(len(pool), ())))
    flat, whole = tensor.view(-1), size - size % len(pool)
    flat[:whole].view(-1, len(pool)).copy_(turned)
    flat[whole:].copy_(turned[: size - whole])


def noise_like(value: Any) -> Any:
    """The same nested value with noise in its floating-point tensors."""
    if isinstance(value, Tensor):
        return torch.randn_like(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: noise_like(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(noise_like(item) for item in value)
    return value


def other_like(value: Any, trial: int, scale: float) -> Any:
    """Another nested value: noise for numbers, the same words in another order."""
    if isinstance(value, Tensor):
        rng = torch.Generator().manual_seed(trial)
        if value.is_floating_point():
            noise = torch.randn(value.shape, generator=rng, dtype=value.dtype)
            return (noise + scale).to(value.device)
        order = torch.randperm(value.numel(), generator=rng).to(value.device)
        return value.reshape(-1)[order].view(value.shape)
    if isinstance(value, dict):
        return {key: other_like(item, trial, scale) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(other_like(item, trial, scale) for item in value)
    return value


def part_of(value: Any, part: slice) -> Any:
    """The same nested value with some of the examples alone."""
    if isinstance(value, Tensor):
        return value[part]
    if isinstance(value, dict):
        return {key: part_of(item, part) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(part_of(item, part) for item in value)
    return value


def num_examples(value: Any) -> int:
    """The length of the first axis of all tensors; 0 if they have none in common."""
    lengths = {len(t) if t.dim() else 0 for t in flat_tensors(value)}
    return lengths.pop() if len(lengths) == 1 else 0


def are_close(now: list[Tensor], before: list[Tensor], share: float = 1.0) -> bool:
    """Whether outputs differ by no more than rounding, or a share of that."""
    return len(now) == len(before) and all(
        a.shape == b.shape and bool(distance(a, b) <= share * tolerance(b))
        for a, b in zip(now, before, strict=True)
        if b.numel()
    )


def distance(a: Tensor, b: Tensor) -> Tensor:
    """The largest difference between two outputs."""
    return (a.double() - b.double()).abs().max()


def tolerance(output: Tensor) -> Tensor:
    """How far rounding may move the output: a share of its spread, not of its size.

    One number alone, such as a loss, has no spread; its size has to do.
    """
    share = 1e-8 if output.dtype == torch.float64 else 1e-4
    middle = output.double().mean() if output.numel() > 1 else 0.0
    return share * (output.double() - middle).abs().max().clamp(1e-9)
