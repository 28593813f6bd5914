"""What a slim copy needs besides smaller tensors, and the proof that it is right."""
