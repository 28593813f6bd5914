"""Every example runs as it stands, and the site names it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
ALL = sorted(
    path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")
)
WITH_TEXTS = ("text_classifier.py", "language_model.py")
"""They need the extra hf, and take longer: see the last test."""

EXAMPLES = [path for path in ALL if path.name not in WITH_TEXTS]


def code_of(path: Path) -> str:
    """A script, or the code of a notebook from the first cell to the last."""
    if path.suffix == ".py":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.name))
def test_an_example_runs_as_it_stands(path: Path, tmp_path: Path) -> None:
    sources = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code_of(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    if path.name == "compare_and_report.py":
        assert (tmp_path / "runs/example/report.html").exists()


def test_there_are_five_scripts_and_two_notebooks_and_the_site_names_them() -> None:
    kinds = [path.suffix for path in EXAMPLES]
    assert (kinds.count(".py"), kinds.count(".ipynb")) == (5, 2)
    page = (ROOT / "docs/examples.md").read_text()
    assert all(f"`{path.name}`" in page for path in ALL)


def test_notebooks_are_kept_without_output() -> None:
    for path in EXAMPLES:
        if path.suffix == ".ipynb":
            for cell in json.loads(path.read_text())["cells"]:
                assert not cell.get("outputs")


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
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
