"""What a client does with its own examples: train, judge, and stop early."""
