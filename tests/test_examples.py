"""The examples run, and find what they promise."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore::UserWarning")  # about neurons that stay active
@pytest.mark.parametrize(
    ("name", "metric"),
    [("text_classifier", "accuracy"), ("language_model", "perplexity")],
)
def test_texts_are_learned_beside_two_rivals(name: str, metric: str) -> None:
    pytest.importorskip("transformers")
    found = example(name).main(rounds=1)
    assert [run["method"] for run in found.runs] == ["fedspu", "local", "fedavg"]
    assert all(run[f"personal_{metric}"] > 0 for run in found.runs)
