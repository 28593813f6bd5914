"""A small BERT that tells which chapter of Python's manual a passage is from.

    python examples/text_classifier.py

Needs the extra hf. Passages have 8 to 24 words. Each client has chapters of its own
liking (Dirichlet, alpha 0.3), and trains 20 to 100 % of the neurons in a round. The
table shows FedSPU beside training alone, and beside FedAvg with whole models that every
client fine-tunes.
"""

import re
import sys
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

import numpy as np
import torch

import fedspu

try:
    import transformers
except ImportError:
    sys.exit("needs the extra hf: pip install -c constraints.txt -e '.[hf]'")

CHAPTERS, WORDS = 8, 400


def passages() -> tuple[list[list[int]], list[int]]:
    """Rows of token numbers, and the chapter of each; 0 is padding, 1 other words."""
    longest = sorted(topics, key=lambda name: -len(topics[name]))[:CHAPTERS]
    texts = [re.findall(r"[a-z_]+", topics[name].lower()) for name in longest]
    counted = Counter(word for text in texts for word in text)
    number = {w: 2 + i for i, (w, _) in enumerate(counted.most_common(WORDS - 2))}
    rng = np.random.default_rng(0)
    rows, chapters = [], []
    for chapter, text in enumerate(texts):
        start = 0
        while start + 24 <= len(text):
            length = int(rng.integers(8, 25))
            rows.append([number.get(word, 1) for word in text[start : start + length]])
            chapters.append(chapter)
            start += length
    return rows, chapters


def save_model(folder: Path) -> str:
    """The name of a small BERT, saved in a folder."""
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=24,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return f"hf:{folder}"


def main(rounds: int = 10) -> fedspu.Comparison:
    """Play the three methods; the table is printed."""
    with TemporaryDirectory() as place:
        found = fedspu.compare(
            ["fedspu", "local", "fedavg@finetune=5"],
            {
                "model": save_model(Path(place) / "bert"),
                "clients.number": 10,
                "clients.per_round": 5,
                "clients.capacities": [0.2, 0.6, 1.0],
                "data.alpha": 0.3,
                "rounds": rounds,
                "train.epochs": 2,
                "train.batch_size": 16,
                "train.optimizer": "adam",
                "train.lr": 2e-3,
            },
            seeds=[0],
            data=passages(),
            out=Path(place) / "runs",
        )
    print(found)
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
