"""The Python in the docs runs, and does what the text around it says."""

import ast
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedspu
from fedspu.cli.export import _what_was_checked, _what_was_written
from fedspu.conformance import LAWS, check
from fedspu.conformance.nets import ConvNet, made_examples
from fedspu.exports import FORMATS
from tests.cli.commands import finished, in_process_of_its_own
from tests.oracles.federation import run_for

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str) -> list[str]:
    """The Python of a page, one text for each block."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.S)


def sample(page: str, start: str) -> tuple[str, str]:
    """A command of a page that starts like this, and what is printed, in words."""
    text = (DOCS / page).read_text("utf-8")
    found = re.search(rf"```sh\n({start}.*?)\n```\n\n```\n(.*?)```", text, re.S)
    assert found
    return found[1], in_words(found[2])


def in_words(printed: str) -> str:
    """What is printed, without spaces at the ends and with # for every number."""
    lines = (line.rstrip() for line in printed.splitlines())
    return re.sub(r"\d+(\.\d+)?(e[-+]\d+)?", "#", "\n".join(lines))


@pytest.fixture
def mylab() -> Iterator[ModuleType]:
    """A module with the example method of its page, as a user would write it."""
    module: Any = ModuleType("mylab_lazy")
    sys.modules["mylab_lazy"] = module
    for block in blocks("write-a-method.md"):
        exec(block, vars(module))
    yield module
    del sys.modules["mylab_lazy"]


def test_the_first_method_of_the_page_is_fedspu_itself() -> None:
    found: dict[str, Any] = {}
    exec(blocks("write-a-method.md")[0], found)
    from fedspu.methods.fedspu import fedspu as ours

    assert found["fedspu"] == ours


def test_the_example_method_obeys_the_laws(mylab: Any) -> None:
    # It is sent everything, and trains its share of that.
    check(mylab.lazy, ConvNet, made_examples(), leave_out=set())
    assert len(LAWS) == 10


def test_the_example_method_trains_all_neurons_equally_often(mylab: Any) -> None:
    run = run_for(method_record=mylab.lazy, clients__per_round=6, rounds=4)
    for client in range(6):
        for counts in run.memory(client).extra.values():
            assert float(counts.max() - counts.min()) <= 1


@pytest.mark.usefixtures("mylab")
def test_the_example_method_has_its_options() -> None:
    run = run_for(
        method="mylab_lazy:steady_for",
        method__stay=2,
        rounds=4,
        clients__per_round=6,
        clients__capacities=[0.5],
    )
    assert run.plan.method.name == "steady-2"

    def offered(t: int) -> list[list[int]]:
        assert run.plan.method.offer is not None
        active = run.plan.method.offer(run.plan.client_round(t, 3)).active
        return [active[name].tolist() for name in sorted(active)]

    assert offered(2) == offered(3)
    assert offered(3) != offered(4)


def test_the_example_of_an_offer_obeys_the_laws(mylab: Any) -> None:
    some = {"only_what_was_trained_leaves_a_client"}
    check(mylab.steady, ConvNet, made_examples(), leave_out=set(LAWS) - some)
    run = run_for(method_record=mylab.steady, rounds=2, clients__per_round=6)
    for client in range(6):
        first, second = (
            mylab.its_own_neurons(run.plan.client_round(t, client)).active
            for t in (1, 2)
        )
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_example_task_runs_and_is_another_one() -> None:
    found: dict[str, Any] = {}
    exec(blocks("tasks.md")[0], found)
    given = {"rounds": 1, "judge.clients": 2}
    smooth = fedspu.simulate(given, task=found["smooth"])
    plain = fedspu.simulate(given)
    assert smooth.summary["task"] == "smooth"
    assert smooth.rounds[0]["train_loss"] != plain.rounds[0]["train_loss"]


def test_the_example_metric_is_what_is_reported() -> None:
    found: dict[str, Any] = {}
    exec(blocks("tasks.md")[1], found)
    run = fedspu.simulate({"rounds": 1, "judge.clients": 2}, task=found["top3"])
    assert 0 <= run.summary["personal_top3_accuracy"] <= 1
    sums = found["in_top_3"](torch.eye(4), torch.tensor([0, 1, 2, 3]))
    assert found["share"](sums) == 1.0
    worst = found["in_top_3"](-torch.eye(4), torch.tensor([0, 1, 2, 3]))
    assert found["share"](worst) == 0.0


def test_the_example_of_several_labels_learns() -> None:
    found: dict[str, Any] = {}
    exec(blocks("tasks.md")[2], found)
    drawn = np.random.default_rng(0)
    x = drawn.normal(size=(400, 6)).astype(np.float32)
    y = (x[:, :3] + x[:, 3:] > 0).astype(np.int64)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    given = {
        "clients.number": 4,
        "clients.per_round": 4,
        "clients.capacities": [0.5, 1.0],
        "data.alpha": 5.0,
        "train.lr": 0.3,
        "train.batch_size": 16,
        "workers": 1,
        "rounds": 4,
    }
    run = fedspu.simulate(given, model=build, data=(x, y), task=found["tags"])
    first = run.rounds[0]["personal_f1"]
    assert first < run.summary["personal_f1"]
    assert run.summary["personal_f1"] > 0.8
    with pytest.raises(fedspu.FedSPUError, match="expected 0 or 1"):
        fedspu.simulate(given, model=build, data=(x, y + 1), task=found["tags"])


def test_the_small_engine_of_its_page_gives_the_same_bits() -> None:
    given = (
        "from fedspu.federation.client import Client\n"
        "from fedspu.federation.engine import Facts\n"
        "from fedspu.federation.messages import pack_request\n"
    )
    found: dict[str, Any] = {}
    exec(given + blocks("write-an-engine.md")[1], found)
    engine = found["LocalEngine"]

    def make_engine(plan: Any, examples: Any) -> Any:
        from fedspu.federation.client_memory import Shelf

        return engine(plan, examples, Shelf(None), torch.device("cpu"))

    same = "arrival_engine_and_resume_make_no_difference"
    others = set(LAWS) - {same}
    check("fedspu", ConvNet, made_examples(), leave_out=others, engines=(make_engine,))


def test_the_files_of_the_page_on_exports_are_used_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    out = "runs/digits-fedspu-seed-0"
    run = fedspu.simulate(
        {"rounds": 1, "clients.per_round": 30, "judge.clients": 1, "out": out}
    )
    images, _ = run.examples.part(3, "test")
    for format in FORMATS:
        written = fedspu.export(out, 3, format)
        if format == "onnx":
            printed = f"{_what_was_checked(written)}\n{_what_was_written(written)}\n"
            assert sample("export.md", "fedspu export runs/")[1] == in_words(printed)
    with torch.no_grad():
        expected = run.personal_model(3)(images)
        load, onnx, graph = blocks("export.md")[:3]
        found: dict[str, Any] = {}
        exec(load, found)
        assert torch.equal(found["net"](images), expected)
        found["images"] = images
        exec(graph, found)
        torch.testing.assert_close(found["scores"], expected)
        found["images"] = images.numpy()
        exec(onnx, found)
        torch.testing.assert_close(torch.from_numpy(found["scores"]), expected)


def test_the_sample_of_a_device_is_what_its_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command, expected = sample("../README.md", "fedspu device --")
    result = finished(in_process_of_its_own(*command.split()[1:]))
    assert (result.code, result.told) == (0, [])

    def without_rows(text: str) -> list[str]:
        """Which p are tried, and what runs the model, depends on the machine."""
        lines = [line for line in text.splitlines() if not line.startswith(" ")]
        return [re.sub("(compiled code|PyTorch)[.]$", "", line) for line in lines]

    assert without_rows(in_words(result.out)) == without_rows(expected)


BENCHMARKS = DOCS.parent / "benchmarks"


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """Each name that a file imports from a module."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names)


def test_benchmarks_are_run_as_the_docs_say() -> None:
    texts = [*DOCS.glob("*.md"), DOCS.parent / "README.md", *BENCHMARKS.rglob("*.py")]
    said = "\n".join(text.read_text("utf-8") for text in texts)
    for name in set(re.findall(r"python benchmarks/([\w/]+)\.py", said)):
        # Python then looks for modules in the script's folder, not in this one.
        ours = {m.split(".")[0] for m, _ in imported(BENCHMARKS / f"{name}.py")}
        assert not ours & {"tests", "benchmarks"}, f"use -m: {name}"
    for name in set(re.findall(r"python -m benchmarks\.(\w+)", said)):
        found = BENCHMARKS / name
        assert found.is_dir() or found.with_suffix(".py").is_file(), name


@pytest.mark.parametrize("file", sorted(BENCHMARKS.rglob("*.py")), ids=lambda f: f.stem)
def test_a_benchmark_uses_what_there_is(file: Path) -> None:
    for module, name in imported(file):
        if module.split(".")[0] == "fedspu":
            found = import_module(module)
            assert hasattr(found, name) or import_module(f"{module}.{name}"), name
