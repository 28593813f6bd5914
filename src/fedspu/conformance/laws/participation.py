"""Laws about who takes part."""

from dataclasses import replace
from itertools import pairwise

import torch

from fedspu.conformance.cases import Case
from fedspu.conformance.entries import first_difference
from fedspu.conformance.laws.law import Broken, law, played_to_its_end
from fedspu.conformance.recorded_turns import arrived
from fedspu.federation.client import Client
from fedspu.federation.client_memory import Shelf
from fedspu.methods.method import Memory


@law
def newcomers_have_w0_and_leavers_stay_away(case: Case) -> None:
    """A client that never took part has w0; one that stopped never takes part again."""
    run = played_to_its_end(case.usual)
    if wrong := first_difference(run.plan.initial, run.initial):
        raise Broken(f"w0 itself has changed: {wrong}")
    plan = replace(run.plan, method=replace(case.method, ready=None))
    player = Client(plan, run.examples, Shelf(None), torch.device("cpu"))
    for client in sorted(set(range(plan.num_clients)) - run.last.last.keys()):
        if client in run.memories:
            raise Broken(f"client {client} never took part, but has a memory")
        if case.method.keeps_own:
            t, state = run.last.round, run.last.global_state
            model = player.ready_model(t, client, Memory(), state).model
            if wrong := first_difference(dict(model.state_dict()), run.initial):
                raise Broken(f"client {client} never took part, but its {wrong}")

    run = played_to_its_end(case.stopping)
    for before, after in pairwise(run.federations):
        turns = run.in_round(after.round)
        here = {turn.client for turn in turns}
        if back := sorted(here & before.stopped):
            raise Broken(
                f"client {back[0]} has stopped, but takes part in round {after.round}"
            )
        gone = {turn.client for turn in turns if arrived(turn).has_stopped}
        if forgotten := sorted((before.stopped | gone) - after.stopped):
            raise Broken(
                f"client {forgotten[0]} has stopped, but after round {after.round} the "
                "server does not know it"
            )
