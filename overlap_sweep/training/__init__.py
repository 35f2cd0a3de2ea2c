"""Data-parallel training: the model and its data, who holds what, on which streams collectives run, and its steps."""
