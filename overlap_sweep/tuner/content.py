"""The content of tuning_report.json, typed, as far as `Report` gives it to Python.

Times are in microseconds, fractions from 0 to 1; what is unknown or undefined is None. Attributes are called as the
columns of docs/columns.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.overlap import space
from overlap_sweep.results.run_directory import one_line
from overlap_sweep.workloads.operator.answer import Scaling

Setting = dict[str, str | int | bool]
"""A slot's method and knobs, as Transformer Engine's `initialize_ub` takes them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What was measured, on what: only times of one case are compared."""

    name: str
    """Fit for a file name; the `case` of other entries."""
    model: str
    backend: str
    device: str
    precision: str | None
    tokens: int | None
    """In the whole batch."""
    measured: str | None
    """When, UTC."""

    def __str__(self) -> str:
        return f"{self.model}, {self.tokens} tokens, {self.precision}, backend {self.backend} on {self.device}"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What to do at one TP size, in words."""

    case: str
    tp_size: int
    headline: str
    sentences: list[str]
    """What that comes from."""
    is_best_tp_size: bool
    """Whether it is the largest TP size that scales."""
    file: str
    """The YAML for Megatron-LM, relative to the report's directory; empty where there is none."""
    use: list[str]
    """Lines for Megatron-LM's command line, with the file's name alone; empty where the answer is not to overlap."""
    to_set: list[str]
    """The switches of Megatron-Core that must not keep their defaults, and why."""


@dataclass(frozen=True, kw_only=True)
class BestSetting:
    """The best setting of a slot. Its times are those of the slot's pass, fwd or bwd: dgrad and wgrad can only be timed
    together."""

    case: str
    model: str
    backend: str
    device: str
    precision: str | None
    tokens: int | None
    tp_size: int
    slot: str
    """Operator and phase: `fc1_dgrad`."""
    operator: str
    phase: Literal["fprop", "dgrad", "wgrad"]
    setting: Setting | None
    """None: no overlap is best."""
    method: str
    """`none`, `bulk`, `ring_exchange` or `pipeline`; it and the knobs below are those of `setting`."""
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
    time_us: float | None
    """Median time of the pass with this setting."""
    noise_us: float | None
    """Half-width of its 95 % interval."""
    none_us: float | None
    """The same without overlap."""
    default_us: float | None
    """The same with the library's own overlap; None where it has none."""
    floor_us: float | None
    """The same GEMMs without communication."""
    hidden_fraction: float | None
    """(none_us - time_us) / (none_us - floor_us): 1 is perfect, 0 useless, negative harmful."""
    speedup: float | None
    """none_us / time_us."""
    overlap_ratio: float | None
    """Overlapped time over the shorter of GEMMs and communication, from the trace; None where it was not profiled."""
    reason: str
    """Why it was chosen."""
    final_setting: str
    """What to train with, in a word: where Megatron-Core's switches or the whole layer forbid `setting`, another."""
    setting_in_yaml: Setting | None
    """The same as the YAML has it; None where the slot is not in it."""
    proven: bool
    """Whether a whole layer was measured with it."""
    recommended: str | None
    """The fastest way to run the whole layer: `tuned`, `none`, `default` or a preset; None where unproven."""
    layer_ratio: float | None
    """The recommended layer's time over that of no overlap."""
    layer_ratio_low: float | None
    """Lower end of its 95 % interval."""
    layer_ratio_high: float | None
    points: list[str]
    """The run directories that were measured with it."""

    @property
    def pass_name(self) -> str:
        """Returns the column `pass`, a word that Python keeps for itself: `fwd` or `bwd`."""
        return space.PASS_OF_PHASE[self.phase]


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """The whole layer, run in one way."""

    variant: str
    fwd_us: float | None
    bwd_us: float | None
    optimizer_us: float | None
    """None without an optimizer."""
    time_us: float | None
    """All of it."""
    noise_us: float | None
    """Half-width of its 95 % interval."""
    none_us: float | None
    """The layer without overlap."""
    floor_us: float | None
    """The layer without communication."""
    speedup: float | None
    """none_us / time_us."""
    reference: str
    """The way that `ratio` is to: `none`, or where that was not measured the first."""
    ratio: float | None
    """Of the time to that of `reference` in the same round, median of the rounds; below 1 is faster."""
    ratio_low: float | None
    """Lower end of its 95 % interval."""
    ratio_high: float | None
    hidden_fraction: float | None
    """(none_us - time_us) / (none_us - floor_us)."""
    launch_bound: bool
    """The host was too slow: the times say nothing about the device."""
    relative_error: float | None
    """The largest of any tensor, against no overlap."""
    settings: dict[str, Setting]
    """By slot."""
    switches: dict[str, bool]
    """Megatron-Core's; empty without overlap."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One time over another, with its 95 % interval; below 1 is faster."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The whole layer at one TP size under no overlap, the library's default, the tuned settings and presets; where
    nothing could be proven, why."""

    case: str | None
    tp_size: int
    proven: bool
    verdict: str
    """The result in a sentence."""
    point: str | None
    """The layer's run directory; None where none was run."""
    variants: dict[str, LayerTimes]
    """By `none`, `default`, `tuned`, `preset <name>` and `floor`, the GEMMs without communication."""
    warnings: list[str] = field(default_factory=list)
    recommended: str | None = None
    """The variant to train with; None where unproven, and so those below."""
    best_other: str | None = None
    """The fastest variant beside `tuned`."""
    tuned_to: dict[str, Ratio] | None = None
    """The time of `tuned` over that of each other variant."""
    settings: dict[str, Setting] | None = None
    """The recommended ones by slot."""
    switches: dict[str, bool] | None = None
    """Megatron-Core's, all of them, to go with the settings."""
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
    """What the exported files make of it: `off`, at the library's `default`, or `as set`."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What to do about one pass of an operator, or about a whole layer. `str()` gives the sentence."""

    tp_size: int
    operator: str | None
    """None: the whole layer."""
    pass_name: str | None
    """`fwd` or `bwd`; None: the whole layer."""
    is_proven: bool
    """Of a whole layer, whether it could be proven; of an operator always true."""
    sentence: str

    def __str__(self) -> str:
        return self.sentence


class PassAdvice(msgspec.Struct):
    """A recommendation for one pass as tuning_report.json has it."""

    tp_size: int
    operator: str
    recommendation: str
    pass_name: str = msgspec.field(name="pass")


class Content(msgspec.Struct):
    """What is read of tuning_report.json; without operators the lists are not there."""

    cases: list[Case] = []
    answers: list[Answer] = []
    best: list[BestSetting] = []
    recommendations: list[PassAdvice] = []
    unmeasured_slots: list[UnmeasuredSlot] = []
    tp_scaling: Scaling | None = None
    proof: list[Proof] = []


def read_content(path: Path) -> Content:
    """Reads tuning_report.json. UserError where it is missing or lacks anything."""
    if not path.exists():
        raise UserError(
            f"{path.parent} holds no {path.name}; analyse it first, or give the directory of a tuner's sweep."
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=Content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}); analyse {path.parent} again.") from None
