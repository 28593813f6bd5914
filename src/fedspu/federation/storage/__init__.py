"""A run on disk: what is written after each round, and how it is read again."""
