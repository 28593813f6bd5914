"""A named random stream for each (seed, purpose, round, client).

A stream depends only on its name: not on who asks for it or when, nor on what was drawn
elsewhere. No global generator is read, and all are left as they were.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import numpy as np
import torch

KEY_BYTES = 16


def stream_key(seed: int, purpose: str, round: int = 0, client: int = 0) -> bytes:
    """The 16 bytes that stand for a stream; enough to draw it again elsewhere."""
    name = f"{seed}/{purpose}/{round}/{client}"
    return sha256(name.encode()).digest()[:KEY_BYTES]


def generator(key: bytes) -> np.random.Generator:
    """A fresh generator at the beginning of the stream with this key."""
    return np.random.Generator(np.random.PCG64(int.from_bytes(key, "little")))


def stream(
    seed: int, purpose: str, round: int = 0, client: int = 0
) -> np.random.Generator:
    """A fresh generator for one purpose, round and client."""
    return generator(stream_key(seed, purpose, round, client))


@contextmanager
def torch_stream(
    seed: int, purpose: str, round: int = 0, client: int = 0
) -> Iterator[None]:
    """Inside, torch's own generators follow the named stream; they are restored after.

    For code that cannot be given a generator: weight initialisation and dropout layers.
    """
    key = stream_key(seed, purpose, round, client)
    number = int.from_bytes(key[:8], "little") >> 1
    if torch.accelerator.is_available():
        with torch.random.fork_rng():
            torch.manual_seed(number)
            yield
        return
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(number)  # quicker: it looks for no other device
    try:
        yield
    finally:
        torch.set_rng_state(before)
