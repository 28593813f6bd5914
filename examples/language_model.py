"""A small Llama that writes Python's manual, letter by letter.

    python examples/language_model.py

Needs the extra hf. Every client has one chapter, and a model of its own that predicts
the next letter; it trains 20 to 100 % of the neurons in a round. The table shows the
perplexity of FedSPU (lower is better) beside training alone, and beside FedAvg with
whole models that every client fine-tunes.
"""

import sys
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

CHAPTERS, ROWS, LENGTH = 8, 60, 48


def save_texts(file: Path) -> int:
    """Write rows of letters, and whose each is; returns how many tokens there are."""
    longest = sorted(topics, key=lambda name: -len(topics[name]))[:CHAPTERS]
    letters = sorted({letter for name in longest for letter in topics[name]})
    number = {letter: 1 + i for i, letter in enumerate(letters)}  # 0 is padding
    rows, owners = [], []
    for name in longest:
        tokens = [number[letter] for letter in topics[name][: LENGTH * ROWS]]
        for start in range(0, len(tokens) - LENGTH + 1, LENGTH):
            rows.append(tokens[start : start + LENGTH])
            owners.append(name)
    np.savez(file, x=np.array(rows), client=np.array(owners))
    return 1 + len(letters)


def save_model(folder: Path, num_tokens: int) -> str:
    """The name of a small Llama, saved in a folder."""
    config = transformers.LlamaConfig(
        vocab_size=num_tokens,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return f"hf:{folder}"


def main(rounds: int = 10) -> fedspu.Comparison:
    """Play the three methods; the table is printed."""
    with TemporaryDirectory() as place:
        num_tokens = save_texts(Path(place) / "texts.npz")
        found = fedspu.compare(
            ["fedspu", "local", "fedavg@finetune=5"],
            {
                "task": "language-model",
                "data.name": f"arrays:{place}/texts.npz",
                "data.partition": "natural",
                "model": save_model(Path(place) / "llama", num_tokens),
                "clients.number": CHAPTERS,
                "clients.per_round": 5,
                "clients.capacities": [0.2, 0.6, 1.0],
                "rounds": rounds,
                "train.epochs": 2,
                "train.batch_size": 16,
                "train.optimizer": "adam",
                "train.lr": 3e-3,
            },
            seeds=[0],
            out=Path(place) / "runs",
        )
    print(found)
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
