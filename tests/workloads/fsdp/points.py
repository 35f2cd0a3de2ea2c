"""Small resolved points of the workloads that train, as Hydra composes them. UserError as for a user."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from overlap_sweep.runtime.point import resolve
from tests.sweeps import ROOT

CONF = ROOT / "conf"
TINY_FSDP = (
    *("workload=fsdp", "runtime.device=cpu", "model=ranking_tiny", "model.hidden_size=32", "model.ffn_hidden_size=64"),
    *("ranking.num_layers=3", "ranking.sequence_length=6", "ranking.num_sparse_features=2", "ranking.vocab_size=50"),
    *("training.max_steps=4", "training.batch_size=2", "training.warmup_steps=0", "training.learning_rate=0.01"),
    *("workload.repeats=3", "workload.steps=1", "workload.warmup=0", "profiling.enabled=false"),
)
TINY_OPTIONS = (
    *("workload=tp_training", "runtime.device=cpu", "profile=none", "tp_training.num_training_steps=5"),
    *("tp_training.warmup_steps=1", "tp_training.seq_length=16", "tp_training.batch_size=2"),
    "tp_training.learning_rate=0.001",
)
TINY_MODEL = (
    *("model.hidden_size=64", "model.ffn_hidden_size=96", "model.num_attention_heads=4", "model.num_kv_heads=2"),
)


def fsdp_point(*overrides: str) -> dict[str, Any]:
    """Two ranks of FSDP2 on the CPU."""
    return composed(*TINY_FSDP, *overrides)


def tp_point(*overrides: str) -> dict[str, Any]:
    """Two tensor-parallel ranks on the CPU, qwen3 with 1019 tokens."""
    return composed(*TINY_OPTIONS, *TINY_MODEL, *overrides)


def composed(*overrides: str) -> dict[str, Any]:
    """The resolved point of these overrides."""
    groups = tuple(each for each in overrides if (CONF / each.partition("=")[0]).is_dir())
    config = copy.deepcopy(_of_groups(groups))
    values = [each for each in overrides if each not in groups]
    for given in OverridesParser.create().parse_overrides(values):
        OmegaConf.update(config, given.key_or_group, given.value(), force_add=given.is_add())
    return resolve(config)


@cache
def _of_groups(overrides: tuple[str, ...]) -> DictConfig:
    """What takes Hydra most of its time: the rest is set in a copy of it."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", list(overrides))
