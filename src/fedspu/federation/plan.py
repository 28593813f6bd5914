"""All that stays the same during a run: who takes part, on what data, and how."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedspu.data.dataset import Dataset
from fedspu.data.division import partition
from fedspu.data.splits import MIN_EXAMPLES, Splits
from fedspu.errors import DataError, ModelError, SettingsError
from fedspu.methods import choose_method
from fedspu.methods.method import Method, Remodel, Situation, global_model
from fedspu.neurons.blocks import state_of
from fedspu.neurons.choose import as_fraction
from fedspu.neurons.mapping import map_neurons
from fedspu.neurons.table import Active, Blocks, Neurons, State
from fedspu.settings import Settings
from fedspu.streams import stream, torch_stream
from fedspu.training import Recipe

Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Plan:
    """One experiment, ready to be played."""

    settings: Settings
    method: Method
    build: Build
    neurons: Neurons
    initial: State  # w0
    data: Dataset
    splits: Splits  # one for each client
    device: torch.device

    @property
    def num_clients(self) -> int:
        """How many clients there are."""
        return len(self.splits)

    @cached_property
    def recipe(self) -> Recipe:
        """How a client trains."""
        return Recipe(**self.settings.train.model_dump())

    @cached_property
    def stays(self) -> frozenset[str]:
        """Tensors that do not travel: of normalisation layers, by policy or method."""
        if self.settings.norm.policy == "local":
            return self.neurons.norm_tensors
        return frozenset() if self.method.sends_statistics else self.neurons.statistics

    @cached_property
    def judged_clients(self) -> tuple[int, ...]:
        """The clients whose accuracy is reported: all, or a seeded sample."""
        number = self.settings.judge.clients
        if number is None or number >= self.num_clients:
            return tuple(range(self.num_clients))
        rng = stream(self.settings.seed, "judged")
        chosen = rng.choice(self.num_clients, number, replace=False)
        return tuple(sorted(chosen.tolist()))

    @property
    def uses_global(self) -> bool:
        """Whether clients use the global model as it is."""
        adapts = self.method.adapts(self.settings.method)
        return self.method.judge is global_model and not adapts

    def capacity(self, client: int) -> Fraction:
        """A client's p: clusters of equal size, in client order."""
        capacities = self.settings.clients.capacities
        return as_fraction(capacities[client * len(capacities) // self.num_clients])

    def situation(
        self, round: int, client: int, kept: Active | None = None
    ) -> Situation:
        """What a method may know about one client in one round."""
        return Situation(
            neurons=self.neurons,
            seed=self.settings.seed,
            round=round,
            rounds=self.settings.rounds,
            client=client,
            capacity=self.capacity(client),
            capacities=capacities_of(self.settings),
            kept=kept,
            options=self.settings.method,
        )

    def travelling(self, active: Active) -> Blocks:
        """The blocks of the active neurons that travel under the norm policy."""
        return self.leaving(self.neurons.blocks(active))

    def leaving(self, blocks: Blocks) -> Blocks:
        """Those of the blocks that travel under the norm policy."""
        return {name: w for name, w in blocks.items() if name not in self.stays}

    def num_examples(self, client: int) -> int:
        """How many examples a client has, for whatever use."""
        return int(self.splits.sizes[client])

    def examples(self, client: int, part: str) -> tuple[Tensor, Tensor]:
        """A client's own ``train``, ``val`` or ``test`` examples."""
        positions = torch.from_numpy(getattr(self.splits[client], part))
        x, y = self.data.take(positions)
        return x.to(self.device), y.to(self.device)


def make_plan(settings: Settings, data: Dataset, build: Build) -> Plan:
    """Check everything that can be checked before any training, and lay it out."""
    method = choose_method(settings.method)
    device = _device(settings.device)
    splits = divide(settings, data)
    if settings.norm.policy == "local" and not method.keeps_own:
        raise SettingsError(
            f"norm.policy = 'local': clients of {method.name} keep no model of their "
            "own, and so no norms; use aggregate, or a method that keeps one"
        )
    with torch_stream(settings.seed, "initial model"):
        model = build_model(build)
    _check_model(model, data, splits)
    if method.score is not None:
        _check_scoring(method, splits)
    neurons = map_neurons(model, data.take(slice(2))[0])
    capacities = capacities_of(settings)
    _note_narrow(neurons, min(capacities))
    if method.remodel is not None:
        example = data.take(slice(2))[0]
        build = Remodelled(build, method.remodel, neurons, capacities, example)
        model, neurons = method.remodel(model, neurons, capacities, example)
    return Plan(
        settings=settings,
        method=method,
        build=build,
        neurons=neurons,
        initial=state_of(model),
        data=data,
        splits=splits,
        device=device,
    )


@dataclass(frozen=True)
class Remodelled:
    """Builds the model that a method has in place of the user's."""

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
    """The capacities of all clients, each once, ascending."""
    return tuple(sorted({as_fraction(p) for p in settings.clients.capacities}))


def build_model(build: Build) -> nn.Module:
    """A new model; refuses what is none."""
    model: Any = None if isinstance(build, nn.Module) else build()
    if not isinstance(model, nn.Module):
        found = build if isinstance(build, nn.Module) else model
        raise ModelError(
            f"the model's build function gave a {type(found).__name__}; expected a "
            "torch.nn.Module, new at each call"
        )
    return model


def divide(settings: Settings, data: Dataset) -> Splits:
    """Each client's train, validation and test examples; by seed and data alone."""
    shares = allot(settings, data)
    splits = Splits(shares, data.y.numpy(), settings.data.split, settings.seed)
    for client in np.flatnonzero(splits.sizes < MIN_EXAMPLES)[:1].tolist():
        splits[client]  # says that it has too few
    return splits


def allot(settings: Settings, data: Dataset) -> list[np.ndarray]:
    """Each client's examples, as sorted positions; by seed and data alone."""
    return partition(
        data.y.numpy(),
        num_clients=settings.clients.number,
        kind=settings.data.partition,
        alpha=settings.data.alpha,
        min_examples=settings.data.min_examples,
        rng=stream(settings.seed, "partition"),
        shards=settings.data.shards,
        owners=None if data.owners is None else data.owners.numpy(),
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SettingsError(
            f"device = {name!r}: cannot be used here ({first_line(error)}); try cpu"
        ) from None
    return device


def _check_model(model: nn.Module, data: Dataset, splits: Splits) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("the model has no learnable parameter")
    was_training = model.training
    try:
        with torch.no_grad():
            out = model.eval()(data.take(slice(2))[0])
    except Exception as error:
        raise ModelError(
            f"the model failed on two examples of shape {tuple(data.x.shape[1:])} "
            f"({data.x.dtype}): {first_line(error)}"
        ) from error
    finally:
        model.train(was_training)
    classes = data.num_classes
    if not isinstance(out, Tensor) or out.dim() != 2 or len(out) != 2:
        found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ModelError(
            f"the model returned {found} for two examples; expected (2, {classes}): "
            f"one score for each of the classes of {data.name}"
        )
    if out.shape[1] < classes:
        raise ModelError(
            f"the model has scores for {out.shape[1]} classes, and the labels of "
            f"{data.name} go up to {classes - 1}; it needs {classes} outputs"
        )
    if any(isinstance(layer, _BATCH_NORMS) for layer in model.modules()):
        client = splits.too_few_to_train()
        if client is not None:
            raise DataError(
                f"client {client} has a single training example, and the model has "
                "batch norms, which cannot train on one; raise data.min_examples or "
                "lower clients.number"
            )


def _check_scoring(method: Method, splits: Splits) -> None:
    client = splits.too_few_to_train()
    if client is not None:
        raise DataError(
            f"client {client} has a single training example, and clients of "
            f"{method.name} train for an epoch to score their neurons; raise "
            "data.min_examples or lower clients.number"
        )


def _note_narrow(neurons: Neurons, p: Fraction) -> None:
    """Say so where the weakest client has less capacity than for one neuron."""
    if narrow := [g.name for g in neurons.groups if p * g.size < 1]:
        warnings.warn(
            f"clients.capacities: {float(p):g} is less than one neuron of "
            f"{', '.join(narrow)}; one is active all the same",
            stacklevel=4,
        )


def first_line(error: BaseException) -> str:
    """What an error says, without the rest of the story."""
    return (str(error) or type(error).__name__).strip().splitlines()[0]


_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
