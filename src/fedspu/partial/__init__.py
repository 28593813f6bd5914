"""Training a part of a model."""
