"""The options that every point has: Hydra composes them, the workers use them, result.json records them.

A workload's own options are in `workloads/<name>/config.py`, where `Config` is a subclass of one of these. The field
docstrings are the manual. Ranges are in the annotations; `declared.decode` enforces them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Protocol

from msgspec import Meta
from omegaconf import MISSING

from overlap_sweep.declared import FLOOR, SCHEDULES, decode, one_of, resolved
from overlap_sweep.errors import UsageError, nearest

BY_TORCH = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Our names of the data types, by torch's. Each option uses one of the two and accepts the other."""
TORCHS = {ours: torchs for torchs, ours in BY_TORCH.items()}

PRECISIONS = ("fp32", "fp16", "bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")

MOST_SMS = 512
"""More streaming multiprocessors than any GPU has; a worker checks against the real number."""


@dataclass
class Model:
    """The model's sizes; `model=<preset>` sets them all."""

    name: str = MISSING
    """The model's name in tables. With `source=hf`: a Hugging Face name, a folder or a config.json."""
    source: Annotated[str, one_of("sizes", "hf")] = "sizes"
    """`sizes`: use the sizes below; `hf`: read the missing ones with transformers' AutoConfig."""
    hidden_size: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    """Width of the residual stream."""
    ffn_hidden_size: Annotated[int, Meta(ge=1, le=2**22)] | None = None
    """Width of the MLP."""
    num_attention_heads: Annotated[int, Meta(ge=1, le=2**14)] | None = None
    """Query heads of the attention."""
    num_kv_heads: Annotated[int, Meta(ge=1, le=2**14)] | None = None
    """Key and value heads (grouped-query attention). null: num_attention_heads."""
    head_dim: Annotated[int, Meta(ge=1, le=2**14)] | None = None
    """Width of one attention head. null: hidden_size / num_attention_heads."""
    gated_mlp: bool | None = None
    """Gated MLP, such as SwiGLU: `fc1` computes two matrices of `ffn_hidden_size` columns."""
    normalization: Annotated[str, one_of("LayerNorm", "RMSNorm")] | None = None
    """Normalisation of the input of `qkv` and `fc1`, which Transformer Engine fuses into them. null: RMSNorm for gated
    models, else LayerNorm."""
    bias: bool | None = None
    """Whether the linear operators add a bias. null: false for gated models, else true."""
    num_experts: Annotated[int, Meta(ge=1, le=2**16)] | None = None
    """Experts of each layer of a mixture of experts, without shared ones. null: the model has none."""
    experts_per_token: Annotated[int, Meta(ge=1, le=2**16)] | None = None
    """Experts that each token is sent to."""
    expert_ffn_hidden_size: Annotated[int, Meta(ge=1, le=2**22)] | None = None
    """Width of one expert."""
    shared_expert_ffn_hidden_size: Annotated[int, Meta(ge=1, le=2**22)] | None = None
    """Width of all shared experts together, which every token passes. null: the model has none."""
    gated_experts: bool | None = None
    """Gated experts, as in gated_mlp. null: true for a model with experts."""
    num_dense_layers: Annotated[int, Meta(ge=0, le=4096)] | None = None
    """Layers of a model with experts that have a dense MLP of ffn_hidden_size instead. null: none."""
    kv_lora_rank: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    """Rank of the keys and values of multi-head latent attention. null: the attention is not latent."""
    q_lora_rank: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    """Rank of the queries of multi-head latent attention. null: queries are not compressed."""
    qk_head_dim: Annotated[int, Meta(ge=1, le=2**14)] | None = None
    """Width of a head's queries and keys in multi-head latent attention, without their rotary part."""
    qk_pos_emb_head_dim: Annotated[int, Meta(ge=1, le=2**14)] | None = None
    """Width of the rotary part of a head's queries and keys in multi-head latent attention."""
    v_head_dim: Annotated[int, Meta(ge=1, le=2**14)] | None = None
    """Width of a head's values in multi-head latent attention."""
    architecture: str | None = None
    """Hugging Face's model_type. This option and those below are for workload=tp_training, which trains a whole
    language model."""
    num_layers: Annotated[int, Meta(ge=0, le=4096)] | None = None
    """Transformer layers of the language model. 0: as many as the model has itself."""
    vocab_size: Annotated[int, Meta(ge=2, le=2**31 - 1)] | None = None
    """Rows of the embedding and of the output projection."""
    rope_theta: Annotated[float, Meta(ge=1.0, le=1e12)] | None = None
    """Base of the rotary position embedding. null: 10000."""
    norm_epsilon: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    """Epsilon that the normalisation adds to the variance. null: 1e-6."""
    tie_word_embeddings: bool | None = None
    """Whether the output projection shares the embedding's weights. null: false."""


@dataclass
class ModelLayers:
    """Layers of a model that are not all dense."""

    number: int | None = None
    """null: unknown."""
    dense_mlp: int | None = 0
    """Layers with a dense MLP; null: all."""
    shared_expert: int | None = None
    """Width of the shared experts."""


@resolved
class ResolvedModel(Model):
    """The model of a point: with all sizes, and what is known of its other parts (`overlap.model_forms.resolve`)."""

    name: str = field()
    instead: dict[str, str] = field(default_factory=dict)
    """What the model has instead of an operator, by operator."""
    layers: ModelLayers | None = None
    """null: all layers are dense."""


def known(number: int | None) -> int:
    """Returns a number that every completed point has which is not refused."""
    assert number
    return number


def _sizes(first: str, last: str) -> tuple[str, ...]:
    """Returns the keys of `model` from the first to the last, in order."""
    names = [declared.name for declared in fields(Model)]
    return tuple(names[names.index(first) : names.index(last) + 1])


SIZES = _sizes("hidden_size", "gated_mlp")
OF_OPERATORS = _sizes("name", "gated_mlp")
"""Keys of `model` that determine the shapes of the linear operators."""
OF_LAYERS = _sizes("name", "bias")
OF_EXPERTS = _sizes("num_experts", "num_dense_layers")
"""Keys of `model` that describe a mixture of experts; all null for other models."""
OF_LATENT_ATTENTION = _sizes("kv_lora_rank", "v_head_dim")
"""Keys of `model` that describe multi-head latent attention; all null for other models."""
OF_LANGUAGE_MODELS = _sizes("architecture", "tie_word_embeddings")

INSTRUMENTS = ("debug", "nvtx", "nsys")
"""Options of `runtime` that look into a point at the cost of its times."""


@dataclass
class Runtime:
    """How the worker processes run."""

    device: Annotated[str, one_of("auto", "cpu", "cuda")] = "auto"
    """`auto`: cuda when a GPU is visible."""
    nodes: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """Machines that the ranks of a point are spread over, equally many on each and in order of the ranks. null: 1; on
    Slurm as many as `hydra.launcher.gpus_per_node` makes necessary. Without Slurm, start launch.py by
    one `torchrun --nnodes` on each machine (see clusters.md)."""
    isolate: bool = False
    """Start a fresh torchrun group for every point instead of one per world size."""
    timeout_s: Annotated[float, Meta(ge=1.0, le=86400.0)] = 300.0
    """Time limit of a point, in seconds. A point that takes longer is killed with its group and recorded as `timeout`;
    the sweep goes on."""
    timeout_factor: Annotated[float, Meta(ge=0.0, le=10**4)] = 10.0
    """Shorter time limit once similar points were measured: this factor times the longest of them, but at least 30
    seconds. 0: always timeout_s."""
    retries: Annotated[int, Meta(ge=0, le=100)] = 1
    """How often a point that failed or timed out is tried again, in a fresh group. Points with wrong numbers are not
    tried again."""
    start_timeout_s: Annotated[float, Meta(ge=1.0, le=3600.0)] = 180.0
    """Time limit for the start of a group, until every rank has joined, in seconds."""
    threads_per_rank: Annotated[int, Meta(ge=1, le=1024), FLOOR] = 1
    """CPU threads of each rank. With one thread, a CPU rank behaves like a device of its own."""
    max_connections: Annotated[int, Meta(ge=1, le=32), SCHEDULES] | None = None
    """CUDA_DEVICE_MAX_CONNECTIONS of the workers: hardware queues that a GPU's streams share. null: as training
    uses it: 1 with Megatron-LM, which needs kernels in launch order, and CUDA's default of 8 with other libraries."""
    multicast: Annotated[bool, SCHEDULES] = False
    """Allow NVLink multicast. false sets UB_SKIPMC=1 and the equivalents of NCCL, PyTorch and NVSHMEM."""
    bootstrap_backend: Annotated[str, one_of("gloo", "nccl", "mpi")] = "gloo"
    """Backend that exchanges the handles of the userbuffers. On two H200s gloo takes 10 ms; NCCL takes 180 ms at first
    and keeps 0.5 GB."""
    ub_timeout_s: Annotated[int, Meta(ge=1, le=86400)] | None = None
    """UB_TIMEOUT of the workers, in whole seconds: a kernel of userbuffers that has waited this long for another rank
    prints what it waits for and goes on with wrong numbers. null: as set in your environment, else Transformer Engine's
    110."""
    debug: bool = False
    """For a point that hangs or computes garbage: every rank prints into worker.log what it builds, every pass, and
    shapes and norms at the check, and NCCL, Transformer Engine and its userbuffers print, too. Each pass is waited for,
    so the point is left out of comparisons (see debugging.md)."""
    nvtx: bool = False
    """Name every pass of every variant by an NVTX range, and let Transformer Engine name its own (NVTE_NVTX_ENABLED).
    That costs host time, so the point is left out of comparisons. For GPUs."""
    nsys: bool = False
    """Run the workers under NVIDIA's `nsys profile`, with a report for each node in the run directory, and nvtx=true.
    On GPUs it records the profiled passes, which torch.profiler then does not. The point is left out of
    comparisons."""
    nsys_args: str = "--trace=cuda,nvtx --sample=none --cpuctxsw=none"
    """Command-line options of `nsys profile` that select what it records."""


@dataclass
class Search:
    """Budget and limits of the search sweepers. Not part of a point."""

    max_points: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    """Stop after this many points, baselines included. The best so far is the answer."""
    max_minutes: Annotated[float, Meta(ge=0.0, le=10**5)] | None = None
    """Stop after this many minutes, also what runs then; on Slurm after what is submitted. The best so far is the
    answer."""
    min_num_sm: Annotated[int, Meta(ge=1, le=MOST_SMS)] = 1
    """Leave out smaller values of num_sm."""
    max_num_sm: Annotated[int, Meta(ge=1, le=MOST_SMS)] = MOST_SMS
    """Leave out larger values of num_sm."""
    reach: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.25
    """Drop a knob's value whose first measurement is slower than the best by more than this fraction."""
    worth: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.01
    """Smallest possible gain for which another point is measured, as a fraction of the fastest time."""
    repeats: Annotated[int, Meta(ge=1, le=100)] = 3
    """How often settings are measured whose times differ by less than the noise."""
    noise_goal: Annotated[float, Meta(ge=0.0, le=1.0)] | None = 0.01
    """workload.noise_goal of a search's points of operators: their repeats end early once the noise is below this
    fraction, those of the baselines below 0.3 times it. null: never."""
    retry_wrong: bool = False
    """Also measure settings that are known to compute wrong numbers with the installed libraries, or did so before on
    an identical machine."""


@dataclass
class Tuner:
    """What `+experiment=tp_overlap_tuner` does besides searching. Not part of a point."""

    presets: list[str] | None = None
    """tp_comm_overlap_cfg files to compare with the tuned one in the proof. `{tp}` in a name stands for the TP size."""
    together: Annotated[int, Meta(ge=0, le=16)] = 4
    """Number of combinations of settings to try on the whole layer before the proof. 0: none."""
    within: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.03
    """A setting is tried in a combination if it is slower than the best of its pass by at most this fraction."""
    noise_goal: Annotated[float, Meta(ge=0.0, le=1.0)] | None = 0.005
    """workload.noise_goal of the proof: its rounds end early once the noise of each ratio to no overlap is below this
    fraction. null: never."""
    prove: bool = True
    """Run the whole layer with no overlap, the default, the tuned settings and the presets, side by side."""
    drop_tp_sizes: bool = True
    """Leave out TP sizes that would not scale even with all communication hidden."""
    tp_scaling_tolerance: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.2
    """A TP size scales while its time is at most (1 + tolerance) x TP=1's time / TP size."""
    overlap_threshold: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.5
    """Smallest overlap ratio that recommendations call effective."""
    unmeasured: Annotated[str, one_of("off", "default")] = "off"
    """Slots that no point overlapped, in exported files. `off`: turned off; `default`: the library's default
    overlap."""


NO_PART_OF_A_POINT = (
    "search",
    "tuner",
    "optimize",
    "max_tp_size",
    "resume",
    "store",
    "reuse",
    "report",
    "tracker",
    "model_preset",
)
"""Options that say how to search and where to keep results; they don't change what a point measures."""


@dataclass
class PointConfig(Mapping[str, Any]):
    """The options of one point. As a mapping they are plain data, as result.json has them."""

    workload: Any = MISSING
    backend: str = "auto"
    """Library that overlaps. `auto`: transformer_engine if it is installed and there is a GPU, else torch."""
    precision: Annotated[str, one_of(*PRECISIONS, also=BY_TORCH)] | None = None
    """Data type of computation and communication. null: bf16 on a GPU, fp32 on a CPU. From fp8_delayed on they are
    Transformer Engine's recipes: DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling and
    NVFP4BlockScaling. torch's names, such as bfloat16, are accepted too."""
    profile: Annotated[str, one_of("all", "best", "none")] = "all"
    """Points to profile after timing. `best`: those within 1 % of the fastest of their operator so far, and the final
    choice of a search."""
    repetition: Annotated[int, Meta(ge=0, le=10**6)] = 0
    """Number of the repetition: sweep over it to measure the same point several times."""
    runtime: Runtime = field(default_factory=Runtime)
    search: Search = field(default_factory=Search)
    tuner: Tuner = field(default_factory=Tuner)
    max_tp_size: Annotated[int, Meta(ge=1, le=1024)] = 8
    """Largest of the TP sizes 2, 4 and 8 that the tuner searches. tp_size overrides it."""
    resume: str | None = None
    """Directory of an earlier sweep to continue, or `last`. Points that it has measured are not measured again."""
    store: str | None = None
    """Keep every measurement in `<store>.d`; see docs/store.md."""
    report: bool = True
    """Whether a sweep ends with its answers and with the files of analyze.py. false leaves that to analyze.py."""
    tracker: str = "none"
    """Where each point is also logged as a run, once it has ended, and the sweep in the end: `mlflow`, `wandb`, or one
    of another package; see docs/tracking.md. `none`: nowhere."""
    reuse: bool = False
    """Reuse measurements from the store instead of measuring again."""

    groups: ClassVar[Mapping[str, Mapping[str, Mapping[str, object]]]] = {}
    """Top-level options that a config group sets, by group and choice. conf/ has the larger ones as files."""
    known_keys: ClassVar[Mapping[str, Callable[[], Iterable[str]]]] = {}
    """Maps whose keys the workload knows, each with what returns them. They need no `+` of Hydra's."""
    precision_option: ClassVar[str | None] = None
    """Option to use instead of `precision`, for workloads that don't read that."""
    precision_from: ClassVar[str | None] = None
    """Option that overrides `precision`."""
    not_recorded: ClassVar[tuple[str, ...]] = NO_PART_OF_A_POINT
    """Options that result.json does not have."""

    @property
    def world_size(self) -> int:
        """Returns the number of ranks of a point that says it (`Workload.ranks`)."""
        return 1

    @property
    def nodes(self) -> int:
        """Returns the number of machines that the ranks are spread over."""
        return self.runtime.nodes or 1

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nodes

    def __getitem__(self, name: str) -> Any:
        if name not in _recorded(type(self)):
            raise KeyError(name)
        value = getattr(self, name)
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value

    def __iter__(self) -> Iterator[str]:
        return iter(_recorded(type(self)))

    def __len__(self) -> int:
        return len(_recorded(type(self)))


@cache
def _recorded(kind: type[PointConfig]) -> tuple[str, ...]:
    """Returns the names of the options that result.json has."""
    return tuple(declared.name for declared in fields(kind) if declared.name not in kind.not_recorded)


@dataclass
class ModelConfig(PointConfig):
    """Options of a workload that runs a model or a part of one."""

    model: Model = field(default_factory=Model)
    model_preset: Any = None
    """Copy of the preset that `model=` names; values of `model` that differ from it were set by the user."""

    reads_of_model: ClassVar[tuple[str, ...]] = OF_LAYERS
    """Keys of `model` that the workload uses. Others may be in a preset, but the user must not set them."""
    instead_of_model: ClassVar[Mapping[str, str]] = {}
    """Options to use instead of unused keys of `model`, by key."""
    own_sizes: ClassVar[tuple[str, ...]] = ()
    """Options that replace the whole model when they are set."""


@dataclass
class TensorParallelConfig(ModelConfig):
    tp_size: Annotated[int, Meta(ge=1, le=8)] | None = 2
    """Tensor-parallel ranks, one GPU or CPU process each. null: all visible GPUs, at most 8; on a CPU 2."""

    reads_of_model: ClassVar[tuple[str, ...]] = (*OF_LAYERS, *OF_EXPERTS, *OF_LATENT_ATTENTION)

    @property
    def world_size(self) -> int:
        assert self.tp_size
        return self.tp_size


@resolved
class ResolvedPoint(PointConfig):
    """What every point has, whatever its workload. Each workload has two subclasses: `Asked`, of a point as composed,
    in which null is what machine or workload decide; `Resolved`, of a completed point, as result.json records it."""

    model: ResolvedModel = field()
    tp_size: int | None = field()
    backend: str = field()


class TensorParallelPoint(Protocol):
    """A completed point of a workload that runs on a backend."""

    runtime: Runtime
    backend: str
    precision: str
    model: ResolvedModel
    tp_size: int
    workload: Any
    """With `tokens`, `seed` and `tolerance`."""


@dataclass
class AnalysisConfig:
    """How `analyze.py` chooses. Set after the directory, as in `analysis.objective=overlap_ratio`."""

    objective: Annotated[str, one_of("time", "overlap_ratio")] = "time"
    """`time`: choose the fastest setting, no overlap included; `overlap_ratio`: the one with the highest overlap
    ratio."""
    tp_scaling_tolerance: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.2
    """A TP size scales while its time is at most (1 + tolerance) x TP=1's time / TP size."""
    overlap_threshold: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.5
    """Smallest overlap ratio that recommendations call effective."""
    unmeasured: Annotated[str, one_of("off", "default")] = "off"
    """Slots that no point overlapped, in exported files. `off`: Megatron-Core's switches turn them off, except those
    that share a switch with a measured setting that wins; `default`: they keep the library's default overlap."""


def analysis_config(overrides: Sequence[str]) -> AnalysisConfig:
    """Returns the defaults with the overrides applied. UsageError for an unknown name or a value out of range."""
    defaults = AnalysisConfig()
    kinds: dict[str, type] = {declared.name: type(getattr(defaults, declared.name)) for declared in fields(defaults)}
    values: dict[str, Any] = {}
    for override in overrides:
        name, equals, value = override.removeprefix("analysis.").partition("=")
        if not override.startswith("analysis.") or not equals or name not in kinds:
            known = [f"analysis.{name}" for name in kinds]
            near = nearest(override.partition("=")[0], known)
            mend = f"Did you mean {near}=...?" if near else f"Choose from {', '.join(known)}."
            raise UsageError(f"Unknown analysis option {override}. {mend}")
        try:
            values[name] = kinds[name](value)
        except ValueError:
            raise UsageError(f"{override}: the value must be a number.") from None
    return decode(asdict(AnalysisConfig(**values)), AnalysisConfig, "analysis.")
