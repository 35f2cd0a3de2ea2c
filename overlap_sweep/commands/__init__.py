"""The commands: launch, tune, and those of analyze.py, one module each."""
