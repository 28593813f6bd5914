"""File formats, one module for each; nothing in a data file is ever executed."""
