"""The work that all peers do: whose examples, in which rounds, on which network.

    python benchmarks/peers/common.py --net cifar10 --out WORK.npz [--folder FOLDER]

makes it, with fedspu: the examples of every client (real CIFAR-10 if the folder has it,
else seeded bytes of the same shape), who takes part in which round, the first weights.
Everything else here needs NumPy and PyTorch alone, so that a peer's own environment can
read the file. The networks are the paper's, in plain PyTorch.

A client's last batch never holds a single example: some peers would skip it, others
join it to the one before, and the number of steps would differ. Such a client has one
example less. With one local step, a client has only as many examples as one batch.
"""

import argparse
import gc
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    TensorDataset,
)

State = dict[str, Tensor]
Examples = tuple[Tensor, Tensor]

CAPACITIES = (0.2, 0.4, 0.6, 0.8, 1.0)  # equal clusters, in client order


class CIFARNet(nn.Module):
    """The paper's network for CIFAR-10."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, kernel_size=3, padding=1)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 16, kernel_size=3, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc1 = nn.Linear(16 * 8 * 8, 120, bias=False)
        self.fc2 = nn.Linear(120, 84, bias=False)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The class scores of images (n, 3, 32, 32)."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


class SpeechNet(nn.Module):
    """The paper's network for Google Speech."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 50, kernel_size=2, stride=2, padding=2)
        self.bn1 = nn.BatchNorm2d(50)
        self.conv2 = nn.Conv2d(50, 50, kernel_size=2, stride=2, padding=2)
        self.bn2 = nn.BatchNorm2d(50)
        self.fc = nn.Linear(50 * 3 * 3, 35)

    def forward(self, x: Tensor) -> Tensor:
        """The class scores of spectrograms (n, 1, 32, 32)."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(x.flatten(1))


@dataclass(frozen=True)
class Net:
    """A network, what it takes, and how the paper trains it."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    examples: int  # in the paper's data set
    batch_size: int
    lr: float
    epochs: int = 5


NETS = {
    "cifar10": Net(CIFARNet, (3, 32, 32), 10, 50_000, 128, 0.1),
    "speech": Net(SpeechNet, (1, 32, 32), 35, 101_012, 16, 5e-4),
}


# What a peer reads --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Work:
    """The work of a run; make it with ``load``."""

    net: Net
    epochs: int
    pixels: np.ndarray  # (n, channels, 32, 32), bytes
    labels: np.ndarray  # (n,), int64
    shares: tuple[np.ndarray, ...]  # each client's training examples, as positions
    cohorts: tuple[tuple[int, ...], ...]  # who takes part, round by round
    initial: State
    seed: int

    @property
    def num_clients(self) -> int:
        """How many clients there are, whether they take part or not."""
        return len(self.shares)

    @property
    def participants(self) -> list[int]:
        """Everyone who takes part in some round."""
        return sorted({client for cohort in self.cohorts for client in cohort})

    def num_steps(self, client: int) -> int:
        """How many optimizer steps one turn of a client is."""
        batches = -(-len(self.shares[client]) // self.net.batch_size)
        return self.epochs * batches

    def capacity(self, client: int) -> float:
        """A client's p, for who trains a part of the model."""
        return CAPACITIES[client * len(CAPACITIES) // self.num_clients]

    def examples(self, client: int) -> Examples:
        """A client's own training examples: x / 255, then (x - .5) / .5."""
        share = self.shares[client]
        x = torch.from_numpy(self.pixels[share]).float().div_(255).sub_(0.5).div_(0.5)
        return x, torch.from_numpy(self.labels[share])

    def model(self) -> nn.Module:
        """A new network with the weights that all begin from."""
        model = self.net.build()
        model.load_state_dict(self.initial)
        return model


def load(path: str, net: str, rounds: int, steps: str) -> Work:
    """The work in a file, for this many rounds."""
    kind = NETS[net]
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    if arrays["x"].shape[1:] != kind.shape:
        raise SystemExit(
            f"{path} holds examples of shape {arrays['x'].shape[1:]}, and the network "
            f"{net} takes {kind.shape}; give the --net that the file was made for"
        )
    if rounds > len(arrays["cohorts"]):
        raise SystemExit(
            f"--rounds {rounds}: {path} says who takes part in {len(arrays['cohorts'])}"
        )
    most = kind.batch_size if steps == "one" else None
    shares = np.split(arrays["train"], arrays["ends"][:-1])
    return Work(
        net=kind,
        epochs=1 if steps == "one" else kind.epochs,
        pixels=arrays["x"],
        labels=arrays["y"],
        shares=tuple(share[:most] for share in shares),
        cohorts=tuple(map(tuple, arrays["cohorts"][:rounds].tolist())),
        initial={
            name.removeprefix("initial."): torch.from_numpy(values)
            for name, values in arrays.items()
            if name.startswith("initial.")
        },
        seed=int(arrays["seed"]),
    )


@cache
def load_once(path: str, net: str, rounds: int, steps: str) -> Work:
    """The same, kept by the process."""
    return load(path, net, rounds, steps)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that all peers have."""
    options = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--work", required=True, help="the file that common.py made")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--net", choices=sorted(NETS), default="cifar10")
    options.add_argument(
        "--steps",
        choices=("all", "one"),
        default="all",
        help="the paper's five local epochs, or one local step: then what is around "
        "the training is most of the time",
    )
    return options


def load_by(options: argparse.Namespace) -> Work:
    """The work that the options name."""
    return load(options.work, options.net, options.rounds, options.steps)


# What a plain PyTorch client does -----------------------------------------------------


def train(
    model: nn.Module, examples: TensorDataset, work: Work, batches: str = "loader"
) -> int:
    """Train a client's model in place by plain SGD; the number of steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=work.net.lr)
    loader = make_loader(examples, work.net.batch_size, batches)
    model.train()
    steps = 0
    for _ in range(work.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
    return steps


def warm_up(work: Work) -> None:
    """Take a step that counts for nothing: PyTorch loads much with its first one.

    Also look through all that was imported for garbage, which would take up to a
    second in some round.
    """
    model = work.net.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.zeros(work.net.batch_size, *work.net.shape)
    model(x).sum().backward()
    optimizer.step()
    gc.collect()


def make_loader(
    examples: TensorDataset, batch_size: int, batches: str
) -> DataLoader[Any]:
    """The usual ``DataLoader``, which takes examples one by one; or whole batches."""
    if batches == "loader":
        return DataLoader(examples, batch_size=batch_size, shuffle=True)
    order = RandomSampler(examples)
    indices = BatchSampler(order, batch_size, drop_last=False)
    return DataLoader(examples, sampler=indices, batch_size=None)


def average(states: Iterable[tuple[int, Mapping[str, Tensor]]]) -> State:
    """The mean of clients' states, weighted by their number of examples."""
    listed = list(states)
    total = sum(num_examples for num_examples, _ in listed)
    summed: State = {}
    for num_examples, state in listed:
        for name, values in state.items():
            part = values * (num_examples / total)
            summed[name] = summed[name] + part if name in summed else part
    return summed


# What a peer prints -------------------------------------------------------------------


def seconds_of_process() -> float:
    """How long this process has been running, its start and imports included."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started


def report(
    peer: str,
    options: argparse.Namespace,
    work: Work,
    startup: float,
    seconds: list[float],
    steps: int | None,
    final: Mapping[str, Tensor],
    packages: Iterable[str] = (),
    **more: Any,
) -> None:
    """Print one JSON line of what was measured.

    ``startup`` is all before the first round, ``seconds`` are of the rounds, ``steps``
    the optimizer steps that were counted (None: they could not be), ``final`` the
    global model. How far its weights have moved is reported: after single steps all
    who average alike must agree, as then the order of examples does not matter.
    """
    wanted = sum(work.num_steps(k) for cohort in work.cohorts for k in cohort)
    if steps is not None and steps != wanted:
        raise SystemExit(f"{peer} took {steps} steps, and the work is {wanted}")
    turns = sum(len(cohort) for cohort in work.cohorts)
    line = {
        "peer": peer,
        "net": options.net,
        "steps": options.steps,
        "rounds": len(work.cohorts),
        "startup_seconds": round(startup, 3),
        "seconds": [round(value, 4) for value in seconds],
        "client_rounds_per_second": round(turns / sum(seconds), 3),
        "optimizer_steps": steps,
        "moved": round(_distance(work, final), 6),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numpy", *packages)},
        },
        **more,
    }
    print(json.dumps(line), flush=True)


def _distance(work: Work, final: Mapping[str, Tensor]) -> float:
    """Between the first weights and the last; statistics of norms are none."""
    names = [name for name, _ in work.net.build().named_parameters()]
    parts = [
        (final[n].double() - work.initial[n].double()).square().sum() for n in names
    ]
    return float(torch.stack(parts).sum().sqrt())


class StepCounter:
    """Counts the steps of all optimizers of this process but one."""

    def __init__(self, but: torch.optim.Optimizer | None = None) -> None:
        self.steps, self.but = 0, but
        register_optimizer_step_post_hook(self._count)

    def _count(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.steps += optimizer is not self.but


# The work is made with fedspu ---------------------------------------------------------


def make(options: argparse.Namespace) -> None:
    """Divide the examples, draw the cohorts and the first weights, and write them."""
    from fedspu.federation.server import Federation, choose_clients

    kind = NETS[options.net]
    x, y = _examples(kind, options)
    plan, examples = plan_of(options.net, x, y, vars(options))
    shares = [_even(split.train, kind.batch_size) for split in examples.splits]
    start = Federation(0, plan.initial)
    cohorts = [
        choose_clients(start, plan, t) for t in range(1, 1 + options.most_rounds)
    ]
    kind.build().load_state_dict(plan.initial)  # the two networks have the same names
    np.savez(
        options.out,
        x=x,
        y=y,
        train=np.concatenate(shares),
        ends=np.cumsum([len(share) for share in shares]),
        cohorts=np.array(cohorts),
        seed=np.array(options.seed),
        **{f"initial.{name}": v.numpy() for name, v in plan.initial.items()},
    )
    sizes = sorted(len(share) for share in shares)
    print(
        f"{options.out}: {len(shares)} clients with {sizes[0]} to {sizes[-1]} training "
        f"examples (median {sizes[len(sizes) // 2]}), {len(cohorts)} rounds of "
        f"{options.per_round}",
        file=sys.stderr,
    )


def plan_of(
    net: str, x: np.ndarray, y: np.ndarray, given: Mapping[str, Any]
) -> tuple[Any, Any]:
    """The plan of a run of fedspu on these examples, and who has which of them."""
    from functools import partial

    from fedspu import models
    from fedspu.data import FROM_MEMORY
    from fedspu.data.dataset import Dataset, Scaling
    from fedspu.data.examples import divide
    from fedspu.federation.plan import Sample, make_plan
    from fedspu.methods import make_method
    from fedspu.resolve import resolve
    from fedspu.tasks.classification import classification

    kind = NETS[net]
    half = (0.5,) * kind.shape[0]
    dataset = Dataset(
        name=net,
        x=torch.from_numpy(x),
        y=torch.from_numpy(y),
        num_outputs=kind.classes,
        scaling=Scaling(mean=half, deviation=half),
    )
    settings = resolve(
        {
            "model": net,
            "seed": given["seed"],
            "rounds": given["rounds"],
            "method": given.get("method", "fedavg"),
            "data.name": FROM_MEMORY,
            "data.alpha": 0.1,
            "clients.number": given["clients"],
            "clients.per_round": given["per_round"],
            "clients.capacities": CAPACITIES[: given["clients"]],
            "train.epochs": given.get("epochs", kind.epochs),
            "train.batch_size": kind.batch_size,
            "train.lr": kind.lr,
        }
    )
    sample = Sample(net, *dataset.take(slice(2)), kind.classes)
    build = partial(models.build, net, kind.classes)
    method = make_method(settings.method)
    plan = make_plan(settings, method, classification, build, sample)
    return plan, divide(settings, dataset, classification)


def _examples(kind: Net, options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    if options.folder is not None:
        from fedspu.data import load as load_data

        real = load_data(options.net, options.folder)
        return real.x.numpy(), real.y.numpy()
    # A pattern for each class under noise, so that there is something to learn.
    rng = np.random.default_rng(options.seed)
    number = options.examples or kind.examples
    y = rng.integers(kind.classes, size=number)
    patterns = rng.integers(64, 192, size=(kind.classes, *kind.shape), dtype=np.uint8)
    x = rng.integers(-63, 64, size=(number, *kind.shape), dtype=np.int8)
    return (patterns[y] + x).astype(np.uint8), y


def _even(share: np.ndarray, batch_size: int) -> np.ndarray:
    """The share, without its last example if that would be a batch of its own."""
    return share[:-1] if len(share) > 1 and len(share) % batch_size == 1 else share


def _main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--net", choices=sorted(NETS), default="cifar10")
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--folder", type=Path, help="with cifar-10-batches-bin in it")
    options.add_argument("--examples", type=int, help="as many as the paper has")
    options.add_argument("--clients", type=int, default=100)
    options.add_argument("--per-round", type=int, default=10)
    options.add_argument("--most-rounds", type=int, default=50)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    given.rounds = given.most_rounds
    make(given)


if __name__ == "__main__":
    _main()
