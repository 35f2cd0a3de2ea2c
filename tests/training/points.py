"""Small resolved points of workload=fsdp, as Hydra composes them."""

from __future__ import annotations

from typing import Any

from hydra import compose, initialize_config_dir

from overlap_sweep.runtime.point import resolve
from tests.sweeps import ROOT

TINY = (
    *("workload=fsdp", "runtime.device=cpu", "model=ranking_tiny", "model.hidden_size=32", "model.ffn_hidden_size=64"),
    *("ranking.num_layers=3", "ranking.sequence_length=6", "ranking.num_sparse_features=2", "ranking.vocab_size=50"),
    *("training.max_steps=4", "training.batch_size=2", "training.warmup_steps=0", "training.learning_rate=0.01"),
    *("workload.repeats=3", "workload.steps=1", "workload.warmup=0", "profiling.enabled=false"),
)


def fsdp_point(*overrides: str) -> dict[str, Any]:
    """Two ranks of FSDP2 on the CPU. UserError as for a user."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return resolve(compose("config", [*TINY, *overrides]))
