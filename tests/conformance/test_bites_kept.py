"""Faults of what stays, is kept, is judged and is reported; planted as elsewhere."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedspu import Payload, State, extract
from fedspu.federation import client as client_module
from fedspu.federation import client_memory as memory
from fedspu.federation import rounds
from fedspu.federation.client import Client
from fedspu.federation.client_memory import Shelf, unpack_memory
from fedspu.federation.engine import Cost
from fedspu.federation.messages import JudgeReply, JudgeRequest, Packet
from fedspu.federation.plan import Plan
from fedspu.federation.record import summarise
from fedspu.federation.server import Federation, next_federation
from fedspu.federation.storage.run_folder import RunFolder
from fedspu.federation.storage.saved_run import Checkpoint, SavedRun
from fedspu.methods.fedspu import fedspu
from fedspu.methods.method import Memory, Trained, Turn, local_epochs
from fedspu.methods.whole_model.ditto import two_models
from fedspu.neurons.blocks import state_of
from fedspu.settings import TrainSettings
from fedspu.training.epochs import LocalTraining
from tests.conformance.catching import (
    BYTES,
    FEDAVG,
    HELD_OUT,
    LEAVES,
    MEAN,
    SAME,
    WHO,
    assert_caught,
)

Patch = pytest.MonkeyPatch

# Tensors that stay, models that are sent, and what the server keeps -------------------


@pytest.mark.parametrize("law", [LEAVES, BYTES])
@pytest.mark.parametrize("name", ["fedper", "fedbn"])
def test_tensors_that_should_stay_and_are_sent_all_the_same(
    monkeypatch: Patch, name: str, law: str
) -> None:
    monkeypatch.setattr(Plan, "stays", frozenset())
    assert_caught(law, name, says="bytes of values")


def test_tensors_that_should_stay_and_are_returned_all_the_same(
    monkeypatch: Patch,
) -> None:
    def fault(state: State, where: Any) -> Payload:
        whole = {name: (None,) * v.dim() for name, v in state.items()}
        return extract(state, {**whole, **where})

    monkeypatch.setattr(client_module, "extract", fault)
    assert_caught(LEAVES, "fedper", says="bytes of values; the entries it trained are ")


def test_a_client_s_model_in_the_server_s_memory(monkeypatch: Patch) -> None:
    def fault(plan: Plan, before: Any, combined: State, replies: Any) -> Federation:
        after = next_federation(plan, before, combined, replies)
        return replace(after, extra={f"client {min(replies)}": combined["fc.weight"]})

    monkeypatch.setattr(rounds, "next_federation", fault)
    assert_caught(LEAVES, says="the server also keeps client ")


def test_a_model_sent_that_is_not_the_one_trained() -> None:
    def fault(turn: Turn, local: LocalTraining) -> Trained:
        return replace(local_epochs(turn, local), sent=turn.merged)

    assert_caught(FEDAVG, replace(fedspu, name="mine", train=fault))


def test_a_personal_model_sent_in_place_of_the_global_one(monkeypatch: Patch) -> None:
    def fault(turn: Turn, local: LocalTraining, pull: float) -> Trained:
        trained = two_models(turn, local, pull)
        return replace(trained, sent=trained.own)

    monkeypatch.setattr("fedspu.methods.whole_model.ditto.two_models", fault)
    assert_caught(FEDAVG, "ditto")


@pytest.mark.parametrize("law", [MEAN, LEAVES])
def test_a_client_that_returns_what_it_keeps_instead(
    monkeypatch: Patch, law: str
) -> None:
    """The method trained one model for the server, and the client sends the other."""
    kept: list[State] = []

    def fault(state: State, settings: TrainSettings) -> None:
        kept.append(state)

    def swapped(state: State, where: Any) -> Payload:
        return extract(kept[-1], where)

    monkeypatch.setattr(client_module, "check_finite", fault)
    monkeypatch.setattr(client_module, "extract", swapped)
    assert_caught(law, "ditto")


# A resume -----------------------------------------------------------------------------


def forgets(monkeypatch: Patch, **what: Any) -> None:
    """After a resume the server no longer knows something."""
    right = SavedRun.checkpoint

    def fault(self: SavedRun) -> Checkpoint:
        found = right(self)
        return replace(found, federation=replace(found.federation, **what))

    monkeypatch.setattr(SavedRun, "checkpoint", fault)


def recalls(monkeypatch: Patch, fault: Callable[[Memory], Memory]) -> None:
    """What a client reads again is not what it kept."""

    def faulty(saved: State) -> Memory:
        return fault(unpack_memory(saved))

    monkeypatch.setattr(memory, "unpack_memory", faulty)


def test_a_resume_that_forgets_who_stopped(monkeypatch: Patch) -> None:
    forgets(monkeypatch, stopped=frozenset())
    assert_caught(SAME, says="after a resume clients ")


def test_a_resume_that_forgets_which_neurons_were_kept(monkeypatch: Patch) -> None:
    forgets(monkeypatch, kept={})
    assert_caught(SAME, "hermes", says="after a resume")


def test_a_resume_that_forgets_who_took_part(monkeypatch: Patch) -> None:
    forgets(monkeypatch, last={})
    assert_caught(SAME, says="after a resume")


@pytest.mark.parametrize("name", ["fedspu", "ditto"])
def test_a_resume_that_forgets_personal_models(monkeypatch: Patch, name: str) -> None:
    recalls(monkeypatch, lambda kept: replace(kept, own=None))
    assert_caught(SAME, name, says="after a resume")


def test_a_resume_that_forgets_losses(monkeypatch: Patch) -> None:
    recalls(monkeypatch, lambda kept: replace(kept, losses=()))
    assert_caught(SAME, says="after a resume")


def test_a_resume_that_forgets_what_else_a_method_keeps(monkeypatch: Patch) -> None:
    recalls(monkeypatch, lambda kept: replace(kept, extra={}))
    assert_caught(SAME, "apfl", says="after a resume")


def test_what_else_a_method_keeps_is_never_saved(monkeypatch: Patch) -> None:
    right = memory.pack_memory

    def fault(kept: Memory) -> State:
        return right(replace(kept, extra={}))

    monkeypatch.setattr(memory, "pack_memory", fault)
    assert_caught(SAME, "apfl", says="after a resume")


class Oldest(Shelf):
    """A shelf that hands out the first memory of a client, not the one asked for."""

    def get(self, client: int, t: int) -> Memory:
        rounds = [t for k, t in self.names() if k == client]
        return super().get(client, min(rounds, default=t))


def test_a_memory_of_the_wrong_round_used_after_a_resume(monkeypatch: Patch) -> None:
    right = RunFolder.open

    def fault(path: Path) -> RunFolder:
        folder = right(path)
        folder.shelf = Oldest(path / "personal")
        return folder

    monkeypatch.setattr(Shelf, "drop", lambda self, client, t: None)
    monkeypatch.setattr(RunFolder, "open", fault)
    assert_caught(SAME, says="after a resume")


# Judging ------------------------------------------------------------------------------


def judging(
    monkeypatch: Patch, fault: Callable[[Client, Memory, Tensor], None]
) -> None:
    """Whoever judges also does something else; it has the client's test examples."""
    right = Client.judge

    def faulty(
        self: Client, request: JudgeRequest, memory: Memory, global_state: State | None
    ) -> JudgeReply:
        reply = right(self, request, memory, global_state)
        fault(self, memory, self.examples.part(request.client, "test")[0])
        return reply

    monkeypatch.setattr(Client, "judge", faulty)


def learns(client: Client, memory: Memory, x: Tensor) -> None:
    """Norms learn from the examples that the client's own model is judged on."""
    own = client.plan.initial if memory.own is None else memory.own.state
    model = client.plan.build()
    model.load_state_dict(own)
    with torch.no_grad():
        model.train()(x)
    for name, values in state_of(model).items():
        own[name].copy_(values)


def test_judging_that_changes_w0(monkeypatch: Patch) -> None:
    judging(monkeypatch, learns)
    assert_caught(WHO, says="w0 itself has changed")


@pytest.mark.parametrize("law", [HELD_OUT, SAME])
def test_judging_that_changes_the_model_it_judges(monkeypatch: Patch, law: str) -> None:
    def fault(client: Client, memory: Memory, x: Tensor) -> None:
        if memory.own is not None:
            learns(client, memory, x)

    judging(monkeypatch, fault)
    assert_caught(law, settings={"judge.clients": 5})


# Reports ------------------------------------------------------------------------------

COSTS = ("bytes_up", "bytes_down", "index_bytes", "bytes_initial")


@pytest.mark.parametrize("name", COSTS)
def test_bytes_that_are_under_reported(monkeypatch: Patch, name: str) -> None:
    right = Cost.of

    def fault(down: Packet, up: Packet) -> Cost:
        cost = right(down, up)
        return replace(cost, **{name: getattr(cost, name) // 2})

    monkeypatch.setattr(Cost, "of", fault)
    assert_caught(BYTES, says=f"{name} = ")


@pytest.mark.parametrize("name", COSTS)
def test_bytes_that_an_engine_under_reports(monkeypatch: Patch, name: str) -> None:
    class Less:
        @staticmethod
        def of(down: Packet, up: Packet) -> Cost:
            cost = Cost.of(down, up)
            return replace(cost, **{name: getattr(cost, name) // 2})

    monkeypatch.setattr("fedspu.federation.client.Cost", Less)
    monkeypatch.setattr("fedspu.engines.workers.Cost", Less)
    assert_caught(BYTES, says=f"{name} = ")


def test_bytes_that_a_summary_leaves_out(monkeypatch: Patch) -> None:
    def fault(*given: Any) -> dict[str, Any]:
        return {**summarise(*given), "bytes_initial": 0}

    monkeypatch.setattr("fedspu.runs.summarise", fault)
    assert_caught(BYTES, says="the summary says bytes_initial = 0")
