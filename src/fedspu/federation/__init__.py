"""The round, written once for every method and every engine."""
