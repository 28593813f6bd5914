"""How long to finish, how fast, what of the model, and how many models to keep.

    python -m benchmarks.finishing try RUN [RUN ...] --to FILE   # minutes for each run
    python -m benchmarks.finishing table FILE [FILE ...]
    python -m benchmarks.finishing cost                          # of a device

Each client of a finished run gets the server's model (with its own class shares, if the
run adjusted logits) and trains it further in several ways. For several sets of the
models that this makes, a client takes the best 1, 3 or 5 of a set on its *validation*
examples. The table says how well their mean does on its *test* examples, and, for the
mean of three, also by capacity. Unlike in a run, the client's own model is not among
them.

``share``: a client trains its share p of every layer's neurons, drawn once for all
epochs (``method.finish``). ``anew``: it draws them again for every epoch; a step costs
the same. ``last``: it trains the whole last layer, and nothing else
(``method.finish_last``).

``cost`` says what these finishes ask of a device with p = 0.2: the memory of a step,
and the CPU time of all epochs for all models of a client.
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
from fedspu.federation.finishing import mean_of
from fedspu.methods.method import all_neurons
from fedspu.models.paper import CIFARNet, EMNISTNet, SpeechNet
from fedspu.neurons.blocks import load_state, state_of
from fedspu.neurons.choose import choose_random
from fedspu.neurons.mapping import map_neurons
from fedspu.neurons.table import State
from fedspu.partial.context import partial_training
from fedspu.profile.peak_memory import peak_of, step_bytes
from fedspu.random_streams import stream
from fedspu.runs import SavedClient, open_client
from fedspu.settings import TrainSettings
from fedspu.tasks import find_task
from fedspu.training.epochs import LocalTraining, train
from fedspu.training.evaluation import Score, evaluate_each
from fedspu.training.last_layer import inputs_of_last_layer, train_last_layer
from fedspu.training.logit_adjustment import with_offsets

Draw = Literal["share", "anew", "last"]
RATES = (1.0, 0.3, 0.1)
"""Learning rates, as shares of train.lr."""

LENGTHS: dict[Draw, tuple[int, ...]] = {
    "share": (5, 10, 20),
    "anew": (5, 10, 20),
    "last": (10, 20, 40),
}
"""After so many epochs the model is looked at; those of the last layer are cheap."""

Key = tuple[Draw, float, int]
"""What trains, at which rate, for how many epochs."""

CAME: Key = ("share", 1.0, 0)
"""The server's model as it came; it is in every set."""


def keys(draw: Draw, rates: Sequence[float], lengths: Sequence[int]) -> tuple[Key, ...]:
    """All of these."""
    return tuple((draw, rate, length) for rate in rates for length in lengths)


SHARE = keys("share", RATES[:2], (5, 10))
LAST = keys("last", RATES[:2], (20, 40))
SETS: dict[str, tuple[Key, ...]] = {
    "as it came": (),
    "share; 1, 0.3; 5, 10 epochs": SHARE,
    "share; 1, 0.3; 10, 20 epochs": keys("share", RATES[:2], (10, 20)),
    "share; 1, 0.3, 0.1; 5, 10 epochs": keys("share", RATES, (5, 10)),
    "anew; 1, 0.3; 5, 10 epochs": keys("anew", RATES[:2], (5, 10)),
    "last; 1, 0.3; 20, 40 epochs": LAST,
    "last; 1, 0.3; 10, 20 epochs": keys("last", RATES[:2], (10, 20)),
    "last; 1, 0.3, 0.1; 20, 40 epochs": keys("last", RATES, (20, 40)),
    "share and last": (*SHARE, *LAST),
}
NUMBERS = (1, 3, 5)


@dataclass(frozen=True)
class Tried:
    """How well one client does with one set of models, as the mean of the best."""

    run: str
    client: int
    capacity: float
    models: str
    number: int
    test: float


def finishes(folder: Path) -> Iterator[Tried]:
    """Every set of models, for every client of a run."""
    saved = open_client(folder, 0, which="global", trust=True)
    examples, plan = saved.divided(None), saved.plan
    trains_all = plan.method.offer is all_neurons and plan.method.trains_what_is_offered
    model = plan.build()
    for client in range(plan.num_clients):
        parts = [examples.part(client, name) for name in ("val", "test")]

        def judged(state: State, parts: Any = parts) -> list[Score]:
            load_state(model, state)
            return evaluate_each(model, parts, plan.task)

        p = 1.0 if trains_all else float(plan.capacity(client))
        known = dict(_models(saved, client, examples.part(client, "train"), p))
        scores = {key: judged(state)[0] for key, state in known.items()}
        for name, models in SETS.items():
            best = sorted(
                (key for key in (CAME, *models) if key in known),
                key=lambda key: (-scores[key].value, scores[key].loss),
            )
            for number in NUMBERS:
                kept = mean_of([known[key] for key in best[:number]])
                test = judged(kept)[1].value
                yield Tried(folder.name, client, p, name, number, test)


def _models(
    saved: SavedClient,
    client: int,
    examples: tuple[torch.Tensor, torch.Tensor],
    p: float,
) -> Iterator[tuple[Key, State]]:
    """All models that the client makes of the server's; none after one overflows."""
    came = saved.federation.shown_state
    usual = _prepare(saved, client, examples, 1.0, came)
    begin = with_offsets(came, usual.offsets, usual.model, examples[0][:2])
    yield CAME, begin
    for draw in get_args(Draw):
        for rate in RATES:
            local = _prepare(saved, client, examples, rate, begin)
            plain = local.settings.model_copy(update={"adjust_logits": False})
            local = replace(local, settings=plain)
            inputs = inputs_of_last_layer(local) if draw == "last" else None
            for epoch in range(LENGTHS[draw][-1]):
                if draw == "anew" or epoch == 0:
                    rng = stream(saved.plan.settings.seed, "which", epoch, client)
                    active = choose_random(saved.plan.neurons, p, rng)
                    local = replace(local, active=active)
                try:
                    train_last_layer(local, inputs) if draw == "last" else train(local)
                except TrainingError:
                    break
                if epoch + 1 in LENGTHS[draw]:
                    yield (draw, rate, epoch + 1), state_of(local.model)


def _prepare(
    saved: SavedClient,
    client: int,
    examples: tuple[torch.Tensor, torch.Tensor],
    rate: float,
    begin: State,
) -> LocalTraining:
    """A model that is trained for one epoch at a time."""
    plan, t = saved.plan, saved.federation.round
    model = plan.build()
    load_state(model, begin)
    settings = plan.train_settings(t)
    return LocalTraining(
        model,
        plan.neurons,
        plan.neurons.everything(),
        *examples,
        plan.task,
        settings.model_copy(update={"lr": rate * settings.lr, "epochs": 1}),
        stream(plan.settings.seed, "finishing", t, client),
    )


def table(tried: Sequence[Tried]) -> str:
    """A line for each set of models: all clients, and by capacity."""
    lines = []
    for run in dict.fromkeys(t.run for t in tried):
        of_run = [t for t in tried if t.run == run]
        capacities = sorted({t.capacity for t in of_run})
        heads = " ".join(f"best {number}" for number in NUMBERS)
        lines += [f"\n{run}", f"{'':33} {heads}   best 3, by capacity"]
        for name in SETS:
            cells = [_percent(of_run, name, number) for number in NUMBERS]
            cells += [_percent(of_run, name, 3, capacity) for capacity in capacities]
            lines.append(f"{name:33} {' '.join(cells)}")
    return "\n".join(lines)


def _percent(
    tried: Sequence[Tried], name: str, number: int, capacity: float | None = None
) -> str:
    of_set = [t for t in tried if (t.models, t.number) == (name, number)]
    tests = [t.test for t in of_set if capacity in (None, t.capacity)]
    return f"{100 * mean(tests):6.1f}"


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
