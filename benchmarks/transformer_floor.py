"""How far freezing can go: a Transformer's step without any gradient of a matrix.

    python benchmarks/transformer_floor.py [--repetitions 11]

In ``exact`` mode the forward pass and the gradients of activations are whole, so plain
PyTorch with all matrices of linear layers frozen (embeddings, norms and biases train)
bounds from below what leaving out weight gradients can save by itself. Ratios of CPU
time to the dense step, in turns. *All tokens*: the loss reads every token, not one.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

import torch
from partial_training import CASES, Ground, Variant
from torch import Tensor, nn


class AllTokens(nn.Module):
    """A model of Hugging Face with a score for each token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        inner = model.model  # of the benchmark's own wrapper
        self.base = inner.base_model
        if hasattr(self.base, "pooler"):
            self.base.pooler = None  # it reads one token
        self.head = nn.Linear(self.base.config.hidden_size, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The mean score of all tokens."""
        hidden = self.base(input_ids=x).last_hidden_state
        scores: Tensor = self.head(hidden).mean(1)
        return scores


def without_matrices(variant: Variant) -> Variant:
    """The same step, in which no matrix of a linear layer trains."""
    for layer in variant.model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.requires_grad_(False)
    left = [p for p in variant.model.parameters() if p.requires_grad]
    return Variant(variant.model, left, variant.x, variant.y)


def measure(name: str, reads_all: bool, repetitions: int) -> None:
    """Print one row: the floor, and ours at p = 0.2."""
    case = CASES[name]
    build: Callable[[], nn.Module] = case.build
    if reads_all:
        case = type(case)(lambda: AllTokens(build()), case.shape, 10, num_tokens=1000)
    ground = Ground.of(case)
    with ExitStack() as stack:
        variants = {
            "dense": ground.variant("", "dense", stack),
            "floor": without_matrices(ground.variant("", "dense", stack)),
            "p = 0.2": ground.variant("exact, fast", "p = 0.2", stack),
        }
        turns: dict[str, list[float]] = {key: [] for key in variants}
        for _ in range(repetitions):
            for key, variant in variants.items():
                start = time.process_time()
                variant.step()
                turns[key].append(time.process_time() - start)
    dense = median(turns["dense"])
    ratios = [f"{median(turns[key]) / dense:.2f}" for key in ("floor", "p = 0.2")]
    reads = "all tokens" if reads_all else "one token"
    print(
        f"| {name} ({1e3 * dense:.0f} ms) | {reads} | {' | '.join(ratios)} |",
        flush=True,
    )


def main() -> None:
    """Measure both models, with a loss on one token and on all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=11)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | the loss reads | no matrix trains | ours at p = 0.2 |")
    print("|---|---|---|---|")
    for name in ("bert", "llama", "bert-wide", "llama-wide"):
        for reads_all in (False, True):
            measure(name, reads_all, given.repetitions)


if __name__ == "__main__":
    main()
