"""What a recording holds about a turn, worked out at full size."""

import torch
from torch import Tensor

from fedspu.conformance.entries import (
    as_bytes,
    at_full_size,
    held_by_slim,
    is_active,
)
from fedspu.conformance.recording import RecordedTraining, RecordedTurn, Recording
from fedspu.federation.messages import Packet, TrainReply, Way
from fedspu.federation.plan import Plan
from fedspu.neurons.table import Active, State


def training_of(turn: RecordedTurn) -> RecordedTraining:
    """What a client's training was given, and what it returned."""
    if turn.training is None:
        raise RuntimeError(f"client {turn.client} did not train in round {turn.round}")
    return turn.training


def arrived(turn: RecordedTurn) -> TrainReply:
    """A reply as the server reads it."""
    if turn.arrived is None:
        raise RuntimeError(f"no reply from client {turn.client} in round {turn.round}")
    return turn.arrived


def up_of(turn: RecordedTurn) -> Packet:
    """A reply as it was sent."""
    if turn.up is None:
        raise RuntimeError(f"no reply from client {turn.client} in round {turn.round}")
    return turn.up


def offered(turn: RecordedTurn) -> Active:
    """The neurons a client was sent."""
    offer = turn.request.offer
    return offer.active if offer else {}


def travelling(plan: Plan) -> list[str]:
    """The tensors that are exchanged: all in the table, except those that stay."""
    stays = set(plan.method.stays(plan.neurons))
    if plan.settings.norm.policy == "local":
        stays |= plan.neurons.norm_tensors
    return [name for name in plan.neurons.shapes if name not in stays]


def are_active(run: Recording, active: Active, name: str) -> Tensor:
    """Which entries of a tensor connect only active neurons."""
    shape = tuple(run.initial[name].shape)
    return is_active(run.plan.neurons, active, name, shape)


def trained_entries(run: Recording, turn: RecordedTurn, name: str) -> Tensor:
    """The entries of a tensor that a client trained for the server."""
    active = arrived(turn).active
    if active is None:
        return torch.zeros(run.initial[name].shape, dtype=torch.bool)
    return are_active(run, active, name)


def model_at_full_size(
    run: Recording, turn: RecordedTurn, state: State
) -> tuple[State, dict[str, Tensor]]:
    """A client's model at its place in the full one, and which entries it has."""
    active = turn.reply.active if turn.reply else None
    if not run.plan.method.is_slim or active is None:
        return state, {
            n: torch.ones_like(v, dtype=torch.bool) for n, v in state.items()
        }
    held = held_by_slim(run.plan.neurons, active)
    return at_full_size(run.plan.neurons, held, state, run.initial)


def sent_at_full_size(run: Recording, turn: RecordedTurn) -> State:
    """The model whose trained entries went back, at its place in the full one."""
    return model_at_full_size(run, turn, training_of(turn).sent)[0]


def bytes_at(run: Recording, state: State, active: Active, way: Way) -> bytes:
    """The travelling entries of the active neurons as they are sent, in order."""
    return b"".join(
        as_bytes(_as_sent(run.plan, name, state[name][inside], way))
        for name in travelling(run.plan)
        for inside in [are_active(run, active, name)]
    )


def _as_sent(plan: Plan, name: str, values: Tensor, way: Way) -> Tensor:
    """The values of a tensor, rounded as ``wire.values`` and ``wire.down`` say."""
    if values.dtype != torch.float32 or name in plan.neurons.statistics:
        return values
    wire = plan.settings.wire
    form = wire.values if way == "up" or wire.down is None else wire.down
    return values.to(getattr(torch, form))


def as_received(plan: Plan, name: str, values: Tensor, way: Way) -> Tensor:
    """The values of a tensor, as whoever they are sent to reads them."""
    return _as_sent(plan, name, values, way).to(values.dtype)
