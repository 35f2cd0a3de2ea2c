"""The typed configuration of one point: Hydra composes it, the workers obey it, result.json records it.

The field docstrings are the manual. Ranges stand in the field's metadata and are checked by `check`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from overlap_sweep.errors import UserError
from overlap_sweep.space import METHODS, OPERATORS, PHASES, point_name

MOST_SMS = 512
"""Above every GPU's count of streaming multiprocessors; a worker checks against the real one."""


def ranged(default: Any, low: float, high: float) -> Any:
    return field(default=default, metadata={"range": (low, high)})


def one_of(default: Any, *choices: str) -> Any:
    return field(default=default, metadata={"choices": choices})


@dataclass
class Model:
    """The sizes of a transformer layer that decide its four linear operators."""

    name: str = MISSING
    """How the model is called in tables; with `source=hf` a Hugging Face name, a folder or a config.json."""
    source: str = one_of("sizes", "sizes", "hf")
    """`sizes`: the numbers below; `hf`: read those that are not given through transformers' AutoConfig."""
    hidden_size: int | None = ranged(None, 1, 2**20)
    ffn_hidden_size: int | None = ranged(None, 1, 2**22)
    num_attention_heads: int | None = ranged(None, 1, 2**14)
    num_kv_heads: int | None = ranged(None, 1, 2**14)
    head_dim: int | None = ranged(None, 1, 2**14)
    gated_mlp: bool | None = None
    """SwiGLU and its kin: `fc1` computes two matrices of `ffn_hidden_size` columns."""


@dataclass
class OperatorWorkload:
    """One parallel linear operator, forward and backward, with sequence parallelism."""

    name: str = "operator"
    tokens: int | None = ranged(None, 1, 2**24)
    """Tokens in the whole sequence-parallel batch. null: 8192 on a GPU; 128 on a CPU, where a GEMM of a small
    model then takes milliseconds."""
    warmup: int = ranged(1, 0, 1000)
    """Untimed forward and backward passes of every variant before the first timed one."""
    repeats: int | None = ranged(None, 3, 1000)
    """Timed passes of every variant; null: 21 on a GPU, 7 on a CPU. The variants (overlapped, none, floor) take
    turns, so that drift hits all."""
    profiled: int = ranged(2, 0, 100)
    """Passes under the profiler, after timing; 0 writes no traces."""
    seed: int = ranged(0, 0, 2**31 - 1)
    tolerance: float | None = ranged(None, 0.0, 1.0)
    """Largest relative error of output and gradients against the operator without overlap.
    null: 1e-4 for fp32, 2e-2 for fp16 and bf16."""


@dataclass
class Runtime:
    """How the worker processes run."""

    device: str = one_of("auto", "auto", "cpu", "cuda")
    """`auto`: cuda when a GPU is visible."""
    isolate: bool = False
    """Start a fresh torchrun group for every point instead of one per world size."""
    timeout_s: float = ranged(300.0, 1.0, 86400.0)
    """A point that takes longer is given up: its group is killed, the point is `timeout`, the sweep goes on."""
    start_timeout_s: float = ranged(180.0, 1.0, 3600.0)
    """How long a group may take from its start until every rank has joined."""
    threads_per_rank: int = ranged(1, 1, 1024)
    """CPU threads that a rank computes with. One makes a rank a device of its own, as a GPU is."""
    multicast: bool = False
    """Allow NVLink multicast (otherwise UB_SKIPMC=1 and its kin are set for every worker)."""


@dataclass
class SweepConfig:
    """One point of the search space, and how to measure it."""

    model: Model = field(default_factory=Model)
    tp_size: int = ranged(2, 1, 8)
    """Tensor-parallel ranks: the world size of the torchrun group."""
    operator: str = one_of("fc1", *OPERATORS)
    phase: str = one_of("all", "all", *PHASES)
    """Which phase of the operator gets the method; the others are not overlapped. `all`: each that takes it."""
    method: str = one_of("bulk", *METHODS)
    num_sm: int = ranged(4, 1, MOST_SMS)
    """The communication's share of the machine: CTAs of the NCCL communicator, or concurrent chunks (and worker
    threads) of gloo."""
    aggregate: bool | None = None
    """ring_exchange of an all-gather: multiply two chunks at a time, half as many GEMMs of twice the size."""
    num_splits: int | None = ranged(None, 1, 1024)
    """pipeline: chunks into which the GEMM and its reduce-scatter are cut."""
    cga_size: int | None = ranged(None, 1, 16)
    """CTAs per cluster of the communication kernels."""
    set_sm_margin: bool | None = None
    """Transformer Engine: the GEMM leaves the SMs of the communication kernel free."""
    use_ce: bool | None = None
    """Transformer Engine: ring exchange by the copy engines instead of SMs."""
    atomic_gemm: bool | None = None
    """Transformer Engine: one GEMM that signals its finished chunks (FP8, CUDA 12 only)."""
    fp8_buf: bool | None = None
    """Transformer Engine: communicate in FP8."""
    backend: str = "torch"
    precision: str | None = one_of(None, "fp32", "fp16", "bf16")
    """null: bf16 on a GPU, fp32 on a CPU."""
    workload: Any = MISSING
    runtime: Runtime = field(default_factory=Runtime)


@dataclass
class AnalysisConfig:
    """How `analyze.py` chooses. Given as `analysis.objective=overlap_ratio` after the directory."""

    objective: str = one_of("time", "time", "overlap_ratio")
    """`time`: the fastest setting, `none` included; `overlap_ratio`: the reference's rule, highest overlap ratio."""
    tp_scaling_tolerance: float = ranged(0.2, 0.0, 10.0)
    """A TP size scales while its time is at most (1 + tolerance) x TP=1's time / TP size."""
    overlap_threshold: float = ranged(0.5, 0.0, 1.0)
    """The overlap ratio from which a recommendation calls an overlap effective."""


def check(config: Any, schema: type, where: str = "") -> None:
    """Raise UserError for the first value outside the range or the choices that `schema` declares.

    `config` is a DictConfig or an instance of `schema`; nested dataclasses are checked too. null passes.
    """
    types = get_type_hints(schema)
    for declared in fields(schema):
        name = f"{where}{declared.name}"
        value = config[declared.name] if isinstance(config, DictConfig) else getattr(config, declared.name)
        if is_dataclass(types[declared.name]):
            check(value, types[declared.name], f"{name}.")
        elif value is None:
            continue
        elif "choices" in declared.metadata and value not in declared.metadata["choices"]:
            raise UserError(f"{name}={value} is not known; choose one of {', '.join(declared.metadata['choices'])}.")
        elif "range" in declared.metadata:
            low, high = declared.metadata["range"]
            if not low <= value <= high:
                raise UserError(f"{name}={value} is out of range; give a value from {low} to {high}.")


WORKLOAD_SCHEMAS: dict[str, type] = {"operator": OperatorWorkload}


def register_schemas() -> None:
    """Make the dataclasses, and `${point_name:}` for the run directories, known to Hydra."""
    store = ConfigStore.instance()
    store.store(name="sweep_schema", node=SweepConfig)
    for name, schema in WORKLOAD_SCHEMAS.items():
        store.store(name=f"{name}_workload_schema", node=schema)
    OmegaConf.register_new_resolver("point_name", _point_name, replace=True)


def _point_name(*, _root_: DictConfig) -> str:
    return point_name(_root_, list(_root_.hydra.overrides.task))
