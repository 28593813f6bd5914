"""Every format takes models of many kinds; its file is what it says it is."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fedspu import exports
from fedspu.errors import ModelError, SettingsError, StorageError
from fedspu.exports import FORMATS
from fedspu.exports.write import WRITERS, Exportable, Exported, write_export
from fedspu.tasks.classification import classification
from fedspu.tasks.language_model import language_model
from fedspu.tasks.segmentation import segmentation
from fedspu.tasks.task import Task
from tests.oracles.zoo import ZOO_BY_NAME


class Regularised(nn.Module):
    """Norm and dropout, both of which do something else in training; uses len(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.fc = nn.Linear(16, 3)
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.norm(self.conv(x))), training=self.training)
        scores: Tensor = self.fc(x.view(len(x), -1))
        return scores


class Undecided(nn.Module):
    """Its forward depends on values, which no graph can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.fc(x)
        return scores if float(x.sum()) > 0 else -scores


class Words(nn.Module):
    """Scores of the next token; its head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embed(x).cumsum(1))
        return scores


def images(count: int = 5) -> Tensor:
    return torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(1))


def tokens() -> Tensor:
    return torch.arange(30).view(5, 6) % 7


def source(
    model: nn.Module, x: Tensor, y: Tensor, task: Task = classification
) -> Exportable:
    return Exportable(model.eval(), lambda: type(model)(), task, x, y, {"fedspu": "1"})


def trained() -> Regularised:
    torch.manual_seed(0)
    model = Regularised()
    model.norm(4 * model.conv(images()) + 1)  # moves its running statistics
    return model


CASES: dict[str, Callable[[], Exportable]] = {
    "norm and dropout": lambda: source(trained(), images(), torch.arange(5) % 3),
    "tokens": lambda: source(Words(), tokens(), tokens(), language_model),
    "one example": lambda: source(trained(), images(1), torch.tensor([1])),
    "pixels": lambda: Exportable(
        ZOO_BY_NAME["unet"].build().eval(),
        ZOO_BY_NAME["unet"].build,
        segmentation,
        ZOO_BY_NAME["unet"].example(),
        torch.zeros(2, 8, 8, dtype=torch.int64),
    ),
}


@pytest.fixture(autouse=True)
def _no_random_numbers_are_used_up() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_file_gives_the_outputs_of_the_model(
    format: str, case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = CASES[case]()
    out = tmp_path / f"mine{FORMATS[format].suffix}"
    found = write_export(given, format, out)
    assert found.checked.num_examples == len(given.x)
    assert found.checked.largest_difference <= found.checked.tolerance < 0.01
    assert found.num_bytes == out.stat().st_size
    assert [file.name for file in tmp_path.iterdir()] == [out.name]
    assert capfd.readouterr() == ("", "")
    run = WRITERS[format].load(out, given.new_model)
    with torch.no_grad():
        torch.testing.assert_close(run(given.x), given.model(given.x))


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_is_not_the_model_is_never_written(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = WRITERS[format].load

    def load(file: Path, new_model: Any) -> Any:
        run = plain(file, new_model)
        return lambda x: run(x) + 1e-3

    monkeypatch.setattr(WRITERS[format], "load", load)
    with pytest.raises(ModelError, match="gives other outputs than the model"):
        write_export(CASES["norm and dropout"](), format, tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["onnx", "torch-export"])
def test_a_model_without_a_graph_is_refused_in_one_line(
    format: str, tmp_path: Path
) -> None:
    given = source(Undecided(), torch.ones(5, 4), torch.arange(5) % 3)
    with pytest.raises(
        ModelError, match=r"cannot follow this model .*safetensors"
    ) as e:
        write_export(given, format, tmp_path / "mine")
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 500
    assert write_export(given, "safetensors", tmp_path / "mine").num_bytes > 0


def exported(format: str, folder: Path) -> tuple[Exportable, Exported]:
    given = CASES["norm and dropout"]()
    suffix = FORMATS[format].suffix
    return given, write_export(given, format, folder / f"mine{suffix}")


def test_an_onnx_file_says_what_it_takes_and_what_it_is(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    _, found = exported("onnx", tmp_path)
    graph = onnx.load(found.file)
    (taken,), (given,) = graph.graph.input, graph.graph.output
    assert (taken.name, given.name) == ("input", "output")
    sizes = [d.dim_param or d.dim_value for d in taken.type.tensor_type.shape.dim]
    assert sizes == ["batch", 1, 4, 4]
    assert [d.dim_param or d.dim_value for d in given.type.tensor_type.shape.dim] == [
        "batch",
        3,
    ]
    facts = {entry.key: entry.value for entry in graph.metadata_props}
    assert facts == found.facts
    assert facts["fedspu"] == "1"
    assert int(facts["opset"]) == graph.opset_import[0].version >= 18


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_does_not_tell_about_the_machine_it_was_made_on(
    format: str, tmp_path: Path
) -> None:
    _, found = exported(format, tmp_path)
    content = found.file.read_bytes()
    assert Path(__file__).name.encode() not in content
    assert b"/torch/nn/modules" not in content


def test_an_exported_graph_runs_in_pytorch_without_fedspu(tmp_path: Path) -> None:
    given, found = exported("torch-export", tmp_path)
    torch.save(given.x, tmp_path / "x.pt")
    code = (
        "import sys, torch, json\n"
        "sys.modules['fedspu'] = None\n"
        "extra = {'fedspu.json': ''}\n"
        "run = torch.export.load(sys.argv[1], extra_files=extra).module()\n"
        "print(json.dumps([run(torch.load(sys.argv[2])).tolist(), extra]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(found.file), str(tmp_path / "x.pt")],
        capture_output=True,
        text=True,
        check=True,
    )
    outputs, extra = json.loads(done.stdout)
    with torch.no_grad():
        assert outputs == given.model(given.x).tolist()
    assert json.loads(extra["fedspu.json"]) == found.facts


def test_safetensors_hold_every_name_of_the_state_also_of_tied_weights(
    tmp_path: Path,
) -> None:
    given = CASES["tokens"]()
    found = write_export(given, "safetensors", tmp_path / "mine")
    state = load_file(found.file)
    new = Words()
    new.load_state_dict(state)
    assert torch.equal(new.head.weight, given.model.state_dict()["embed.weight"])
    with safe_open(found.file, framework="pt") as file:
        assert file.metadata() == {"fedspu": "1"}


def test_a_missing_library_is_named_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"needs onnx, .* '\.\[onnx\]'"):
        write_export(CASES["tokens"](), "onnx", tmp_path / "mine")


# Where it is written ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "name", "says"),
    [
        ("onxx", "a", r"--format onxx: expected one of .* \(did you mean onnx\?\)"),
        ("safetensors", "a.onnx", r"\.onnx is the ending of --format onnx"),
        ("safetensors", ".", "is a folder; expected a file's name"),
        ("safetensors", "no/a", "there is no folder .*no; make it first"),
        ("safetensors", "here", "exists already; .* --force"),
        ("safetensors", "link", "exists already"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused(
    format: str, name: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "here").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(SettingsError, match=says):
        write_export(CASES["tokens"](), format, tmp_path / name)
    assert (tmp_path / "here").read_text() == "mine"


def test_a_file_is_replaced_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("mine")
    write_export(CASES["tokens"](), "safetensors", tmp_path / "here", force=True)
    assert load_file(tmp_path / "here").keys() == {"embed.weight", "head.weight"}


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedspu.files.os.write", full)
    with pytest.raises(StorageError, match=r"cannot be written .No space left"):
        write_export(CASES["tokens"](), "safetensors", tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []
