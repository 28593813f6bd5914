"""What is sent to other machines, with its long parts as arrays.

Ray places arrays without packing them, and all actors of a machine read the same ones.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save

from fedspu.data.examples import DividedData
from fedspu.federation.client_memory import Shelf, pack_memory, unpack_memory
from fedspu.federation.messages import Packet, Seconds
from fedspu.methods.method import Memory

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class PackedPacket:
    """A packet whose long parts are arrays."""

    header: bytes
    positions: bytes
    values: Bytes
    initial: Bytes
    took: Seconds


def packed(packet: Packet) -> PackedPacket:
    """A packet, ready to be sent."""
    values, initial = as_array(packet.values), as_array(packet.initial)
    return PackedPacket(packet.header, packet.positions, values, initial, packet.took)


def unpacked(packed: PackedPacket) -> Packet:
    """The packet that was sent."""
    values, initial = packed.values.tobytes(), packed.initial.tobytes()
    return Packet(packed.header, packed.positions, values, initial, packed.took)


def as_array(content: bytes) -> Bytes:
    """Bytes as an array, without copying them."""
    return np.frombuffer(content, np.uint8)


def memory_as_array(shelf: Shelf, client: int, t: int) -> Bytes:
    """What a client had after round t."""
    return as_array(save(pack_memory(shelf.get(client, t))))


@dataclass(frozen=True)
class Examples:
    """All clients' examples, with arrays for tensors."""

    bare: DividedData  # without x and y
    x: NDArray[Any]
    y: NDArray[Any]

    @staticmethod
    def of(examples: DividedData) -> "Examples":
        """These examples, to be placed."""
        data = examples.data
        none = torch.empty(0)
        bare = replace(examples, data=replace(data, x=none, y=none, owners=None))
        return Examples(bare, data.x.numpy(), data.y.numpy())

    def divided(self) -> DividedData:
        """The examples again; nobody may write into them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # they cannot be written
            x, y = torch.from_numpy(self.x), torch.from_numpy(self.y)
        return replace(self.bare, data=replace(self.bare.data, x=x, y=y))


def memory_from_array(content: Bytes) -> Memory:
    """The memory that ``memory_as_array`` made this from."""
    return unpack_memory(load(content.tobytes()))
