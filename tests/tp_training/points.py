"""Small resolved points of workload=tp_training, as Hydra composes them."""

from __future__ import annotations

from typing import Any

from hydra import compose, initialize_config_dir

from overlap_sweep.runtime.point import resolve
from tests.sweeps import ROOT

TINY = (
    *("workload=tp_training", "runtime.device=cpu", "profile=none", "model.hidden_size=64", "model.ffn_hidden_size=96"),
    *("model.num_attention_heads=4", "model.num_kv_heads=2", "tp_training.num_training_steps=5"),
    *("tp_training.warmup_steps=1", "tp_training.seq_length=16", "tp_training.batch_size=2"),
    "tp_training.learning_rate=0.001",
)


def tp_point(*overrides: str) -> dict[str, Any]:
    """Two tensor-parallel ranks on the CPU, qwen3 with 1019 tokens. UserError as for a user."""
    return composed(*TINY, *overrides)


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return resolve(compose("config", list(overrides)))
