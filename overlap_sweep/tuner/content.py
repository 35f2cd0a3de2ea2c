"""The content of tuning_report.json as typed objects.

Times are in microseconds, shares are fractions from 0 to 1, and unknown values are None. Attributes have the names of
the columns in docs/columns.md.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from overlap_sweep.effects import Rest
from overlap_sweep.effects import Setting as InForce
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import space
from overlap_sweep.overlap.space import Setting
from overlap_sweep.results.run_directory import one_line
from overlap_sweep.workloads.operator.answer import Scaling


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, backend, device and precision. Only times of the same case are comparable."""

    name: str
    """Name of the case, valid in file names; other entries refer to it as `case`."""
    model: str
    backend: str
    device: str
    precision: str | None
    tokens: int | None
    """Tokens in the whole batch."""
    sizes: dict[str, int | float | bool | str]
    """The model's sizes, named as the options of `model`: hidden_size, ffn_hidden_size, num_attention_heads,
    num_kv_heads, head_dim, num_layers and so on; without those that it lacks."""
    measured: str | None
    """Time of the measurement, UTC."""
    tp_scaling: Scaling
    """Whether a larger TP size pays, by operator and in total."""
    applies_to: list[str] = field(default_factory=list)
    """Which layers of the model the files apply to, in sentences; empty if all layers are alike."""
    process_wide: str = ""
    """Unusual settings of whole processes, such as `CUDA_DEVICE_MAX_CONNECTIONS=8`."""

    def __str__(self) -> str:
        more = f", {self.process_wide}" if self.process_wide else ""
        return f"{self.model}, {self.tokens} tokens, {self.precision}, backend {self.backend} on {self.device}{more}"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The recommendation for one TP size, in words."""

    case: str
    tp_size: int
    headline: str
    sentences: list[str]
    """Explanation of the headline."""
    is_best_tp_size: bool
    """Whether it is the largest TP size that scales."""
    file: str
    """The YAML for Megatron-LM, relative to the report's directory; empty if there is none."""
    use: list[str]
    """Lines for Megatron-LM's command line, with the file's name only; empty if the answer is no overlap."""
    to_set: list[str]
    """Switches of Megatron-Core to change from their defaults, with reasons."""


@dataclass(frozen=True, kw_only=True)
class BestSetting:
    """The best setting of a slot. Times are of the slot's pass, fwd or bwd, since dgrad and wgrad can only be timed
    together."""

    case: str
    model: str
    backend: str
    device: str
    precision: str | None
    tokens: int | None
    process_wide: str | None = None
    tp_size: int
    slot: str
    """Operator and phase, such as `fc1_dgrad`."""
    operator: str
    phase: Literal["fprop", "dgrad", "wgrad"]
    config_id: str
    """Name of the configuration in `configurations`, with what the pass's other slot runs."""
    setting: Setting | None
    """Method and knobs; None if no overlap is best."""
    method: str
    """Method of `setting`: `none`, `bulk`, `ring_exchange` or `pipeline`. The knobs below are of `setting` too."""
    num_sm: int | None
    """SMs of the communication kernels."""
    aggregate: bool | None
    num_splits: int | None
    cga_size: int | None
    set_sm_margin: bool | None
    use_ce: bool | None
    """Whether copy engines move the data."""
    atomic_gemm: bool | None
    fp8_buf: bool | None
    comm_priority: int | None = None
    gemm_priority: int | None = None
    pipeline_rs_overlap_first_gemm: bool | None = None
    time_us: float | None
    """Median time of the pass with this setting."""
    noise_us: float | None
    """Half-width of the 95 % interval of `time_us`."""
    none_us: float | None
    """Median time without overlap."""
    default_us: float | None
    """Median time with the library's default overlap; None if it has none."""
    floor_us: float | None
    """Median time of the same GEMMs without communication."""
    hidden_fraction: float | None
    """(none_us - time_us) / (none_us - floor_us): 1 is perfect, 0 useless, negative harmful."""
    speedup: float | None
    """none_us / time_us."""
    overlap_ratio: float | None
    """Overlapped time / min(GEMM time, communication time), from the trace; None if not profiled."""
    reason: str
    """Why it was chosen."""
    final_setting: str
    """Name of the setting to train with. It differs from `setting` if Megatron-Core's switches or the whole layer
    require another one."""
    setting_in_yaml: Setting | None
    """The setting in the YAML; None if the slot is not in it."""
    proven: bool
    """Whether whole layers show beyond the noise that the file is better than the alternative."""
    recommended: str | None
    """The fastest variant of the whole layer: `tuned`, `none`, `default` or a preset; None if none was measured."""
    layer_ratio: float | None
    """Time of the recommended layer / time with no overlap."""
    layer_ratio_low: float | None
    """Lower end of the 95 % interval of `layer_ratio`."""
    layer_ratio_high: float | None
    points: list[str]
    """Run directories of points with this setting."""

    @property
    def pass_name(self) -> str:
        """Returns the column `pass`, which is a keyword in Python: `fwd` or `bwd`."""
        return space.PASS_OF_PHASE[self.phase]


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Times of one variant of the whole layer."""

    variant: str
    fwd_us: float | None
    bwd_us: float | None
    optimizer_us: float | None
    """Time of the optimizer; None without one."""
    both_us: float | None = None
    """Time of the pairs of a backward and the next forward; None without several micro batches."""
    time_us: float | None
    """Median time of the whole iteration."""
    noise_us: float | None
    """Half-width of the 95 % interval of `time_us`."""
    none_us: float | None
    """Median time of the layer without overlap."""
    floor_us: float | None
    """Median time of the layer without communication."""
    speedup: float | None
    """none_us / time_us."""
    reference: str
    """Variant that `ratio` compares with: `none`, or the first if that was not measured."""
    ratio: float | None
    """Time / time of `reference` in the same round, median over rounds; below 1 is faster."""
    ratio_low: float | None
    """Lower end of the 95 % interval of `ratio`."""
    ratio_high: float | None
    hidden_fraction: float | None
    """(none_us - time_us) / (none_us - floor_us)."""
    launch_bound: bool
    """Whether the host was too slow, so that the times say nothing about the GPU."""
    relative_error: float | None
    """Largest relative error of any tensor, compared with no overlap."""
    effect: str | None = None
    """Aspects of what ran that differ from `reference`, or `nothing`; None without traces of both."""
    settings: dict[str, Setting]
    """Settings by slot."""
    switches: dict[str, bool]
    """Megatron-Core's switches; empty without overlap."""
    slots: list[InForce] = field(default_factory=list)
    """Whether each slot of `settings` ran; empty without traces."""
    rests: list[Rest] = field(default_factory=list)
    """What keeps it from the floor, by operator and pass; empty without traces."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ratio of two times with its 95 % interval; below 1 is faster."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The whole layer at one TP size with no overlap, the library's default, the tuned settings and presets, or the
    reason why nothing was proven."""

    case: str | None
    tp_size: int
    proven: bool
    """Whether `tuned` and the best other variant differ beyond the noise."""
    verdict: str
    """The result in a sentence."""
    point: str | None
    """The layer's run directory; None if no layer was run."""
    variants: dict[str, LayerTimes]
    """Times by variant: `none`, `default`, `tuned`, `preset <name>` and `floor`."""
    warnings: list[str] = field(default_factory=list)
    recommended: str | None = None
    """The variant to train with. It and the fields below are None if nothing was compared."""
    best_other: str | None = None
    """The fastest variant other than `tuned`."""
    tuned_to: dict[str, Ratio] | None = None
    """Time of `tuned` / time of each other variant."""
    settings: dict[str, Setting] | None = None
    """Recommended settings by slot."""
    switches: dict[str, bool] | None = None
    """All switches of Megatron-Core that belong to the settings."""
    file: str | None = None
    """The YAML for Megatron-LM, relative to the report's directory."""
    reason: str | None = None
    """Why nothing was proven."""


@dataclass(frozen=True, kw_only=True)
class UnmeasuredSlot:
    """A slot that no point of an operator overlapped."""

    case: str
    tp_size: int
    slot: str
    runs: str
    """How the slot runs with the exported files: `off`, the library's `default`, or `as set`."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The recommendation for one pass of an operator or a whole layer. `str()` gives the sentence."""

    tp_size: int
    operator: str | None
    """The operator; None for the whole layer."""
    pass_name: str | None
    """`fwd` or `bwd`; None for the whole layer."""
    is_proven: bool
    """Whether the whole layer proves it beyond the noise; always true for an operator."""
    sentence: str

    def __str__(self) -> str:
        return self.sentence


class PassAdvice(msgspec.Struct):
    """A recommendation for one pass, as in tuning_report.json."""

    tp_size: int
    operator: str
    recommendation: str
    pass_name: str = msgspec.field(name="pass")


class Content(msgspec.Struct):
    """The parts of tuning_report.json that are read; without operators the lists are missing."""

    cases: list[Case] = []
    answers: list[Answer] = []
    best: list[BestSetting] = []
    recommendations: list[PassAdvice] = []
    unmeasured_slots: list[UnmeasuredSlot] = []
    proof: list[Proof] = []


def read_content(path: Path) -> Content:
    """Reads tuning_report.json. UserError if it is missing or incomplete."""
    if not path.exists():
        raise UserError(f"{path.parent} has no {path.name}; analyse it first, or give the directory of a tuner sweep.")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}); analyse {path.parent} again.") from None
