"""The rival methods as one would write them down from paper, slowly.

A net is a dictionary of tensors and a function; a sub-model is cut from it by hand;
norms, steps and averages are spelled out. Nothing here calls the code it is there to
check: only the random streams are fedspu's own, or nothing could be compared.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import sqrt

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedspu import State, stream
from fedspu.prepare import Prepared
from fedspu.random_streams import torch_stream
from tests.oracles.federation import CLASSES, slow_batches

Kept = dict[str, list[int]]
"""Layer -> its kept neurons."""

EPS, MOMENTUM = 1e-5, 0.1
"""Those of a batch norm, as PyTorch has them."""


# Nets --------------------------------------------------------------------------------


Axis = tuple[tuple[str, int], ...] | None
"""The layers along an axis, one after the other, with how many places a neuron has."""


@dataclass(frozen=True)
class Net:
    """A net by hand: layers, where their neurons lie, and what it computes."""

    sizes: dict[str, int]
    axes: dict[str, tuple[Axis, ...]]
    incoming: dict[str, list[list[str]]]  # group -> each layer's tensors that make it
    output: tuple[str, str]
    forward: Callable[[State, Tensor, "Mode"], Tensor]

    @property
    def whole(self) -> Kept:
        return {layer: list(range(size)) for layer, size in self.sizes.items()}

    def first(self, p: Fraction) -> Kept:
        """The first floor(p n) neurons of each layer, at least one."""
        return {
            layer: list(range(max(1, size * p.numerator // p.denominator)))
            for layer, size in self.sizes.items()
        }

    def only(self, kept: Kept) -> "Net":
        """The net of the kept neurons, which are numbered anew."""
        sizes = {layer: len(neurons) for layer, neurons in kept.items()}
        return replace(self, sizes=sizes)

    def places(self, name: str, kept: Kept) -> list[list[int] | None]:
        """Where the kept neurons lie along each axis of a tensor; None: all of it."""
        return [self._along(axis, kept) for axis in self.axes[name]]

    def _along(self, axis: Axis, kept: Kept) -> list[int] | None:
        if axis is None:
            return None
        found: list[int] = []
        start = 0
        for layer, per_neuron in axis:
            for neuron in kept[layer]:
                first = start + neuron * per_neuron
                found += range(first, first + per_neuron)
            start += self.sizes[layer] * per_neuron
        return found

    def cut(self, state: State, kept: Kept) -> State:
        """The sub-model of the kept neurons."""
        out = {}
        for name in self.axes:
            tensor = state[name]
            for dim, places in enumerate(self.places(name, kept)):
                if places is not None:
                    tensor = tensor[(slice(None),) * dim + (places,)]
            out[name] = tensor.clone()
        return out

    def spread(self, values: State, kept: Kept, like: State) -> State:
        """A sub-model's values in tensors of full size; NaN where it has none."""
        out = {}
        for name, tensor in values.items():
            full = torch.full_like(like[name], float("nan"))
            places = [
                list(range(n)) if here is None else here
                for n, here in zip(full.shape, self.places(name, kept), strict=False)
            ]
            full[np.ix_(*places)] = tensor
            out[name] = full
        return out


@dataclass
class Mode:
    """How a net is run."""

    norm: str  # train: batch statistics, running ones follow; batch; running
    scale: dict[str, float] = field(default_factory=dict)  # what layers are divided by
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # statistics


def batch_norm(w: State, name: str, x: Tensor, mode: Mode) -> Tensor:
    """Ioffe and Szegedy's Algorithm 1; running variances are unbiased."""
    if mode.norm == "running":
        mean, var = w[f"{name}.running_mean"], w[f"{name}.running_var"]
    else:
        n = x.numel() / x.shape[1]
        mean = x.mean((0, 2, 3))
        var = ((x - mean.view(1, -1, 1, 1)) ** 2).mean((0, 2, 3))
        unbiased = var.detach() * n / (n - 1)
        mode.seen.append((mean.detach(), unbiased))
        if mode.norm == "train":
            for kind, now in (("mean", mean.detach()), ("var", unbiased)):
                running = w[f"{name}.running_{kind}"]
                running.copy_((1 - MOMENTUM) * running + MOMENTUM * now)
    x = (x - mean.view(1, -1, 1, 1)) / (var.view(1, -1, 1, 1) + EPS).sqrt()
    return x * w[f"{name}.weight"].view(1, -1, 1, 1) + w[f"{name}.bias"].view(
        1, -1, 1, 1
    )


def conv_forward(w: State, x: Tensor, mode: Mode) -> Tensor:
    """What tests.oracles.federation.ConvNet computes, at any width."""
    for i in (1, 2):
        x = F.conv2d(x, w[f"conv{i}.weight"], w[f"conv{i}.bias"], padding=1)
        x = x / mode.scale.get(f"conv{i}", 1)
        x = batch_norm(w, f"bn{i}", x, mode).clamp(min=0)
    x = F.max_pool2d(x, 2).flatten(1)
    return x @ w["fc.weight"].T + w["fc.bias"]


def mlp_forward(w: State, x: Tensor, mode: Mode) -> Tensor:
    """What tests.oracles.federation.mlp computes, at any width."""
    x = x.flatten(1)
    for i in (1, 3):
        x = x @ w[f"{i}.weight"].T + w[f"{i}.bias"]
        x = (x / mode.scale.get(f"{i}", 1)).clamp(min=0)
    return x @ w["5.weight"].T + w["5.bias"]


def drop_forward(w: State, x: Tensor, mode: Mode) -> Tensor:
    """What ``drop_mlp`` computes, at any width."""
    x = (x.flatten(1) @ w["1.weight"].T + w["1.bias"]).clamp(min=0)
    x = F.dropout(x, 0.5, training=mode.norm == "train")
    return x @ w["4.weight"].T + w["4.bias"]


def residual_forward(w: State, x: Tensor, mode: Mode) -> Tensor:
    """What ``Residual`` computes, at any width."""
    x = (x.flatten(1) @ w["first.weight"].T + w["first.bias"]).clamp(min=0)
    x = x + (x @ w["second.weight"].T).clamp(min=0)
    return x @ w["out.weight"].T + w["out.bias"]


def joined_forward(w: State, x: Tensor, mode: Mode) -> Tensor:
    """What ``Joined`` computes, at any width."""
    x = x.flatten(1)
    both = [
        ((x @ w[f"{i}.weight"].T + w[f"{i}.bias"]) / mode.scale.get(i, 1)).clamp(min=0)
        for i in ("left", "right")
    ]
    return torch.cat(both, 1) @ w["out.weight"].T + w["out.bias"]


class Joined(nn.Module):
    """Two layers side by side, read together: the second's neurons begin further on."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(16, 4)
        self.right = nn.Linear(16, 6)
        self.out = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        both = [F.relu(self.left(x)), F.relu(self.right(x))]
        scores: Tensor = self.out(torch.cat(both, 1))
        return scores


def drop_mlp() -> nn.Module:
    """A hidden layer of 8 neurons, half of them dropped in training."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(8, CLASSES),
    )


class Residual(nn.Module):
    """Two layers whose outputs are added: their neurons are one group."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x.flatten(1)))
        scores: Tensor = self.out(x + F.relu(self.second(x)))
        return scores


def by(layer: str, places: int = 1) -> Axis:
    """An axis along which the neurons of one layer lie."""
    return ((layer, places),)


def _vectors(layer: str, *names: str) -> dict[str, tuple[Axis, ...]]:
    return dict.fromkeys(names, (by(layer),))


def _norm(i: int) -> list[str]:
    kinds = ("weight", "bias", "running_mean", "running_var")
    return [f"bn{i}.{kind}" for kind in kinds]


CONV = Net(
    sizes={"conv1": 4, "conv2": 6},
    axes={
        "conv1.weight": (by("conv1"), None),
        **_vectors("conv1", "conv1.bias", *_norm(1)),
        "conv2.weight": (by("conv2"), by("conv1")),
        **_vectors("conv2", "conv2.bias", *_norm(2)),
        "fc.weight": (None, by("conv2", 4)),  # 2x2 places each
        "fc.bias": (None,),
    },
    incoming={
        "conv1": [["conv1.weight", "conv1.bias"]],
        "conv2": [["conv2.weight", "conv2.bias"]],
    },
    output=("fc.weight", "fc.bias"),
    forward=conv_forward,
)

MLP = Net(
    sizes={"1": 8, "3": 5},
    axes={
        "1.weight": (by("1"), None),
        **_vectors("1", "1.bias"),
        "3.weight": (by("3"), by("1")),
        **_vectors("3", "3.bias"),
        "5.weight": (None, by("3")),
        "5.bias": (None,),
    },
    incoming={"1": [["1.weight", "1.bias"]], "3": [["3.weight", "3.bias"]]},
    output=("5.weight", "5.bias"),
    forward=mlp_forward,
)

DROP = Net(
    sizes={"1": 8},
    axes={
        "1.weight": (by("1"), None),
        **_vectors("1", "1.bias"),
        "4.weight": (None, by("1")),
        "4.bias": (None,),
    },
    incoming={"1": [["1.weight", "1.bias"]]},
    output=("4.weight", "4.bias"),
    forward=drop_forward,
)

RESIDUAL = Net(
    sizes={"first": 8},
    axes={
        "first.weight": (by("first"), None),
        **_vectors("first", "first.bias"),
        "second.weight": (by("first"), by("first")),
        "out.weight": (None, by("first")),
        "out.bias": (None,),
    },
    incoming={"first": [["first.weight", "first.bias"], ["second.weight"]]},
    output=("out.weight", "out.bias"),
    forward=residual_forward,
)

JOINED = Net(
    sizes={"left": 4, "right": 6},
    axes={
        "left.weight": (by("left"), None),
        **_vectors("left", "left.bias"),
        "right.weight": (by("right"), None),
        **_vectors("right", "right.bias"),
        "out.weight": (None, (("left", 1), ("right", 1))),
        "out.bias": (None,),
    },
    incoming={
        "left": [["left.weight", "left.bias"]],
        "right": [["right.weight", "right.bias"]],
    },
    output=("out.weight", "out.bias"),
    forward=joined_forward,
)


# Training ----------------------------------------------------------------------------


def is_statistic(name: str) -> bool:
    return ".running_" in name


def is_norm(name: str) -> bool:
    return name.startswith("bn")


@dataclass
class Descent:
    """Gradient descent with momentum and weight decay, on some entries of a state."""

    lr: float
    momentum: float
    decay: float
    velocity: State = field(default_factory=dict)

    def step(self, w: State, gradients: State, trains: State | None = None) -> None:
        """``trains`` is 1 where an entry may move; velocities of others stay put."""
        for name, gradient in gradients.items():
            step = gradient + self.decay * w[name]
            if name in self.velocity:
                step = self.momentum * self.velocity[name] + step
            if trains is not None:
                before = self.velocity.get(name, torch.zeros_like(step))
                step = torch.where(trains[name] > 0, step, before)
                self.velocity[name] = step
                w[name].sub_(self.lr * step * trains[name])
            else:
                self.velocity[name] = step
                w[name].sub_(self.lr * step)


def gradients_of(loss: Tensor, leaves: State) -> State:
    found = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def leaves_of(w: State) -> State:
    return {
        name: tensor.clone().requires_grad_()
        for name, tensor in w.items()
        if not is_statistic(name)
    }


# The federation ----------------------------------------------------------------------


Accuracies = tuple[float, float]
"""On test examples, and on validation examples."""


@dataclass
class Turn:
    """What became of one client's turn."""

    kept: Kept
    trained: State
    train_loss: float
    val_loss: float
    bytes_initial: int
    bytes_down: int
    bytes_up: int


@dataclass
class Round:
    """What became of one round."""

    global_state: State
    turns: dict[int, Turn]
    personal: dict[int, Accuracies]  # as known after this round
    global_accuracy: Accuracies | None
    stopped: set[int]


def num_bytes(values: State) -> int:
    return sum(8 * tensor.numel() for tensor in values.values())  # float64


class FedAvg:
    """McMahan et al.: the whole model for all. The rivals change a few words of it."""

    judges_own = False

    def __init__(self, ready: Prepared, net: Net) -> None:
        plan, self.examples = ready.plan, ready.examples
        self.net, self.settings = net, plan.settings
        self.seed = plan.settings.seed
        self.number = plan.settings.clients.number
        self.rounds = plan.settings.rounds
        self.w0 = {name: plan.initial[name].clone() for name in net.axes}
        self.global_state = self.w0
        self.own: dict[int, tuple[Kept, State]] = {}
        self.tracked: dict[int, int] = {}  # batches seen by norms, over all turns
        self.losses: dict[int, list[float]] = {}
        self.stopped: set[int] = set()

    # What the rivals differ in

    def offered(self, t: int, k: int) -> Kept:
        return self.net.whole

    def keep(self, t: int, k: int, received: State) -> Kept:
        return self.offered(t, k)

    def judged(self, t: int, k: int) -> State:
        """The model a client would use now, or the tensors of it."""
        return self.global_state

    def travels(self, name: str) -> bool:
        return not (self.settings.norm.policy == "local" and is_norm(name))

    def weight(self, k: int) -> float:
        return float(len(self.examples.splits[k].train))

    # What they share

    def p(self, k: int) -> Fraction:
        """Clusters of equal size, in client order."""
        clusters = self.settings.clients.capacities
        return Fraction(str(clusters[k * len(clusters) // self.number]))

    def part(self, k: int, part: str) -> tuple[Tensor, Tensor]:
        where = getattr(self.examples.splits[k], part)
        return self.examples.data.x[where], self.examples.data.y[where]

    def descent(self) -> Descent:
        train = self.settings.train
        return Descent(train.lr, train.momentum, train.weight_decay)

    def batches(
        self, k: int, rng: np.random.Generator, epochs: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.part(k, "train")
        for _ in range(epochs):
            for batch in slow_batches(len(x), self.settings.train.batch_size, rng):
                yield x[batch], y[batch]

    def train(
        self, w: State, k: int, rng: np.random.Generator, epochs: int
    ) -> tuple[float, State, int]:
        """Train in place; the mean loss, the sum of all gradients, the batches."""
        descent, count = self.descent(), 0
        losses: list[float] = []
        total = {n: torch.zeros_like(v) for n, v in w.items() if not is_statistic(n)}
        for x, y in self.batches(k, rng, epochs):
            leaves = leaves_of(w)
            each = F.cross_entropy(
                self.net.forward({**w, **leaves}, x, Mode("train")), y, reduction="none"
            )
            gradients = gradients_of(each.mean(), leaves)
            total = {name: total[name] + gradients[name] for name in total}
            descent.step(w, gradients)
            losses += each.tolist()
            count += 1
        return sum(losses) / len(losses), total, count

    def epochs(self, t: int, k: int, w: State) -> float:
        """The usual local epochs."""
        rng = stream(self.seed, "batches", t, k)
        with torch_stream(self.seed, "dropout", t, k):
            loss, _, count = self.train(w, k, rng, self.settings.train.epochs)
        self.tracked[k] = self.tracked.get(k, 0) + count
        return loss

    def ready(self, w: State, t: int, k: int) -> State:
        """What a state lacks before it can be judged: nothing."""
        return w

    def scores(self, w: State, k: int, part: str) -> tuple[float, float]:
        """Mean loss, and share of right answers."""
        x, y = self.part(k, part)
        out = self.net.forward(w, x, Mode("running"))
        loss = -out.log_softmax(1)[torch.arange(len(y)), y].mean()
        return float(loss), float((out.argmax(1) == y).double().mean())

    def begin(self, k: int, kept: Kept) -> State:
        """The payload; norms that do not travel are the client's own, w0's at first."""
        w = self.net.cut(self.global_state, kept)
        mine = self.full(k)
        return {
            name: w[name] if self.travels(name) else self.net.cut(mine, kept)[name]
            for name in w
        }

    def full(self, k: int) -> State:
        """A client's own model at full size; what it never had is as in w0."""
        mine = self.w0
        if k in self.own:
            kept, state = self.own[k]
            spread = self.net.spread(state, kept, self.w0)
            mine = {n: torch.where(v.isnan(), self.w0[n], v) for n, v in spread.items()}
        return mine

    def first_contact(self, k: int) -> int:
        """Bytes of w0 that are sent apart."""
        return 0

    def returned(self, k: int, w: State) -> State:
        """What leaves the client; NaN in place of entries that do not."""
        return {name: v for name, v in w.items() if self.travels(name)}

    def turn(self, t: int, k: int) -> Turn:
        offered = self.offered(t, k)
        received = self.net.cut(self.global_state, offered)
        down = {name: v for name, v in received.items() if self.travels(name)}
        initial = 0 if k in self.own else self.first_contact(k)
        kept = self.keep(t, k, received)
        w = self.begin(k, kept)
        train_loss = self.epochs(t, k, w)
        val_loss, _ = self.scores(self.ready(w, t, k), k, "val")
        up = self.returned(k, w)
        self.own[k] = (kept, w)
        sent = sum(8 * int((~v.isnan()).sum()) for v in up.values())
        return Turn(kept, w, train_loss, val_loss, initial, num_bytes(down), sent)

    def average(self, turns: dict[int, Turn]) -> State:
        """Of each entry, over the clients that returned it."""
        out = {}
        spread = {
            k: self.net.spread(self.returned(k, turn.trained), turn.kept, self.w0)
            for k, turn in turns.items()
        }
        for name, before in self.global_state.items():
            if not self.travels(name):
                out[name] = before
                continue
            total, weights = torch.zeros_like(before), torch.zeros_like(before)
            for k, values in spread.items():
                is_there = ~values[name].isnan()
                total += torch.where(is_there, self.weight(k) * values[name], 0)
                weights += self.weight(k) * is_there
            out[name] = torch.where(
                weights > 0, total / weights.clamp(min=1e-9), before
            )
        return out

    def accuracies(self, w: State, t: int, k: int) -> Accuracies:
        """Of a model that is made ready: on test, and on validation examples."""
        w = self.ready(w, t, k)
        return self.scores(w, k, "test")[1], self.scores(w, k, "val")[1]

    def accuracy(self, t: int, k: int) -> Accuracies:
        return self.accuracies(self.judged(t, k), t, k)

    def global_accuracy(self, t: int) -> Accuracies:
        each = [self.accuracies(self.global_state, t, k) for k in range(self.number)]
        test, val = (sum(values) / len(each) for values in zip(*each, strict=True))
        return test, val

    def has_global(self) -> bool:
        """A model that lacks learned tensors is none."""
        return all(self.travels(name) or is_statistic(name) for name in self.w0)

    def cohort(self, t: int) -> list[int]:
        left = [k for k in range(self.number) if k not in self.stopped]
        if len(left) <= self.settings.clients.per_round:
            return left
        rng = stream(self.seed, "cohort", t)
        size = self.settings.clients.per_round
        return sorted(left[i] for i in rng.choice(len(left), size, replace=False))

    def stops(self, k: int, turn: Turn) -> bool:
        """Algorithm 2."""
        if not self.settings.early_stopping.on:
            return False
        blend = self.settings.early_stopping.blend
        loss = blend * turn.train_loss + (1 - blend) * turn.val_loss
        before = self.losses.setdefault(k, [])
        before.append(loss)
        return len(before) > 1 and loss > before[-2]

    def play(self) -> list[Round]:
        played: list[Round] = []
        personal = {k: self.accuracy(0, k) for k in range(self.number)}
        global_accuracy: Accuracies | None = None
        for t in range(1, self.rounds + 1):
            turns = {k: self.turn(t, k) for k in self.cohort(t)}
            self.global_state = self.average(turns)
            self.stopped |= {k for k, turn in turns.items() if self.stops(k, turn)}
            is_last = t == self.rounds or len(self.stopped) == self.number
            is_due = is_last or t % self.settings.judge.every == 0
            if self.judges_own:
                personal = {**personal, **{k: self.accuracy(t, k) for k in turns}}
            elif is_due:
                personal = {k: self.accuracy(t, k) for k in range(self.number)}
            if is_due and self.has_global():
                global_accuracy = self.global_accuracy(t)
            played.append(
                Round(
                    self.global_state,
                    turns,
                    personal,
                    global_accuracy,
                    set(self.stopped),
                )
            )
            if is_last:
                break
        return played


class Finetuned(FedAvg):
    """FedAvg, judged after some epochs on the client's own examples."""

    def judged(self, t: int, k: int) -> State:
        w = self.net.cut(self.global_state, self.net.whole)
        rng = stream(self.seed, "adapt", t, k)
        with torch_stream(self.seed, "adapt dropout", t, k):
            self.train(w, k, rng, self.settings.method.options["finetune"])
        return w


class FedDrop(FedAvg):
    """Caldas et al.: a random sub-model for each client, new each round."""

    def offered(self, t: int, k: int) -> Kept:
        rng = stream(self.seed, "neurons", t, k)
        counts = {layer: len(kept) for layer, kept in self.net.first(self.p(k)).items()}
        return {
            layer: sorted(rng.permutation(size)[: counts[layer]].tolist())
            for layer, size in self.net.sizes.items()
        }


class FedRolex(FedAvg):
    """Alam et al.: neighbouring neurons, from one further each round."""

    def offered(self, t: int, k: int) -> Kept:
        return {
            layer: sorted((t - 1 + i) % self.net.sizes[layer] for i in first)
            for layer, first in self.net.first(self.p(k)).items()
        }


class FjORD(FedAvg):
    """The first neurons; judged by that slice of the global model."""

    def offered(self, t: int, k: int) -> Kept:
        return self.net.first(self.p(k))

    def judged(self, t: int, k: int) -> State:
        return self.net.cut(self.global_state, self.net.first(self.p(k)))


class Pruned(FedAvg):
    """Score once by an epoch of training that is thrown away; keep the best."""

    judges_own = True
    of, order = "weights", 2

    def offered(self, t: int, k: int) -> Kept:
        return self.own[k][0] if k in self.own else self.net.whole

    def wanted(self, t: int, k: int) -> dict[str, int]:
        return {layer: len(kept) for layer, kept in self.net.first(self.p(k)).items()}

    def keep(self, t: int, k: int, received: State) -> Kept:
        if k in self.own:
            return self.own[k][0]
        wanted = self.wanted(t, k)
        if wanted == self.net.sizes:
            return self.net.whole
        scores = self.neuron_scores(t, k, received)
        return {layer: best(scores[layer], n) for layer, n in wanted.items()}

    def neuron_scores(self, t: int, k: int, received: State) -> dict[str, list[float]]:
        mine = self.full(k)
        w = {
            name: (v if self.travels(name) else mine[name]).clone()
            for name, v in received.items()
        }
        with torch_stream(self.seed, "scoring dropout", t, k):
            _, total, _ = self.train(w, k, stream(self.seed, "scoring", t, k), 1)
        source = w if self.of == "weights" else total
        scores = {}
        for layer, size in self.net.sizes.items():
            scores[layer] = [
                sum(
                    self.norm([source[name][i].reshape(-1) for name in names])
                    for names in self.net.incoming[layer]
                )
                for i in range(size)
            ]
        return scores

    def norm(self, parts: list[Tensor]) -> float:
        """Of a neuron's incoming weights and bias together."""
        entries: list[float] = torch.cat(parts).tolist()
        if self.order == 1:
            return sum(abs(entry) for entry in entries)
        return sqrt(sum(entry * entry for entry in entries))

    def first_contact(self, k: int) -> int:
        """With norms that stay with the client, it has to be sent w0 for them."""
        return num_bytes(self.w0) if self.settings.norm.policy == "local" else 0

    def judged(self, t: int, k: int) -> State:
        return self.own[k][1] if k in self.own else self.w0


def best(scores: list[float], count: int, given: list[int] | None = None) -> list[int]:
    """The given neurons, and the best-scored others up to the count."""
    chosen = list(given or [])
    others = [i for i in range(len(scores)) if i not in chosen]
    others.sort(key=lambda i: -scores[i])
    return sorted(chosen + others[: count - len(chosen)])


class Hermes(Pruned):
    """By the l2 norm of weights."""


class FedMP(Pruned):
    """By the l1 norm of weights."""

    order = 1


class PruneFL(Pruned):
    """By the l2 norm of the gradient summed over the scoring epoch."""

    of = "gradients"


class FedSelect(Pruned):
    """By the same; p grows from .25 to .5, whatever the capacity."""

    of = "gradients"

    def wanted(self, t: int, k: int) -> dict[str, int]:
        p = Fraction(1, 4)
        if self.rounds > 1:
            p += Fraction(1, 4) * Fraction(t - 1, self.rounds - 1)
        return {layer: len(kept) for layer, kept in self.net.first(p).items()}

    def is_enough(self, t: int, k: int) -> bool:
        return k in self.own and all(
            len(self.own[k][0][layer]) >= n for layer, n in self.wanted(t, k).items()
        )

    def offered(self, t: int, k: int) -> Kept:
        return self.own[k][0] if self.is_enough(t, k) else self.net.whole

    def keep(self, t: int, k: int, received: State) -> Kept:
        if self.is_enough(t, k):
            return self.own[k][0]
        scores = self.neuron_scores(t, k, received)
        had = self.own[k][0] if k in self.own else {}
        return {
            layer: best(scores[layer], n, had.get(layer))
            for layer, n in self.wanted(t, k).items()
        }


class Small(FedAvg):
    """FedAvg of the first neurons of w0, as many as the weakest client can train."""

    def __init__(self, ready: Prepared, net: Net, w0: State) -> None:
        kept = net.first(
            min(Fraction(str(p)) for p in ready.plan.settings.clients.capacities)
        )
        super().__init__(ready, net.only(kept))
        self.w0 = self.global_state = net.cut(w0, kept)


# HeteroFL ----------------------------------------------------------------------------


class HeteroFL(FjORD):
    """Diao et al.: the first neurons, Scaler, masked loss, static norms, plain mean."""

    def travels(self, name: str) -> bool:
        return super().travels(name) and not is_statistic(name)

    def weight(self, k: int) -> float:
        return 1.0

    def labels(self, k: int) -> list[int]:
        return sorted(set(self.part(k, "train")[1].tolist()))

    def epochs(self, t: int, k: int, w: State) -> float:
        kept = self.net.first(self.p(k))
        left = {
            layer: len(kept[layer]) / size for layer, size in self.net.sizes.items()
        }
        owned = torch.zeros(CLASSES, dtype=torch.float64)
        owned[self.labels(k)] = 1
        trains = {
            name: torch.ones_like(v) for name, v in w.items() if not is_statistic(name)
        }
        weight, bias = self.net.output
        trains[weight] = trains[weight] * owned.view(-1, 1)
        trains[bias] = owned
        descent = self.descent()
        losses: list[float] = []
        rng = stream(self.seed, "batches", t, k)
        for x, y in self.batches(k, rng, self.settings.train.epochs):
            leaves = leaves_of(w)
            mode = Mode("batch", scale=left)
            out = self.net.forward({**w, **leaves}, x, mode) * owned
            each = F.cross_entropy(out, y, reduction="none")
            descent.step(w, gradients_of(each.mean(), leaves), trains)
            losses += each.tolist()
        return sum(losses) / len(losses)

    def returned(self, k: int, w: State) -> State:
        out = super().returned(k, {name: v.clone() for name, v in w.items()})
        others = [c for c in range(CLASSES) if c not in self.labels(k)]
        for name in self.net.output:
            out[name][others] = float("nan")
        return out

    def ready(self, w: State, t: int, k: int) -> State:
        """With statistics of the client's own training examples, in one pass.

        The mean over batches in the order of the examples; a last one of one example
        joins the one before.
        """
        x, size = self.part(k, "train")[0], self.settings.train.batch_size
        order = list(range(len(x)))
        cut = [order[start : start + size] for start in range(0, len(x), size)]
        if len(cut) > 1 and len(cut[-1]) == 1:
            cut = [*cut[:-2], cut[-2] + cut[-1]]
        seen = []
        for batch in cut:
            mode = Mode("batch")
            self.net.forward(w, x[batch], mode)
            seen.append(mode.seen)
        out = dict(w)
        for i, layers in enumerate(zip(*seen, strict=True), start=1):
            means, variances = zip(*layers, strict=True)
            out[f"bn{i}.running_mean"] = sum(means) / len(means)
            out[f"bn{i}.running_var"] = sum(variances) / len(variances)
        return out


# FjORD, the original -----------------------------------------------------------------


class FjORDOriginal(FjORD):
    """Horváth et al.: a width for each batch, and statistics for each width.

    ``statistics[i]`` are those of the i-th width, with as many entries as it has. What
    SGD does not see a gradient of still has its momentum and decay, as in the authors'
    implementation.
    """

    def __init__(self, ready: Prepared, net: Net, w0: State) -> None:
        super().__init__(ready, net)
        self.w0 = self.global_state = {name: w0[name] for name in net.axes}
        clusters = ready.plan.settings.clients.capacities
        self.widths = sorted({Fraction(str(p)) for p in clusters})
        self.statistics = [self._statistics(self.w0, p) for p in self.widths]
        self.mine: dict[int, list[State]] = {}
        self.history: list[list[State]] = []  # the statistics after each round

    def _statistics(self, w: State, p: Fraction) -> State:
        cut = self.net.cut(w, self.net.first(p))
        return {name: v for name, v in cut.items() if is_statistic(name)}

    def epochs(self, t: int, k: int, w: State) -> float:
        widths = [p for p in self.widths if p <= self.p(k)]
        slim = self.net.only(self.net.first(self.p(k)))
        mine = [
            {name: v.clone() for name, v in each.items()}
            for each in self.statistics[: len(widths)]
        ]
        descent = self.descent()
        losses: list[float] = []
        draws = stream(self.seed, "widths", t, k)
        rng = stream(self.seed, "batches", t, k)
        for x, y in self.batches(k, rng, self.settings.train.epochs):
            i = int(draws.integers(len(widths)))
            leaves = leaves_of(w)

            def at(i: int, leaves: State = leaves, x: Tensor = x) -> Tensor:
                part = slim.cut({**w, **leaves}, self.net.first(widths[i]))
                part.update(mine[i])
                return self.net.forward(part, x, Mode("train"))

            if self.settings.method.options.get("distillation"):
                full = at(len(widths) - 1)
                each = F.cross_entropy(full, y, reduction="none")
                loss = each.mean()
                if i < len(widths) - 1:
                    soft = full.detach().softmax(1)
                    loss = loss - (soft * at(i).log_softmax(1)).sum(1).mean()
            else:
                each = F.cross_entropy(at(i), y, reduction="none")
                loss = each.mean()
            found = torch.autograd.grad(
                loss, list(leaves.values()), materialize_grads=True
            )
            descent.step(w, dict(zip(leaves, found, strict=True)))
            losses += each.tolist()
        self.mine[k] = mine
        w.update({name: v.clone() for name, v in mine[-1].items()})
        return sum(losses) / len(losses)

    def average(self, turns: dict[int, Turn]) -> State:
        after = []
        for i, before in enumerate(self.statistics):
            those = [k for k in turns if self.p(k) >= self.widths[i]]
            total = sum(self.weight(k) for k in those)
            after.append(
                {
                    name: torch.stack(
                        [self.weight(k) / total * self.mine[k][i][name] for k in those]
                    ).sum(0)
                    if those
                    else value
                    for name, value in before.items()
                }
            )
        self.statistics = after
        self.history.append(after)
        weights = super().average(turns)
        # The global model is judged by the statistics of its widest clients.
        last = self.net.spread(after[-1], self.net.first(self.widths[-1]), self.w0)
        return {
            name: torch.where(last[name].isnan(), self.w0[name], last[name])
            if name in last
            else weights[name]
            for name in weights
        }

    def judged(self, t: int, k: int) -> State:
        w = super().judged(t, k)
        return {**w, **self.statistics[self.widths.index(self.p(k))]}

    def turn(self, t: int, k: int) -> Turn:
        """Statistics travel in as many rows as there are widths up to the client's."""
        found = super().turn(t, k)
        more = self.widths.index(self.p(k)) * num_bytes(
            {n: v for n, v in found.trained.items() if is_statistic(n)}
        )
        return replace(
            found,
            bytes_down=found.bytes_down + more,
            bytes_up=found.bytes_up + more,
        )
