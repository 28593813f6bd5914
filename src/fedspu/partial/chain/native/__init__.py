"""Chains of layers as compiled code: forward, backward and whole epochs in one call."""
