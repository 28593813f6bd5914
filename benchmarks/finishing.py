"""How long to finish, how fast, and what of the model: tried on runs that are there.

    python -m benchmarks.finishing try RUN [RUN ...] --to FILE   # minutes for each run
    python -m benchmarks.finishing table FILE [FILE ...]
    python -m benchmarks.finishing cost                          # of a device

Each client of a finished run gets the server's model and trains it further in several
ways, and looks at the model after some epochs. ``FILE`` keeps how well each does on the
client's validation and test examples. The table says, for several sets of candidates,
what clients have on *test* examples if they choose by *validation* examples, as in a
run.

``once``: a client trains its share p of every layer's neurons, drawn once for all
epochs (``method.finish``). ``anew``: it draws them again for every epoch; a step costs
the same. ``last``: it trains the whole last layer, and nothing else
(``method.finish_last``).

``cost`` says what these two finishes ask of a device with p = 0.2: the memory of a
step, and the CPU time of all epochs for all candidates of a client.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from time import process_time
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from fedspu.errors import TrainingError
from fedspu.methods.method import all_neurons
from fedspu.models.paper import CIFARNet, EMNISTNet, SpeechNet
from fedspu.neurons.blocks import load_state
from fedspu.neurons.choose import choose_random
from fedspu.neurons.mapping import map_neurons
from fedspu.neurons.table import Active
from fedspu.partial.context import partial_training
from fedspu.profile.peak_memory import peak_of, step_bytes
from fedspu.random_streams import stream
from fedspu.runs import SavedClient, open_client
from fedspu.settings import TrainSettings
from fedspu.tasks import find_task
from fedspu.training.epochs import LocalTraining, train
from fedspu.training.evaluation import evaluate_each
from fedspu.training.last_layer import inputs_of_last_layer, train_last_layer

Draw = Literal["once", "anew", "last"]
RATES = (10.0, 5.0, 3.0, 1.7, 1.0, 0.3)
"""Learning rates, as shares of train.lr."""

LENGTHS = (0, 5, 10, 20)
LENGTHS_OF_LAST = (0, 5, 10, 20, 40)
"""After so many epochs the model is looked at; those of the last layer are cheap."""


@dataclass(frozen=True)
class Tried:
    """How well one client does with one way of finishing."""

    run: str
    client: int
    capacity: float
    draw: Draw
    rate: float
    epochs: int
    val: float
    val_loss: float
    test: float


def finishes(folder: Path) -> Iterator[Tried]:
    """Every way of finishing, for every client of a run."""
    saved = open_client(folder, 0, which="global", trust=True)
    examples = saved.divided(None)
    plan = saved.plan
    trains_all = plan.method.offer is all_neurons and plan.method.trains_what_is_offered
    for client in range(plan.num_clients):
        parts = [examples.part(client, name) for name in ("val", "test")]
        p = 1 if trains_all else plan.capacity(client)
        for draw in get_args(Draw):
            if draw == "anew" and p == 1:
                continue
            lengths = LENGTHS_OF_LAST if draw == "last" else LENGTHS
            for rate in RATES:
                local = _prepare(saved, client, examples.part(client, "train"), rate)
                for epoch in range(lengths[-1] + 1):
                    if epoch in lengths:
                        val, test = evaluate_each(local.model, parts, plan.task)
                        yield Tried(
                            *(folder.name, client, float(p), draw, rate, epoch),
                            *(val.value, val.loss, test.value),
                        )
                    if draw == "anew" or epoch == 0:
                        rng = stream(plan.settings.seed, "which", epoch, client)
                        active = choose_random(plan.neurons, p, rng)
                        local = replace(local, active=active)
                    try:
                        (train_last_layer if draw == "last" else train)(local)
                    except TrainingError:  # it overflowed
                        break


def _prepare(
    saved: SavedClient,
    client: int,
    examples: tuple[torch.Tensor, torch.Tensor],
    rate: float,
) -> LocalTraining:
    """The server's model, ready for one epoch at a time."""
    plan = saved.plan
    model = plan.build()
    load_state(model, saved.federation.shown_state)
    settings = plan.train_settings(saved.federation.round)
    everything: Active = plan.neurons.everything()
    return LocalTraining(
        model,
        plan.neurons,
        everything,
        *examples,
        plan.task,
        settings.model_copy(update={"lr": rate * settings.lr, "epochs": 1}),
        stream(plan.settings.seed, "finishing", saved.federation.round, client),
    )


# What clients have, if they choose by validation examples -----------------------------

Rates = tuple[float, ...]
Candidates = tuple[Draw, Rates, tuple[int, ...]]
SHARE: Candidates = ("once", (1, 0.3), (0, 5, 10))
LAST: Candidates = ("last", (1, 0.3), (0, 20, 40))
SETS: dict[str, tuple[Candidates, ...]] = {
    "as it came": (("once", RATES, (0,)),),
    "both, as built": (SHARE, LAST),
    **{
        f"{' '.join(f'{rate:g}' for rate in rates)}; to {lengths[-1]} epochs; {draw}": (
            (draw, rates, lengths),
        )
        for rates in ((1, 0.3), (3, 1), (3, 1, 0.3), (10, 3, 1, 0.3), RATES[1:])
        for lengths in (LENGTHS[:-1], LENGTHS, LENGTHS_OF_LAST)
        for draw in get_args(Draw)
        if draw == "last" or lengths != LENGTHS_OF_LAST
    },
    **{
        f"{rate:g}; {epochs} epochs; {draw}": ((draw, (rate,), (epochs,)),)
        for rate in RATES
        for epochs in LENGTHS_OF_LAST[1:]
        for draw in get_args(Draw)
        if draw == "last" or epochs in LENGTHS
    },
}
"""Sets of candidates, by name: what trains, learning rates, epochs."""


def chosen(
    tried: Sequence[Tried], candidates: Sequence[Candidates]
) -> dict[int, Tried]:
    """What each client would keep; one that trains all neurons draws only once."""
    best: dict[int, Tried] = {}
    for t in tried:
        if any(_is_among(t, *some) for some in candidates):
            known = best.get(t.client)
            if known is None or (t.val, -t.val_loss) > (known.val, -known.val_loss):
                best[t.client] = t
    return best


def _is_among(t: Tried, draw: Draw, rates: Rates, lengths: tuple[int, ...]) -> bool:
    if t.capacity == 1 and draw == "anew":
        draw = "once"
    return t.draw == draw and t.rate in rates and t.epochs in lengths


def table(tried: Sequence[Tried]) -> str:
    """A line for each set of candidates: all clients, and by capacity."""
    lines = []
    for run in dict.fromkeys(t.run for t in tried):
        of_run = [t for t in tried if t.run == run]
        capacities = sorted({t.capacity for t in of_run})
        lines += [f"\n{run}", f"{'':38} {'val':>5} {'test':>5}  by capacity"]
        for name, candidates in SETS.items():
            kept = chosen(of_run, candidates).values()
            if not kept:
                continue
            by_capacity = (
                100 * mean(t.test for t in kept if t.capacity == c) for c in capacities
            )
            lines.append(
                f"{name:38} {100 * mean(t.val for t in kept):5.1f} "
                f"{100 * mean(t.test for t in kept):5.1f}  "
                + " ".join(f"{score:5.1f}" for score in by_capacity)
            )
    return "\n".join(lines)


# What it asks of a device -------------------------------------------------------------

NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "EMNIST": (EMNISTNet, 62),
    "CIFAR-10": (CIFARNet, 10),
    "Speech": (SpeechNet, 35),
}
"""The paper's networks, and the numbers of classes."""

NUM_EXAMPLES, BATCH_SIZE, P = 350, 16, 0.2
REPETITIONS = 5


def costs() -> str:
    """A line for each network: peak memory of a step, and seconds of all epochs."""
    torch.set_num_threads(1)
    lines = [f"{'':10} {'share, p = 0.2':>22} {'last layer':>22} {'all neurons':>22}"]
    for name, (build, num_classes) in NETS.items():
        cells = []
        for what in ("share", "last", "all"):
            local = _example(build, num_classes, P if what == "share" else 1)
            epochs = 80 if what == "last" else 20
            taken = []
            for _ in range(REPETITIONS):
                began = process_time()
                if what == "last":
                    inputs = inputs_of_last_layer(local)
                    train_last_layer(local.with_epochs(epochs), inputs)
                else:
                    train(local.with_epochs(epochs))
                taken.append(process_time() - began)
            kilobytes = _peak(local, what == "last") / 1000
            cells.append(f"{kilobytes:9,.0f} kB {median(taken):7.3f} s")
        lines.append(f"{name:10} " + " ".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)


def _example(
    build: Callable[[], nn.Module], num_classes: int, p: float
) -> LocalTraining:
    """One client of a network, with examples made up at random."""
    torch.manual_seed(0)
    model = build()
    x = torch.randn(NUM_EXAMPLES, *cast(Any, build).input_shape)
    neurons = map_neurons(model, x[:2])
    return LocalTraining(
        model,
        neurons,
        choose_random(neurons, p, stream(0, "neurons")),
        x,
        torch.randint(num_classes, (NUM_EXAMPLES,)),
        find_task("classification"),
        TrainSettings(batch_size=BATCH_SIZE, lr=0.001),
        stream(0, "batches"),
    )


def _peak(local: LocalTraining, is_last: bool) -> int:
    """The most bytes that one step holds, with PyTorch's own operations."""
    x, y = local.x[:BATCH_SIZE], local.y[:BATCH_SIZE]
    if is_last:
        few = replace(local.with_epochs(1), x=x, y=y)
        own = [*few.model.parameters(), *few.model.buffers()]
        peak = peak_of(lambda: train_last_layer(few, inputs_of_last_layer(few)))
        return peak + sum(tensor.nbytes for tensor in own)
    local.model.train()
    with partial_training(local.model, local.neurons, local.active) as trainable:
        return step_bytes(local.model, trainable, x, y).peak


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["cost"]:
            print(costs())
        case ["try", *runs, "--to", file]:
            found = [asdict(t) for run in runs for t in finishes(Path(run))]
            Path(file).write_text(json.dumps(found), encoding="utf-8")
        case ["table", *files] if files:
            read = [
                json.loads(Path(file).read_text(encoding="utf-8")) for file in files
            ]
            print(table([Tried(**line) for lines in read for line in lines]))
        case _:
            sys.exit(__doc__)
