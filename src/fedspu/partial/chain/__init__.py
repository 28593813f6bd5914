"""Small networks that are one chain of layers, run as one operation."""
