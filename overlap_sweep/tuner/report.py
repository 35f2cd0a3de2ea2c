"""The answer for a model as Python objects: what tuning_report.json and the files beside it say, typed.

Times are in microseconds, fractions from 0 to 1; what is unknown or undefined is None. Attributes are called as the
columns of docs/columns.md.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.report.files import REPORT_FILE
from overlap_sweep.results.run_directory import one_line
from overlap_sweep.workloads.operator.answer import Scaling
from overlap_sweep.workloads.operator.switches import FLAGS

if TYPE_CHECKING:
    import pandas as pd

FILES = ("*.txt", "*.json", "*.yaml", "*.py", "*.csv", "*.parquet", "*.html")
"""What lies beside the run directories and does not belong to a single point."""

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

    fwd_us: float | None
    bwd_us: float | None
    all_us: float | None
    """Forward and backward."""
    reference: str
    """The way that `ratio` is to: `none`, or where that was not measured the first."""
    ratio: float | None
    """Of the time to that of `reference` in the same round, median of the rounds; below 1 is faster."""
    ratio_low: float | None
    """Lower end of its 95 % interval."""
    ratio_high: float | None
    hidden_fraction: float | None
    launch_bound: bool
    """The host was too slow: the times say nothing about the device."""
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


class _Pass(msgspec.Struct):
    """A recommendation for one pass as tuning_report.json has it."""

    tp_size: int
    operator: str
    recommendation: str
    pass_name: str = msgspec.field(name="pass")


class _Content(msgspec.Struct):
    """What is read of tuning_report.json; without operators the lists are not there."""

    cases: list[Case] = []
    answers: list[Answer] = []
    best: list[BestSetting] = []
    recommendations: list[_Pass] = []
    unmeasured_slots: list[UnmeasuredSlot] = []
    tp_scaling: Scaling | None = None
    proof: list[Proof] = []


def _read(path: Path) -> _Content:
    """Reads tuning_report.json. UserError where it is missing or lacks anything."""
    if not path.exists():
        raise UserError(
            f"{path.parent} holds no {path.name}; analyse it first, or give the directory of a tuner's sweep."
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}); analyse {path.parent} again.") from None


class Report:
    """The answer for a model, read from the directory of a tuner's sweep or of any analysed one."""

    def __init__(self, directory: Path | str) -> None:
        """UserError where the directory has no tuning_report.json, or one that cannot be read."""
        self.directory = Path(directory)
        self._content = _read(self.directory / REPORT_FILE)

    @property
    def cases(self) -> list[Case]:
        """Returns what was measured: after `tune` one case."""
        return self._content.cases

    @property
    def answers(self) -> list[Answer]:
        """Returns what to do in words, an entry per TP size."""
        return self._content.answers

    @property
    def best(self) -> list[BestSetting]:
        """Returns the best setting of each TP size and slot, measured operator by operator."""
        return self._content.best

    @property
    def proof(self) -> dict[int, Proof]:
        """Returns by TP size what the whole layer says; empty where none was run."""
        return {proof.tp_size: proof for proof in self._content.proof if proof.point}

    @property
    def recommendations(self) -> list[Recommendation]:
        """Returns sentences: the proofs' verdicts, one per TP size and pass of an operator; last the unproven."""
        layers = [
            Recommendation(
                tp_size=tp_size,
                operator=None,
                pass_name=None,
                is_proven=proof.proven,
                sentence=f"TP={tp_size}: {proof.verdict}",
            )
            for tp_size, proof in self.proof.items()
        ]
        passes = [
            Recommendation(
                tp_size=one.tp_size,
                operator=one.operator,
                pass_name=one.pass_name,
                is_proven=True,
                sentence=one.recommendation,
            )
            for one in self._content.recommendations
        ]
        return [*(one for one in layers if one.is_proven), *passes, *(one for one in layers if not one.is_proven)]

    @property
    def tp_scaling(self) -> Scaling | None:
        """Returns whether a larger TP size pays, by operator and in sum; None where several cases were measured."""
        return self._content.tp_scaling

    @property
    def unmeasured_slots(self) -> list[UnmeasuredSlot]:
        """Returns the slots that no point overlapped, and what the exported files make of them."""
        return self._content.unmeasured_slots

    @property
    def files(self) -> dict[str, Path]:
        """Returns the written reports, tables and exported files by name, without the run directories."""
        # A directory that somebody sent may hold links to anything.
        here = self.directory.resolve()
        found = sorted(path for pattern in FILES for path in self.directory.glob(pattern))
        return {path.name: path for path in found if path.is_file() and path.resolve().is_relative_to(here)}

    def yaml(self, tp_size: int) -> Path:
        """Returns the path of the file for Megatron-LM. UserError when there is none for this TP size."""
        written = [answer for answer in self.answers if answer.tp_size == tp_size]
        if len(written) > 1:
            cases = ", ".join(answer.case for answer in written)
            raise UserError(
                f"TP={tp_size} was measured for several cases ({cases}); take the file of one of `answers`."
            )
        if not written or not written[0].file:
            raise UserError(f"{self.directory} has no file for TP={tp_size}: it was not searched.")
        return self.directory / written[0].file

    def switches(self, tp_size: int) -> dict[str, bool]:
        """Returns Megatron-Core's switches to train with, fields of its TransformerConfig. UserError as `yaml`."""
        return overlap_cfg.read(self.yaml(tp_size)).switches

    def megatron_arguments(self, tp_size: int) -> list[str]:
        """Returns the arguments of Megatron-LM that train with the file; empty where the answer is not to overlap.

        UserError as `yaml`, and where a switch is needed that Megatron-LM has no argument for.
        """
        path = self.yaml(tp_size)
        config = overlap_cfg.read(path)
        if not config.switches["tp_comm_overlap"]:
            return []
        changed = {name: on for name, on in config.switches.items() if on != overlap_cfg.SWITCH_DEFAULTS[name]}
        if missing := [f"{name}={on}" for name, on in changed.items() if name not in FLAGS]:
            raise UserError(f"Megatron-LM has no argument for {', '.join(missing)}; set it in its TransformerConfig.")
        # It refuses to overlap without sequence parallelism.
        always = ["--tensor-model-parallel-size", str(tp_size), "--sequence-parallel", FLAGS["tp_comm_overlap"]]
        return [*always, "--tp-comm-overlap-cfg", str(path), *(FLAGS[name] for name in changed)]

    def ub_cfgs(self, tp_size: int) -> dict[str, Setting] | None:
        """Returns the slots of the file for Transformer Engine's `initialize_ub`; None where the answer is not to
        overlap, since an empty map gives every slot the library's default. UserError as `yaml`."""
        config = overlap_cfg.read(self.yaml(tp_size))
        return config.slots if config.switches["tp_comm_overlap"] else None

    def to_frame(self) -> pd.DataFrame:
        """Returns a row per measured point and phase; times in microseconds."""
        import pandas as pd

        return pd.read_parquet(self.directory / "points.parquet")

    def save(self, directory: Path | str) -> list[Path]:
        """Copies `files` there; returns the copies."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        if target.resolve() == self.directory.resolve():
            return list(self.files.values())
        return [Path(shutil.copy2(path, target / name)) for name, path in self.files.items()]

    def __repr__(self) -> str:
        return f"Report({str(self.directory)!r})"

    def __str__(self) -> str:
        lines = [line for case in self.cases for line in self._lines(case)]
        return "\n".join(lines or [f"{self.directory}: no operator was measured."])

    def _lines(self, case: Case) -> list[str]:
        answers = [one for one in self.answers if one.case == case.name]
        return [str(case), *(f"  TP={a.tp_size}: {a.headline}{f' ({a.file})' if a.file else ''}" for a in answers)]

    def _repr_html_(self) -> str:
        """Returns the answers and the best settings for a notebook."""
        from overlap_sweep.tuner.notebook import html

        return html(self)
