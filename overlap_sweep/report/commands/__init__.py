"""The commands of analyze.py, one module each. What a command needs is imported when it runs."""
