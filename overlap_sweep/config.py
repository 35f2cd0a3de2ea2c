"""What the configuration of every point has: Hydra composes it, the workers obey it, result.json records it.

A workload's own options are in `workloads/<name>/config.py`, whose `Config` is a subclass of one of these. The field
docstrings are the manual. Ranges stand in the field's metadata and are checked by `declared.check`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from omegaconf import MISSING

from overlap_sweep.declared import check, one_of, ranged
from overlap_sweep.errors import UserError, nearest

BY_TORCH = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Our names of the types, by torch's. Each option has one of the two, and understands the other."""
TORCHS = {ours: torchs for torchs, ours in BY_TORCH.items()}

PRECISIONS = ("fp32", "fp16", "bf16", "fp8_delayed", "fp8_current")

MOST_SMS = 512
"""Above every GPU's count of streaming multiprocessors; a worker checks against the real one."""


@dataclass
class Model:
    """The model's sizes; `model=<preset>` sets them all."""

    name: str = MISSING
    """How the model is called in tables; with `source=hf` a Hugging Face name, a folder or a config.json."""
    source: str = one_of("sizes", "sizes", "hf")
    """`sizes`: the numbers below; `hf`: read those that are not given through transformers' AutoConfig."""
    hidden_size: int | None = ranged(None, 1, 2**20)
    """Width of the residual stream."""
    ffn_hidden_size: int | None = ranged(None, 1, 2**22)
    """Width of the MLP."""
    num_attention_heads: int | None = ranged(None, 1, 2**14)
    """Query heads of the attention."""
    num_kv_heads: int | None = ranged(None, 1, 2**14)
    """Key and value heads (grouped-query attention). null: as many as query heads."""
    head_dim: int | None = ranged(None, 1, 2**14)
    """Width of one attention head. null: hidden_size / num_attention_heads."""
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
    """Transformer layers of the language model."""
    vocab_size: int | None = ranged(None, 2, 2**31 - 1)
    """Rows of the embedding and of the output projection."""
    rope_theta: float | None = ranged(None, 1.0, 1e12)
    """Base of the rotary position embedding. null: 10000."""
    norm_epsilon: float | None = ranged(None, 0.0, 1.0)
    """Added to the variance by the normalisation. null: 1e-6."""
    tie_word_embeddings: bool | None = None
    """The output projection has the embedding's weights; null: weights of its own."""


SIZES = ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_kv_heads", "head_dim", "gated_mlp")

OF_OPERATORS = ("name", "source", *SIZES)
"""Of `model`, what decides the shapes of its linear operators."""

OF_LAYERS = (*OF_OPERATORS, "normalization", "bias")

OF_LANGUAGE_MODELS = (
    *("architecture", "num_layers", "vocab_size", "rope_theta", "norm_epsilon", "tie_word_embeddings"),
)


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
    """How the searching sweepers look for the fastest settings. No part of a point."""

    max_points: int | None = ranged(None, 1, 10**6)
    """Stop after so many points, baselines included. The best so far is the answer."""
    max_minutes: float | None = ranged(None, 0.0, 10**5)
    """Stop after so long; looked at after every few points."""
    min_num_sm: int = ranged(1, 1, MOST_SMS)
    """Leave out smaller values of num_sm."""
    max_num_sm: int = ranged(MOST_SMS, 1, MOST_SMS)
    """Leave out larger values of num_sm."""
    reach: float = ranged(0.25, 0.0, 10.0)
    """A value of a knob that is slower by more than this share when it is first measured is dropped."""
    worth: float = ranged(0.01, 0.0, 1.0)
    """What a further measurement must promise to gain at best, as a share of the fastest time."""
    repeats: int = ranged(3, 1, 100)
    """How often contenders are measured that the noise cannot tell apart."""


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
    """A TP size scales while its time is at most (1 + this) x TP=1's time / TP size."""
    overlap_threshold: float = ranged(0.5, 0.0, 1.0)
    """The overlap ratio from which a recommendation calls an overlap effective."""
    unmeasured: str = one_of("off", "off", "default")
    """What exported files do about slots that no point overlapped: turn them off, or leave them at the library's
    default overlap."""


NO_PART_OF_A_POINT = ("search", "tuner", "max_tp_size", "resume", "store", "reuse", "model_preset")
"""What says how to search and where results are kept, not what a point is."""


@dataclass
class PointConfig:
    """One point of the search space, and how to measure it."""

    workload: Any = MISSING
    backend: str = "auto"
    """Who overlaps. `auto`: transformer_engine where it is installed and there is a GPU, else torch."""
    precision: str | None = one_of(None, *PRECISIONS, also=BY_TORCH)
    """What is computed and communicated in. null: bf16 on a GPU, fp32 on a CPU. fp8_delayed and fp8_current are
    Transformer Engine's recipes. torch's names, such as bfloat16, are understood."""
    profile: str = one_of("all", "all", "best", "none")
    """Which points run under the profiler after they were timed. `best`: those that are the fastest of their
    operator so far, or within 1 % of it, and what a search chose in the end."""
    repetition: int = ranged(0, 0, 10**6)
    """Changes nothing: a sweep over it measures the same points again."""
    runtime: Runtime = field(default_factory=Runtime)
    search: Search = field(default_factory=Search)
    tuner: Tuner = field(default_factory=Tuner)
    max_tp_size: int = ranged(8, 1, 1024)
    """Of the tuner: it searches TP=2, 4 and 8 up to this, unless tp_size names others."""
    resume: str | None = None
    """The directory of an earlier sweep to go on with, or `last`: what it has measured is not measured again."""
    store: str | None = None
    """Remembers every measurement, in `<store>.d`; see docs/store.md."""
    reuse: bool = False
    """Ask the store before measuring."""

    groups: ClassVar[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {}
    """By config group, by option, what it sets at the top level. conf/ has the larger ones as files."""
    precision_option: ClassVar[str | None] = None
    """What stands for `precision`, where that is not read."""
    precision_from: ClassVar[str | None] = None
    """The option that decides the precision where it is given."""


@dataclass
class ModelConfig(PointConfig):
    """Options of a workload that runs a model or a part of one."""

    model: Model = field(default_factory=Model)
    model_preset: Any = None
    """What the file that `model` names says, as conf/workload/ has it read: what differs in `model` was given."""

    reads_of_model: ClassVar[tuple[str, ...]] = OF_LAYERS
    """What is read of `model`. A preset may say more, for other workloads; to give more oneself is refused."""
    instead_of_model: ClassVar[Mapping[str, str]] = {}
    """By key of `model` that is not read, the option to give instead."""
    own_sizes: ClassVar[tuple[str, ...]] = ()
    """Options that stand for the whole model where they are given."""


@dataclass
class TensorParallelConfig(ModelConfig):
    tp_size: int = ranged(2, 1, 8)
    """Tensor-parallel ranks, one GPU or CPU process each."""


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


def analysis_config(overrides: Sequence[str]) -> AnalysisConfig:
    """Returns the defaults with the overrides applied. UserError for an unknown name or a value out of range."""
    defaults = AnalysisConfig()
    kinds: dict[str, type] = {declared.name: type(getattr(defaults, declared.name)) for declared in fields(defaults)}
    given: dict[str, Any] = {}
    for override in overrides:
        name, equals, value = override.removeprefix("analysis.").partition("=")
        if not override.startswith("analysis.") or not equals or name not in kinds:
            known = [f"analysis.{name}" for name in kinds]
            near = nearest(override.partition("=")[0], known)
            mend = f"Did you mean {near}=...?" if near else f"Choose from {', '.join(known)}."
            raise UserError(f"{override} is no option of the analysis. {mend}")
        try:
            given[name] = kinds[name](value)
        except ValueError:
            raise UserError(f"{override} is no number; give analysis.{name} one.") from None
    config = AnalysisConfig(**given)
    check(asdict(config), AnalysisConfig, "analysis.")
    return config
