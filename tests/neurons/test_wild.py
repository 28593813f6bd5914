"""Other people's models: a small part of benchmarks/wild, held to the same laws."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MODELS = {
    "hf-text": ("bert", "roberta", "distilbert", "albert", "electra", "t5", "bart"),
    "hf-causal": ("gpt2", "gpt_neox", "opt", "llama", "qwen3", "gemma2", "phi3"),
    "hf-vision": ("vit", "swin", "resnet", "poolformer"),
    "hf-audio": ("wav2vec2", "whisper"),
}
"""Twenty models of the library that dev environments have; each is mapped quickly."""


@pytest.mark.parametrize("family", MODELS)
def test_other_peoples_models_can_be_frozen_and_keep_the_laws(
    family: str, tmp_path: Path
) -> None:
    names, file = [f"{family}/{name}" for name in MODELS[family]], tmp_path / "found"
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.wild", "--exactly", "--json", file, *names],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(file.read_text())
    assert {name: found[name]["class"] for name in names} == dict.fromkeys(
        names, "useful"
    )
