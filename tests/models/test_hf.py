"""Models of Hugging Face, from a folder: padding, heads, weights, and whole runs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedspu
from fedspu import models
from fedspu.errors import DataError, ModelError
from fedspu.imports import is_place

transformers: Any = pytest.importorskip("transformers")

TOKENS = 20
SMALL: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}


def saved(folder: Path, kind: str, **more: Any) -> str:
    """The name of a small model of this kind, saved in a folder."""
    config = getattr(transformers, f"{kind.partition('For')[0]}Config")
    model = getattr(transformers, kind)(config(**SMALL, **more))
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return f"hf:{folder}"


@pytest.fixture
def bert(tmp_path: Path) -> str:
    return saved(tmp_path / "bert", "BertForSequenceClassification", num_labels=3)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return saved(tmp_path / "llama", "LlamaForCausalLM", num_key_value_heads=1)


def texts(number: int, seed: int = 0) -> list[list[int]]:
    """Rows of unequal lengths; their first token follows from the second."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(1, TOKENS, rng.integers(3, 12)).tolist() for _ in range(number)
    ]


def test_padding_changes_no_score(bert: str) -> None:
    model = models.build(bert, 3).eval()
    row = torch.tensor([[5, 6, 7, 8]])
    filled = torch.tensor([[5, 6, 7, 8, 0, 0], [1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        torch.testing.assert_close(model(filled)[:1], model(row))
        other = filled.clone()
        other[0, 4:] = 9  # not padding
        assert not torch.allclose(model(other)[:1], model(row))


def test_weights_are_taken_from_the_folder_and_a_head_for_other_classes_is_new(
    bert: str,
) -> None:
    theirs = transformers.BertForSequenceClassification.from_pretrained(bert[3:])
    same = models.build(bert, 3).state_dict()
    for name, values in theirs.state_dict().items():
        assert torch.equal(same[f"model.{name}"], values)
    wider = models.build(bert, 5).state_dict()
    assert wider["model.classifier.weight"].shape == (5, 16)
    name = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(wider[f"model.{name}"], theirs.state_dict()[name])


def test_a_folder_without_weights_gives_random_ones(bert: str) -> None:
    (Path(bert[3:]) / "model.safetensors").unlink()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        one, other = models.build(bert, 3), models.build(bert, 3)
    name = "model.bert.embeddings.word_embeddings.weight"
    assert not torch.equal(one.state_dict()[name], other.state_dict()[name])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "config.json: No such file or directory; expected a folder that save_p"),
        ("{", "config.json: not JSON; expected a folder"),
        ("[]", "config.json: not a table; expected a folder"),
        ("{}", r"architectures = null; expected one, as in \[\"BertFor"),
        (
            '{"architectures": ["A", "B"]}',
            r"architectures = \[\"A\", \"B\"\]; expected",
        ),
        ('{"architectures": ["Nothing"]}', "architecture 'Nothing' is not one of tran"),
        ('{"architectures": ["logging"]}', "architecture 'logging' is not one of tran"),
        (
            '{"architectures": ["BertForSequenceClassification"], "model_type": "no"}',
            "model type `no`|Unrecognized model",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_refused(
    tmp_path: Path, content: str | None, complaint: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=complaint) as caught:
        models.build(f"hf:{tmp_path}", 3)
    assert "\n" not in str(caught.value)


def test_a_folder_is_not_taken_for_code() -> None:
    assert not is_place("hf:folder")
    assert is_place("hfs:folder")
    with pytest.raises(ModelError, match="or your own as"):
        models.check_name("hf:")


GIVEN: dict[str, Any] = {
    "clients.number": 4,
    "clients.per_round": 2,
    "clients.capacities": (0.5, 1.0),
    "rounds": 2,
    "train.epochs": 1,
    "train.batch_size": 4,
    "train.lr": 0.05,
    "data.partition": "iid",
    "workers": 1,
}


def test_rows_are_filled_with_the_models_own_padding_or_refused(tmp_path: Path) -> None:
    name = saved(tmp_path / "odd", "BertForSequenceClassification", num_labels=3)
    config = Path(name[3:]) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "pad_token_id": 1}))
    data = texts(40), np.arange(40) % 3
    with pytest.raises(DataError, match=r"filled with token 0, .* pad_token_id = 1; "):
        fedspu.simulate({**GIVEN, "model": name}, data=data)


@pytest.mark.parametrize("method", ["fedspu", "local", "fedavg"])
def test_a_classifier_of_texts_is_trained(bert: str, method: str) -> None:
    rows = texts(60)
    labels = [row[0] % 3 for row in rows]
    run = fedspu.simulate(
        {**GIVEN, "model": bert, "method.name": method}, data=(rows, labels)
    )
    assert 0 <= run.summary["personal_accuracy"] <= 1
    model = run.personal_model(0)
    assert model(torch.tensor(rows[0])[None]).shape == (1, 3)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of neurons, here too few
def test_a_language_model_is_trained(llama: str) -> None:
    given = {**GIVEN, "model": llama, "task": "language-model", "rounds": 4}
    rows = [[1 + (i + k) % 5 for k in range(4 + i % 6)] for i in range(60)]
    run = fedspu.simulate({**given, "train.lr": 0.5}, data=(rows, None))
    perplexity = [line["personal_perplexity"] for line in run.rounds]
    assert perplexity[-1] < perplexity[0]
    assert run.plan.untrained == ()
