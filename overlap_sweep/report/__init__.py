"""Output of `analyze.py`: terminal, text, tables, JSON, page and charts."""
