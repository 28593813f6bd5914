"""A model's neurons: the table of them, and what is derived from it."""
