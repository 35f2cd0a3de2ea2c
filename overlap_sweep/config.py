"""The typed configuration of one point: Hydra composes it, the workers obey it, result.json records it.

The field docstrings are the manual. Ranges stand in the field's metadata and are checked by `declared.check`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from overlap_sweep import workloads
from overlap_sweep.declared import one_of, ranged
from overlap_sweep.overlap.kernel_shape import KERNELS, PRECISION_OF_DTYPE
from overlap_sweep.overlap.models import SIZES
from overlap_sweep.overlap.space import (
    LAYER_KINDS,
    METHODS,
    MOST_OF,
    OPERATORS,
    PHASES,
    PRECISIONS,
)
from overlap_sweep.results.run_directory import last_sweep
from overlap_sweep.workloads.fsdp.config import (
    Compile,
    CopyEngine,
    Distributed,
    Fsdp,
    Profiling,
    Ranking,
    Streams,
    Telemetry,
    Training,
)
from overlap_sweep.workloads.tp_training.config import IMPLEMENTATIONS, TpTraining


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
    normalization: str | None = one_of(None, "LayerNorm", "RMSNorm")
    """What `qkv` and `fc1` normalise their input with (Transformer Engine fuses it into them).
    null: RMSNorm for gated models, else LayerNorm."""
    bias: bool | None = None
    """Whether the linear operators add a bias. null: not in gated models."""
    architecture: str | None = None
    """Hugging Face's model_type. This and what follows makes a language model of the layer, for workload=tp_training;
    others refuse it, unless a preset says it."""
    num_layers: int | None = ranged(None, 1, 4096)
    vocab_size: int | None = ranged(None, 2, 2**31 - 1)
    rope_theta: float | None = ranged(None, 1.0, 1e12)
    """null: 10000."""
    norm_epsilon: float | None = ranged(None, 0.0, 1.0)
    """null: 1e-6."""
    tie_word_embeddings: bool | None = None
    """The output projection has the embedding's weights; null: weights of its own."""


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
    profiled: int = ranged(2, 1, 100)
    """Passes under the profiler, after timing, of the points that `profile` asks for."""
    default_every_s: float = ranged(30.0, 0.0, 86400.0)
    """How old the time of the library's default overlap may be before a point of the operator measures it again;
    `none` and `floor` are measured beside every point."""
    seed: int = ranged(0, 0, 2**31 - 1)
    tolerance: float | None = ranged(None, 0.0, 1.0)
    """Largest relative error of output and gradients against the operator without overlap.
    null: 1e-4 for fp32, 2e-2 for fp16, bf16 and FP8, 0.2 where `fp8_buf` reduces in FP8."""


@dataclass
class LayerWorkload:
    """A whole transformer layer or a part of it, under several overlap configurations side by side; see `layer`."""

    name: str = "layer"
    tokens: int | None = ranged(None, 1, 2**24)
    """Tokens in the whole batch: sequence length x `layer.micro_batch_size`. null: 8192, on a CPU 128."""
    warmup: int = ranged(2, 0, 1000)
    repeats: int | None = ranged(None, 3, 1000)
    """Timed iterations of every variant; null: 21, on a CPU 7."""
    profiled: int = ranged(2, 1, 100)
    """Iterations under the profiler, of the variants that `profile` asks for."""
    seed: int = ranged(0, 0, 2**31 - 1)
    tolerance: float | None = ranged(None, 0.0, 1.0)
    """Largest relative error of output and gradients against `none`. null: 1e-4 for fp32, 5e-2 for fp16 and bf16, 0.2
    for FP8."""


@dataclass
class KernelWorkload:
    """One GEMM and one collective, by every implementation that a backend has, side by side: see `kernel`."""

    name: str = "kernel"
    tokens: int | None = ranged(None, 1, 2**24)
    """`m`."""
    warmup: int | None = ranged(None, 0, 1000)
    """`warmup_iters`; null: 3, on a CPU 1."""
    repeats: int | None = ranged(None, 3, 1000)
    """`iters`; null: 21, on a CPU 7. The implementations and baselines take turns."""
    profiled: int = ranged(2, 1, 100)
    """Iterations under the profiler, of all implementations, or with `profile=best` of the fastest and the baseline."""
    seed: int = ranged(0, 0, 2**31 - 1)
    tolerance: float | None = ranged(None, 0.0, 1.0)
    """Largest difference from the result in float32, over its largest magnitude. null: 1e-4 for float32, else 2e-2."""


@dataclass
class FsdpWorkload:
    """Training steps of a ranking model under FSDP2 or DDP, compared with the same steps whose collectives have the
    device to themselves (`none`), and without communication (`floor`); see `fsdp`, `training`, `distributed`."""

    name: str = "fsdp"
    tokens: int | None = ranged(None, 1, 2**31 - 1)
    """Tokens of all ranks' micro batches of a step; what `training` and `ranking` say."""
    warmup: int = ranged(1, 0, 1000)
    """Untimed turns of every variant before the first timed one, after the run that the telemetry records."""
    repeats: int = ranged(7, 3, 1000)
    """Timed turns of every variant."""
    steps: int = ranged(3, 1, 1000)
    """Consecutive steps of each turn, after an untimed one; their mean is the turn's time."""
    seed: int = ranged(0, 0, 2**31 - 1)
    """Of parameters and data."""


@dataclass
class CopyEngineWorkload:
    """GEMMs and copies, one after the other and at once: what a copy engine can hide; see `copy_engine`."""

    name: str = "copy_engine"
    tokens: int | None = ranged(None, 1, 2**24)
    """`copy_engine.matrix_size`: rows of the GEMM."""
    warmup: int = ranged(2, 0, 1000)
    repeats: int | None = ranged(None, 3, 10**5)
    """`copy_engine.iterations`; null: 21, on a CPU 7."""
    seed: int = ranged(0, 0, 2**31 - 1)


@dataclass
class Layer:
    """What `workload=layer` runs: a transformer layer or a part of one, with `layer=<kind>`. It is Transformer Engine's
    own, or with backend=torch one of the same form on plain torch.distributed."""

    kind: str = one_of("transformer_layer", *LAYER_KINDS)
    variants: list[str] | None = None
    """Overlap configurations, interleaved: `none`; `default` (Transformer Engine's; torch has none); `file:<path>` (a
    tp_comm_overlap_cfg); a method (each slot that takes it gets it with `num_sm` and the other knobs, the rest is not
    overlapped); `split` (ring exchange of all-gathers, pipelined reduce-scatters); `rs_dgrad` (the default, but dgrad's
    own reduce-scatter by ring exchange instead of the bulk overlaps); `atomic` (ring exchange of one atomic GEMM).
    `floor`, the same layer without communication, is always measured too. null: none, and what the next three say."""
    comm_overlap: bool = True
    """false: `none` alone, whatever else is given."""
    tp_comm_overlap_cfg: str | None = None
    """A file to overlap by instead of the default; in `variants` it is `file:<path>`."""
    ub_overlap_rs_dgrad: bool = False
    """`rs_dgrad` instead of the default."""
    num_replicas: int = ranged(1, 1, 1024)
    """Data-parallel replicas, through DDP: the layer runs on tp_size x num_replicas GPUs."""
    micro_batch_size: int = ranged(1, 1, 2**20)
    """Sequences in the batch."""
    training: bool = False
    """Training steps: an optimizer (Adam) after each backward, and with delayed scaling new FP8 scales in each step."""


@dataclass
class Runtime:
    """How the worker processes run."""

    device: str = one_of("auto", "auto", "cpu", "cuda")
    """`auto`: cuda when a GPU is visible."""
    isolate: bool = False
    """Start a fresh torchrun group for every point instead of one per world size."""
    timeout_s: float = ranged(300.0, 1.0, 86400.0)
    """A point that takes longer is given up: its group is killed, the point is `timeout`, the sweep goes on."""
    timeout_factor: float = ranged(10.0, 0.0, 10**4)
    """Once points of its kind were measured, a point is given up sooner: after so many times the longest of them, but
    not before 30 seconds. 0: only after timeout_s."""
    retries: int = ranged(1, 0, 100)
    """How often a point that failed or timed out is tried again, in a fresh group. Wrong numbers are not."""
    start_timeout_s: float = ranged(180.0, 1.0, 3600.0)
    """How long a group may take from its start until every rank has joined."""
    threads_per_rank: int = ranged(1, 1, 1024)
    """CPU threads that a rank computes with. One makes a rank a device of its own, as a GPU is."""
    max_connections: int | None = ranged(None, 1, 32)
    """CUDA_DEVICE_MAX_CONNECTIONS of the workers: hardware queues that a GPU's streams share. null: as it is trained
    with; 1, which Megatron-LM needs to keep kernels in the order in which they were launched, but for backend=symm_mem
    CUDA's own 8."""
    multicast: bool = False
    """Allow NVLink multicast (otherwise UB_SKIPMC=1 and its kin are set for every worker)."""
    bootstrap_backend: str = one_of("gloo", "gloo", "nccl", "mpi")
    """Who exchanges the userbuffers' handles. On two H200s gloo takes 10 ms where NCCL takes 180 at first and keeps
    half a gigabyte."""


@dataclass
class Search:
    """How `hydra/sweeper=bisect` looks for the fastest settings. No part of a point."""

    max_points: int | None = ranged(None, 1, 10**6)
    """Stop after so many points, baselines included. The best so far is the answer."""
    max_minutes: float | None = ranged(None, 0.0, 10**5)
    """Stop after so long; looked at after every few points."""
    min_num_sm: int = ranged(1, 1, MOST_OF["num_sm"])
    max_num_sm: int = ranged(MOST_OF["num_sm"], 1, MOST_OF["num_sm"])
    """Leave out of num_sm's values what is less, or more."""
    reach: float = ranged(0.25, 0.0, 10.0)
    """A value of a knob that is slower by more than this share when it is first measured is dropped."""
    worth: float = ranged(0.01, 0.0, 1.0)
    """What a further measurement must promise to gain at best, as a share of the fastest time."""
    repeats: int = ranged(3, 1, 100)
    """How often contenders are measured that the noise cannot tell apart."""
    start: str = one_of("usual", "usual", "model")
    """Which num_sm is tried first. `usual`: the library's own; `model`: what an estimate from link and GEMM rates
    says."""
    tp_sizes: str = one_of("in_turn", "in_turn", "together")
    """`in_turn`: one TP size after the other, from the smallest, so that torchrun's groups start once each. `together`:
    every round has points of all, for launchers that run them side by side."""


@dataclass
class Tuner:
    """What `+experiment=tp_overlap_tuner` does beside the search. No part of a point."""

    presets: list[str] | None = None
    """tp_comm_overlap_cfg files to prove the tuned one against. `{tp}` in a name stands for the TP size."""
    together: int = ranged(4, 0, 16)
    """How many combinations of settings are tried on the whole layer before the proof; 0 tries none."""
    within: float = ranged(0.03, 0.0, 1.0)
    """By what share of its pass's time a setting may be slower than the best and still be tried in a combination."""
    prove: bool = True
    """Run the whole layer: none, default, tuned and presets, side by side."""
    drop_tp_sizes: bool = True
    """Leave out a TP size that could not scale even if all its communication were hidden."""
    tp_scaling_tolerance: float = ranged(0.2, 0.0, 10.0)
    overlap_threshold: float = ranged(0.5, 0.0, 1.0)
    unmeasured: str = one_of("off", "off", "default")
    """All three as in AnalysisConfig."""


@dataclass
class TpTrainingWorkload:
    """Training steps of a language model by one of several tensor-parallel stacks, timed step by step; see `impl` and
    `tp_training`."""

    name: str = "tp_training"
    tokens: int | None = ranged(None, 1, 2**40)
    """Tokens of a step: of all data-parallel ranks' micro batches; what `tp_training` says."""
    repeats: int | None = ranged(None, 1, 10**6)
    """Timed steps: what `tp_training` says."""
    profiled: int = ranged(2, 1, 100)
    """Steps under the profiler, after the timed ones, unless `profile=none`."""


OF_WORKLOAD = {
    "fsdp": ("ranking", "fsdp", "training", "distributed", "streams", "compile", "profiling", "telemetry"),
    "copy_engine": ("copy_engine",),
    "tp_training": ("tp_training",),
}
"""Groups of options that only these workloads know."""

OPTIONS_OF_WORKLOAD = {
    "kernel": ("kernel", "m", "n", "k", "dtype", "iters", "warmup_iters", "implementations"),
    "tp_training": ("impl", "dp_size"),
}
"""Single options that only these workloads know; null for all others."""

OF_LANGUAGE_MODELS = (
    *("architecture", "num_layers", "vocab_size", "rope_theta", "norm_epsilon", "tie_word_embeddings"),
)
"""Of `model`, what only `workload=tp_training` knows."""

_OF_OPERATORS = ("name", "source", *SIZES)
_OF_LAYERS = (*_OF_OPERATORS, "normalization", "bias")

READ_OF_MODEL: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("operator", "layer", "fsdp"), _OF_LAYERS),
    "kernel": _OF_OPERATORS,
    "copy_engine": (),
    "tp_training": (*(name for name in _OF_OPERATORS if name != "gated_mlp"), *OF_LANGUAGE_MODELS),
}
"""By workload what it reads of `model`. A preset may say more, for others; to give more oneself is refused."""

NO_PART_OF_A_POINT = ("search", "tuner", "max_tp_size", "resume", "store", "reuse", "model_preset")
"""What says how to search and where results are kept, not what a point is."""


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
    num_sm: int = ranged(4, 1, MOST_OF["num_sm"])
    """The communication's share of the machine: CTAs of the NCCL communicator, or concurrent chunks (and worker
    threads) of gloo."""
    aggregate: bool | None = None
    """ring_exchange of an all-gather: multiply two chunks at a time, half as many GEMMs of twice the size."""
    num_splits: int | None = ranged(None, 1, MOST_OF["num_splits"])
    """pipeline: chunks into which the GEMM and its reduce-scatter are cut."""
    cga_size: int | None = ranged(None, 1, MOST_OF["cga_size"])
    """CTAs per cluster of the communication kernels."""
    set_sm_margin: bool | None = None
    """Transformer Engine: the GEMM leaves the SMs of the communication kernel free."""
    use_ce: bool | None = None
    """Transformer Engine: ring exchange by the copy engines instead of SMs."""
    atomic_gemm: bool | None = None
    """Transformer Engine: one GEMM that signals its finished chunks (FP8, CUDA 12 only)."""
    fp8_buf: bool | None = None
    """Transformer Engine: communicate in FP8."""
    phases: Any = None
    """Instead of `phase`, `method` and the knobs: what each phase of the operator is given, all at once, such as
    `{fprop: {method: ring_exchange}, dgrad: {method: bulk, num_sm: 8}, wgrad: {method: bulk, num_sm: 16}}`.
    A phase that is left out is not overlapped."""
    backend: str = "auto"
    """Who overlaps. `auto`: transformer_engine where it is installed and there is a GPU, else torch."""
    precision: str | None = one_of(None, *PRECISIONS)
    """null: bf16 on a GPU, fp32 on a CPU. fp8_delayed and fp8_current are Transformer Engine's recipes."""
    profile: str = one_of("all", "all", "best", "none")
    """Which points run under the profiler after they were timed. `best`: those that are the fastest of their
    operator so far, or within 1 % of it, and what a search chose in the end."""
    repetition: int = ranged(0, 0, 10**6)
    """Changes nothing: a sweep over it measures the same points again."""
    workload: Any = MISSING
    layer: Layer = field(default_factory=Layer)
    kernel: str | None = one_of(None, *KERNELS)
    """What `workload=kernel` runs: a GEMM after an all-gather, or before a reduce-scatter or an all-reduce. null: what
    `operator` does in its forward. Of a row-parallel operator `ag_gemm` is its dgrad, of a column-parallel one
    `gemm_rs` and `gemm_ar` are."""
    m: int | None = ranged(None, 1, 2**24)
    """Rows of the whole input and output: tokens. null: 8192, on a CPU 128."""
    n: int | None = ranged(None, 1, 2**22)
    """Columns of the whole output; null: `model` and `operator` say it."""
    k: int | None = ranged(None, 1, 2**22)
    """Columns of the whole input, which the GEMM sums over; null: `model` and `operator` say it."""
    dtype: str | None = one_of(None, *PRECISION_OF_DTYPE)
    """Of the kernel, by torch's names; null: `precision`. float8_e4m3fn: FP8 with one scale a tensor, into bfloat16."""
    iters: int | None = ranged(None, 3, 1000)
    """Of the kernel: timed iterations; null: 21, on a CPU 7."""
    warmup_iters: int | None = ranged(None, 0, 1000)
    """Of the kernel: untimed iterations; null: 3, on a CPU 1."""
    implementations: list[str] | None = None
    """Of the kernel: which of the backend's implementations. Names as in the table that is printed, such as
    `ring_agg1`, and with other knobs, such as `pipeline_sm12_split8`. null: all that it lists."""
    ranking: Ranking = field(default_factory=Ranking)
    fsdp: Fsdp = field(default_factory=Fsdp)
    training: Training = field(default_factory=Training)
    distributed: Distributed = field(default_factory=Distributed)
    streams: Streams = field(default_factory=Streams)
    compile: Compile = field(default_factory=Compile)
    profiling: Profiling = field(default_factory=Profiling)
    telemetry: Telemetry = field(default_factory=Telemetry)
    copy_engine: CopyEngine = field(default_factory=CopyEngine)
    impl: str | None = one_of(None, *IMPLEMENTATIONS)
    """Of workload=tp_training, who trains: `autotp`, DeepSpeed's AutoTP and ZeRO; `fsdp_dtensor`, FSDP2 over the
    data-parallel ranks and DTensor over the tensor-parallel ones; `async_tp`, the same with PyTorch's asynchronous TP;
    `megatron`, Megatron-Core. null: fsdp_dtensor."""
    dp_size: int | None = ranged(None, 1, 1024)
    """Of workload=tp_training: data-parallel ranks; it runs on tp_size x dp_size. null: 1."""
    tp_training: TpTraining = field(default_factory=TpTraining)
    runtime: Runtime = field(default_factory=Runtime)
    search: Search = field(default_factory=Search)
    tuner: Tuner = field(default_factory=Tuner)
    max_tp_size: int = ranged(8, 1, 1024)
    """Of the tuner: it searches TP=2, 4 and 8 up to this, unless tp_size names others."""
    resume: str | None = None
    """The directory of an earlier sweep to go on with, or `last`: what it has measured is not measured again."""
    store: str | None = None
    """A file that remembers every measurement, such as measurements.sqlite; see docs/store.md."""
    reuse: bool = False
    """Ask the store before measuring."""
    model_preset: Any = None
    """What the file that `model` names says, as conf/config.yaml has it read: what differs in `model` was given."""


@dataclass
class AnalysisConfig:
    """How `analyze.py` chooses. Given as `analysis.objective=overlap_ratio` after the directory."""

    objective: str = one_of("time", "time", "overlap_ratio")
    """`time`: the fastest setting, `none` included; `overlap_ratio`: the reference's rule, highest overlap ratio."""
    tp_scaling_tolerance: float = ranged(0.2, 0.0, 10.0)
    """A TP size scales while its time is at most (1 + tolerance) x TP=1's time / TP size."""
    overlap_threshold: float = ranged(0.5, 0.0, 1.0)
    """The overlap ratio from which a recommendation calls an overlap effective."""
    unmeasured: str = one_of("off", "off", "default")
    """What exported files do about slots that no point overlapped. `off`: Megatron-Core's switches turn them off, but
    for those that share their switch with a measured setting that wins; `default`: they keep the library's default
    overlap."""


WORKLOAD_SCHEMAS: dict[str, type] = {
    "operator": OperatorWorkload,
    "layer": LayerWorkload,
    "kernel": KernelWorkload,
    "fsdp": FsdpWorkload,
    "copy_engine": CopyEngineWorkload,
    "tp_training": TpTrainingWorkload,
}


def register_schemas() -> None:
    """Make the dataclasses known to Hydra, and what conf/ and the launchers' options say of a point or a sweep."""
    store = ConfigStore.instance()
    store.store(name="sweep_schema", node=SweepConfig)
    for name, schema in WORKLOAD_SCHEMAS.items():
        store.store(name=f"{name}_workload_schema", node=schema)
    OmegaConf.register_new_resolver("point_name", _point_name, replace=True)
    OmegaConf.register_new_resolver("gpus_of_point", _gpus_of_point, replace=True)
    OmegaConf.register_new_resolver("cpus_of_point", _cpus_of_point, replace=True)
    OmegaConf.register_new_resolver("output_dir", _output_dir, replace=True)
    OmegaConf.register_new_resolver("run_dir", _run_dir, replace=True)
    OmegaConf.register_new_resolver("sweep_dir", _sweep_dir, replace=True, use_cache=True)


def _point_name(*, _root_: DictConfig) -> str:
    from overlap_sweep.workloads.naming import point_name

    return point_name(_root_, list(_root_.hydra.overrides.task))


def _gpus_of_point(*, _root_: DictConfig) -> int | None:
    return None if _root_.runtime.device == "cpu" else workloads.gpus(_root_)


def _output_dir(*, _root_: DictConfig) -> str | None:
    """Where the user wants results instead of multirun/, by the workload's own option."""
    return _root_.training.output_dir or _root_.tp_training.output_dir


def _run_dir(date: str, time: str, name: str, *, _root_: DictConfig) -> str:
    """Where a single point goes. Of training by stacks several go into one directory, to be compared."""
    if _root_.tp_training.output_dir:
        return f"{_root_.tp_training.output_dir}/{name}"
    return _root_.training.output_dir or f"multirun/{date}/{time}/{name}"


def _cpus_of_point(*, _root_: DictConfig) -> int:
    return 2 * workloads.world_size(_root_) * int(_root_.runtime.threads_per_rank)


def _sweep_dir(resume: str | None, date: str, time: str, output_dir: str | None) -> str:
    """Where a sweep's run directories go: into those of the sweep that it goes on with, else into new ones."""
    if resume is None:
        return output_dir or f"multirun/{date}/{time}"
    return str(last_sweep()) if resume == "last" else resume
