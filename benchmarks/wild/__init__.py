"""Other people's models, at small sizes; ``python -m benchmarks.wild`` tries them."""

from benchmarks.wild import held_out, hugging_face, others, vision
from benchmarks.wild.zoo import MODELS

__all__ = ["MODELS", "held_out", "hugging_face", "others", "vision"]
