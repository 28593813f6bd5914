"""Compiled code: its sources, and how a process finds or compiles it."""
