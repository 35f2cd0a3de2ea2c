"""Tensor-parallel overlap: slots, methods, knobs, their files, and model sizes."""
