"""What is checked about a message before it is used, by the server and by a client.

A message that fails is never used in part: ``read_reply`` and ``read_request`` give it
whole, or raise a ModelError that says what is wrong with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedspu.errors import ModelError
from fedspu.federation.messages import (
    LONGEST_HEADER,
    JudgeReply,
    JudgeRequest,
    Packet,
    Reply,
    Request,
    TrainReply,
    TrainRequest,
    Way,
    longest_positions,
    pack_reply,
    pack_request,
    unpack_reply,
    unpack_request,
    wire_type,
)
from fedspu.federation.plan import Plan
from fedspu.neurons.blocks import is_finite
from fedspu.neurons.table import Active, State

ROUNDING = 1e-6
"""How far a share may be from 0 to 1: means of floats are not exact."""


@dataclass(frozen=True)
class Sizes:
    """The most bytes that each part of a message may have."""

    header: int
    positions: int
    values: int
    initial: int


def largest(plan: Plan) -> Sizes:
    """The most bytes that any message of a plan has, part by part."""
    if plan not in _LARGEST:
        _LARGEST[plan] = _largest(plan)
    return _LARGEST[plan]


_LARGEST: "WeakKeyDictionary[Plan, Sizes]" = WeakKeyDictionary()


def _largest(plan: Plan) -> Sizes:
    table = {name: plan.initial[name] for name in plan.neurons.shapes}
    return Sizes(
        header=LONGEST_HEADER,
        positions=longest_positions(plan),
        values=sum(
            whole.numel()
            * max(wire_type(plan, name, way).itemsize for way in get_args(Way))
            for name, whole in table.items()
            if name not in plan.stays
        ),
        initial=sum(plan.initial[name].nbytes for name in plan.sent_initially),
    )


# The server ---------------------------------------------------------------------------


def read_reply(
    plan: Plan, request: Request, packet: Packet, num_examples: int | None = None
) -> Reply:
    """The reply to a request, if the server may use it.

    ``num_examples`` is how many training examples the client had in earlier rounds.
    Only the offer of a train request is needed, not its values.
    """
    _check_sizes(replace(largest(plan), initial=0), packet)
    for seconds in packet.took:
        if not (isfinite(seconds) and seconds >= 0):
            raise ModelError(f"it took {seconds} seconds")
    reply = unpack_reply(plan, request, packet)
    _check_kind(request, reply)
    if (reply.round, reply.client) != (request.round, request.client):
        raise ModelError(f"it belongs to client {reply.client} in round {reply.round}")
    _check_count(plan, reply.num_examples)
    if isinstance(reply, JudgeReply):
        _check_score(plan, reply)
    elif isinstance(request, TrainRequest):
        if num_examples not in (None, reply.num_examples):
            raise ModelError(
                f"it is from {reply.num_examples} examples; before, the client had "
                f"{num_examples}"
            )
        _check_losses(plan, request, reply)
        _check_neurons(plan, request, reply)
        _check_values(plan, "its", reply.payload)
    # A message has one form: any other hides something, such as bits that belong to no
    # neuron. Values have no second form.
    bare = replace(reply, payload={}) if isinstance(reply, TrainReply) else reply
    _check_form(packet, pack_reply(plan, request, bare))
    return reply


def _check_kind(request: Request, reply: Reply) -> None:
    wanted = JudgeReply if isinstance(request, JudgeRequest) else TrainReply
    if not isinstance(reply, wanted):
        raise ModelError(
            f"it is a {type(reply).__name__}; expected a {wanted.__name__}"
        )


def _check_count(plan: Plan, num_examples: int) -> None:
    most = plan.settings.clients.max_examples
    if num_examples < 1:
        raise ModelError(f"it is from {num_examples} examples")
    if num_examples > most:
        raise ModelError(
            f"it is from {num_examples} examples; clients.max_examples is {most}"
        )


def _check_score(plan: Plan, reply: JudgeReply) -> None:
    metric = plan.task.metric
    parts = {"": reply.value, " on validation examples": reply.val_value}
    for part, value in parts.items():
        if not (isfinite(reply.loss) and isfinite(value)):
            raise ModelError(f"its {metric.title}{part} is {value}, loss {reply.loss}")
        if metric.is_share and not -ROUNDING <= value <= 1 + ROUNDING:
            raise ModelError(f"its {metric.title}{part} is {value}; expected 0 to 1")


def _check_losses(plan: Plan, request: TrainRequest, reply: TrainReply) -> None:
    is_on = plan.settings.early_stopping.on or request.is_finish
    if not isfinite(reply.train_loss):
        raise ModelError(f"its training loss is {reply.train_loss}")
    if reply.val_loss is not None and not isfinite(reply.val_loss):
        raise ModelError(f"its validation loss is {reply.val_loss}")
    if is_on and reply.val_loss is None:
        raise ModelError("it has no validation loss, which early stopping needs")
    if request.is_finish and reply.has_stopped:
        raise ModelError("it says that the client stops, but the run has ended")
    if not is_on and (reply.val_loss is not None or reply.has_stopped):
        what = "says that the client stops" if reply.has_stopped else "validates"
        raise ModelError(f"it {what}, but early_stopping is off")


def _check_neurons(plan: Plan, request: TrainRequest, reply: TrainReply) -> None:
    """Refuse neurons that were not offered; others than offered, if none may choose."""
    offer = request.offer
    if offer is None or request.is_finish:
        if reply.active is not None:
            raise ModelError("it has values, but nothing is exchanged")
        return
    if reply.active is None:
        raise ModelError("it has no values")
    if reply.active is offer.active:  # as read from a reply that says "the same"
        return
    if name := _first_outside(reply.active, offer.active):
        raise ModelError(f"it has neurons of {name} that were not offered")
    if not plan.method.trains_what_is_offered:
        return
    if name := _first_outside(offer.active, reply.active):
        raise ModelError(f"it lacks neurons of {name} that were offered")


def _first_outside(active: Active, allowed: Active) -> str | None:
    """The first group with an active neuron that is not allowed."""
    for name, indices in active.items():
        if not bool(torch.isin(indices, allowed[name]).all()):
            return name
    return None


# A client -----------------------------------------------------------------------------


def read_request(plan: Plan, packet: Packet) -> Request:
    """A request, if a client may follow it."""
    _check_sizes(largest(plan), packet)
    request = unpack_request(plan, packet)
    t, last = request.round, request.last
    if isinstance(request, JudgeRequest):
        if last > t:
            raise ModelError(
                f"a request to judge after round {t} says that the client last took "
                f"part in round {last}"
            )
        if request.which == "global" and not plan.method.exchanges:
            raise ModelError("a request to judge a server's model, but there is none")
        _check_form(packet, pack_request(plan, request))
        return request
    if not last < t:
        raise ModelError(
            f"a request for round {t} says that the client last took part in round "
            f"{last}"
        )
    if request.is_finish and not plan.finishes:
        raise ModelError("a request to finish, but this run makes no last models")
    if (request.offer is not None) != plan.method.exchanges:
        what = "nothing" if request.offer is None else "values"
        raise ModelError(f"a request offers {what}, unlike the method")
    is_first = last == 0 and plan.sends_initial
    if (request.initial is not None) != is_first:
        what = "without" if is_first else "with"
        raise ModelError(f"a request {what} the initial model; last round: {last}")
    _check_values(plan, "the server's", request.payload)
    _check_values(plan, "the initial", request.initial or {})
    _check_form(packet, pack_request(plan, replace(request, payload={}, initial=None)))
    return request


def check_broadcast(plan: Plan, state: State) -> None:
    """Refuse a server's model that does not fit the plan."""
    shapes = {name: (values.shape, values.dtype) for name, values in state.items()}
    if shapes != {name: (w.shape, w.dtype) for name, w in plan.initial.items()}:
        raise ModelError("the server's model has other tensors than the plan")
    _check_values(plan, "the server's", state)


# Both ---------------------------------------------------------------------------------


def _check_sizes(most: Sizes, packet: Packet) -> None:
    """Refuse a message that is too long, before anything of it is read."""
    for part in ("header", "positions", "values", "initial"):
        length, limit = len(getattr(packet, part)), getattr(most, part)
        if length > limit:
            raise ModelError(
                f"a message with {length} bytes of {part}; expected at most {limit}"
            )


VARIANCE = "running_var"
"""How the names of those norm statistics end that are variances, as in PyTorch."""


def _check_values(plan: Plan, whose: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse values that are not finite, and variances below 0."""
    for name, values in tensors.items():
        if not is_finite(values):
            raise ModelError(f"{whose} {name} is not finite")
        is_variance = name in plan.neurons.statistics and name.endswith(VARIANCE)
        if is_variance and bool((values < 0).any()):
            raise ModelError(f"{whose} {name} is negative; it is a variance")


def _check_form(found: Packet, again: Packet) -> None:
    """Refuse a header or positions that fedspu would not have written."""
    for part in ("header", "positions"):
        if getattr(found, part) != getattr(again, part):
            raise ModelError(f"bits of its {part} mean nothing")
