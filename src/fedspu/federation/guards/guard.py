"""What a guard is, and the one that the settings name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedspu.federation.guards.accountant import epsilon
from fedspu.federation.guards.noisy_sum import NoisySum, most_turns
from fedspu.federation.guards.rules import Ruled, find_rule
from fedspu.federation.plan import Plan
from fedspu.federation.server import TrainRequests
from fedspu.neurons.average import Accumulator
from fedspu.settings import GuardSettings


@dataclass(frozen=True)
class Guard:
    """Limits what one client can do to the server's model.

    ``on_server``: what combines a round's updates, from that round's requests and the
    method's own accumulator. It may change updates on their way there, or replace it.
    ``facts``: what the summary of a run says about the guard, after so many rounds.
    """

    on_server: Callable[[TrainRequests, Accumulator], Accumulator]
    facts: Callable[[Plan, int], dict[str, Any]]


def find_guard(settings: GuardSettings) -> Guard:
    """The guard that the settings name."""
    if settings.noise:
        return _privacy(settings)
    if settings.rule != "none":
        return _against_hostile_clients(settings)
    return Guard(on_server=lambda requests, own: own, facts=lambda plan, rounds: {})


def _against_hostile_clients(settings: GuardSettings) -> Guard:
    def on_server(requests: TrainRequests, own: Accumulator) -> Accumulator:
        statistics = requests.plan.neurons.statistics
        state = requests.federation.global_state
        return Ruled(find_rule(settings), state, statistics, own)

    return Guard(on_server, facts=lambda plan, rounds: {"guard": settings.rule})


def _privacy(settings: GuardSettings) -> Guard:
    def on_server(requests: TrainRequests, own: Accumulator) -> Accumulator:
        return NoisySum(requests, settings.clip, settings.noise)

    def facts(plan: Plan, rounds: int) -> dict[str, Any]:
        turns = most_turns(plan, rounds)
        return {
            "guard": "noise",
            "epsilon": epsilon(settings.noise, settings.delta, turns),
            "delta": settings.delta,
            "most_turns": turns,
        }

    return Guard(on_server, facts)
