"""APFL: a client's model is a mix of its own weights and the global model's.

Deng, Kamani and Mahdavi, "Adaptive Personalized Federated Learning", 2020. In each
batch a client takes a step of the global model w, and a step of its own weights v by
the gradient of the mixed model α v + (1 - α) w; it returns w. The share α is learned,
between 0 and 1: α <- α - η <v - w, gradient of the mixed model>. Everyone trains at
full size. The mixed model is the one that a client uses.

Taken from the paper: all of that; both steps of a batch start from the same w. Assumed:
α is learned once in a turn, in its first batch, as in the authors' code, with the
learning rate of the weights; v begins from w0, α from ``method.mix``. The loss that is
reported is the mixed model's. Norms' running statistics are each model's own.
"""

import copy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedspu.methods.method import Method, Trained, Turn, all_neurons
from fedspu.methods.options import APFLOptions
from fedspu.neurons.blocks import load_state, state_of
from fedspu.neurons.table import State
from fedspu.partial.context import partial_training
from fedspu.training.epochs import LocalTraining, RunningMean, make_optimizer, take_step

OWN, SHARE = "own:", "share"
"""In a client's memory: its own weights, by name, and its share α of them."""


@dataclass
class Mixture:
    """A client's own weights, their share, and the model that the mix is put into."""

    own: dict[str, Tensor]
    share: float
    model: nn.Module

    @staticmethod
    def of(turn: Turn, model: nn.Module, mix: float) -> "Mixture":
        """The mixture that the client remembers; at first, w0 and the share ``mix``."""
        extra = turn.memory.extra
        own = {
            name: extra.get(f"{OWN}{name}", turn.own[name]).to(p.device).clone()
            for name, p in model.named_parameters()
        }
        share = float(extra[SHARE]) if SHARE in extra else mix
        mixed = copy.deepcopy(model)
        load_state(mixed, turn.own)  # for the statistics of its norms
        return Mixture(own, share, mixed)

    @torch.no_grad()
    def blend(self, weights: dict[str, Tensor]) -> None:
        """Put the mix with the global weights into the model."""
        for name, parameter in self.model.named_parameters():
            mixed = self.share * self.own[name] + (1 - self.share) * weights[name]
            parameter.copy_(mixed)

    def take_gradient(self, grads: dict[str, Tensor | None]) -> None:
        """Pass the gradient of the mixed model on to the client's own weights."""
        for name, own in self.own.items():
            grad = grads[name]
            own.grad = None if grad is None else self.share * grad

    def next_share(
        self, weights: dict[str, Tensor], grads: dict[str, Tensor | None], lr: float
    ) -> float:
        """The share after one step, by the gradient of the mixed model."""
        slope = sum(
            float(((self.own[name].detach() - weights[name]) * grad).sum())
            for name, grad in grads.items()
            if grad is not None
        )
        return min(1.0, max(0.0, self.share - lr * slope))

    def memory(self) -> State:
        """What the client keeps besides the mixed model."""
        own = {f"{OWN}{name}": t.detach().cpu() for name, t in self.own.items()}
        return {**own, SHARE: torch.tensor(self.share, dtype=torch.float64)}


def mixed_epochs(turn: Turn, local: LocalTraining, options: APFLOptions) -> Trained:
    """Local epochs of the global model, and of the client's own weights beside it."""
    settings = local.settings
    mixture = Mixture.of(turn, local.model, options.mix)
    mean, loss = RunningMean(), local.loss
    training = partial(
        partial_training,
        neurons=local.neurons,
        active=local.active,
        mode=settings.gradient,
        saves=settings.saves,
        kernels=settings.kernels,
    )
    local.model.train()
    mixture.model.train()
    for tensor in mixture.own.values():
        tensor.requires_grad_()
    with local.dropout(), training(local.model) as shared, training(mixture.model):
        of_shared = make_optimizer(shared, settings)
        of_own = make_optimizer(list(mixture.own.values()), settings)
        is_first = True
        for _ in range(settings.epochs):
            for x, y in local.batches():
                weights = _values(local.model)
                mixture.blend(weights)
                mixture.model.zero_grad()
                value = loss(mixture.model(x), y)
                value.backward()
                grads = {n: p.grad for n, p in mixture.model.named_parameters()}
                share = mixture.share
                if is_first and options.adaptive:
                    share = mixture.next_share(weights, grads, settings.lr)
                of_shared.zero_grad()
                loss(local.model(x), y).backward()
                take_step(of_shared, settings)
                mixture.take_gradient(grads)
                take_step(of_own, settings)
                mixture.share, is_first = share, False
                mean.add(value, local.task.count(y))
            mean.check(settings)
    mixture.blend(_values(local.model))
    return Trained(
        mean.value,
        sent=state_of(local.model),
        own=state_of(mixture.model),
        extra=mixture.memory(),
    )


def _values(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a model's parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def apfl(options: APFLOptions) -> Method:
    """APFL with these options."""
    return Method(
        name="apfl",
        reference="Deng, Kamani and Mahdavi, 2020",
        reading="original",
        in_words=(
            "the full model, whatever the client's capacity",
            "the full model; and weights of its own, as a part of the mixed model",
            "the mixed model, its own weights and their share",
            "the mixed model",
        ),
        judged_by="own",
        offer=all_neurons,
        train=partial(mixed_epochs, options=options),
    )
