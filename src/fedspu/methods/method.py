"""What a federated method is: four answers, and the answers that several share."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from fedspu.core.active import choose_random
from fedspu.core.neurons import Neurons
from fedspu.core.streams import generator, stream_key
from fedspu.core.types import Active, Blocks, Payload, State


@dataclass(frozen=True)
class Situation:
    """All that a method may know when it decides about one client's round."""

    neurons: Neurons
    seed: int
    round: int
    rounds: int
    client: int
    capacity: Fraction


@dataclass(frozen=True)
class Offer:
    """The neurons a server sends; with the stream they were drawn from, if any."""

    active: Active
    key: bytes | None = None


Start = Callable[[State, Blocks, Payload], State]
Judged = Callable[[State, State], State]


@dataclass(frozen=True)
class Method:
    """A federated method.

    ``offer``: the neurons the server sends to a client; None if nothing is exchanged.
    ``start``: the state training begins from, given the client's own, and what came.
    ``keep``: the neurons the client trains, and returns if anything is exchanged.
    ``judge``: the model a client would use now, given the global state and its own.
    ``keeps_own``: whether a client keeps a full model between rounds, w0 at first.
    """

    name: str
    reference: str
    offer: Callable[[Situation], Offer | None]
    start: Start
    keep: Callable[[Situation, Offer | None], Active]
    judge: Judged
    keeps_own: bool
    in_words: tuple[str, str, str, str]  # sends, trains, keeps, is judged by

    @property
    def exchanges(self) -> bool:
        """Whether anything crosses between server and clients."""
        return self.offer is not nothing


def random_neurons(now: Situation) -> Offer:
    """A random fraction of every group, new each round (paper, step 1)."""
    key = stream_key(now.seed, "neurons", now.round, now.client)
    return Offer(choose_random(now.neurons, now.capacity, generator(key)), key)


def all_neurons(now: Situation) -> Offer:
    """The whole model, whatever the client's capacity."""
    return Offer(now.neurons.everything())


def nothing(now: Situation) -> None:
    """No exchange at all."""


def what_was_offered(now: Situation, offer: Offer | None) -> Active:
    """The client trains what it was sent."""
    return offer.active if offer else now.neurons.everything()


def own_state(own: State, where: Blocks, payload: Payload) -> State:
    """Training goes on from the client's own model."""
    return own


def personal_model(global_state: State, own: State) -> State:
    """The client's own full model."""
    return own


def global_model(global_state: State, own: State) -> State:
    """The server's model, the same for all clients."""
    return global_state
