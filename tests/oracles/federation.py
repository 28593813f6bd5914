"""What the tests of a whole federation share: small nets, made examples, a slow round.

Nothing here calls the code it is there to check, except to prepare and play a run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import fedspu
from fedspu import State
from fedspu.engines.local import LocalEngine
from fedspu.federation.client import Client
from fedspu.federation.client_memory import Shelf
from fedspu.federation.messages import TrainReply, TrainRequest
from fedspu.federation.plan import Build, Plan
from fedspu.federation.rounds import Round, Scores, play
from fedspu.federation.server import Federation, TrainRequests
from fedspu.methods.method import Memory
from fedspu.prepare import Prepared, prepare

CLASSES = 3

SMALL: dict[str, Any] = {
    "workers": 1,
    "clients.number": 6,
    "clients.per_round": 3,
    "clients.capacities": [0.3, 0.5, 1.0],
    "rounds": 3,
    "train.epochs": 2,
    "train.batch_size": 4,
    "train.lr": 0.1,
    "data.alpha": 1.0,
    "judge.every": 2,
}
"""Six clients, three a round: some take part twice, in most seeds one never does."""


class ConvNet(nn.Module):
    """Two convolutions of 4 and 6 neurons with batch norms, and a linear layer."""

    def __init__(self, norm_momentum: float = 0.1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4, momentum=norm_momentum)
        self.conv2 = nn.Conv2d(4, 6, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(6, momentum=norm_momentum)
        self.fc = nn.Linear(6 * 2 * 2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        scores: Tensor = self.fc(x.flatten(1))
        return scores


def still_convnet() -> nn.Module:
    """The same net, whose norm statistics never move."""
    return ConvNet(norm_momentum=0.0)


def mlp() -> nn.Module:
    """Two hidden layers of 8 and 5 neurons; no norms, no buffers."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Linear(8, 5),
        nn.ReLU(),
        nn.Linear(5, CLASSES),
    )


def digits_mlp() -> nn.Module:
    """A hidden layer of 6 neurons, for the built-in digits."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10))


def wide_mlp() -> nn.Module:
    """A hidden layer of 200 neurons: a bitmap of them is longer than a stream's key."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 200), nn.ReLU(), nn.Linear(200, CLASSES)
    )


@cache
def examples(count: int = 120) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Images of 4x4 that are brighter in a corner of their own for each class."""
    rng = np.random.default_rng(7)
    y = np.arange(count, dtype=np.int64) % CLASSES
    x = rng.normal(size=(count, 1, 4, 4)).astype(np.float32)
    for label, (row, column) in enumerate([(0, 0), (0, 2), (2, 0)]):
        x[y == label, :, row : row + 2, column : column + 2] += 1.5
    return x, y


def run_for(model: Build = ConvNet, **given: Any) -> fedspu.Run:
    """A run on the made examples; settings by name, with __ for a dot."""
    method = given.pop("method_record", None)
    return fedspu.simulate(named(**given), model=model, data=examples(), method=method)


def prepared_for(model: Build = ConvNet, **given: Any) -> Prepared:
    """Such a run, ready to be played."""
    method = given.pop("method_record", None)
    return prepare(named(**given), model=model, data=examples(), method=method)


def plan_for(model: Build = ConvNet, **given: Any) -> Plan:
    """The plan of such a run."""
    return prepared_for(model, **given).plan


def named(**given: Any) -> dict[str, Any]:
    """The small settings with some changed."""
    return {**SMALL, **{name.replace("__", "."): v for name, v in given.items()}}


def in_double(ready: Prepared) -> Prepared:
    """The same run with weights and examples in float64."""
    plan, data = ready.plan, ready.examples.data
    double = replace(
        plan,
        build=partial(_built_in_double, plan.build),
        initial={
            name: tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in plan.initial.items()
        },
    )
    data = replace(data, x=data.x.double())
    return replace(ready, plan=double, examples=replace(ready.examples, data=data))


def _built_in_double(build: Build) -> nn.Module:
    return build().double()


def with_part(ready: Prepared, part: str, value: float = float("nan")) -> Prepared:
    """The same run with one value in all of every client's examples of one part."""
    x = ready.examples.data.x.clone()
    for split in ready.examples.splits:
        x[torch.from_numpy(getattr(split, part))] = value
    return with_inputs(ready, x)


def with_inputs(ready: Prepared, x: Tensor) -> Prepared:
    """The same run with other inputs."""
    data = replace(ready.examples.data, x=x)
    return replace(ready, examples=replace(ready.examples, data=data))


def client_of(ready: Prepared) -> Client:
    """A client that plays all clients of a run in memory."""
    cpu = torch.device("cpu")
    return Client(ready.plan, ready.examples, Shelf(None), cpu)


def request_for(
    plan: Plan, federation: Federation, t: int, client: int
) -> TrainRequest:
    """What the server asks of a client in round t, whether or not it is chosen."""
    return TrainRequests(federation, plan, t)[client]


def empty_reply(t: int, client: int, **given: Any) -> TrainReply:
    """A reply in round t without values; what is given says more."""
    plain: dict[str, Any] = {
        "active": None,
        "payload": {},
        "num_examples": 4,
        "train_loss": 1.0,
        "val_loss": None,
        "has_stopped": False,
    }
    return TrainReply(t, client, **{**plain, **given})


@dataclass
class Played:
    """What a run came to."""

    federation: Federation
    rounds: list[Round]
    engine: LocalEngine

    def memory(self, client: int) -> Memory:
        """What a client keeps."""
        last = self.federation.last.get(client, 0)
        return self.engine.shelf.get(client, last)

    def own(self, client: int) -> State:
        """A client's own model as it stands."""
        own = self.memory(client).own
        assert own is not None
        return own.state


def play_all(ready: Prepared) -> Played:
    """Play a run to its end in memory."""
    plan = ready.plan
    engine = LocalEngine(plan, ready.examples)
    rounds = list(play(plan, engine, Federation(0, plan.initial), Scores()))
    return Played(rounds[-1].federation, rounds, engine)


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two states are equal entry by entry; -0.0 is not 0.0, NaN is NaN."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and bits(a[name]) == bits(b[name])
        for name in a
    )


def bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The largest difference of two states in any entry."""
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def folder_content(path: Path) -> dict[str, bytes]:
    """Every file of a run folder that one seed decides: no times, no lock.

    An index marks the file with the times.
    """
    apart = {"times.jsonl", "summary.json", "settings.toml", ".lock"}
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and file.name not in apart
        and not file.name.startswith(("comparison.", "report."))  # they have times
        and not file.name.startswith("save-round-")
    }


# A slow federation -------------------------------------------------------------------
#
# Algorithms 1 and 2 for ConvNet as one would write them down from the paper: a mask for
# each tensor, full backward passes, a loop over entries. Only the random streams are
# fedspu's own, or nothing could be compared.


def draw_active(seed: int, t: int, client: int, p: float) -> tuple[set[int], set[int]]:
    """The active neurons of both convolutions (line 6)."""
    rng = fedspu.stream(seed, "neurons", t, client)
    first, second = (
        set(rng.permutation(size)[: max(1, floor(p * size + 1e-9))].tolist())
        for size in (4, 6)
    )
    return first, second


def masks(first: set[int], second: set[int]) -> dict[str, Tensor]:
    """For every travelling entry, 1 if all the neurons it connects are active."""
    one = torch.tensor([float(i in first) for i in range(4)])
    two = torch.tensor([float(o in second) for o in range(6)])
    mask = {
        "conv1.weight": one.view(4, 1, 1, 1).expand(4, 1, 3, 3),
        "conv2.weight": (two.view(6, 1, 1, 1) * one.view(1, 4, 1, 1)).expand(
            6, 4, 3, 3
        ),
        "fc.weight": torch.stack([two[j // 4] for j in range(24)]).expand(CLASSES, 24),
        "fc.bias": torch.ones(CLASSES),
    }
    for layer, values in (("1", one), ("2", two)):
        for name in ("weight", "bias", "running_mean", "running_var"):
            mask[f"bn{layer}.{name}"] = values
        mask[f"conv{layer}.bias"] = values
    return {name: values.contiguous() for name, values in mask.items()}


def slow_merge(own: State, mask: Mapping[str, Tensor], global_state: State) -> State:
    """Line 9, entry by entry."""
    merged = {name: tensor.clone() for name, tensor in own.items()}
    for name, inside in mask.items():
        here, there = merged[name].view(-1), global_state[name].reshape(-1)
        for i, is_active in enumerate(inside.reshape(-1).tolist()):
            if is_active:
                here[i] = there[i]
    return merged


def slow_batches(count: int, size: int, rng: np.random.Generator) -> list[list[int]]:
    """One epoch; a last batch of one joins the one before."""
    order = rng.permutation(count).tolist()
    cut = [order[start : start + size] for start in range(0, count, size)]
    if len(cut) > 1 and len(cut[-1]) == 1:
        single = cut.pop()
        cut[-1] = cut[-1] + single
    return cut


def slow_training(
    model: nn.Module,
    mask: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    plan: Plan,
    rng: np.random.Generator,
) -> float:
    """Line 10: SGD with a full backward pass, then a masked step; the mean loss."""
    recipe = plan.settings.train
    model.train()
    losses: list[float] = []
    momenta: dict[str, Tensor] = {}
    for _ in range(recipe.epochs):
        for batch in slow_batches(len(x), recipe.batch_size, rng):
            model.zero_grad()
            each = F.cross_entropy(model(x[batch]), y[batch], reduction="none")
            each.mean().backward()
            losses += each.detach().tolist()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    assert parameter.grad is not None
                    step = parameter.grad + recipe.weight_decay * parameter
                    if name in momenta:
                        step = recipe.momentum * momenta[name] + step
                    momenta[name] = step
                    parameter.sub_(recipe.lr * step * mask[name])
    return sum(losses) / len(losses)


def slow_average(
    state: State, updates: list[tuple[dict[str, Tensor], State, int]]
) -> State:
    """The weighted mean of each entry over those who trained it, one by one."""
    averaged = {name: tensor.clone() for name, tensor in state.items()}
    for name in masks(set(), set()):
        flat = averaged[name].view(-1)
        for i in range(len(flat)):
            those = [
                (float(trained[name].reshape(-1)[i]), n)
                for mask, trained, n in updates
                if mask[name].reshape(-1)[i]
            ]
            if those:
                flat[i] = sum(v * n for v, n in those) / sum(n for _, n in those)
    return averaged


@dataclass
class Slow:
    """Where the slow federation stands."""

    global_state: State
    personal: dict[int, State] = field(default_factory=dict)
    losses: dict[int, list[float]] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    rounds: int = 0


def slow_turn(
    ready: Prepared, now: Slow, t: int, client: int
) -> tuple[dict[str, Tensor], State, float, float]:
    """One client's mask, trained state, training and validation loss."""
    plan, settings = ready.plan, ready.plan.settings
    clusters = settings.clients.capacities
    p = clusters[client * len(clusters) // settings.clients.number]
    mask = masks(*draw_active(settings.seed, t, client, p))
    model = plan.build()
    own = now.personal.get(client, plan.initial)
    model.load_state_dict(slow_merge(own, mask, now.global_state))
    data, split = ready.examples.data, ready.examples.splits[client]
    x, y = data.x, data.y
    rng = fedspu.stream(settings.seed, "batches", t, client)
    train_loss = slow_training(model, mask, x[split.train], y[split.train], plan, rng)
    model.eval()
    with torch.no_grad():
        val_loss = float(F.cross_entropy(model(x[split.val]), y[split.val]))
    trained = {name: values.clone() for name, values in model.state_dict().items()}
    return mask, trained, train_loss, val_loss


def slow_federation(ready: Prepared) -> Slow:
    """Algorithm 1; with early stopping on, Algorithm 2."""
    settings = ready.plan.settings
    now = Slow(ready.plan.initial)
    for t in range(1, settings.rounds + 1):
        left = [k for k in range(settings.clients.number) if k not in now.stopped]
        if not left:
            break
        cohort = left
        if len(left) > settings.clients.per_round:
            rng = fedspu.stream(settings.seed, "cohort", t)
            chosen = rng.choice(len(left), settings.clients.per_round, replace=False)
            cohort = sorted(left[i] for i in chosen)
        updates = []
        for client in cohort:
            mask, trained, train_loss, val_loss = slow_turn(ready, now, t, client)
            number = len(ready.examples.splits[client].train)
            updates.append((mask, trained, number))
            now.personal[client] = trained
            if settings.early_stopping.on:
                blend = settings.early_stopping.blend
                loss = blend * train_loss + (1 - blend) * val_loss
                before = now.losses.setdefault(client, [])
                if before and loss > before[-1]:
                    now.stopped.add(client)
                before.append(loss)
        now.global_state = slow_average(now.global_state, updates)
        now.rounds = t
    return now
