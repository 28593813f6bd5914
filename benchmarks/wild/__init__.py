"""Other people's models, at small sizes; ``python -m benchmarks.wild`` tries them."""

from benchmarks.wild import hugging_face, others, vision
from benchmarks.wild.zoo import MODELS

__all__ = ["MODELS", "hugging_face", "others", "vision"]
