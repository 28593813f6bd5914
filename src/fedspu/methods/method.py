"""What a federated method is: four answers, and the answers that several share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu.neurons.choose import choose_random
from fedspu.neurons.table import Active, Blocks, Neurons, Payload, State
from fedspu.settings import MethodSettings
from fedspu.streams import generator, stream_key
from fedspu.training import Recipe, train


@dataclass(frozen=True)
class Situation:
    """All that a method may know when it decides about one client's round."""

    neurons: Neurons
    seed: int
    round: int
    rounds: int
    client: int
    capacity: Fraction
    capacities: tuple[Fraction, ...]  # of all clients, each once, ascending
    kept: Active | None  # what the client kept last, in methods that score neurons
    options: MethodSettings


@dataclass(frozen=True)
class Offer:
    """The neurons a server sends; with the stream they were drawn from, if any."""

    active: Active
    key: bytes | None = None


@dataclass(frozen=True)
class Held:
    """A model's values; of a slim model, ``active`` says which neurons it has."""

    state: State
    active: Active | None = None


@dataclass(frozen=True)
class Score:
    """How a client finds out which neurons matter to it.

    By an epoch of training, whose result is thrown away; then by the l1 or l2 norm
    (``order``) of each neuron's weights, or of the gradient summed over the epoch.
    """

    of: str  # weights or gradients
    order: int


@dataclass(frozen=True)
class Lesson:
    """A model, and all that local epochs need."""

    model: nn.Module
    neurons: Neurons  # the model's own table, slim if it is slim
    active: Active
    x: Tensor
    y: Tensor
    recipe: Recipe
    rng: np.random.Generator
    now: Situation


@dataclass(frozen=True)
class Own:
    """What a client alone knows when it decides which neurons to train.

    ``scores`` scores its neurons, by group; it takes an epoch of training when called.
    """

    labels: Tensor  # of its training examples
    scores: Callable[[], Mapping[str, Tensor]]


Loss = Callable[[Tensor, Tensor], Tensor]
Start = Callable[[State, Blocks, Payload], State]
Keep = Callable[[Situation, Offer | None, Own], Active]
Judge = Callable[[Situation, State, Held], Held]
Remodel = Callable[
    [nn.Module, Neurons, tuple[Fraction, ...], Tensor], tuple[nn.Module, Neurons]
]
"""From a model, its table, all capacities and two examples."""


def local_epochs(lesson: Lesson, loss_of: Loss = F.cross_entropy) -> float:
    """The usual local epochs; their mean loss."""
    return train(
        lesson.model,
        lesson.neurons,
        lesson.active,
        lesson.x,
        lesson.y,
        lesson.recipe,
        lesson.rng,
        loss_of,
    )


@dataclass(frozen=True)
class Method:
    """A federated method.

    ``offer``: the neurons the server sends to a client; None if nothing is exchanged.
    ``start``: the state training begins from, given the client's own, and what came.
    ``keep``: the neurons the client trains, and returns if anything is exchanged. They
    are what was offered, or some of everything.
    ``judge``: the model a client would use now, given the global state and its own.
    ``keeps_own``: whether a client keeps a model between rounds, w0 at first.

    The rest is for the few that need it. ``is_slim``: a client's model has the neurons
    it keeps, and no others. ``score``: how ``keep`` gets its scores; the server then
    remembers which neurons each client kept. ``train``: in place of the usual local
    epochs. ``settle``: what a model lacks before anybody can judge it. ``adapt``: what
    a client does to a model to make it its own, before it uses it. ``remodel``: another
    model in place of the user's, with its table. ``weighs_examples``: whether clients
    weigh as many as their examples in the average, or all the same.
    ``sends_statistics``: whether statistics of normalisation layers travel.
    ``options``: settings of its own.
    """

    name: str
    reference: str
    offer: Callable[[Situation], Offer | None]
    start: Start
    keep: Keep
    judge: Judge
    keeps_own: bool
    in_words: tuple[str, str, str, str]  # sends, trains, keeps, is judged by
    reading: str = "paper"
    is_slim: bool = False
    score: Score | None = None
    train: Callable[[Lesson], float] = local_epochs
    settle: Callable[[Lesson], None] | None = None
    adapt: Callable[[Lesson], None] | None = None
    remodel: Remodel | None = None
    weighs_examples: bool = True
    sends_statistics: bool = True
    options: frozenset[str] = frozenset()

    @property
    def exchanges(self) -> bool:
        """Whether anything crosses between server and clients."""
        return self.offer is not nothing

    def adapts(self, options: MethodSettings) -> bool:
        """Whether a client does anything to a model before it uses it."""
        is_off = "finetune" in self.options and not options.finetune
        return self.adapt is not None and not is_off

    @property
    def judges_own(self) -> bool:
        """Whether clients are judged by models of their own."""
        return self.judge is own_model


# What the server sends ----------------------------------------------------------------


def random_neurons(now: Situation) -> Offer:
    """A random fraction of every group, new each round (paper, step 1)."""
    key = stream_key(now.seed, "neurons", now.round, now.client)
    return Offer(choose_random(now.neurons, now.capacity, generator(key)), key)


def all_neurons(now: Situation) -> Offer:
    """The whole model, whatever the client's capacity."""
    return Offer(now.neurons.everything())


def nothing(now: Situation) -> None:
    """No exchange at all."""


# What the client begins from, and trains ----------------------------------------------


def own_state(own: State, where: Blocks, payload: Payload) -> State:
    """Training goes on from the client's own model."""
    return own


def what_was_offered(now: Situation, offer: Offer | None, own: Own) -> Active:
    """The client trains what it was sent."""
    return offer.active if offer else now.neurons.everything()


# What is judged -----------------------------------------------------------------------


def own_model(now: Situation, global_state: State, own: Held) -> Held:
    """The client's own model."""
    return own


def global_model(now: Situation, global_state: State, own: Held) -> Held:
    """The server's model, the same for all clients."""
    return Held(global_state)
