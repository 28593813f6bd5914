"""What a newcomer to the Python functions stumbled over: one clear line for each."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fedspu
from fedspu.errors import FedSPUError
from fedspu.tasks.classification import classification
from fedspu.tasks.task import Task
from tests.oracles.federation import SMALL, examples


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


class Says(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.function = net(), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.net(x))


def frozen() -> nn.Module:
    return net().requires_grad_(False)


def lazy() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))


def images() -> nn.Module:
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), *pool)


def exits() -> nn.Module:
    raise SystemExit("no GPU")


X, Y = examples()
BROKEN = np.where(np.arange(X.size).reshape(X.shape) == 0, np.nan, X)


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (lambda: Says(lambda s: (s, s)), (X, Y), "a tuple; .* like output\\[0\\]"),
        (lambda: Says(lambda s: {"logits": s}), (X, Y), "like output\\['logits'\\]"),
        (lambda: Says(lambda s: None), (X, Y), "let forward return the scores alone"),
        (frozen, (X, Y), r"requires_grad=True; .*model\.requires_grad_\(True\)"),
        (
            lazy,
            (X, Y),
            r"1 \(LazyLinear\), 3 \(LazyLinear\); name the sizes, or run one batch "
            r".*model\(torch\.zeros\(2, 1, 4, 4\)\)",
        ),
        (net, (BROKEN, Y), r"the first is x\[0\]; leave them out, .*nan_to_num"),
        (net, (X, Y[:100]), "100 targets in y; expected one target for each"),
        (
            images,
            (np.zeros((120, 8, 8, 3), np.float32), Y),
            r"channels come last: .*x\.transpose\(0, 3, 1, 2\)",
        ),
        (net, (X, Y * 1000), "or number labels from 0 upwards: y = np.unique"),
        (net, (np.array(["a", "b", "c"])[Y], Y), "x holds text; .*docs/text.md"),
        (net, (Y, Y), r"x has shape .*use x\.reshape\(-1, 1\)"),
        (
            net,
            DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y))),
            r"data is a DataLoader; .*data=loader\.dataset",
        ),
        (exits, (X, Y), "build function: it raised SystemExit: no GPU"),
    ],
)
def test_what_is_wrong_comes_with_the_next_step(
    model: Callable[[], nn.Module], data: Any, message: str
) -> None:
    with pytest.raises(FedSPUError) as caught:
        fedspu.simulate(SMALL, model=model, data=data)
    assert re.search(message, str(caught.value))


def test_a_lazy_model_that_has_seen_a_batch_is_a_model_as_any_other() -> None:
    def ready() -> nn.Module:
        model = lazy()
        model(torch.zeros(2, 1, 4, 4))
        return model

    fedspu.simulate({**SMALL, "rounds": 1}, model=ready, data=(X, Y))
    with pytest.raises(FedSPUError, match=r"before it is returned: model\(x\[:2\]\)"):
        fedspu.map_neurons(lazy(), torch.zeros(2, 1, 4, 4))


def mean_accuracy(output: Tensor, y: Tensor) -> Tensor:
    return (output.argmax(1) == y).float().mean()


def every_loss(output: Tensor, y: Tensor, /, *, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


def bare_loss(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y)


NO_REDUCTION: Any = bare_loss


METRIC = replace(classification.metric, name="mine", measure=mean_accuracy, value=float)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (replace(classification, metric=METRIC), "expected sums over examples"),
        (replace(classification, loss=every_loss), "expected one number: the mean"),
        (
            replace(classification, loss=NO_REDUCTION),
            "'reduction' .*; docs/tasks.md says",
        ),
    ],
)
def test_a_task_of_one_s_own_learns_what_to_return(task: Task, message: str) -> None:
    task = replace(task, name="mine", weigh_classes=None)
    with pytest.raises(FedSPUError, match=message):
        fedspu.simulate(SMALL, model=net, data=(X, Y), task=task)


def test_settings_are_no_arguments() -> None:
    with pytest.raises(FedSPUError, match=r"has no argument rounds; .*simulate\({'"):
        fedspu.simulate(rounds=1)  # type: ignore[arg-type]  # this is the mistake


def test_a_client_is_a_whole_number() -> None:
    run = fedspu.simulate({**SMALL, "rounds": 1}, model=net, data=(X, Y))
    with pytest.raises(FedSPUError, match="client = '3': expected a whole number"):
        run.personal_model("3")  # type: ignore[arg-type]  # this is the mistake
    assert run.personal_model(np.int64(3)).training is False  # type: ignore[arg-type]  # NumPy's are fine


def test_a_seed_is_no_generator() -> None:
    neurons = fedspu.map_neurons(net(), torch.zeros(2, 16))
    with pytest.raises(FedSPUError, match=r"rng = 0: .*np\.random\.default_rng\(0\)"):
        fedspu.choose_random(neurons, 0.4, 0)  # type: ignore[arg-type]  # this is the mistake


@pytest.mark.parametrize(
    ("name", "how"), [("x.onnx", "InferenceSession"), ("x.pt2", r"torch\.export\.load")]
)
def test_another_format_is_loaded_by_its_own_library(name: str, how: str) -> None:
    with pytest.raises(FedSPUError, match=f"expected a .safetensors file; .*{how}"):
        fedspu.load_exported(Path(name))
