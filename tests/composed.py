"""Points as Hydra composes them from what one types, in this process. UserError as for a user."""

from functools import cache
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig

from overlap_sweep.hydra_adapter.composition import compose_point, read_files_once
from overlap_sweep.hydra_adapter.overrides import quoted_for_hydra
from overlap_sweep.runtime.point import resolve
from overlap_sweep.runtime.resolvers import register
from tests.sweeps import ROOT

register()

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
SIZES = (
    *("model.hidden_size=256", "model.ffn_hidden_size=512", "model.num_attention_heads=8", "model.num_kv_heads=4"),
    "model.head_dim=32",
)
"""Of an operator or a layer that takes a moment."""
QUICK = ("runtime.device=cpu", "workload.tokens=64", "workload.repeats=3", "profile=none")
TINY_MODEL = (
    *("model.hidden_size=64", "model.ffn_hidden_size=96", "model.num_attention_heads=4", "model.num_kv_heads=2"),
)


@cache
def hydra() -> Hydra:
    """Hydra with the files in conf/."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        found = GlobalHydra.instance().hydra
        assert found
        read_files_once()
        return found


@cache
def multirun(*typed: str) -> tuple[ConfigLoader, DictConfig]:
    """What Hydra gives to launchers of `launch.py -m`. Not to be changed."""
    config = hydra().compose_config("config", quoted_for_hydra(typed), RunMode.MULTIRUN, with_log_configuration=False)
    return hydra().config_loader, config


def configuration(*typed: str) -> DictConfig:
    """The composed point with Hydra's part."""
    return compose_point(*multirun(), quoted_for_hydra(typed))


def composed(*typed: str) -> Any:
    """The resolved point."""
    return resolve(configuration(*typed))


def fsdp_point(*typed: str) -> Any:
    """Two ranks of FSDP2 on the CPU."""
    return composed(*TINY_FSDP, *typed)


def tp_point(*typed: str) -> Any:
    """Two tensor-parallel ranks on the CPU, qwen3 with 1019 tokens."""
    return composed(*TINY_OPTIONS, *TINY_MODEL, *typed)
