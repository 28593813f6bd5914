"""How long to finish, how fast, and which neurons: tried on runs that are there.

    python -m benchmarks.finishing try RUN [RUN ...] --to FILE   # minutes for each run
    python -m benchmarks.finishing table FILE [FILE ...]

Each client of a finished run gets the server's model and trains it further in several
ways (``method.finish``), always its share p of every layer's neurons, and looks at the
model after some epochs. ``FILE`` keeps how well each does on the client's validation
and test examples. The table says, for several sets of candidates, what clients have on
*test* examples if they choose by *validation* examples, as in a run.

``once``: a client draws its neurons once, for all epochs. ``anew``: it draws them again
for every epoch. A step costs the same.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Literal, get_args

import torch

from fedspu.methods.method import all_neurons
from fedspu.neurons.blocks import load_state
from fedspu.neurons.choose import choose_random
from fedspu.neurons.table import Active
from fedspu.random_streams import stream
from fedspu.runs import SavedClient, open_client
from fedspu.training.epochs import LocalTraining, train
from fedspu.training.evaluation import evaluate_each

Draw = Literal["once", "anew"]
RATES = (10.0, 5.0, 3.0, 1.7, 1.0, 0.3)
"""Learning rates, as shares of train.lr."""

LENGTHS = (0, 5, 10, 20)
"""After so many epochs the model is looked at."""


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
        for draw in get_args(Draw)[: 1 if p == 1 else None]:
            for rate in RATES:
                local = _prepare(saved, client, examples.part(client, "train"), rate)
                for epoch in range(LENGTHS[-1] + 1):
                    if epoch in LENGTHS:
                        val, test = evaluate_each(local.model, parts, plan.task)
                        yield Tried(
                            *(folder.name, client, float(p), draw, rate, epoch),
                            *(val.value, val.loss, test.value),
                        )
                    if draw == "anew" or epoch == 0:
                        rng = stream(plan.settings.seed, "which", epoch, client)
                        active = choose_random(plan.neurons, p, rng)
                        local = replace(local, active=active)
                    train(local)


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
SETS: dict[str, tuple[Draw, Rates, tuple[int, ...]]] = {
    "as it came": ("once", RATES, (0,)),
    **{
        f"{' '.join(f'{rate:g}' for rate in rates)}; to {lengths[-1]} epochs; {draw}": (
            draw,
            rates,
            lengths,
        )
        for rates in ((1, 0.3), (3, 1), (3, 1, 0.3), (10, 3, 1, 0.3), RATES[1:])
        for lengths in (LENGTHS[:-1], LENGTHS)
        for draw in get_args(Draw)
    },
    **{
        f"{rate:g}; {epochs} epochs; {draw}": (draw, (rate,), (epochs,))
        for rate in RATES
        for epochs in LENGTHS[1:]
        for draw in get_args(Draw)
    },
}
"""Sets of candidates, by name: how neurons are drawn, learning rates, epochs."""


def chosen(
    tried: Sequence[Tried], draw: Draw, rates: Rates, lengths: tuple[int, ...]
) -> dict[int, Tried]:
    """What each client would keep; one that trains all neurons draws only once."""
    best: dict[int, Tried] = {}
    for t in tried:
        is_candidate = t.rate in rates and t.epochs in lengths
        if is_candidate and (t.draw == draw or t.capacity == 1):
            known = best.get(t.client)
            if known is None or (t.val, -t.val_loss) > (known.val, -known.val_loss):
                best[t.client] = t
    return best


def table(tried: Sequence[Tried]) -> str:
    """A line for each set of candidates: all clients, and by capacity."""
    lines = []
    for run in dict.fromkeys(t.run for t in tried):
        of_run = [t for t in tried if t.run == run]
        capacities = sorted({t.capacity for t in of_run})
        lines += [f"\n{run}", f"{'':38} {'val':>5} {'test':>5}  by capacity"]
        for name, candidates in SETS.items():
            kept = chosen(of_run, *candidates).values()
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


if __name__ == "__main__":
    match sys.argv[1:]:
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
