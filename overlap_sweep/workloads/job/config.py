"""The typed configuration of `workload=job`. The field docstrings are the manual."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from msgspec import Meta
from omegaconf import MISSING

from overlap_sweep import levers
from overlap_sweep.config import PointConfig, ResolvedPoint
from overlap_sweep.declared import VERBATIM, Count, Name, one_of, resolved
from overlap_sweep.overlap.overlap_cfg import OverlapConfig

MOST_VALUES = 1000
Line = Annotated[str, Meta(max_length=100_000)]
_Values = Annotated[dict[Name, str | int | float | bool | None], Meta(max_length=MOST_VALUES)]

_Levers = Annotated[dict[Name, dict[Name, str | int | float | bool | None]], Meta(max_length=MOST_VALUES)]


@dataclass
class WorkloadOptions:
    """Your own training command: its steps are timed and profiled without changing the script; see `job`."""

    name: str = "job"


@dataclass
class Job:
    """Your command, its settings, and which of its steps are measured."""

    command: Annotated[str, VERBATIM] = MISSING
    """The command line, run without a shell: `torchrun --nproc-per-node={ranks} train.py --bucket-cap-mb {bucket}`.
    `{bucket}` stands for job.values.bucket, `{ranks}` for job.ranks, `{run}` for the point's run directory,
    `{repetition}` for repetition; `{{` and `}}` are braces. A placeholder in quotes stays in its word, others are split
    at spaces. `{overlap:megatron}` turns the value `none`, `default` or a tp_comm_overlap_cfg file into Megatron-LM's
    arguments. With runtime.nodes the command is started on every node: `{nodes}` is their number, `{node}` this node's
    number, from 0, `{ranks_per_node}` the ranks of each; `{host}` and `{port}` are the first node's address and a free
    port of it. On one node they are 1, 0, job.ranks, localhost and a free port."""
    ranks: Annotated[int, Meta(ge=1, le=10**5)] = 1
    """Number of training processes that the command starts, on one GPU each; with runtime.nodes on all nodes
    together."""
    values: dict[str, Any] = field(default_factory=dict)
    """Values of placeholders, to be swept: +job.values.bucket=25,100. Others are compared with the first
    values. null is empty, true and false are in lower case unless they are quoted. A value that names a file stands for
    its content, too: when that changes, it is measured again."""
    env: dict[str, Any] = field(default_factory=dict)
    """Environment variables of the command, to be swept: +job.env.CUDA_DEVICE_MAX_CONNECTIONS=1,8. Placeholders are
    filled in; null leaves a variable as it is."""
    levers: dict[str, Any] = field(default_factory=dict)
    """Levers, which change the training without an argument of the script, to be swept:
    job.levers.ddp.bucket_cap_mb=25,4,100, with or without Hydra's +. `analyze.py levers` lists them. null leaves it as
    it is. What cannot be applied is skipped with the reason."""
    levers_override: bool = False
    """Let levers change what the script sets itself, too."""
    directory: Annotated[str, VERBATIM] = "."
    """Working folder of the command, relative to where launch.py was started; it must exist on all nodes.
    Placeholders are filled in."""
    attach: bool = True
    """Record the steps of every Python process of the command in which an optimizer of torch steps. For that a
    `sitecustomize`, which lets one of yours run, is put on PYTHONPATH."""
    skip_steps: Annotated[int, Meta(ge=0, le=10**6)] = 5
    """Steps at the start that are not timed: allocation, compilation, autotuning."""
    steps: Annotated[int, Meta(ge=3, le=10**5)] = 20
    """Timed steps."""
    profile_steps: Annotated[int, Meta(ge=0, le=100)] = 3
    """Steps that are profiled after the timed ones, on all ranks. 0, or profile=none: no trace."""
    optimizer_steps: Annotated[int, Meta(ge=1, le=10**5)] | None = None
    """Calls of `step` of torch's optimizers that make up one training step. null: recognised from their order, such as
    two if two optimizers take turns. Gradient accumulation needs no setting."""
    metric: Annotated[str, VERBATIM] | None = None
    """Regular expression with one group for a number in the command's output, such as `tps: ([0-9.]+)`, which replaces
    the recorded step times."""
    metric_is: Annotated[str, one_of("rate", "seconds", "milliseconds")] = "rate"
    """Kind of the metric: work per second, or time per step."""
    loss: Annotated[str, VERBATIM] | None = None
    """Regular expression with one group for the loss in the command's output, such as `loss: ([0-9.]+)`, to see whether
    settings compute the same. Norms of gradients and parameters are compared without it."""
    samples_per_step: Annotated[str, VERBATIM] | None = None
    """Samples in a step of all ranks: a number or a product such as `{batch} * {ranks}`. Settings are then compared by
    time per sample."""
    tokens_per_step: Annotated[str, VERBATIM] | None = None
    """Tokens in a step of all ranks, like samples_per_step."""
    finish: bool = False
    """Let the command run to its end instead of ending it after the last measured step."""


@dataclass
class Optimize:
    """What `overlap-sweep optimize` tries. Not part of a point."""

    allow: Annotated[str, one_of("exact", "rounding", "training")] = "exact"
    """Levers that may be tried: `exact`: those that keep results equal bit by bit; `rounding`: also those that sum in
    another order; `training`: also those that train differently."""
    memory: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.95
    """Largest share of a GPU's memory that a setting may use."""
    levers: list[str] | None = None
    """Levers or their families to try, such as [ddp, nccl.max_ctas]. null: all that apply."""


@dataclass
class Config(PointConfig):
    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    job: Job = field(default_factory=Job)
    optimize: Optimize = field(default_factory=Optimize)

    known_keys: ClassVar[Mapping[str, Callable[[], Iterable[str]]]] = {"job.levers": levers.levers}
    precision_option = "job.command"

    @property
    def world_size(self) -> int:
        return self.job.ranks


@resolved
class ResolvedJob(Job):
    command: Line = field()
    values: _Values = field()
    env: _Values = field()
    levers: _Levers = field(default_factory=dict)
    levers_override: bool = False
    ranks: Annotated[int, Meta(ge=1, le=10**5)] = field()
    directory: Line = field()
    steps: Annotated[int, Meta(ge=3, le=10**5)] = field()
    samples_per_step: Line | float | None = field()  # type: ignore[assignment]
    tokens_per_step: Line | float | None = field()  # type: ignore[assignment]
    optimizer_steps: Annotated[int, Meta(ge=1, le=10**5)] | None = field()
    metric: Line | None = field()
    loss: Line | None = None
    metric_is: Annotated[str, one_of("rate", "seconds", "milliseconds")] = field()
    files: Annotated[dict[Line, Name], Meta(max_length=MOST_VALUES)] = field(default_factory=dict)
    """Digests of the files that the point depends on, by name."""


@resolved
class Resolved(Config, ResolvedPoint):
    backend: str = field()
    repetition: Annotated[int, Meta(ge=0, le=10**6)] = field()
    job: ResolvedJob = field()
    tp_size: Count = field()
    overlap_cfg: OverlapConfig | None = None
    """Content of the file that `{overlap:megatron}` names."""
