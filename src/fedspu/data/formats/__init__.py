"""File formats, each read by one file, and nothing in them is executed."""
