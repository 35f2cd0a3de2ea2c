"""Changes of a graph of steps, each a small function: what would run otherwise if a lever were set."""
