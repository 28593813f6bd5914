"""What a training step costs: time, memory, products, and the paper's formula."""
