"""One client's turn, and the memory it keeps between turns."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from fedspu.errors import TrainingError
from fedspu.federation.messages import Reply, Request
from fedspu.federation.plan import Plan
from fedspu.federation.workbench import Bench, Workspace
from fedspu.methods.method import Held, Lesson, Own, Situation
from fedspu.neurons.blocks import extract, merge, state_of
from fedspu.neurons.scores import score_neurons
from fedspu.neurons.slim import slim_state, slimmable
from fedspu.neurons.table import Active, State
from fedspu.streams import stream, torch_stream
from fedspu.training import (
    Score,
    blended_loss,
    check_finite,
    evaluate,
    has_stopped,
    train,
)

Which = Literal["personal", "global"]
"""The model a client would use now, or the server's."""


@dataclass(frozen=True)
class Memory:
    """All that a client keeps between turns; it never leaves the client."""

    own: Held | None  # its own model; None if the method keeps none
    losses: tuple[float, ...] = ()  # blended, one per participation
    kept: Active | None = None  # the neurons it chose, in methods that score them


def take_turn(
    plan: Plan, workspace: Workspace, request: Request, memory: Memory | None
) -> tuple[Reply, Memory]:
    """Algorithm 1, lines 8 to 11, and Algorithm 2, lines 8 to 16."""
    memory = memory or Memory(None)
    t, client = request.round, request.client
    try:
        return _turn(plan, workspace, request, memory)
    except TrainingError as error:
        raise TrainingError(f"round {t}, client {client}: {error}") from None


def _turn(
    plan: Plan, workspace: Workspace, request: Request, memory: Memory
) -> tuple[Reply, Memory]:
    method, offer = plan.method, request.offer
    now = plan.situation(request.round, request.client, memory.kept)
    x, y = plan.examples(now.client, "train")

    # Merge what came into the client's own model.
    base = _full(plan, memory.own, request.initial)
    where = plan.travelling(offer.active) if offer else {}
    begin = Held(method.start(base, where, request.payload))

    # Choose what to train; the rest is frozen, or does not exist.
    own = Own(y, lambda: _scores(plan, workspace.place(begin), now, x, y))
    active = method.keep(now, offer, own)
    if method.is_slim:
        kept = slimmable(plan.neurons, active)
        begin = Held(slim_state(begin.state, plan.neurons, kept), kept)

    # Train.
    bench = workspace.place(begin)
    lesson = _lesson(plan, bench, now, "batches", x, y, _inside(active, begin))
    sent = bench.neurons.blocks(lesson.active)
    with torch_stream(now.seed, "dropout", now.round, now.client):
        train_loss = method.train(lesson)
    trained = replace(begin, state=state_of(bench.model))
    check_finite(trained.state, plan.recipe)

    # Stop once the loss no longer falls.
    losses, val_loss = memory.losses, None
    rule = plan.settings.early_stopping
    if rule.on:
        _settle(plan, bench, now, x, y)
        val_loss = evaluate(bench.model, *plan.examples(now.client, "val")).loss
        if not isfinite(val_loss):
            raise TrainingError(
                f"the validation loss is {val_loss}; lower train.lr (it is "
                f"{plan.recipe.lr})"
            )
        losses = (*losses, blended_loss(train_loss, val_loss, rule.blend))

    reply = Reply(
        active=active if offer else None,
        payload=extract(trained.state, plan.leaving(sent)) if offer else {},
        num_examples=len(x),
        train_loss=train_loss,
        val_loss=val_loss,
        has_stopped=rule.on and has_stopped(losses, rule.patience),
    )
    return reply, Memory(
        own=trained if method.keeps_own else None,
        losses=losses,
        kept=active if method.score is not None else None,
    )


def _full(plan: Plan, own: Held | None, initial: State | None) -> State:
    """The client's own model at full size; what it does not have is as in w0."""
    if own is None:
        return initial or plan.initial
    if own.active is None:
        return own.state
    shapes = {name: tuple(tensor.shape) for name, tensor in plan.initial.items()}
    return merge(plan.initial, plan.neurons.blocks(own.active, shapes), own.state)


def _inside(active: Active, held: Held) -> Active:
    """Active neurons, as the model that has them numbers them."""
    if held.active is None:
        return active
    return {
        name: torch.searchsorted(held.active[name], indices)
        for name, indices in active.items()
    }


def _scores(
    plan: Plan, bench: Bench, now: Situation, x: Tensor, y: Tensor
) -> Mapping[str, Tensor]:
    """Score neurons by an epoch of full training; its weights are thrown away."""
    score = plan.method.score
    if score is None:
        raise TypeError(f"{plan.method.name} asks for scores, and has no score")
    model, everything = bench.model, bench.neurons.everything()
    summed = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def add_gradients() -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                summed[name] += parameter.grad

    rng = stream(now.seed, "scoring", now.round, now.client)
    recipe = replace(plan.recipe, epochs=1)
    with torch_stream(now.seed, "scoring dropout", now.round, now.client):
        train(
            *(model, bench.neurons, everything, x, y, recipe, rng),
            after_backward=add_gradients,
        )
    weights = {name: p.detach() for name, p in model.named_parameters()}
    values = weights if score.of == "weights" else summed
    check_finite(values, plan.recipe)
    return score_neurons(model, bench.neurons, values, score.order)


def _lesson(
    plan: Plan,
    bench: Bench,
    now: Situation,
    purpose: str,
    x: Tensor,
    y: Tensor,
    active: Active | None = None,
) -> Lesson:
    return Lesson(
        model=bench.model,
        neurons=bench.neurons,
        active=bench.neurons.everything() if active is None else active,
        x=x,
        y=y,
        recipe=plan.recipe,
        rng=stream(now.seed, purpose, now.round, now.client),
        now=now,
    )


def _settle(plan: Plan, bench: Bench, now: Situation, x: Tensor, y: Tensor) -> None:
    if plan.method.settle is not None:
        plan.method.settle(_lesson(plan, bench, now, "settle", x, y))


# The model a client would use ---------------------------------------------------------


def ready_model(
    plan: Plan,
    workspace: Workspace,
    t: int,
    client: int,
    memory: Memory | None,
    global_state: State,
    which: Which = "personal",
) -> Bench:
    """The model that a client would use after round t, or the server's; as judged."""
    memory = memory or Memory(None)
    now = plan.situation(t, client, memory.kept)
    held = Held(global_state)
    if which == "personal":
        held = plan.method.judge(now, global_state, memory.own or Held(plan.initial))
    bench, method = workspace.place(held), plan.method
    adapts = which == "personal" and method.adapts(now.options)
    if method.settle is None and not adapts:
        return bench
    x, y = plan.examples(client, "train")
    _settle(plan, bench, now, x, y)
    if method.adapt is not None and adapts:
        with torch_stream(now.seed, "adapt dropout", t, client):
            method.adapt(_lesson(plan, bench, now, "adapt", x, y))
    return bench


def judge(
    plan: Plan,
    workspace: Workspace,
    t: int,
    client: int,
    memory: Memory | None,
    global_state: State,
    which: Which = "personal",
) -> Score:
    """How well the model does on the client's own test examples."""
    bench = ready_model(plan, workspace, t, client, memory, global_state, which)
    return evaluate(bench.model, *plan.examples(client, "test"))
