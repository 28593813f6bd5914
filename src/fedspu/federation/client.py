"""One client's turn, and the memory it keeps between turns."""

from dataclasses import dataclass
from math import isfinite

from torch import nn

from fedspu.core.blocks import extract
from fedspu.core.evaluation import Score, evaluate
from fedspu.core.neurons import load_state, state_of
from fedspu.core.stopping import blended_loss, has_stopped
from fedspu.core.streams import stream, torch_stream
from fedspu.core.training import check_finite, train
from fedspu.core.types import State
from fedspu.errors import TrainingError
from fedspu.federation.messages import Reply, Request
from fedspu.federation.plan import Plan


@dataclass(frozen=True)
class Memory:
    """All that a client keeps between turns; it never leaves the client."""

    own: State | None  # its personal model; None if the method keeps none
    losses: tuple[float, ...] = ()  # blended, one per participation


def take_turn(
    plan: Plan, model: nn.Module, request: Request, memory: Memory | None
) -> tuple[Reply, Memory]:
    """Algorithm 1, lines 8 to 11, and Algorithm 2, lines 8 to 16.

    ``model`` is a workspace: what was in it before does not matter.
    """
    t, client = request.round, request.client
    now = plan.situation(t, client)
    active = plan.method.keep(now, request.offer)

    # Merge what came into the client's own model.
    own = memory.own if memory else None
    base = own or request.initial or plan.initial
    where = plan.travelling(request.offer.active) if request.offer else {}
    load_state(model, plan.method.start(base, where, request.payload))

    # Train the active neurons; the others are frozen.
    x, y = plan.examples(client, "train")
    seed = plan.settings.seed
    with torch_stream(seed, "dropout", t, client):
        try:
            rng = stream(seed, "batches", t, client)
            train_loss = train(model, plan.neurons, active, x, y, plan.recipe, rng)
            trained = state_of(model)
            check_finite(trained, plan.recipe)
        except TrainingError as error:
            raise TrainingError(f"round {t}, client {client}: {error}") from None

    # Stop once the loss no longer falls.
    losses = memory.losses if memory else ()
    val_loss = None
    rule = plan.settings.early_stopping
    if rule.on:
        val_loss = evaluate(model, *plan.examples(client, "val")).loss
        if not isfinite(val_loss):
            raise TrainingError(
                f"round {t}, client {client}: the validation loss is {val_loss}; lower "
                f"train.lr (it is {plan.recipe.lr})"
            )
        losses = (*losses, blended_loss(train_loss, val_loss, rule.blend))

    reply = Reply(
        active=active if request.offer else None,
        payload=extract(trained, plan.travelling(active)) if request.offer else {},
        num_examples=len(x),
        train_loss=train_loss,
        val_loss=val_loss,
        has_stopped=rule.on and has_stopped(losses, rule.patience),
    )
    return reply, Memory(trained if plan.method.keeps_own else None, losses)


def judge(
    plan: Plan, model: nn.Module, client: int, state: State, part: str = "test"
) -> Score:
    """How well a state does on a client's own examples."""
    load_state(model, state)
    return evaluate(model, *plan.examples(client, part))
