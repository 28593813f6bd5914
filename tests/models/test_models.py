import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fedspu import models
from fedspu.errors import ModelError
from fedspu.models.paper import CIFARNet, DigitsNet, EMNISTNet, SpeechNet

INPUTS = {
    "digits": (1, 8, 8),
    "emnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "speech": (1, 32, 32),
    "audio": (1, 16000),
    "mlp": (1, 28, 28),
    "mobilenet": (3, 32, 32),
    "resnet18": (3, 32, 32),
    "transformer": (3, 32, 32),
}
PAPER = ("cifar10", "digits", "emnist", "speech")  # and one that is shaped like them


def num_values(model: nn.Module) -> int:
    """Learnable entries and running statistics: what travels at p = 1."""
    state = model.state_dict().values()
    return sum(values.numel() for values in state if values.is_floating_point())


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (EMNISTNet(), 64_802),
        (CIFARNet(), 134_946),
        (SpeechNet(), 26_485),
        # 16*9+16 + 4*16 + 32*16*9+32 + 4*32 + 128*10+10
        (DigitsNet(), 6_282),
    ],
)
def test_as_many_values_travel_as_in_the_paper(model: nn.Module, values: int) -> None:
    assert num_values(model) == values


def test_every_built_in_says_what_it_reads() -> None:
    shapes = {name: models.find(name).input_shape for name in models.MODELS}  # type: ignore[attr-defined]  # what the built-in ones have
    assert shapes == INPUTS


@pytest.mark.parametrize("name", sorted(models.MODELS))
@pytest.mark.parametrize("num_outputs", [1, 2, 17])
def test_a_built_in_gives_as_many_outputs_as_are_needed(
    name: str, num_outputs: int
) -> None:
    outputs = models.build(name, num_outputs)(torch.rand(3, *INPUTS[name]))
    assert outputs.shape == (3, num_outputs)


@pytest.mark.parametrize("name", PAPER)
def test_every_convolution_is_normalised_rectified_and_pooled(name: str) -> None:
    model = models.build(name, 10).eval()
    first, norm = model.get_submodule("conv1"), model.get_submodule("bn1")
    assert isinstance(norm, nn.BatchNorm2d)
    norm.weight.data.uniform_(-1, 1)
    norm.bias.data.uniform_(-1, 1)
    seen: list[torch.Tensor] = []
    model.get_submodule("conv2").register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0])
    )
    x = torch.rand(2, *INPUTS[name])
    model(x)
    expected = nn.functional.max_pool2d(norm(first(x)).clamp(min=0), 2)
    torch.testing.assert_close(seen[0], expected)


def test_the_hidden_linear_layers_for_cifar_have_no_bias_and_are_rectified() -> None:
    model = CIFARNet().eval()
    assert not {"fc1.bias", "fc2.bias"} & set(model.state_dict())
    seen: list[torch.Tensor] = []
    for layer in (model.fc2, model.fc3):
        layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(torch.rand(8, 3, 32, 32))
    assert [float(inputs.min()) for inputs in seen] == [0, 0]


def write(folder: Path, text: str, name: str = "my_nets.py") -> None:
    (folder / name).write_text(text)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of its own, left without traces."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    return tmp_path


def test_a_model_of_one_s_own_is_found_in_the_working_folder(here: Path) -> None:
    write(here, "from torch import nn\ndef build(): return nn.Linear(4, 3)\n")
    model = models.build("my_nets:build", num_outputs=10)
    assert isinstance(model, nn.Linear)
    assert model.out_features == 3


def test_a_model_of_one_s_own_may_lie_in_a_package(here: Path) -> None:
    (here / "mine").mkdir()
    write(here / "mine", "from torch import nn\nbuild = nn.Identity\n", "nets.py")
    assert isinstance(models.build("mine.nets:build", 10), nn.Identity)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "digit",
            r"one of audio, cifar10, digits, emnist, mlp, mobilenet, resnet18, speech, "
            r"transformer, a folder .*, or .*\(did you mean digits\?\)$",
        ),
        (
            "my_nets",
            r"or your own as package\.module:build \(did you mean my_nets:build\?\)$",
        ),
        (
            "my_nets:",
            r"or your own as package\.module:build \(did you mean my_nets:build\?\)$",
        ),
        (":build", r"or your own as package\.module:build$"),
        (
            ".my_nets:build",
            r"or your own as package\.module:build \(did you mean my_nets:build\?\)$",
        ),
        ("none_such:build", "no module named none_such is installed or in"),
        ("none_such.nets:build", "no module named none_such is installed or in"),
        ("my_nets:none_such", r"my_nets\.py has no none_such$"),
        ("my_nets:SIZE", "it is an int; expected a function that returns the model"),
        ("my_nets:size", "it returned an int; expected a torch.nn.Module"),
        ("my_nets:wide", "function without arguments; missing .* 'width'"),
    ],
)
def test_a_model_that_cannot_be_had_is_refused(
    here: Path, name: str, complaint: str
) -> None:
    write(here, "SIZE = 3\ndef size(): return SIZE\ndef wide(width): return width\n")
    with pytest.raises(ModelError, match=complaint) as caught:
        models.build(name, 10)
    assert f"model = {name!r}: " in str(caught.value)


def test_a_module_that_lacks_something_is_not_called_missing(here: Path) -> None:
    write(here, "import none_such_either\n")
    with pytest.raises(ModelError, match=r"cannot be imported .*'none_such_either'"):
        models.find("my_nets:build")


def test_a_mistake_inside_a_model_of_one_s_own_says_where_it_is(here: Path) -> None:
    write(here, "def build(): return 1 / 0\n")
    said = r"it raised ZeroDivisionError: .* \(my_nets\.py, line 1\)"
    with pytest.raises(ModelError, match=said) as found:
        models.build("my_nets:build", 10)
    assert isinstance(found.value.__cause__, ZeroDivisionError)
