"""A client's turn as every engine on this machine plays it: bytes in, bytes out."""

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import torch

from fedspu.federation.client import take_turn
from fedspu.federation.memory import Entry, Shelf
from fedspu.federation.messages import Packet, pack_reply, unpack_request
from fedspu.federation.plan import Plan
from fedspu.federation.rounds import Cost
from fedspu.federation.workbench import Workspace
from fedspu.training import make_optimizer


@dataclass(frozen=True)
class Turn:
    """What is left of a turn: the reply, the new memory, what it took."""

    up: Packet
    entry: Entry
    seconds: float

    def cost(self, down: Packet) -> Cost:
        """What it cost, with what was sent to the client."""
        return Cost(
            bytes_initial=len(down.initial),
            bytes_down=len(down.values),
            bytes_up=len(self.up.values),
            index_bytes=down.index_bytes + self.up.index_bytes,
            train_seconds=self.seconds,
        )


def play_turn(
    plan: Plan, workspace: Workspace, shelf: Shelf, down: Packet, entry: Entry | None
) -> Turn:
    """Play one client's turn, from the bytes it was sent and its memory."""
    request = unpack_request(plan, down)
    memory = None if entry is None else shelf.get(entry)
    start = perf_counter()
    reply, memory = take_turn(plan, workspace, request, memory)
    seconds = perf_counter() - start
    kept = shelf.put(request.client, request.round, memory)
    return Turn(pack_reply(plan, reply, request.offer), kept, seconds)


def warm_up(plan: Plan) -> None:
    """Do what would else be on the clock of the first client."""
    # Torch loads a second's worth of modules with the first optimizer.
    make_optimizer([torch.zeros(1, requires_grad=True)], plan.recipe).zero_grad()
    keep_memory()


def keep_memory() -> None:
    """Let glibc keep freed blocks: handing them back costs a page fault each time."""
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
