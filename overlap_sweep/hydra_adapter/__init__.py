"""Everything that knows Hydra's inside. docs/hydra.md lists what it relies on, and what breaks if that changes."""
