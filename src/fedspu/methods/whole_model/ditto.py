"""Ditto: a personal model trains beside the global one, and is pulled towards it.

Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021. A client trains the global model as in FedAvg and returns
it. It also trains a model of its own, on its own loss plus λ/2 times the squared
distance from the global model it was sent. Everyone trains at full size.

Taken from the paper: all of that, in this order. Assumed: both train for the usual
local epochs, in random streams of their own; personal models begin from w0; λ, the
setting ``method.pull``, is 1. The loss that is reported, and blended for early
stopping, is the personal model's, without the distance. Norms' running statistics are
each model's own.
"""

from functools import partial

import torch

from fedspu.methods.method import Method, ModelState, Trained, Turn, all_neurons
from fedspu.methods.options import DittoOptions
from fedspu.neurons.blocks import state_of
from fedspu.training.epochs import LocalTraining, train


def two_models(turn: Turn, local: LocalTraining, pull: float) -> Trained:
    """Local epochs of the global model, then of the client's own."""
    train(local)
    sent = state_of(local.model)
    personal = turn.prepare(ModelState(turn.own), "personal")

    def draw_to_global() -> None:
        with torch.no_grad():
            for name, parameter in personal.model.named_parameters():
                if parameter.grad is not None:
                    away = parameter - turn.merged[name].to(parameter.device)
                    parameter.grad.add_(away, alpha=pull)

    loss = train(personal, after_backward=draw_to_global)
    return Trained(loss, sent=sent, own=state_of(personal.model))


def ditto(options: DittoOptions) -> Method:
    """Ditto with a pull of this strength."""
    return Method(
        name="ditto",
        reference="Li, Hu, Beirami and Smith, ICML 2021",
        reading="original",
        in_words=(
            "the full model, whatever the client's capacity",
            "the full model; and its own, pulled towards what was sent",
            "a full model of its own",
            "its own model",
        ),
        judged_by="own",
        offer=all_neurons,
        train=partial(two_models, pull=options.pull),
    )
