"""Comparisons of sweeps and of traces: as text, charts and files."""
