"""What a user of the suite sees: reports, refusals, a method of one's own."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedspu import State
from fedspu.conformance import (
    LAWS,
    MODELS,
    Case,
    Setup,
    Violation,
    check,
    examine,
    laws_for,
)
from fedspu.conformance.entries import first_difference, is_active
from fedspu.conformance.nets import ConvNet, made_examples, mlp
from fedspu.engines.local import LocalEngine
from fedspu.errors import ModelError, SettingsError
from fedspu.federation.engine import Answer, Missing
from fedspu.federation.messages import Request, TrainRequest
from fedspu.methods import all_methods, make_method
from fedspu.methods.fedspu import fedspu
from fedspu.methods.method import Trained, Turn, local_epochs
from fedspu.neurons.table import Axis, NeuronGroup, Neurons
from fedspu.settings import MethodSettings
from fedspu.training.epochs import LocalTraining
from tests.oracles.tampering import with_values

DATA = made_examples()
SAME = "arrival_engine_and_resume_make_no_difference"


def only(*laws: str) -> list[str]:
    """The names of all other laws."""
    return [name for name in LAWS if name not in laws]


# A method of one's own ----------------------------------------------------------------


def test_a_method_of_ones_own_passes_without_being_listed_anywhere() -> None:
    check(replace(fedspu, name="mine", reference="nobody"), mlp, DATA)


def test_a_violation_lists_every_law_that_is_broken_once() -> None:
    def noisy(turn: Turn, local: LocalTraining) -> Trained:
        trained = local_epochs(turn, local)
        for name, _ in local.model.named_parameters():
            trained.sent[name].add_(0.5)
        return trained

    laws = ("nothing_is_learnt_from_nothing", "only_what_was_trained_leaves_a_client")
    with pytest.raises(Violation) as caught:
        check(
            replace(fedspu, name="noisy", train=noisy),
            mlp,
            DATA,
            leave_out=only(*laws, "bytes_reported_are_bytes_sent"),
        )
    assert caught.value.laws == laws
    first, second = str(caught.value).split("\n\n")
    assert first.startswith("nothing_is_learnt_from_nothing: noisy on mlp violates ")
    assert second.startswith("only_what_was_trained_leaves_a_client: noisy on mlp ")


def test_a_violation_names_law_method_model_entry_and_numbers() -> None:
    def drifting(turn: Turn, local: LocalTraining) -> Trained:
        trained = local_epochs(turn, local)
        trained.sent["1.bias"].fill_(2.0)
        return trained

    with pytest.raises(Violation) as caught:
        check(
            replace(fedspu, name="drifting", train=drifting),
            mlp,
            DATA,
            leave_out=only("nothing_is_learnt_from_nothing"),
        )
    text = str(caught.value)
    assert "nothing_is_learnt_from_nothing: drifting on mlp" in text
    assert "after round 1 at learning rate 0" in text
    assert "the global 1.bias[0] is 2.0 instead of " in text
    assert "of 136 entries of 1.bias differ" in text


def test_a_method_that_fails_is_reported_with_its_error() -> None:
    def broken(turn: Turn, local: LocalTraining) -> Trained:
        raise ZeroDivisionError("no such luck")

    with pytest.raises(Violation, match="could not be checked: ZeroDivisionError: no"):
        check(replace(fedspu, name="broken", train=broken), mlp, DATA)


def test_a_report_has_one_line_for_each_law_and_model() -> None:
    only_one = only("bytes_reported_are_bytes_sent")
    findings = list(examine("local", leave_out=only_one))
    assert [finding.model for finding in findings] == list(MODELS)
    assert all(finding.violation is None for finding in findings)
    assert all(finding.seconds > 0 for finding in findings)


def test_a_law_that_does_not_exist_cannot_be_left_out() -> None:
    with pytest.raises(SettingsError) as caught:
        check("fedspu", leave_out=["bytes_reported_are_bytes_send"])
    text = str(caught.value)
    assert "did you mean bytes_reported_are_bytes_sent?" in text
    assert all(law in text for law in LAWS)


def test_a_model_without_data_is_refused() -> None:
    with pytest.raises(SettingsError, match="expected a model and data for it"):
        check("fedspu", ConvNet)


def test_a_model_that_will_not_do_is_refused_as_in_any_run() -> None:
    with pytest.raises(ModelError, match="the model failed on two examples"):
        check("fedspu", lambda: torch.nn.Linear(7, 3), DATA)


def test_laws_are_left_out_for_few_methods_and_on_purpose() -> None:
    left_out = {
        method.name: LAWS.keys() - laws_for(method).keys()
        for method in all_methods().values()
    }
    few = {name: laws for name, laws in left_out.items() if laws}
    assert few.keys() == {"fedala", "fedrep", "fedselect"}
    fedavg = "at_full_capacity_it_is_fedavg"
    assert all(laws == {fedavg} for laws in few.values())


# Settings, and tasks other than classification ----------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm.policy", "local"),
        ("train.optimizer", "adam"),
        ("train.clip", 0.1),
        ("train.augment", ["flip", "crop"]),
        ("train.class_weights", "balanced"),
        ("wire.down", "float16"),
        ("train.schedule", "cosine"),
        ("early_stopping.patience", 2),
        ("clients.per_round", 4),
    ],
)
def test_the_laws_hold_in_runs_with_other_settings(name: str, value: object) -> None:
    net = ConvNet if name == "norm.policy" else mlp
    check("fedspu", net, DATA, settings={name: value})


def test_a_learning_rate_that_is_given_is_that_of_every_run_that_learns() -> None:
    """A model that diverges with ours could not be tried at all."""
    case = Case(fedspu, Setup("mlp", mlp, DATA, settings={"train.lr": 0.01}))
    for run in (case.usual, case.full, case.stopping):
        assert run.plan.settings.train.lr == 0.01
    assert case.idle.plan.settings.train.lr == 0


@pytest.mark.parametrize("method", ["fedspu", "hermes", "apfl", "fjord"])
def test_the_laws_hold_where_numbers_are_learned(method: str) -> None:
    x, _ = DATA
    data = x, x.mean((1, 2, 3))

    def net() -> nn.Module:
        layers = nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 1)
        return nn.Sequential(nn.Flatten(), *layers)

    check(method, net, data, settings={"task": "regression"})


@pytest.mark.parametrize("method", ["fedspu", "hermes", "fedrolex"])
def test_the_laws_hold_where_text_is_learned(method: str) -> None:
    tokens = np.random.default_rng(5).integers(7, size=(64, 6))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 5)
            self.gru = nn.GRU(5, 6, batch_first=True)
            self.head = nn.Linear(6, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.gru(self.embed(x))[0])
            return scores

    check(method, Net, (tokens, None), settings={"task": "language-model"})


@pytest.mark.parametrize("method", ["fedspu", "hermes", "fedbn"])
def test_the_laws_hold_where_maps_are_learned(method: str) -> None:
    x, _ = DATA
    maps = (x[:, 0] > 0).astype(np.int64) + (x[:, 0] > 1)
    maps[:, 0, 0] = -100

    def net() -> nn.Module:
        hidden = nn.Conv2d(1, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU()
        return nn.Sequential(*hidden, nn.Conv2d(5, 3, 1))

    check(method, net, (x, maps), settings={"task": "segmentation"})


# Engines ------------------------------------------------------------------------------


class Careless(LocalEngine):
    """An engine in which one client's reply comes back changed."""

    def exchange(
        self, requests: Mapping[int, Request], broadcast: State | None = None
    ) -> Iterator[tuple[int, Answer | Missing]]:
        """What clients said, but for a bias."""
        asked = {client: requests[client] for client in requests}
        for client, answer in super().exchange(asked, broadcast):
            if isinstance(asked[client], TrainRequest) and client == max(requests):
                assert isinstance(answer, Answer)
                yield client, larger_bias(self.plan, asked[client], answer)
            else:
                yield client, answer


larger_bias = with_values(lambda reply: {"5.bias": reply.payload["5.bias"] + 1})


def test_engines_can_be_put_on_trial_too() -> None:
    check("fedspu", mlp, DATA, leave_out=only(SAME), engines=(LocalEngine,))
    with pytest.raises(
        Violation, match=r"on Careless, after round 1, the global 5.bias"
    ):
        check("fedspu", mlp, DATA, leave_out=only(SAME), engines=(Careless,))


# What is looked at --------------------------------------------------------------------


def test_the_usual_run_has_all_that_the_laws_look_at() -> None:
    run = Case(fedspu, Setup("mlp", mlp, DATA)).usual
    cohorts = run.cohorts()
    taken_part = [client for cohort in cohorts for client in cohort]
    assert all(len(cohort) >= 3 for cohort in cohorts)  # two would add up either way
    assert len(set(taken_part)) < len(taken_part)  # someone comes twice
    assert set(taken_part) < set(range(run.plan.num_clients))  # someone never does
    capacities = {float(run.plan.capacity(client)) for client in cohorts[0]}
    assert capacities == {0.5, 0.75}  # so some entries are not trained by anyone
    sizes = {len(run.examples.splits[client].train) for client in cohorts[0]}
    assert len(sizes) > 1  # weights matter
    labels = [run.examples.part(client, "train")[1] for client in cohorts[0]]
    assert any(len(own.unique()) < 3 for own in labels)  # HeteroFL leaves rows out


def test_full_and_partial_clients_meet_in_the_run_with_early_stopping() -> None:
    run = Case(fedspu, Setup("convnet", ConvNet, DATA)).stopping
    last = [float(run.plan.capacity(client)) for client in run.cohorts()[-1]]
    assert min(last) < 1.0 == max(last)


@pytest.mark.parametrize("method", ["fedspu", "hermes", "local"])
@pytest.mark.parametrize("model", list(MODELS))
def test_clients_stop_while_there_is_a_round_to_come(model: str, method: str) -> None:
    setup = Setup(model, MODELS[model], DATA)
    run = Case(make_method(MethodSettings(name=method)), setup).stopping
    assert run.federations[2].stopped
    assert run.last.round == 3


def test_an_entry_is_active_where_all_its_neurons_are() -> None:
    table = Neurons(
        (
            NeuronGroup("a", 2, (Axis("w", dim=0),)),
            NeuronGroup("b", 2, (Axis("w", dim=1, repeat=2, offset=1),)),
        ),
        shapes={"w": (2, 5)},
    )
    active = {"a": torch.tensor([1]), "b": torch.tensor([0])}
    found = is_active(table, active, "w", (2, 5))
    assert found.tolist() == [[False] * 5, [True, True, True, False, False]]


def test_gates_of_one_neuron_are_active_together() -> None:
    axis = Axis("w", dim=0, copies=3, stride=2)
    table = Neurons((NeuronGroup("a", 2, (axis,)),), shapes={"w": (6,)})
    found = is_active(table, {"a": torch.tensor([1])}, "w", (6,))
    assert found.tolist() == [False, True] * 3


def test_a_difference_is_told_by_its_place_and_its_values() -> None:
    a, b = {"w": torch.zeros(2, 2)}, {"w": torch.zeros(2, 2)}
    assert first_difference(a, b) is None
    b["w"][1, 0] = 3.0
    assert first_difference(a, b) == (
        "w[1, 0] is 0.0 instead of 3.0 (1 of 4 entries of w differ)"
    )
    assert (
        first_difference(a, {"v": b["w"]}) == "v, w can be found in only one of the two"
    )


def test_minus_zero_is_not_zero_and_nan_is_nan() -> None:
    zero, minus = {"w": torch.tensor(0.0)}, {"w": torch.tensor(-0.0)}
    nan = {"w": torch.tensor(torch.nan)}
    assert first_difference(zero, minus) == (
        "w is 0.0 instead of -0.0 (1 of 1 entries of w differ)"
    )
    assert first_difference(nan, {"w": torch.tensor(torch.nan)}) is None


# From a shell -------------------------------------------------------------------------

OWN = """
from dataclasses import replace
from fedspu.methods.fedspu import fedspu
from fedspu.methods.method import local_epochs

good = replace(fedspu, name="good")

def fault(turn, local):
    trained = local_epochs(turn, local)
    next(iter(trained.sent.values())).add_(1)
    return trained

bad = replace(fedspu, name="bad", train=fault)
"""


def in_a_shell(
    folder: Path, *args: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """What a command says, run elsewhere than in our own folder."""
    (folder / "own.py").write_text(OWN)
    return subprocess.run(
        [sys.executable, *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_pytest_runs_the_suite_on_a_method_of_ones_own(tmp_path: Path) -> None:
    suite = ["-m", "pytest", "-q", "-W", "error", "--pyargs", "fedspu.conformance"]
    suite += ["-k", "mlp", "-p", "no:cacheprovider"]
    good = in_a_shell(tmp_path, *suite, FEDSPU_METHOD="own:good")
    assert good.returncode == 0, good.stdout
    assert f"{len(LAWS)} passed" in good.stdout
    bad = in_a_shell(tmp_path, *suite, FEDSPU_METHOD="own:bad")
    assert bad.returncode == 1
    assert "nothing_is_learnt_from_nothing: bad on mlp violates the law" in bad.stdout


def test_the_laws_need_no_pytest(tmp_path: Path) -> None:
    asks = "import fedspu.conformance, sys; print('pytest' in sys.modules)"
    said = in_a_shell(tmp_path, "-c", asks)
    assert said.stdout.strip() == "False", said.stderr
