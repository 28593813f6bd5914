"""One client's exception costs that client's turn, on every engine."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedspu
from fedspu.engines.workers import can_fork
from fedspu.errors import (
    MethodError,
    ModelError,
    SettingsError,
    StorageError,
    TrainingError,
)
from fedspu.federation.client import Client
from fedspu.federation.client_memory import Shelf, ShelfError
from fedspu.federation.messages import JudgeReply, JudgeRequest, TrainRequest
from fedspu.federation.server import Federation, choose_clients
from fedspu.methods.fedspu import fedspu as fedspu_record
from fedspu.methods.method import Memory, Offer
from tests.oracles.federation import (
    CLASSES,
    ConvNet,
    examples,
    folder_content,
    named,
    plan_for,
)

needs_fork = pytest.mark.skipif(not can_fork(), reason="workers are forked")
ENGINES = [1, pytest.param(2, marks=needs_fork)]

Raise = Callable[[], BaseException]


def run(path: Path | None = None, **given: Any) -> fedspu.Run:
    settings = named(rounds=3, clients__per_round=4, judge__every=1, **given)
    if path is not None:
        settings["out"] = str(path)
    return fedspu.simulate(settings, model=ConvNet, data=examples())


def cohort(t: int) -> list[int]:
    plan = plan_for(rounds=3, clients__per_round=4)
    return choose_clients(Federation(t - 1, plan.initial), plan, t)


VICTIM = cohort(2)[1]


def failing(
    monkeypatch: pytest.MonkeyPatch, error: Raise, t: int = 2, *clients: int
) -> None:
    """Let training fail in one round: for one client, or some."""
    original = Client.take_turn

    def turn(self: Client, request: TrainRequest, memory: Memory) -> Any:
        if request.round == t and request.client in (clients or (VICTIM,)):
            raise error()
        return original(self, request, memory)

    monkeypatch.setattr(Client, "take_turn", turn)


ERRORS: dict[str, tuple[Raise, str]] = {
    "a loss that overflowed": (
        lambda: TrainingError("the training loss is nan"),
        r"^the training loss is nan$",
    ),
    "the user's own code": (
        lambda: KeyError("no such key"),
        r"^it raised KeyError: 'no such key' \(test_failures\.py, line \d+\)$",
    ),
    "PyTorch": (
        lambda: RuntimeError("out of memory\nand more"),
        r"^it raised RuntimeError: out of memory \(test_failures\.py, line \d+\)$",
    ),
    "an error of a setting": (
        lambda: SettingsError("guard = 3"),
        r"^guard = 3$",
    ),
    "an error of a file": (
        lambda: StorageError("my.csv cannot be read"),
        r"^my\.csv cannot be read$",
    ),
    "an exit": (
        lambda: SystemExit("bye"),
        r"^it raised SystemExit: bye \(test_failures\.py, line \d+\)$",
    ),
    "no memory": (MemoryError, r"^it raised MemoryError \("),
}


@pytest.mark.filterwarnings("ignore:1 of clients' turns were lost")
@pytest.mark.parametrize("workers", ENGINES)
@pytest.mark.parametrize("kind", ERRORS)
def test_one_client_s_exception_costs_its_turn_and_is_shown(
    kind: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, reason = ERRORS[kind]
    failing(monkeypatch, error)
    found = run(workers=workers)
    lost = [line["missing_clients"] for line in found.rounds]
    assert [list(missing) for missing in lost] == [[], [str(VICTIM)], []]
    assert found.summary["missing_turns"] == 1
    assert re.search(reason, lost[1][str(VICTIM)])
    assert found.rounds[1]["clients"] == [k for k in cohort(2) if k != VICTIM]


@pytest.mark.filterwarnings("ignore:1 of clients' turns were lost")
@needs_fork
def test_all_engines_go_on_in_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client begins again from what it had before."""
    failing(monkeypatch, ERRORS["the user's own code"][0])
    for workers in (1, 2):
        run(tmp_path / str(workers), workers=workers)
    contents = [folder_content(tmp_path / str(workers)) for workers in (1, 2)]
    assert contents[0] == contents[1]
    names = {Path(name).name for name in contents[0]}
    assert f"client-{VICTIM}-round-2.safetensors" not in names


def test_a_warning_counts_the_turns_that_were_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing(monkeypatch, lambda: KeyError("x"))
    with pytest.warns(UserWarning, match=r"^1 of clients' turns were lost \(round"):
        run()


@pytest.mark.parametrize("workers", ENGINES)
@pytest.mark.parametrize("kind", ERRORS)
def test_if_all_fail_the_run_ends_with_the_first_failure(
    kind: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, ERRORS[kind][0], 2, *range(6))
    wanted = rf"round 2, client {cohort(2)[0]}: .*; the other 3 failed too$"
    with pytest.raises(TrainingError, match=wanted) as caught:
        run(tmp_path / "run", workers=workers)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "run/rounds.jsonl").read_text().count("\n") == 1


LOUD: dict[str, tuple[Raise, type[BaseException]]] = {
    "a disk that is full": (lambda: ShelfError("no space left"), StorageError),
    "a method's wrong answer": (lambda: MethodError("its keep"), SettingsError),
}


@pytest.mark.parametrize("workers", ENGINES)
@pytest.mark.parametrize("kind", LOUD)
def test_an_error_that_is_not_the_client_s_own_ends_the_run(
    kind: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, wanted = LOUD[kind]
    failing(monkeypatch, error)
    with pytest.raises(wanted):
        run(workers=workers)


def test_an_interrupt_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        run()


class OnlyJudged(nn.Module):
    """Fails when it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            raise ValueError("not in training")
        scores: Tensor = self.inner(x)
        return scores


@pytest.mark.parametrize("workers", ENGINES)
def test_a_model_that_fails_only_in_training_is_one_line(workers: int) -> None:
    with pytest.raises(TrainingError, match=r"ValueError: not in training") as caught:
        fedspu.simulate(named(workers=workers), model=OnlyJudged, data=examples())
    assert str(caught.value).startswith("round 1, client ")
    assert "\n" not in str(caught.value)


# Judging ------------------------------------------------------------------------------


def unjudgeable(
    monkeypatch: pytest.MonkeyPatch, fails: Callable[[JudgeRequest], bool]
) -> None:
    original = Client.judge

    def judge(self: Client, request: JudgeRequest, *rest: Any) -> JudgeReply:
        if fails(request):
            raise ZeroDivisionError("nothing to score")
        return original(self, request, *rest)

    monkeypatch.setattr(Client, "judge", judge)


@pytest.fixture(params=ENGINES)
def workers(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


def test_a_client_that_cannot_be_judged_does_not_end_the_run(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(workers=workers)
    unjudgeable(monkeypatch, lambda r: (r.round, r.client) == (2, VICTIM))
    with pytest.warns(UserWarning, match=r"^1 times a client could not be judged"):
        found = run(workers=workers)
    lost = [line["unjudged_clients"] for line in found.rounds]
    assert [list(line) for line in lost] == [[], [str(VICTIM)], []]
    assert "ZeroDivisionError: nothing to score" in lost[1][str(VICTIM)]
    same = [name for name in whole.rounds[1] if "accuracy" not in name]
    same.remove("unjudged_clients")
    for name in same:
        assert found.rounds[1][name] == whole.rounds[1][name]
    assert found.summary["unjudged_turns"] == 1


def test_if_nobody_was_ever_judged_and_all_fail_the_run_ends(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unjudgeable(monkeypatch, lambda request: True)
    wanted = r"round 0, client 0: it raised ZeroDivisionError: .*failed too$"
    with pytest.raises(TrainingError, match=wanted):
        run(workers=workers)


@pytest.mark.parametrize("method", ["fedspu", "fedavg"])
def test_if_none_can_be_judged_any_more_scores_stay_as_before(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(method=method)
    unjudgeable(monkeypatch, lambda request: request.round >= 2)
    with pytest.warns(UserWarning, match=r"^12 times a client could not be judged"):
        found = run(method=method)
    assert found.rounds[0] == whole.rounds[0]
    for name in ("personal_accuracy", "global_accuracy"):
        assert found.summary[name] == found.rounds[0][name]
    for line in found.rounds[1:]:
        assert len(line["unjudged_clients"]) == 6
        assert line["global_accuracy"] is None  # an older one is not shown as new


# Rounds of one client -----------------------------------------------------------------


def alone(monkeypatch: pytest.MonkeyPatch, *rounds: int) -> fedspu.Run:
    """A run with one client a round, whose turns fail in some rounds."""
    original = Client.take_turn

    def turn(self: Client, request: TrainRequest, memory: Memory) -> Any:
        if request.round in rounds:
            raise KeyError("no such key")
        return original(self, request, memory)

    monkeypatch.setattr(Client, "take_turn", turn)
    settings = named(rounds=3, clients__per_round=1)
    return fedspu.simulate(settings, model=ConvNet, data=examples())


@pytest.mark.filterwarnings("ignore:2 of clients' turns were lost")
def test_a_client_that_is_alone_in_its_round_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = alone(monkeypatch, 2, 3)
    assert [len(line["missing_clients"]) for line in found.rounds] == [0, 1, 1]


def test_if_the_first_client_fails_and_is_alone_the_run_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(TrainingError, match=r"^round 1, client \d: it raised KeyError"):
        alone(monkeypatch, 1)


def test_a_shelf_that_cannot_be_read_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Shelf.get

    def get(self: Shelf, client: int, t: int) -> Memory:
        if t == 1:
            raise StorageError("cannot be read")
        return original(self, client, t)

    monkeypatch.setattr(Shelf, "get", get)
    with pytest.raises(StorageError, match="cannot be read"):
        run()


# A method's own code on the server ----------------------------------------------------


def given(anything: Any) -> Any:
    """What a type checker would refuse."""
    return anything


@pytest.mark.parametrize(
    ("offer", "says"),
    [
        (lambda now: 1 / 0, "its offer raised ZeroDivisionError"),
        (
            lambda now: Offer(given({"conv1": [0]})),
            "has a list for group 'conv1'; expected a",
        ),
        (lambda now: Offer(given([0, 1])), "an Offer of a list; expected a dict"),
    ],
)
def test_an_offer_that_cannot_be_made_is_one_line(offer: Any, says: str) -> None:
    method = replace(fedspu_record, name="mine", offer=offer)
    with pytest.raises(MethodError, match=says) as caught:
        fedspu.simulate(named(), model=ConvNet, data=examples(), method=method)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["method", "model", "task"])
def test_a_name_given_instead_of_an_object_says_where_names_go(name: str) -> None:
    key = "method.name" if name == "method" else name
    says = rf"^{name} = 'local': a name goes into the settings.*'{key}': 'local'"
    given: dict[str, Any] = {name: "local"}
    with pytest.raises(SettingsError, match=says):
        fedspu.simulate(named(), data=examples(), **given)


def test_many_wrong_neurons_are_not_all_listed() -> None:
    table = plan_for().neurons
    active = {**table.everything(), "conv1": torch.arange(5000)}
    with pytest.raises(ModelError, match=r"got \[0, 1, .*, 9, …\], 5000 in all$"):
        table.blocks(active)
