"""Which devices a run has, as its folder says it, and what their data is like."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fedspu.engines.flower.wire import Like
from fedspu.errors import FedSPUError, StorageError
from fedspu.federation.server import Federation
from fedspu.federation.storage.finding import resume_command
from fedspu.federation.storage.saved_run import DEVICES


def without(federation: Federation, clients: Collection[int]) -> Federation:
    """The federation as if these clients had never taken part."""
    return replace(
        federation,
        last={k: t for k, t in federation.last.items() if k not in clients},
        kept={k: a for k, a in federation.kept.items() if k not in clients},
    )


def examples_like(usual: Like) -> tuple[Tensor, Tensor]:
    """Two examples and targets of the devices' shape and type."""
    x_dtype, y_dtype = _dtype(usual.x_dtype), _dtype(usual.y_dtype)
    x = torch.zeros(2, *usual.x_shape, dtype=x_dtype)
    if x_dtype.is_floating_point:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(2, *usual.x_shape, generator=generator).to(x_dtype)
    return x, torch.zeros(2, *usual.y_shape, dtype=y_dtype)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise FedSPUError(f"the devices' data is of type {name!r}, which PyTorch lacks")
    return found


def format_devices(key: str, names: Sequence[str]) -> str:
    """What a run folder says of its devices, in the order of their numbers."""
    return f"{DEVICES}{key}: {' '.join(names)}"


def parse_devices(text: str, path: Path) -> tuple[str, list[str]]:
    """The key of a run, and its devices' names."""
    if not text.startswith(DEVICES):
        raise StorageError(
            f"{path} is a run on one machine; resume it with `{resume_command(path)}`, "
            "or choose another deploy.out"
        )
    key, _, names = text.removeprefix(DEVICES).partition(": ")
    return key, names.split()
