"""What a training step costs: bytes that are held, products that are computed."""
