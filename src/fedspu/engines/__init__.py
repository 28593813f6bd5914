"""Ways to carry a request to a client, and its reply back."""
