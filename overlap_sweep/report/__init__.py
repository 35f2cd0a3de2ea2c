"""What `analyze.py` writes and prints: YAML for Megatron-LM, JSON, text, tables."""
