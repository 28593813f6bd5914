"""What an engine is, and what it hands to the server: answers, as bytes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from fedspu.federation.messages import Packet, Request
from fedspu.neurons.table import State


@dataclass(frozen=True)
class Cost:
    """What one client's turn cost: bytes as serialised, seconds as measured."""

    bytes_initial: int
    bytes_down: int
    bytes_up: int
    index_bytes: int
    train_seconds: float
    train_cpu_seconds: float

    @staticmethod
    def of(down: Packet, up: Packet) -> "Cost":
        """What these messages cost."""
        return Cost(
            bytes_initial=len(down.initial),
            bytes_down=len(down.values),
            bytes_up=len(up.values),
            index_bytes=down.index_bytes + up.index_bytes,
            train_seconds=up.took.wall,
            train_cpu_seconds=up.took.cpu,
        )


@dataclass(frozen=True)
class Answer:
    """A client's reply as it arrived, not yet read, and what it cost."""

    up: Packet
    cost: Cost
    retried: bool = False  # the client was lost once, and asked again


@dataclass(frozen=True)
class Missing:
    """Why a client gave no answer."""

    reason: str
    has_failed: bool = False  # it was reached, and its own turn went wrong


@dataclass(frozen=True)
class Facts:
    """What an engine can tell about itself."""

    num_workers: int = 1
    peak_bytes: int = 0  # memory of the largest of its other processes


class Engine(Protocol):
    """A way to reach clients: it carries messages, and that is all."""

    @property
    def facts(self) -> Facts:
        """What it can tell about itself."""

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        """Carry each request to its client, and its reply back; in any order.

        ``broadcast`` goes to all of these clients alike. A client that cannot be
        reached, or whose turn went wrong, is ``Missing``, with the reason.
        """

    def close(self) -> None:
        """Release all that the engine holds."""
