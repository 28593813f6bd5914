"""FedALA: a client begins from a learned mix of the global model and its own.

Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning",
AAAI 2023. The lower layers are the global model's. In the last layers every entry
begins from own + weight * (global - own); the weights, between 0 and 1, are learned on
a random share of the client's examples, while the model itself does not change. Then
the client trains all of it, keeps it, and returns it. Everyone trains at full size.

Taken from the paper and its authors' code: all of that; weights begin at 1 and are
kept; the first time, they are learned until the loss varies by less than 0.1 over ten
epochs, later for one epoch. Assumed: at most 30 epochs the first time; at a client's
first participation there is nothing to mix; norms' running statistics come from the
server.
"""

from functools import partial
from statistics import pstdev

import torch
from torch import Tensor

from fedspu.methods.method import Method, Trained, Turn, all_neurons, local_epochs
from fedspu.methods.options import FedALAOptions
from fedspu.random_streams import stream
from fedspu.training.epochs import LocalTraining, RunningMean, batches
from fedspu.training.last_layer import last_layers

WINDOW, THRESHOLD, MOST = 10, 0.1, 30
"""Weights are learned until the losses of the last WINDOW epochs vary by less than
THRESHOLD, for at most MOST epochs."""


def mix_then_train(turn: Turn, local: LocalTraining, options: FedALAOptions) -> Trained:
    """Learn the mix, put it into the model, and train as usual."""
    extra: dict[str, Tensor] = {}
    if turn.memory.own is not None:
        extra = _mix(turn, local, options)
    trained = local_epochs(turn, local)
    return Trained(trained.loss, trained.sent, trained.own, extra)


def _mix(turn: Turn, local: LocalTraining, options: FedALAOptions) -> dict[str, Tensor]:
    """Learn the mix and put it into the last layers; return its weights."""
    names = last_layers(turn.now.neurons, options.layers)
    mixed = {n: p for n, p in local.model.named_parameters() if n in names}
    came = {name: p.detach().clone() for name, p in mixed.items()}
    own = {name: turn.own[name].to(p.device) for name, p in mixed.items()}
    weights = {
        name: turn.memory.extra.get(name, torch.ones_like(own[name])).to(p.device)
        for name, p in mixed.items()
    }
    buffers = {name: b.clone() for name, b in local.model.named_buffers()}
    is_first = not turn.memory.extra
    losses: list[float] = []
    x, y = _share(turn, local, options.share)
    rng = stream(turn.now.seed, "mixing", turn.now.round, turn.now.client)
    local.model.train()
    with local.dropout():
        while True:
            mean = RunningMean()
            for batch in batches(len(x), local.settings.batch_size, rng):
                _put(mixed, own, came, weights)
                local.model.zero_grad()
                loss = local.loss(local.model(x[batch]), y[batch])
                loss.backward()
                mean.add(loss, local.task.count(y[batch]))
                for name, parameter in mixed.items():
                    if parameter.grad is not None:
                        slope = parameter.grad * (came[name] - own[name])
                        step = weights[name] - options.mix_lr * slope
                        weights[name] = step.clamp(0, 1)
            mean.check(local.settings)
            losses.append(mean.value)
            if not is_first or len(losses) == MOST or _is_settled(losses):
                break
    _put(mixed, own, came, weights)
    local.model.zero_grad()
    with torch.no_grad():
        for name, buffer in local.model.named_buffers():
            buffer.copy_(buffers[name])
    return {name: values.cpu() for name, values in weights.items()}


@torch.no_grad()
def _put(
    mixed: dict[str, torch.nn.Parameter],
    own: dict[str, Tensor],
    came: dict[str, Tensor],
    weights: dict[str, Tensor],
) -> None:
    for name, parameter in mixed.items():
        parameter.copy_(own[name] + weights[name] * (came[name] - own[name]))


def _share(turn: Turn, local: LocalTraining, share: float) -> tuple[Tensor, Tensor]:
    """A random share of the client's examples, at least two of them."""
    rng = stream(turn.now.seed, "mixing share", turn.now.round, turn.now.client)
    number = min(len(local.x), max(2, round(share * len(local.x))))
    chosen = torch.from_numpy(rng.permutation(len(local.x))[:number])
    return local.x[chosen], local.y[chosen]


def _is_settled(losses: list[float]) -> bool:
    return len(losses) > WINDOW and pstdev(losses[-WINDOW:]) < THRESHOLD


def fedala(options: FedALAOptions) -> Method:
    """FedALA with these options."""
    return Method(
        name="fedala",
        reference="Zhang et al., AAAI 2023",
        reading="original",
        in_words=(
            "the full model, whatever the client's capacity",
            "how its last layers mix with its own; then the full model",
            "a full model of its own, and the weights of the mix",
            "its own model",
        ),
        judged_by="own",
        departs={
            "at_full_capacity_it_is_fedavg": "clients mix what came with what they had"
        },
        offer=all_neurons,
        train=partial(mix_then_train, options=options),
    )
