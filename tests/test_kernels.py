"""Which kernels a run uses: chosen once, written down, and never mixed."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedspu
from fedspu.compiled import library
from fedspu.errors import SettingsError, StorageError
from fedspu.methods import all_methods
from fedspu.methods.method import Method
from fedspu.settings_text import read_toml
from tests.oracles.federation import ConvNet, examples, mlp, named

Found = library.Found


def used(path: Path) -> str:
    """What a run folder says."""
    kernels: str = read_toml(path / "settings.toml")["train"]["kernels"]
    return kernels


def play(out: Path | None = None, **given: Any) -> fedspu.Run:
    where = {} if out is None else {"out": str(out)}
    return fedspu.simulate(named(**given, **where), model=ConvNet, data=examples())


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler."""
    native = "fedspu.partial.chain.native"
    for place in ("fedspu.compiled.library", f"{native}.models", f"{native}.network"):
        module = f"{place}.find"
        monkeypatch.setattr(module, lambda: Found(None, "no C++ compiler was found"))
    for place in ("chain.autograd", "clamped_norms"):
        monkeypatch.setattr(
            f"fedspu.partial.{place}.find", lambda: Found(None, "no C++ compiler")
        )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, "native"),
        ({"train__kernels": "native"}, "native"),
        ({"train__kernels": "torch"}, "torch"),
        ({"train__saves": "lean"}, "native"),
        ({"method": "fjord", "method__reading": "original"}, "torch"),
    ],
)
def test_a_run_folder_says_what_was_used(
    given: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    play(tmp_path / "run", **given)
    assert used(tmp_path / "run") == wanted


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_pytorch_runs_everything(tmp_path: Path) -> None:
    play(tmp_path / "run")
    assert used(tmp_path / "run") == "torch"
    with pytest.raises(SettingsError, match=r"kernels = 'native'.* no C\+\+ compiler"):
        play(train__kernels="native")


def test_a_model_that_is_no_chain_is_named() -> None:
    given = named(train__kernels="native", method="fjord", method__reading="original")
    with pytest.raises(SettingsError, match="'native': they cannot run"):
        fedspu.simulate(given, model=ConvNet, data=examples())


def test_a_native_run_is_not_resumed_without_a_compiler(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    stopped = Interrupted(after=1)
    with pytest.raises(KeyboardInterrupt):
        fedspu.simulate(
            named(rounds=3, out=str(tmp_path / "run")),
            model=ConvNet,
            data=examples(),
            watch=stopped,
        )
    request.getfixturevalue("no_compiler")
    with pytest.raises(SettingsError, match="'native'"):
        fedspu.resume(tmp_path / "run", model=ConvNet, data=examples())
    model = fedspu.load_personal(tmp_path / "run", 0, ConvNet, examples())
    assert sum(p.numel() for p in model.parameters()) > 0


class Interrupted:
    """Interrupts a run after a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, plan: Any, played: Any) -> None:
        if played.federation.round == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("method", all_methods(), ids=lambda m: f"{m.name}-{m.reading}")
def test_both_paths_learn_the_same(method: Method) -> None:
    """PyTorch's path is compared with slow twins in float64 elsewhere."""
    given: Any = {"method": method.name, "method__reading": method.reading, "rounds": 2}
    runs = [play(train__kernels=kernels, **given) for kernels in ("auto", "torch")]
    for client in range(6):
        mine, theirs = (run.personal_model(client).state_dict() for run in runs)
        for name, tensor in mine.items():
            scale = theirs[name].abs().max().clamp(min=0.1)
            assert (tensor - theirs[name]).abs().max() <= 2e-3 * scale, name


def test_a_comparison_takes_runs_of_either_kind(tmp_path: Path) -> None:
    given = {**named(rounds=1), "model": "digits", "data.name": "digits"}

    def run(kernels: str) -> float:
        asked = {**given, "train.kernels": kernels}
        found = fedspu.compare(["local"], asked, seeds=[0], out=tmp_path)
        return float(found.records[0]["personal_accuracy"])

    assert run("torch") == run("auto")
    with pytest.raises(StorageError, match=r"train\.kernels = torch, but native"):
        run("native")


class OtherNet(ConvNet):
    """A network with an operation that compiled code does not know."""

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = F.relu6(self.bn1(self.conv1(x)))
        x = F.max_pool2d(F.relu6(self.bn2(self.conv2(x))), 2)
        scores: Tensor = self.fc(x.flatten(1))
        return scores


def test_networks_whose_norms_are_compiled_say_so(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def play(name: str) -> None:
        given = named(rounds=1, out=str(tmp_path / name))
        fedspu.simulate(given, model=OtherNet, data=examples())

    play("with")
    assert used(tmp_path / "with") == "native"
    request.getfixturevalue("no_compiler")
    play("without")
    assert used(tmp_path / "without") == "torch"


FROZEN_LAYERS = (("5.",), ("1.",), ("3.", "5."), ("3.bias",))


@pytest.mark.parametrize("gradient", ["exact", "truncated"])
@pytest.mark.parametrize("frozen", FROZEN_LAYERS)
def test_layers_that_the_user_has_frozen_stay_frozen_in_both(
    frozen: tuple[str, ...], gradient: str
) -> None:
    def build() -> nn.Module:
        model = mlp()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        return model

    states = []
    for kernels in ("native", "torch"):
        given = named(train__kernels=kernels, train__gradient=gradient)
        run = fedspu.simulate(given, model=build, data=examples())
        states.append([run.personal_model(k).state_dict() for k in range(6)])
    initial = run.plan.initial
    for mine, theirs in zip(*states, strict=True):
        for name, values in mine.items():
            torch.testing.assert_close(values, theirs[name], rtol=1e-4, atol=1e-5)
            if name.startswith(frozen):
                assert torch.equal(values, initial[name])
