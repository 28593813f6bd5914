"""The user's own examples: arrays, folders, Hugging Face data sets."""
