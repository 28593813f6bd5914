"""The public surface of DESIGN.md, as it is written there."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedspu
from tests.oracles.federation import ConvNet, examples, same_bits

NAMES = """
    map_neurons choose_random choose_ordered choose_top extract merge average Update
    partial_training slim_model simulate load_personal export load_exported
"""


def test_the_names_of_the_public_surface_are_there() -> None:
    assert set(NAMES.split()) <= set(fedspu.__all__)
    assert all(hasattr(fedspu, name) for name in fedspu.__all__)
    assert set(fedspu.__all__) <= set(dir(fedspu))


def test_a_name_that_is_not_there_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="'fedspu' has no attribute 'simulat'"):
        fedspu.simulat  # noqa: B018  # to ask for it is the point


def test_pytorch_is_imported_only_when_it_is_needed() -> None:
    code = "import fedspu, sys; fedspu.Settings; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_the_core_runs_as_written() -> None:
    model = ConvNet()
    images, labels = examples()
    x, y = torch.from_numpy(images[:8]), torch.from_numpy(labels[:8])
    state = fedspu.state_of(model)
    rng = np.random.default_rng(0)
    p = 0.5

    neurons = fedspu.map_neurons(model, x)
    assert "conv2" in str(neurons)
    active = fedspu.choose_random(neurons, p, rng)
    blocks = neurons.blocks(active)
    payload = fedspu.extract(state, blocks)
    assert payload["conv2.weight"].shape == (3, 2, 3, 3)
    assert same_bits(fedspu.merge(state, blocks, payload), state)
    averaged = fedspu.average(state, [fedspu.Update(blocks, payload, 5)] * 2)
    assert same_bits(averaged, state)

    with fedspu.partial_training(model, neurons, active, mode="exact") as trainable:
        optimizer = torch.optim.SGD(trainable, lr=0.1)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    trained = fedspu.state_of(model)
    learnable = {name for name, _ in model.named_parameters()}
    moved = fedspu.merge(state, blocks, fedspu.extract(trained, blocks))
    assert all(torch.equal(moved[name], trained[name]) for name in learnable)
    assert not torch.equal(state["fc.weight"], trained["fc.weight"])

    slim = fedspu.slim_model(model, neurons, active)
    assert slim(x).shape == (8, 3)
    assert sum(t.numel() for t in slim.parameters()) < sum(
        t.numel() for t in model.parameters()
    )


def test_neurons_can_also_be_chosen_in_order_and_by_score() -> None:
    neurons = fedspu.map_neurons(ConvNet(), torch.zeros(2, 1, 4, 4))
    ordered = fedspu.choose_ordered(neurons, 0.5)
    assert ordered["conv2"].tolist() == [0, 1, 2]
    scores = {"conv1": torch.tensor([1.0, 9, 2, 8]), "conv2": torch.arange(6.0)}
    top = fedspu.choose_top(neurons, 0.5, scores)
    assert top["conv1"].tolist() == [1, 3]
    assert top["conv2"].tolist() == [3, 4, 5]


def test_a_run_in_a_notebook_runs_as_written(tmp_path: Path) -> None:
    run_dir, build = tmp_path / "run", ConvNet
    x, y = examples()
    settings = {
        "clients": {"number": 6, "per_round": 2, "capacities": [0.5, 1.0]},
        "rounds": 1,
        "train": {"epochs": 1, "batch_size": 8},
        "out": run_dir,
    }
    client = 3
    run = fedspu.simulate(settings, model=build, data=(x, y))
    net = run.personal_model(client)
    assert isinstance(net, torch.nn.Module)
    later = fedspu.load_personal(run_dir, client, build)
    assert same_bits(dict(later.state_dict()), dict(net.state_dict()))
    with torch.no_grad():
        assert later(torch.from_numpy(x[:5])).shape == (5, 3)


def test_settings_alone_name_a_whole_run() -> None:
    settings = {"rounds": 1, "clients.per_round": 1, "train.epochs": 1}
    run = fedspu.simulate(settings)
    assert run.summary["dataset"] == "digits"


def test_no_module_has_the_name_of_a_public_function() -> None:
    """Whoever imports such a module would hide the function."""
    modules = {found.name for found in pkgutil.iter_modules(fedspu.__path__)}
    assert not modules & set(fedspu.__all__)
