"""launch.py's arguments for a model so small that a point of it takes a moment."""

from __future__ import annotations

SIZES = (
    "model.hidden_size=256",
    "model.ffn_hidden_size=512",
    "model.num_attention_heads=8",
    "model.num_kv_heads=4",
    "model.head_dim=32",
)
QUICK = ("runtime.device=cpu", "workload.tokens=64", "workload.repeats=3", "profile=none")
