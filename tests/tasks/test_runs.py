"""Whole small runs of every task: each is learned, and told by its own metric."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import exp, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import fedspu
from fedspu.data import load
from fedspu.errors import SettingsError, TrainingError
from fedspu.federation.plan import Build
from fedspu.reports.comparison.blocks import plain
from fedspu.reports.comparison.statistics import RunOfMethod, make_case
from fedspu.reports.tables import run_table
from fedspu.tasks import TASKS
from fedspu.tasks.regression import regression
from fedspu.tasks.task import IGNORED, RESERVED
from tests.oracles.tasks import KINDS
from tests.oracles.zoo import chain

SETTINGS: dict[str, Any] = {
    "workers": 1,
    "clients.number": 6,
    "clients.per_round": 6,
    "clients.capacities": [0.5, 1.0],
    "train.epochs": 2,
    "train.batch_size": 16,
    "data.alpha": 1.0,
}

LENGTH = 32


@dataclass(frozen=True)
class Problem:
    """A task with real or made data, a model, and what must be beaten.

    ``to_beat`` is the metric of the best answer that ignores the inputs, from a
    client's own training and test targets.
    """

    settings: Mapping[str, Any]
    to_beat: Callable[[Tensor, Tensor], float]
    model: Build | None = None
    data: Callable[[], tuple[Any, Any]] | None = None

    def run(self, **given: Any) -> fedspu.Run:
        data = self.data() if self.data else None
        settings = {**SETTINGS, **self.settings, **given}
        return fedspu.simulate(settings, model=self.model, data=data)


# The four problems --------------------------------------------------------------------


def commonest(train: Tensor, test: Tensor) -> float:
    return float((test == train.mode().values).float().mean())


def sides() -> tuple[Tensor, Tensor]:
    """Digits, and how much more ink is on the left than on the right."""
    x, _ = load("digits").take(slice(600))
    halves = x[:, 0, :, :4], x[:, 0, :, 4:]
    left, right = (half.sum((1, 2)) for half in halves)
    return x, (left - right) / 8


def counting() -> nn.Module:
    layers = nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1)
    return nn.Sequential(nn.Flatten(), *layers)


def the_mean(train: Tensor, test: Tensor) -> float:
    return float((test - train.mean()).abs().mean())


def characters() -> list[str]:
    return list((Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8"))


def text() -> tuple[Any, None]:
    """The characters of a licence, as tokens in rows."""
    letters = characters()
    known = sorted(set(letters))
    tokens = np.array([known.index(letter) for letter in letters])
    return tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH), None


class Recurrent(nn.Module):
    """Reads one character after the other."""

    def __init__(self) -> None:
        super().__init__()
        size = len(set(characters()))
        self.embed = nn.Embedding(size, 16)
        self.gru = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, size)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.gru(self.embed(x))[0])
        return scores


def unigram(train: Tensor, test: Tensor) -> float:
    """Of the best model without a context: one that knows the test text's letters."""
    tokens = test[test != IGNORED]
    shares = torch.bincount(tokens).double() / len(tokens)
    return exp(-float(shares[tokens].log().mean()))


def rectangles() -> tuple[Any, Any]:
    """A bright rectangle on noise, and where it is."""
    rng = np.random.default_rng(0)
    maps = np.zeros((160, 10, 10), dtype=np.int64)
    for where in maps:
        height, width = rng.integers(3, 7, size=2)
        top, left = rng.integers(10 - height), rng.integers(10 - width)
        where[top : top + height, left : left + width] = 1
    noise = rng.normal(scale=0.5, size=maps.shape)
    return (noise + 1.5 * maps).astype(np.float32)[:, None], maps


def drawing() -> nn.Module:
    return chain(
        conv1=nn.Conv2d(1, 8, 3, padding=1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(8, 8, 3, padding=1),
        relu2=nn.ReLU(),
        out=nn.Conv2d(8, 2, 1),
    )


def nothing_there(train: Tensor, test: Tensor) -> float:
    """The overlap of those who see no rectangle anywhere."""
    return float((test == 0).float().mean()) / 2


PROBLEMS = {
    "classification": Problem({"data.name": "digits", "rounds": 3}, commonest),
    "regression": Problem(
        {"task": "regression", "rounds": 6, "train.lr": 0.05},
        *(the_mean, counting, sides),
    ),
    "language-model": Problem(
        {
            "task": "language-model",
            "rounds": 5,
            "train.optimizer": "adam",
            "train.lr": 0.02,
        },
        *(unigram, Recurrent, text),
    ),
    "segmentation": Problem(
        {
            "task": "segmentation",
            "rounds": 10,
            "train.lr": 0.3,
            "data.partition": "iid",
        },
        *(nothing_there, drawing, rectangles),
    ),
}

tasks = pytest.mark.parametrize("task", PROBLEMS)
methods = pytest.mark.parametrize("method", ["fedspu", "hermes", "local"])


@cache
def played(task: str, method: str) -> fedspu.Run:
    """A run that several tests look at."""
    return PROBLEMS[task].run(method=method)


# Learning -----------------------------------------------------------------------------


def test_every_task_is_played_here() -> None:
    assert PROBLEMS.keys() == TASKS.keys()


@tasks
@methods
def test_personal_models_beat_what_needs_no_model(task: str, method: str) -> None:
    run = played(task, method)
    metric = run.plan.task.metric
    targets = [
        [run.examples.part(client, part)[1] for part in ("train", "test")]
        for client in range(run.plan.num_clients)
    ]
    easy = [PROBLEMS[task].to_beat(train, test) for train, test in targets]
    found = run.summary[f"personal_{metric.name}"]
    baseline = sum(easy) / len(easy)
    if metric.is_higher_better:
        assert found > 1.2 * baseline
    else:
        assert found < baseline / 1.2


@methods
def test_rectangles_are_found(method: str) -> None:
    assert played("segmentation", method).summary["personal_iou"] > 0.6


@tasks
@methods
def test_a_score_is_the_mean_over_clients_own_models(task: str, method: str) -> None:
    """Each as the definition has it, on the client's own test examples."""
    run = played(task, method)
    slow = []
    for client in range(run.plan.num_clients):
        x, y = run.examples.part(client, "test")
        with torch.no_grad():
            output = run.personal_model(client)(x)
        slow.append(KINDS[task].metric(output, y))
    metric = run.plan.task.metric.name
    found = run.summary[f"personal_{metric}"]
    assert found == pytest.approx(sum(slow) / len(slow), rel=1e-4)
    assert run.rounds[-1][f"personal_{metric}"] == found


@tasks
def test_slim_models_are_played_in_every_task(task: str) -> None:
    run = played(task, "hermes")
    sizes = [
        sum(p.numel() for p in run.personal_model(client).parameters())
        for client in (0, 5)  # of capacities .5 and 1
    ]
    assert sizes[0] < 0.8 * sizes[1]


@tasks
def test_one_seed_gives_the_same_run_of_every_task(task: str) -> None:
    first, again = (PROBLEMS[task].run(rounds=1) for _ in range(2))
    assert first.rounds == again.rounds
    for name, values in first.last.federation.global_state.items():
        assert torch.equal(values, again.last.federation.global_state[name])


# Records, summaries and tables --------------------------------------------------------

METRICS = {
    "classification": "accuracy",
    "regression": "mae",
    "language-model": "perplexity",
    "segmentation": "iou",
}


@tasks
def test_records_have_the_metric_under_its_own_name(task: str, tmp_path: Path) -> None:
    own = METRICS[task]
    run = PROBLEMS[task].run(rounds=1, out=str(tmp_path / "run"))
    assert (run.summary["task"], run.summary["metric"]) == (task, own)
    assert run.summary["higher_is_better"] is (own in ("accuracy", "iou"))
    of_a_round = {
        f"{whose}_{part}{own}"
        for whose in ("personal", "participating", "global")
        for part in ("", "val_")
    }
    names = of_a_round | {f"personal_{own}_by_capacity", f"worst_tenth_{own}"}
    saved = json.loads((tmp_path / "run" / "summary.json").read_text())
    lines = [
        json.loads((tmp_path / "run" / record).read_text().splitlines()[0])
        for record in ("rounds.jsonl", "clients.jsonl")
    ]
    others = [metric for metric in METRICS.values() if metric != own]
    for found, wanted in (
        (run.summary, names),
        (saved, names),
        (lines[0], of_a_round),
        (lines[1], {own, f"val_{own}"}),
    ):
        assert {name for name in found if own in name} == wanted
        assert not [name for name in found for other in others if other in name]
    assert isfinite(lines[1][own])
    assert isfinite(lines[1][f"val_{own}"])


@tasks
def test_scores_by_capacity_are_those_of_its_clients(task: str) -> None:
    run = played(task, "fedspu")
    own = METRICS[task]
    scores = run.last.scores.personal
    assert run.summary[f"personal_{own}_by_capacity"] == {
        "0.5": pytest.approx(sum(scores[k].test for k in (0, 1, 2)) / 3),
        "1.0": pytest.approx(sum(scores[k].test for k in (3, 4, 5)) / 3),
    }


@tasks
def test_the_worst_tenth_of_six_clients_is_the_worst(task: str) -> None:
    run = played(task, "fedspu")
    each = [values.test for values in run.last.scores.personal.values()]
    worst = min(each) if task in ("classification", "segmentation") else max(each)
    assert run.summary[f"worst_tenth_{METRICS[task]}"] == worst
    assert min(each) < max(each)


@tasks
def test_validation_scores_are_of_validation_examples(task: str) -> None:
    run = played(task, "fedspu")
    learned = run.plan.task
    for client, found in run.last.scores.personal.items():
        model = run.personal_model(client)
        for part, value in found._asdict().items():
            x, y = run.examples.part(client, part)
            with torch.no_grad():
                sums = learned.metric.measure(model(x), y)
            assert value == pytest.approx(learned.metric.value(sums), rel=1e-4)


@tasks
def test_tables_say_if_lower_is_better(task: str) -> None:
    run = played(task, "fedspu")
    console = Console(width=200)
    with console.capture() as shown:
        console.print(run_table(run.summary))
    first = next(line for line in shown.get().splitlines() if "personal" in line)
    compared = plain(
        [make_case({}, [RunOfMethod("fedspu", run.summary, {}, False, {})])]
    )
    is_lower = task in ("regression", "language-model")
    assert ("lower is better" in first) is is_lower
    assert ("(lower is better)" in " ".join(compared.split())) is is_lower
    assert f"personal {METRICS[task]}" in first
    value = run.plan.task.metric.show(run.summary[f"personal_{METRICS[task]}"])
    assert value in first
    assert value.removesuffix(" %") in compared
    assert f"personal {METRICS[task]} {value}" in repr(run)
    assert value.endswith("%") is not is_lower


# What is refused ----------------------------------------------------------------------


def small(**given: Any) -> fedspu.Run:
    """A short run of numbers to predict."""
    task = given.pop("task", None)
    problem = PROBLEMS["regression"]
    assert problem.data is not None
    settings = {**SETTINGS, **problem.settings, "rounds": 1, **given}
    return fedspu.simulate(settings, model=counting, data=problem.data(), task=task)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_metric_that_is_not_finite_is_refused_in_one_line(bad: float) -> None:
    metric = replace(regression.metric, name="own_metric", value=lambda sums: bad)
    with pytest.raises(TrainingError, match=f"the own metric {bad}; ") as caught:
        small(task=replace(regression, metric=metric))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("round 0, client 0: ")


def raising(*_: Any, **__: Any) -> Any:
    raise KeyError("no such key")


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a metric that raises": (
        {"value": raising},
        "its metric raised KeyError: 'no such",
    ),
    "a measure that raises": ({"measure": raising}, "its metric raised KeyError"),
    "a text for a metric": ({"value": lambda sums: "x"}, "metric returned a str; exp"),
    "numbers for a metric": ({"value": lambda sums: sums}, r"a tensor of shape \(2,\)"),
    "a list for sums": ({"measure": lambda a, b: [1]}, "its metric measured a list"),
}


@pytest.mark.parametrize(("broken", "says"), BROKEN.values(), ids=BROKEN)
def test_a_broken_metric_is_one_line_that_names_the_task(
    broken: dict[str, Any], says: str
) -> None:
    metric = replace(regression.metric, **broken)
    with pytest.raises(TrainingError, match=says) as caught:
        small(task=replace(regression, name="mine", metric=metric))
    assert str(caught.value).startswith("round 0, client 0: task 'mine': its metric ")
    assert "\n" not in str(caught.value)


def only_in_training(output: Tensor, y: Tensor, /, *, reduction: str = "mean") -> Any:
    return 3.0 if reduction == "mean" else regression.loss(output, y, reduction="sum")


LOSSES: dict[str, tuple[Any, str]] = {
    "raises": (raising, "round 0, client 0: task 'mine': its loss raised KeyError"),
    "knows no reduction": (
        lambda output, y: output.sum(),
        "round 0, client 0: task 'mine': its loss raised TypeError",
    ),
    "is a number, not a tensor": (
        only_in_training,
        r"round 1, client \d: task 'mine': its loss returned a float; expected one",
    ),
    "is many numbers": (
        lambda output, y, reduction: output,
        r"task 'mine': its loss returned a tensor of shape \(\d+, 1\); expected one",
    ),
}


@pytest.mark.parametrize(("loss", "says"), LOSSES.values(), ids=LOSSES)
def test_a_broken_loss_is_one_line_that_names_the_task(loss: Any, says: str) -> None:
    with pytest.raises(TrainingError, match=says) as caught:
        small(task=replace(regression, name="mine", loss=loss))
    assert "\n" not in str(caught.value)


def test_no_metric_may_have_a_name_that_records_use_for_something_else(
    tmp_path: Path,
) -> None:
    run = small(out=str(tmp_path / "run"))
    line = json.loads((tmp_path / "run/clients.jsonl").read_text().splitlines()[0])
    written = {*run.summary, *run.rounds[0]}
    own = {"mae", "val_mae", "mae_by_capacity"}
    prefixes = ("personal_", "participating_", "global_", "worst_tenth_")
    after = {name.removeprefix(p) for p in prefixes for name in written if p in name}
    taken = line.keys() | after
    # A metric is there twice, the second time as val_: so none may be called loss.
    taken |= {name.removeprefix("val_") for name in taken}
    assert taken - own == RESERVED


def test_a_perplexity_beyond_all_numbers_is_refused() -> None:
    class Sure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Recurrent()

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.net(x) * 1e6
            return scores

    problem = replace(PROBLEMS["language-model"], model=Sure)
    with pytest.raises(TrainingError, match="the perplexity inf; expected finite"):
        problem.run(rounds=1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"task": "language-model", "data.partition": "dirichlet"}, "no classes to"),
        ({"task": "segmentation", "train.augment": "flip,crop"}, "not the targets of"),
        ({"task": "language-model", "train.augment": "flip"}, "not the targets of"),
        ({"task": "regression", "train.class_weights": "balanced"}, "has no classes"),
    ],
)
def test_what_a_task_cannot_follow_is_refused_before_data_is_loaded(
    given: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=says):
        fedspu.simulate({"data.name": "cifar10", "data.dir": str(tmp_path), **given})


def test_a_task_of_one_s_own_without_classes_is_divided_at_random() -> None:
    run = small(task=replace(regression, name="mine", strata=None))
    assert run.plan.settings.data.partition == "iid"


def test_text_cannot_be_divided_by_classes() -> None:
    with pytest.raises(SettingsError, match=r"'dirichlet': .*no classes.*iid, natural"):
        PROBLEMS["language-model"].run(**{"data.partition": "dirichlet"})


def test_a_method_of_classes_cannot_learn_numbers() -> None:
    with pytest.raises(SettingsError, match=r"heterofl .*only classification"):
        small(method="heterofl")


# A task of one's own ------------------------------------------------------------------

OWN = """
from dataclasses import replace
import torch
from fedspu.tasks.regression import regression
from fedspu.tasks.task import Metric

def loss(output, target, /, *, reduction="mean"):
    miss = target - output.view_as(target)
    each = torch.maximum(0.9 * miss, -0.1 * miss)
    return each.sum() if reduction == "sum" else each.mean()

def misses(output, target):
    below = (target > output.view_as(target)).sum()
    return torch.tensor([float(below), len(target)], dtype=torch.float64)

def off(sums):
    return abs(float(sums[0] / sums[1]) - 0.1)

quantile = replace(
    regression,
    name="quantile",
    loss=loss,
    metric=Metric("calibration_gap", misses, off, is_higher_better=False),
)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A task in a module of the folder where one works."""
    (tmp_path / "quantile_task.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "quantile_task", raising=False)
    return "quantile_task:quantile"


def test_a_task_of_ones_own_is_learned_and_told_by_its_own_metric(
    own: str, tmp_path: Path
) -> None:
    run = PROBLEMS["regression"].run(task=own, out=str(tmp_path / "run"))
    found = run.summary["personal_calibration_gap"]
    assert found == pytest.approx(gap_from_nine_tenths(run), rel=1e-6)
    assert found < 0.1
    assert gap_from_nine_tenths(played("regression", "fedspu")) > 0.2
    assert run.summary["task"] == "quantile"
    assert run.summary["metric"] == "calibration_gap"
    assert "personal calibration gap" in repr(run)
    assert f'task = "{own}"' in (tmp_path / "run" / "settings.toml").read_text()


def gap_from_nine_tenths(run: fedspu.Run) -> float:
    """How far clients' models are from being above nine targets in ten."""
    gaps: list[float] = []
    for client in range(run.plan.num_clients):
        x, y = run.examples.part(client, "test")
        with torch.no_grad():
            said = run.personal_model(client)(x)[:, 0].tolist()
        above = [float(true) > mine for true, mine in zip(y, said, strict=True)]
        gaps.append(abs(sum(above) / len(above) - 0.1))
    return sum(gaps) / len(gaps)


def test_models_of_a_task_of_ones_own_can_be_used_later(
    own: str, tmp_path: Path
) -> None:
    run = PROBLEMS["regression"].run(task=own, out=str(tmp_path / "run"), rounds=1)
    model = fedspu.load_personal(tmp_path / "run", 2, counting, trust=True)
    x, _ = run.examples.part(2, "test")
    with torch.no_grad():
        assert torch.equal(model(x), run.personal_model(2)(x))


def test_a_task_given_in_python_plays_as_one_named_in_settings(own: str) -> None:
    from fedspu.tasks import find_task

    by_name = PROBLEMS["regression"].run(task=own, rounds=1)
    assert small(task=find_task(own)).rounds == by_name.rounds
