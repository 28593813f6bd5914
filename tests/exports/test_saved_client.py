"""Models of saved runs as files: every kind of method, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedspu
from fedspu.errors import (
    DataError,
    FedSPUError,
    ModelError,
    SettingsError,
    StorageError,
)
from fedspu.methods import METHODS
from fedspu.tasks.regression import regression
from tests.oracles.federation import ConvNet, examples, mlp, run_for

pytestmark = pytest.mark.filterwarnings("ignore:.*is less than one neuron")

REMODELLED = ("small", "heterofl")


def play(path: Path, **given: Any) -> tuple[fedspu.Run, int]:
    """A run in a folder, and a client that took part in it."""
    run = run_for(out=path, **given)
    return run, min(run.last.federation.last)


@pytest.mark.parametrize("method", METHODS)
def test_the_model_of_every_method_is_exported_and_loaded_again(
    method: str, tmp_path: Path
) -> None:
    run, client = play(tmp_path / "run", method=method)
    out = tmp_path / "mine"
    given: dict[str, Any] = {"build": ConvNet, "data": examples()}
    found = fedspu.export(tmp_path / "run", client, out=out, **given)
    x, _ = run.examples.part(client, "test")
    assert found.checked.num_examples == len(x)
    assert found.facts["round"] == "3"
    metric = run.last.scores.personal[client].test
    assert found.checked.values == pytest.approx((metric, metric))
    if method in REMODELLED:
        with pytest.raises(ModelError, match=f"the method {method} changed the model"):
            fedspu.load_exported(out, trust=True)
        return
    model = fedspu.load_exported(out, ConvNet)
    with torch.no_grad():
        assert torch.equal(model(x), run.personal_model(client)(x))


@pytest.mark.parametrize("format", ["onnx", "torch-export"])
@pytest.mark.parametrize(
    "given",
    [
        {"method": "hermes"},
        {"method": "fjord", "method__reading": "original"},
        {"method": "fedavg", "method__finetune": 1},
    ],
    ids=["slim", "remodelled", "made ready"],
)
def test_graphs_of_other_methods_models(
    format: str, given: dict[str, Any], tmp_path: Path
) -> None:
    run, client = play(tmp_path / "run", **given)
    found = fedspu.export(
        tmp_path / "run", client, format, tmp_path / "a", build=ConvNet, data=examples()
    )
    x, y = run.examples.part(client, "test")
    with torch.no_grad():
        right = (run.personal_model(client)(x).argmax(1) == y).float().mean()
    assert found.checked.values == pytest.approx((float(right), float(right)))


def test_a_file_says_what_model_it_is(tmp_path: Path) -> None:
    _, client = play(tmp_path / "run", method="hermes", rounds=2, seed=4)
    found = fedspu.export(
        tmp_path / "run", client, out=tmp_path / "a", build=ConvNet, data=examples()
    )
    facts = dict(found.facts)
    kept = json.loads(facts.pop("kept"))
    assert {name: len(indices) for name, indices in kept.items()}.keys() == {
        "conv1",
        "conv2",
    }
    assert facts == {
        "fedspu": "0.1.0",
        "model": "tests.oracles.federation:ConvNet",
        "task": "classification",
        "method": "hermes",
        "client": str(client),
        "capacity": f"{[0.3, 0.3, 0.5, 0.5, 1.0, 1.0][client]:g}",
        "seed": "4",
        "round": "2",
        "num_outputs": "3",
        "input_shape": "1,4,4",
        "input_dtype": "float32",
    }


def test_how_bytes_are_scaled_is_part_of_the_file(tmp_path: Path) -> None:
    x = (50 * np.abs(examples()[0])).clip(0, 255).astype(np.uint8)
    data = (x, examples()[1])
    settings = {"clients.number": 6, "clients.per_round": 6, "rounds": 1, "workers": 1}
    fedspu.simulate({**settings, "out": tmp_path / "run"}, model=ConvNet, data=data)
    found = fedspu.export(
        tmp_path / "run", 0, out=tmp_path / "a", build=ConvNet, data=data
    )
    assert found.facts["input_dtype"] == "float32"
    assert json.loads(found.facts["input_mean"]) == [0.0]
    assert json.loads(found.facts["input_deviation"]) == [1.0]


def test_a_regression_is_exported_with_its_own_metric(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 1))

    x, y = examples()
    data = (x, y.astype(np.float32))
    settings = {"clients.number": 6, "clients.per_round": 6, "rounds": 1, "workers": 1}
    given: dict[str, Any] = {"data": data, "task": regression}
    fedspu.simulate({**settings, "out": tmp_path / "run"}, model=build, **given)
    found = fedspu.export(
        tmp_path / "run", 0, "torch-export", tmp_path / "a", build=build, **given
    )
    assert (found.checked.metric, found.checked.changed_predictions) == ("mae", None)


def test_a_client_that_never_took_part_has_w0(tmp_path: Path) -> None:
    run, _ = play(tmp_path / "run", rounds=1)
    idle = next(c for c in range(6) if c not in run.last.federation.last)
    with pytest.warns(UserWarning, match=f"client {idle} has not taken part .* w0"):
        found = fedspu.export(
            tmp_path / "run", idle, out=tmp_path / "a", build=ConvNet, data=examples()
        )
    model = fedspu.load_exported(found.file, ConvNet)
    initial = run.plan.initial
    assert all(torch.equal(t, initial[n]) for n, t in model.state_dict().items())


# What is refused ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    play(path)
    return path


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"client": 6}, SettingsError, "client = 6: expected 0 to 5"),
        ({"client": -1}, SettingsError, "client = -1: expected 0 to 5"),
        ({"client": "1"}, SettingsError, "client = '1': expected a whole number"),
        ({"data": None}, SettingsError, r"in Python too: .* data=\(x, y\)"),
        ({"build": None}, SettingsError, "names code of its own .* add --trust"),
        ({"data": examples(60)}, DataError, "played with other data"),
        ({"build": mlp}, FedSPUError, "tensor"),
        ({"format": "pt2"}, SettingsError, "--format pt2: expected one of safetensors"),
        ({"run_dir": "nowhere"}, StorageError, "nowhere: no such folder"),
    ],
)
def test_what_cannot_be_exported_is_said(
    given: dict[str, Any],
    error: type[Exception],
    says: str,
    played: Path,
    tmp_path: Path,
) -> None:
    usual: dict[str, Any] = {
        "run_dir": played,
        "client": 1,
        "out": tmp_path / "a",
        "build": ConvNet,
        "data": examples(),
    }
    with pytest.raises(error, match=says):
        fedspu.export(**{**usual, **given})
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_run_is_refused(tmp_path: Path) -> None:
    _, client = play(tmp_path / "run")
    for file in (tmp_path / "run" / "personal").glob(f"client-{client}-*"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(StorageError, match=r"damaged: it is not what was saved"):
        fedspu.export(
            tmp_path / "run", client, out=tmp_path / "a", build=ConvNet, data=examples()
        )
    assert not (tmp_path / "a").exists()


@pytest.fixture(scope="module")
def slim(played: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slim")
    run = run_for(out=folder / "run", method="hermes")
    weak = min(run.last.federation.last)
    found = fedspu.export(
        folder / "run", weak, out=folder / "a", build=ConvNet, data=examples()
    )
    return found.file


def changed(file: Path, to: Path, **facts: str | None) -> Path:
    """The same file with other facts."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(file, framework="pt") as opened:
        found = {**opened.metadata(), **facts}
    kept = {name: value for name, value in found.items() if value is not None}
    save_file(load_file(file), to, metadata=kept)
    return to


def test_code_that_a_file_names_is_run_only_if_trusted(slim: Path) -> None:
    with pytest.raises(SettingsError, match=r"names code of its own .*trust=True"):
        fedspu.load_exported(slim)
    assert isinstance(fedspu.load_exported(slim, trust=True), ConvNet)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"fedspu": None}, "was not written by fedspu export"),
        ({"kept": "{"}, "its metadata is damaged"),
        ({"kept": "[1]"}, "its metadata is damaged"),
        ({"kept": '{"conv1": [0]}'}, "conv2 is in only one"),
        ({"kept": '{"conv1": [0], "conv2": [99]}'}, "active neurons of conv2"),
        ({"kept": '{"conv1": ["a"], "conv2": [0]}'}, "its metadata is damaged"),
        ({"kept": None}, "is of another model"),
        ({"input_shape": "1,x"}, "its metadata is damaged"),
        ({"input_shape": None}, "its metadata is damaged"),
        ({"input_dtype": "nn"}, "its metadata is damaged"),
        ({"input_shape": "7,7"}, "failed on the example input"),
        (
            {"input_shape": "1,99999,99999"},
            "its metadata is damaged .ValueError: input",
        ),
        ({"input_shape": "1,0,4"}, "its metadata is damaged .ValueError: input_shape"),
        ({"kept": '{"conv1": [true], "conv2": [0]}'}, "expected a list of numbers"),
        ({"classes": "x" * 2**24}, "it has more than 16777216 characters"),
    ],
)
def test_a_file_with_wrong_facts_is_refused(
    facts: dict[str, str | None], says: str, slim: Path, tmp_path: Path
) -> None:
    with pytest.raises(FedSPUError, match=says):
        fedspu.load_exported(changed(slim, tmp_path / "b", **facts), ConvNet)


@pytest.mark.parametrize("number", ["-1", "999999999", "ten", "9" * 5000])
def test_a_built_in_model_has_no_more_outputs_than_the_file(
    number: str, slim: Path, tmp_path: Path
) -> None:
    facts = {"model": "digits", "num_outputs": number}
    with pytest.raises(StorageError, match="its metadata is damaged") as caught:
        fedspu.load_exported(changed(slim, tmp_path / "b", **facts))
    assert len(str(caught.value)) < 400


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no such file"):
        fedspu.load_exported(tmp_path / "missing")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(StorageError, match="cannot be read as safetensors"):
        fedspu.load_exported(tmp_path / "text")
