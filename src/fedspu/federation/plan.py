"""What server and clients both know, and what stays the same during a run.

There is no data in a plan: a client brings its own examples.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedspu.errors import DataError, ModelError, SettingsError
from fedspu.federation.guards.accountant import check_installed
from fedspu.federation.guards.choices import check_guard
from fedspu.imports import call
from fedspu.methods.method import ClientRound, Method, Remodel, answered
from fedspu.neurons.blocks import is_finite, state_of
from fedspu.neurons.choose import as_fraction
from fedspu.neurons.mapping import map_neurons, refuse_lazy
from fedspu.neurons.table import Active, Blocks, Neurons, State
from fedspu.random_streams import stream, torch_stream
from fedspu.settings import Settings, TrainSettings
from fedspu.tasks.choices import check_settings
from fedspu.tasks.task import Task, check_metric, check_output
from fedspu.training.schedule import in_round

Build = Callable[[], nn.Module]


@dataclass(frozen=True, eq=False)
class Plan:
    """One experiment, ready to be played."""

    settings: Settings
    method: Method
    task: Task
    build: Build
    neurons: Neurons
    initial: State  # w0
    capacities: tuple[Fraction, ...]  # each client's p
    noise_seed: int | None = None  # a server's secret; else the noise is from the seed

    @property
    def num_clients(self) -> int:
        """How many clients there are."""
        return len(self.capacities)

    def capacity(self, client: int) -> Fraction:
        """A client's p."""
        return self.capacities[client]

    @cached_property
    def distinct_capacities(self) -> tuple[Fraction, ...]:
        """The capacities of all clients, each once, ascending."""
        return tuple(sorted(set(self.capacities)))

    @cached_property
    def stays(self) -> frozenset[str]:
        """Tensors that do not travel, by the method and by ``norm.policy``."""
        stays = answered(
            self.method, "stays", self.method.stays(self.neurons), frozenset
        )
        if self.settings.norm.policy == "local":
            stays |= self.neurons.norm_tensors
        return stays

    @cached_property
    def judged_clients(self) -> tuple[int, ...]:
        """The clients that are judged: all, or a seeded sample."""
        number = self.settings.judge.clients
        if number is None or number >= self.num_clients:
            return tuple(range(self.num_clients))
        rng = stream(self.settings.seed, "judged")
        chosen = rng.choice(self.num_clients, number, replace=False)
        return tuple(sorted(chosen.tolist()))

    @property
    def has_global(self) -> bool:
        """Whether the server's model is whole: all that is learned reaches it."""
        return self.method.exchanges and self.stays <= self.neurons.statistics

    @cached_property
    def untrained(self) -> tuple[str, ...]:
        """Values that never train: the same in w0, on the server and on each client.

        They reach a client once, with w0, and never travel again.
        """
        return tuple(
            name
            for name, values in sorted(self.initial.items())
            if values.is_floating_point() and name not in self.neurons.shapes
        )

    @cached_property
    def sent_initially(self) -> tuple[str, ...]:
        """The tensors of w0 that a client is sent when it is first asked to train."""
        # A slim model uses only that part of w0 which stays with the client.
        method = self.method
        sends_all = method.keeps_own and (not method.is_slim or bool(self.stays))
        return (*(self.neurons.shapes if sends_all else ()), *self.untrained)

    @property
    def sends_initial(self) -> bool:
        """Whether a client is sent any of w0 when it is first asked to train."""
        return bool(self.sent_initially)

    @property
    def finishes(self) -> bool:
        """Whether clients make a last model once all rounds are played."""
        return self.settings.method.finishes

    @property
    def uses_global(self) -> bool:
        """Whether clients use the global model as it is."""
        return self.method.judged_by == "global" and self.method.ready is None

    def client_round(
        self,
        round: int,
        client: int,
        kept: Active | None = None,
        server: State | None = None,
    ) -> ClientRound:
        """What a method may know about one client in one round."""
        return ClientRound(
            neurons=self.neurons,
            seed=self.settings.seed,
            round=round,
            rounds=self.settings.rounds,
            client=client,
            capacity=self.capacity(client),
            capacities=self.distinct_capacities,
            kept=kept,
            server=server or {},
        )

    def train_settings(self, round: int) -> TrainSettings:
        """How clients train in a round: its learning rate follows the schedule."""
        return in_round(self.settings.train, round, self.settings.rounds)

    def travelling(self, active: Active) -> Blocks:
        """The blocks of the active neurons that travel."""
        # Each choice is asked about three times: to send, to read and to average.
        known = self._travelling
        if id(active) not in known:
            if len(known) == MOST_KNOWN:
                del known[next(iter(known))]
            # The choice itself is kept too, so that no other can get its id.
            known[id(active)] = active, self.leaving(self.neurons.blocks(active))
        return known[id(active)][1]

    @cached_property
    def _travelling(self) -> dict[int, tuple[Active, Blocks]]:
        return {}

    def leaving(self, blocks: Blocks) -> Blocks:
        """Only those blocks that travel."""
        return {name: w for name, w in blocks.items() if name not in self.stays}


MOST_KNOWN = 64
"""Of so many choices of neurons, the blocks that travel are remembered."""


@dataclass(frozen=True)
class Sample:
    """Two examples, as a model takes them: enough to check and map a model.

    ``num_outputs`` is how many outputs the model needs for all targets; ``name`` is the
    data's name, for messages.
    """

    name: str
    x: Tensor
    y: Tensor
    num_outputs: int


def check_choices(settings: Settings, method: Method, task: Task) -> None:
    """Refuse settings that the method or the task cannot follow; no data is needed."""
    if settings.norm.policy == "local" and not method.keeps_own:
        raise SettingsError(
            f"norm.policy = 'local': clients of {method.name} keep no model of their "
            "own, and so no norms; use aggregate, or a method that keeps one"
        )
    if method.tasks is not None and task.name not in method.tasks:
        raise SettingsError(
            f"task = {task.name!r}: {method.name} ({method.reading}) learns only "
            f"{', '.join(sorted(method.tasks))}"
        )
    if settings.method.finishes:
        _check_finish(settings, method)
    if settings.train.adjust_logits:
        _check_adjusting(method)
    check_guard(settings, method)
    check_settings(settings, task)


def _check_finish(settings: Settings, method: Method) -> None:
    """Refuse to finish where there is no server's model that a client could train."""
    chosen = settings.method
    given = f"method.finish = {chosen.finish}"
    if not chosen.finish:
        given = f"method.finish_last = {chosen.finish_last}"
    why = ""
    if not method.exchanges:
        why = (
            f"clients of {method.name} exchange nothing, so there is no server's model"
        )
    elif method.is_slim or method.judged_by == "slice":
        why = f"clients of {method.name} have only a part of the model"
    elif method.ready is not None:
        why = f"clients of {method.name} make their models ready in a way of their own"
    if why:
        raise SettingsError(f"{given}: {why}; leave it out, or use another method")
    if settings.data.split == "paper":
        raise SettingsError(
            f"{given}: clients would choose a model by the examples they are tested "
            "on; set data.split to three-way"
        )


def _check_adjusting(method: Method) -> None:
    """Refuse to adjust logits where a client's own model would be adjusted twice."""
    why = ""
    if method.ready is not None:
        why = f"clients of {method.name} make their models ready in a way of their own"
    elif method.keeps_own and not method.begins_anew:
        why = (
            f"clients of {method.name} go on from models of their own, which have "
            "their shares already"
        )
    if why:
        raise SettingsError(
            f"train.adjust_logits = true: {why}; leave it out, or use fedspu with "
            "method.context = 'global', fedspu-plus or fedavg"
        )


def make_plan(
    settings: Settings, method: Method, task: Task, build: Build, sample: Sample
) -> Plan:
    """Build the model, check it on two examples, and map its neurons."""
    check_choices(settings, method, task)
    if settings.guard.noise:
        check_installed()
    _check_augmentation(settings.train, task, sample)
    with torch_stream(settings.seed, "initial model"):
        model = build_model(build)
    _check_model(model, task, sample)
    neurons = map_neurons(model, sample.x)
    capacities = capacities_of(settings)
    distinct = tuple(sorted(set(capacities)))
    if method.uses_capacity:
        _note_narrow(neurons, distinct[0])
    if method.remodel is not None:
        build = Remodelled(build, method.remodel, neurons, distinct, sample.x)
        model, neurons = method.remodel(model, neurons, distinct, sample.x)
    return Plan(settings, method, task, build, neurons, state_of(model), capacities)


@dataclass(frozen=True)
class Remodelled:
    """Builds the model that a method uses instead of the user's."""

    build: Build
    remodel: Remodel
    neurons: Neurons  # of the user's model
    capacities: tuple[Fraction, ...]
    example: Tensor

    def __call__(self) -> nn.Module:
        """A new model."""
        model = build_model(self.build)
        return self.remodel(model, self.neurons, self.capacities, self.example)[0]


def capacities_of(settings: Settings) -> tuple[Fraction, ...]:
    """Each client's p by the settings: clusters of equal size, in client order."""
    given = [as_fraction(p) for p in settings.clients.capacities]
    number = settings.clients.number
    return tuple(given[client * len(given) // number] for client in range(number))


def build_model(build: Build) -> nn.Module:
    """A new model; refuses a ``build`` that returns anything else."""
    if isinstance(build, nn.Module):
        raise ModelError(
            f"model is a {type(build).__name__} itself; pass the function that builds "
            "it, new at each call: model=build, or model=lambda: Net(10)"
        )
    model: Any = call(build, "the model's build function", ModelError)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the model's build function gave a {type(model).__name__}; expected a "
            "torch.nn.Module, new at each call"
        )
    return model


def _check_model(model: nn.Module, task: Task, sample: Sample) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            "the model has no learnable parameter: none has requires_grad=True; set it "
            "for what is to be learned, like model.requires_grad_(True)"
        )
    refuse_lazy(model, tuple(sample.x.shape))
    was_training = model.training
    try:
        with torch.no_grad():
            output = model.eval()(sample.x)
    except Exception as error:  # the user's own code
        raise ModelError(
            f"the model failed on two examples of shape {tuple(sample.x.shape[1:])} "
            f"({sample.x.dtype}), from the data {sample.name} (--data names others): "
            f"{first_line(error)}{_about_channels(sample.x)}"
        ) from error
    finally:
        model.train(was_training)
    try:
        check_output(task, output, sample.y, sample.num_outputs)
    except ModelError as error:
        raise ModelError(f"{error} (data: {sample.name})") from None
    check_metric(task, output, sample.y)
    for name, values in model.named_parameters():
        if not is_finite(values):
            raise ModelError(
                f"{name} of the new model is not finite (NaN or infinite) before any "
                "training; look at how the model sets its first weights"
            )


CHANNELS = (1, 3, 4)


def _about_channels(x: Tensor) -> str:
    """What to do if images seem to have their channels last."""
    if x.dim() != 4 or x.shape[3] not in CHANNELS or x.shape[1] in CHANNELS:
        return ""
    return (
        "; if these are images, their channels come last: put them first with "
        "x = x.transpose(0, 3, 1, 2)"
    )


def _check_augmentation(train: TrainSettings, task: Task, sample: Sample) -> None:
    if train.augment and sample.y.dim() > 2:
        raise SettingsError(
            f"train.augment = {', '.join(train.augment)}: would move images but not "
            f"their targets, and the task {task.name} has one per pixel; leave it out"
        )
    if train.augment and not (sample.x.dim() == 4 and sample.x.is_floating_point()):
        raise DataError(
            f"train.augment = {', '.join(train.augment)}: the examples of "
            f"{sample.name} have shape {tuple(sample.x.shape[1:])} "
            f"({sample.x.dtype}); expected images, (channels, height, width)"
        )


def _note_narrow(neurons: Neurons, p: Fraction) -> None:
    """Warn where the weakest client's capacity is less than one neuron."""
    if narrow := [g.name for g in neurons.groups if p * g.size < 1]:
        warnings.warn(
            f"clients.capacities: {float(p):g} is less than one neuron of "
            f"{', '.join(narrow)}; one neuron is active anyway",
            stacklevel=4,
        )


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if it has none."""
    return (str(error) or type(error).__name__).strip().splitlines()[0]
