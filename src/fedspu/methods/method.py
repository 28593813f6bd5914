"""What a federated method is: a record of its answers; and answers that several share.

docs/write-a-method.md explains each answer, with an example.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor, nn

from fedspu.errors import FedSPUError, MethodError, SettingsError
from fedspu.imports import raised
from fedspu.neurons.average import Accumulator, average_by_examples
from fedspu.neurons.blocks import merge, state_of
from fedspu.neurons.choose import choose_random
from fedspu.neurons.table import Active, Blocks, Neurons, Payload, State
from fedspu.random_streams import generator, stream_key
from fedspu.settings_text import with_article
from fedspu.tasks.task import Task
from fedspu.training.epochs import LocalTraining, train

Which = Literal["personal", "global"]
"""The model a client would use now, or the server's."""


@dataclass(frozen=True)
class ClientRound:
    """One client in one round: what both sides know about it."""

    neurons: Neurons
    seed: int
    round: int
    rounds: int
    client: int
    capacity: Fraction
    capacities: tuple[Fraction, ...]  # of all clients, each once, ascending
    kept: Active | None = None  # what it returned last, in methods whose clients choose
    server: Mapping[str, Tensor] = field(default_factory=dict)  # the method's memory


@dataclass(frozen=True)
class Offer:
    """The neurons a server sends, and the key they were drawn from, if any."""

    active: Active
    key: bytes | None = None

    def __post_init__(self) -> None:
        """Refuse neurons in another form than a table of tensors."""
        if not isinstance(self.active, Mapping):
            raise MethodError(
                f"an Offer of {with_article(type(self.active).__name__)}; expected a "
                "dict from the name of each group to a tensor of its neurons"
            )
        for name, indices in self.active.items():
            if not isinstance(indices, Tensor):
                raise MethodError(
                    f"an Offer has {with_article(type(indices).__name__)} for group "
                    f"{name!r}; expected a tensor, like torch.tensor([0, 1])"
                )


@dataclass(frozen=True)
class ModelState:
    """A model's values; for a slim model, ``active`` says which neurons it has."""

    state: State
    active: Active | None = None


@dataclass(frozen=True)
class Memory:
    """All that a client keeps between turns; it never leaves the client.

    ``losses`` are the last blended losses, for early stopping; ``extra`` is whatever
    else the method keeps.
    """

    own: ModelState | None = None
    losses: tuple[float, ...] = ()
    extra: State = field(default_factory=dict)


class Prepare(Protocol):
    """Makes a model ready for local epochs, with a random stream of its own."""

    def __call__(
        self, model: ModelState, purpose: str, active: Active | None = None
    ) -> LocalTraining:
        """The model on the workbench, with all that local epochs need."""


@dataclass(frozen=True)
class Turn:
    """A client's turn, before it trains: what was received, and what the client has.

    ``own`` is its model at full size: w0 until it has one; what a slim model lacks is
    as in w0. ``prepare`` puts a model on the workbench, ready to train all of its
    neurons, or only the ``active`` ones. It overwrites the model of the same size that
    is there. ``validation`` gives the client's validation examples.
    """

    now: ClientRound
    offer: Offer | None
    where: Blocks
    payload: Payload
    own: State
    memory: Memory
    x: Tensor
    y: Tensor
    task: Task
    prepare: Prepare
    validation: Callable[[], tuple[Tensor, Tensor]]

    @cached_property
    def merged(self) -> State:
        """The client's own model with the payload merged in: where training begins."""
        return merge(self.own, self.where, self.payload)


@dataclass(frozen=True)
class Trained:
    """The result of a turn.

    ``loss`` is reported, and blended for early stopping. ``sent`` is the model whose
    trained entries go back, ``own`` the one the client keeps, if the method keeps any.
    ``extra`` is kept too.
    """

    loss: float
    sent: State
    own: State
    extra: State = field(default_factory=dict)


Remodel = Callable[
    [nn.Module, Neurons, tuple[Fraction, ...], Tensor], tuple[nn.Module, Neurons]
]
"""Makes a model and its table from the user's, all capacities and two examples."""


def nothing_stays(neurons: Neurons) -> frozenset[str]:
    """Every tensor of the table travels."""
    return frozenset()


def what_was_offered(turn: Turn) -> Active:
    """The client trains what it was sent; everything if it was sent nothing."""
    return turn.offer.active if turn.offer else turn.now.neurons.everything()


def local_epochs(turn: Turn, local: LocalTraining) -> Trained:
    """The usual local epochs; the trained model is both sent and kept."""
    loss = train(local)
    state = state_of(local.model)
    return Trained(loss, sent=state, own=state)


@dataclass(frozen=True)
class Method:
    """A federated method.

    ``offer``: the neurons the server sends to a client; None if nothing is exchanged.
    ``keep``: the neurons the client trains, and returns if anything is exchanged. They
    are what was offered, or a part of it.
    ``train``: what a client does with its own model once the payload is merged in; see
    ``Trained``.
    ``judged_by``: the model a client would use: its ``own``, which it then keeps from
    turn to turn (w0 at first); the ``slice`` of the global model that it would be
    offered; or the ``global`` model.
    ``is_slim``: a client's model has only the neurons it keeps.
    ``is_choice``: clients choose what they keep, and the server remembers it.
    ``ready``: what is done to a model before it is used or judged.
    ``stays``: tensors of the table that never travel.
    ``combine``: how the server makes one state of many updates.
    ``server``: what the server remembers for the method after a round, from what it
    remembered before and the replies, by client.
    ``remodel``: makes a model to use instead of the user's, with its table.
    ``tasks``: names of the tasks it can learn; None for all.
    ``departs``: laws of ``fedspu.conformance`` that it breaks on purpose, and why.
    """

    name: str
    reference: str
    in_words: tuple[str, str, str, str]  # sends, trains, keeps, is judged by
    judged_by: Literal["own", "slice", "global"]
    offer: Callable[[ClientRound], Offer] | None
    keep: Callable[[Turn], Active] = what_was_offered
    train: Callable[[Turn, LocalTraining], Trained] = local_epochs
    reading: str = "paper"
    is_slim: bool = False
    is_choice: bool = False
    ready: Callable[[LocalTraining, Which], None] | None = None
    stays: Callable[[Neurons], frozenset[str]] = nothing_stays
    combine: Callable[[State], Accumulator] = average_by_examples
    server: Callable[[State, Mapping[int, Any]], State] | None = None
    remodel: Remodel | None = None
    tasks: frozenset[str] | None = None
    departs: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a record that lacks an answer."""
        if not isinstance(self.name, str) or not self.name:
            raise SettingsError(f"a method's name is {self.name!r}; expected a text")
        words = self.in_words
        if not isinstance(words, tuple) or len(words) != len(IN_WORDS):
            raise SettingsError(
                f"method {self.name!r}: in_words = {words!r}; expected four texts: "
                f"what it {', '.join(IN_WORDS)}"
            )
        if isinstance(self.tasks, str):
            raise SettingsError(
                f"method {self.name!r}: tasks = {self.tasks!r}; expected a set of names"
            )
        for entry in fields(self):
            value = getattr(self, entry.name)
            must_be_callable = entry.name in MUST_ANSWER or (
                entry.name in MAY_ANSWER and value is not None
            )
            if must_be_callable and not callable(value):
                raise SettingsError(
                    f"method {self.name!r}: its {entry.name} is {value!r}; expected a "
                    "function; docs/write-a-method.md says which"
                )
        if self.judged_by not in JUDGED_BY:
            raise SettingsError(
                f"method {self.name!r}: judged_by = {self.judged_by!r}; expected one "
                f"of {', '.join(JUDGED_BY)}"
            )
        if self.judged_by == "slice" and (self.server or self.is_choice):
            raise SettingsError(
                f"method {self.name!r}: judged_by = 'slice': a client finds its slice "
                "without knowing what the server remembers; leave server and is_choice "
                "out, or use 'own'"
            )
        if self.judged_by != "own" and self.offer is None:
            raise SettingsError(
                f"method {self.name!r}: nothing is exchanged (offer = None), so a "
                "client can only be judged by its own model: judged_by = 'own'"
            )

    @property
    def keeps_own(self) -> bool:
        """Whether a client keeps a model of its own between turns."""
        return self.judged_by == "own"

    @property
    def trains_what_is_offered(self) -> bool:
        """Whether clients train all that they are offered, and nothing else."""
        return self.keep is what_was_offered

    @property
    def begins_anew(self) -> bool:
        """Whether every turn begins with the server's whole model, and nothing else."""
        return (
            self.offer is all_neurons
            and self.train is local_epochs
            and self.stays is nothing_stays
        )

    @property
    def uses_capacity(self) -> bool:
        """Whether a client's p makes any difference."""
        is_whole = self.offer is None or self.offer is all_neurons
        trains_all = is_whole and self.keep is what_was_offered
        return not trains_all or self.remodel is not None

    @property
    def exchanges(self) -> bool:
        """Whether anything crosses between server and clients."""
        return self.offer is not None


Found = TypeVar("Found")


def answered(method: Method, name: str, value: Any, kind: type[Found]) -> Found:
    """What a function of a method returned; refuses any other kind of thing."""
    if not isinstance(value, kind):
        raise MethodError(
            f"method {method.name!r}: its {name} returned "
            f"{with_article(type(value).__name__)}; expected "
            f"{with_article(kind.__name__)}; docs/write-a-method.md says more"
        )
    return value


def offer_to(method: Method, now: ClientRound) -> Offer | None:
    """What a method offers a client; None if nothing is exchanged."""
    if method.offer is None:
        return None
    try:
        found = method.offer(now)
    except FedSPUError:
        raise
    except Exception as error:  # the user's own code
        raise MethodError(
            f"method {method.name!r}: its offer raised {raised(error)}"
        ) from error
    return answered(method, "offer", found, Offer)


IN_WORDS = ("sends", "trains", "keeps", "is judged by")
JUDGED_BY = ("own", "slice", "global")
MUST_ANSWER = ("keep", "train", "stays", "combine")
MAY_ANSWER = ("offer", "ready", "server", "remodel")


# What the server sends ----------------------------------------------------------------


def random_neurons(now: ClientRound) -> Offer:
    """A random fraction of every group, new each round (paper, step 1)."""
    key = stream_key(now.seed, "neurons", now.round, now.client)
    return Offer(choose_random(now.neurons, now.capacity, generator(key)), key)


def all_neurons(now: ClientRound) -> Offer:
    """The whole model, whatever the client's capacity."""
    return Offer(now.neurons.everything())
