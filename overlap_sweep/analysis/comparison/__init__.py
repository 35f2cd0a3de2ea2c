"""Sweeps against each other, or traces: what is faster, what slower, and what else changed."""
