"""The commands of analyze.py, one module each."""
