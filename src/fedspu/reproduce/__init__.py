"""The paper's tables and its memory figure, ours beside the printed values."""
