"""Which neurons to train: other choices than a random one, at equal cost.

    python -m benchmarks.guided play FOLDER DATA    # what results/ lacks
    python -m benchmarks.guided collect FOLDER      # finished runs, into results/

Each method here is ``fedspu-plus`` as it was at first (clients finished by training
their share of all layers), but for which neurons a client trains, a share p of every
layer as ever. ``benchmarks.beyond page`` puts the results into docs/beyond.md.
``gradient`` is not at equal cost: it needs a full step for its choice, and is here to
show what knowing more would bring.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.reproduction.playing import Folders, Part, collect, play
from fedspu.methods.fedspu import in_global_context
from fedspu.methods.method import Method, ModelState, Trained, Turn, local_epochs
from fedspu.neurons.choose import choose_random, choose_top, num_active
from fedspu.neurons.scores import score_neurons
from fedspu.neurons.table import Active, NeuronGroup
from fedspu.random_streams import stream
from fedspu.training.epochs import LocalTraining

# What a client remembers: a number for each neuron ------------------------------------

PREFIX = "guided:"


def remembered(turn: Turn, group: NeuronGroup, default: float) -> Tensor:
    """What the client remembers about a group's neurons."""
    default_ = torch.full((group.size,), default, dtype=torch.float64)
    return turn.memory.extra.get(PREFIX + group.name, default_)


def remember(
    turn: Turn, local: LocalTraining, find: Callable[[Turn, Trained], dict[str, Tensor]]
) -> Trained:
    """Train as usual; ``find`` gives new numbers, for the neurons that trained."""
    trained = local_epochs(turn, local)
    found, extra = find(turn, trained), {}
    for group in turn.now.neurons.groups:
        numbers = remembered(turn, group, float("inf")).clone()
        active = local.active[group.name]
        numbers[active] = found[group.name][active]
        extra[PREFIX + group.name] = numbers
    return replace(trained, extra=extra)


def with_ties_by_chance(turn: Turn, scores: dict[str, Tensor]) -> Active:
    """The best neurons; of equals, any."""
    rng = stream(turn.now.seed, "ties", turn.now.round, turn.now.client)
    chosen = {}
    for group in turn.now.neurons.groups:
        order = torch.from_numpy(rng.permutation(group.size))
        ranked = order[scores[group.name][order].argsort(descending=True, stable=True)]
        count = num_active(turn.now.capacity, group.size)
        chosen[group.name] = ranked[:count].sort().values
    return chosen


# The choices --------------------------------------------------------------------------


def in_turn(turn: Turn) -> Active:
    """Neighbouring neurons, one share further each round."""
    now, chosen = turn.now, {}
    for group in now.neurons.groups:
        count = num_active(now.capacity, group.size)
        places = ((now.round - 1) * count + torch.arange(count)) % group.size
        chosen[group.name] = places.sort().values
    return chosen


def longest_ago(turn: Turn) -> Active:
    """Those that the client trained longest ago, or never."""
    groups = turn.now.neurons.groups
    scores = {g.name: -remembered(turn, g, float("-inf")) for g in groups}
    never = {name: s.masked_fill(s.isinf(), float("inf")) for name, s in scores.items()}
    return with_ties_by_chance(turn, never)


def when(turn: Turn, trained: Trained) -> dict[str, Tensor]:
    """The round."""
    t = float(turn.now.round)
    groups = turn.now.neurons.groups
    return {g.name: torch.full((g.size,), t, dtype=torch.float64) for g in groups}


def moved_most(turn: Turn) -> Active:
    """Those that moved most when the client last trained them, or never trained."""
    groups = turn.now.neurons.groups
    scores = {g.name: remembered(turn, g, float("inf")) for g in groups}
    return with_ties_by_chance(turn, scores)


def how_far(local: LocalTraining, turn: Turn, trained: Trained) -> dict[str, Tensor]:
    """How far each neuron moved in this turn."""
    steps = _less(trained.own, turn.merged)
    return score_neurons(local.model, turn.now.neurons, steps, 2)


def farthest(turn: Turn) -> Active:
    """Those in which the client's own model is farthest from the server's."""
    if turn.memory.own is None:
        rng = stream(turn.now.seed, "first", turn.now.round, turn.now.client)
        return choose_random(turn.now.neurons, turn.now.capacity, rng)
    model = turn.prepare(ModelState(turn.merged), "scoring").model
    scores = score_neurons(model, turn.now.neurons, _less(turn.own, turn.merged), 2)
    return choose_top(turn.now.neurons, turn.now.capacity, scores)


def steepest(turn: Turn) -> Active:
    """Those with the largest gradient in one full batch."""
    local = turn.prepare(ModelState(turn.merged), "scoring")
    local.model.train()
    x, y = next(local.batches())
    local.model.zero_grad()
    local.loss(local.model(x), y).backward()
    grads = {n: p.grad for n, p in local.model.named_parameters() if p.grad is not None}
    scores = score_neurons(local.model, turn.now.neurons, grads, 2)
    local.model.zero_grad()
    return choose_top(turn.now.neurons, turn.now.capacity, scores)


def _less(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: a[name] - b[name] for name in a if a[name].is_floating_point()}


def _remember_moves(turn: Turn, local: LocalTraining) -> Trained:
    return remember(turn, local, partial(how_far, local))


def _remember_rounds(turn: Turn, local: LocalTraining) -> Trained:
    return remember(turn, local, when)


def _method(name: str, keep: Callable[[Turn], Active]) -> Method:
    words = in_global_context.in_words
    about = (keep.__doc__ or "").rstrip(".").lower()
    return replace(
        in_global_context,
        name=name,
        reference="docs/beyond.md",
        reading="original",
        in_words=(words[0], f"a share p of each layer: {about}", *words[2:]),
        keep=keep,
    )


rolling = _method("rolling", in_turn)
oldest = replace(_method("oldest", longest_ago), train=_remember_rounds)
moving = replace(_method("moving", moved_most), train=_remember_moves)
far = _method("far", farthest)
gradient = _method("gradient", steepest)

# Playing ------------------------------------------------------------------------------

NAMES = ("rolling", "oldest", "moving", "far", "gradient")
ALPHAS = (0.1, 1.0)
FOLDERS: Folders = {"guided-cifar10": ("cifar10", False)}
RANDOM = "fedspu@context=global"
METHODS = (RANDOM, *(f"benchmarks.guided:{name}" for name in NAMES))
PARTS = tuple(
    Part("guided-cifar10", (method,), alphas=(alpha,))
    for alpha in ALPHAS
    for method in METHODS
)
SETTINGS = {
    "rounds": 200,
    "method.finish": 10,
    "server.average": "ema",
    "wire.down": "bfloat16",
}
"""As in fedspu-plus at first."""

if __name__ == "__main__":
    match sys.argv[1:]:
        case ["play", folder, data]:
            play(Path(folder), Path(data), PARTS, FOLDERS, SETTINGS)
        case ["collect", folder]:
            collect(Path(folder), FOLDERS)
        case _:
            sys.exit(__doc__)
