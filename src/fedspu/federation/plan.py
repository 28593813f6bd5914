"""All that stays the same during a run: who takes part, on what data, and how."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedspu.core.active import as_fraction
from fedspu.core.mapping import map_neurons
from fedspu.core.neurons import Neurons, state_of
from fedspu.core.streams import stream, torch_stream
from fedspu.core.training import Recipe
from fedspu.core.types import Active, Blocks, State
from fedspu.data.dataset import Dataset
from fedspu.data.partition import partition
from fedspu.data.splits import Split, split
from fedspu.errors import DataError, ModelError, SettingsError
from fedspu.methods import find_method
from fedspu.methods.method import Method, Situation
from fedspu.settings import Settings

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
    splits: tuple[Split, ...]  # one for each client
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
        """Tensors that do not travel, by the policy on normalisation layers."""
        if self.settings.norm.policy == "local":
            return self.neurons.norm_tensors
        return frozenset()

    @cached_property
    def judged_clients(self) -> tuple[int, ...]:
        """The clients whose accuracy is reported: all, or a seeded sample."""
        number = self.settings.judge.clients
        if number is None or number >= self.num_clients:
            return tuple(range(self.num_clients))
        rng = stream(self.settings.seed, "judged")
        chosen = rng.choice(self.num_clients, number, replace=False)
        return tuple(sorted(chosen.tolist()))

    def capacity(self, client: int) -> Fraction:
        """A client's p: clusters of equal size, in client order."""
        capacities = self.settings.clients.capacities
        return as_fraction(capacities[client * len(capacities) // self.num_clients])

    def situation(self, round: int, client: int) -> Situation:
        """What a method may know about one client in one round."""
        return Situation(
            neurons=self.neurons,
            seed=self.settings.seed,
            round=round,
            rounds=self.settings.rounds,
            client=client,
            capacity=self.capacity(client),
        )

    def travelling(self, active: Active) -> Blocks:
        """The blocks of the active neurons that travel under the norm policy."""
        blocks = self.neurons.blocks(active)
        return {name: w for name, w in blocks.items() if name not in self.stays}

    def examples(self, client: int, part: str) -> tuple[Tensor, Tensor]:
        """A client's own ``train``, ``val`` or ``test`` examples."""
        positions = torch.from_numpy(getattr(self.splits[client], part))
        x, y = self.data.take(positions)
        return x.to(self.device), y.to(self.device)


def make_plan(settings: Settings, data: Dataset, build: Build) -> Plan:
    """Check everything that can be checked before any training, and lay it out."""
    method = find_method(settings.method.name)
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
    neurons = map_neurons(model, data.take(slice(2))[0])
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


def divide(settings: Settings, data: Dataset) -> tuple[Split, ...]:
    """Each client's train, validation and test examples; by seed and data alone."""
    labels = data.y.numpy()
    shares = allot(settings, data)
    return tuple(
        _split(settings, share, labels, client) for client, share in enumerate(shares)
    )


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


def _split(
    settings: Settings, share: np.ndarray, labels: np.ndarray, client: int
) -> Split:
    rng = stream(settings.seed, "split", client=client)
    try:
        return split(share, labels, settings.data.split, rng)
    except DataError as error:
        raise DataError(f"client {client}: {error}") from None


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SettingsError(
            f"device = {name!r}: cannot be used here ({first_line(error)}); try cpu"
        ) from None
    return device


def _check_model(model: nn.Module, data: Dataset, splits: tuple[Split, ...]) -> None:
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
        for client, part in enumerate(splits):
            if len(part.train) < 2:
                raise DataError(
                    f"client {client} has a single training example, and the model has "
                    "batch norms, which cannot train on one; raise data.min_examples "
                    "or lower clients.number"
                )


def first_line(error: BaseException) -> str:
    """What an error says, without the rest of the story."""
    return (str(error) or type(error).__name__).strip().splitlines()[0]


_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
