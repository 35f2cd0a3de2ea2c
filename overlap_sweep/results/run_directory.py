"""The contract between launching and analysing: what lies in a point's run directory.

Launching writes one `result.json` per point, whole or not at all; analysis reads nothing but these directories.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from overlap_sweep.errors import UserError

SCHEMA = 1
RESULT_FILE = "result.json"
SETTINGS_FILE = "tp_comm_overlap_cfg.yaml"
LOG_FILE = "worker.log"
LOCK_FILE = ".lock"
"""Of a sweep's directory: see runtime/lock.py."""
TUNER_FILE = "tuner.json"
SEARCH_FILE = "search.json"

PROFILERS_FOLDERS = ("torch_profiler", "rocprofv3")
"""What profilers write beside the traces."""

_METRICS = re.compile(r"rank_(\d+)_metrics\.jsonl")

Status = Literal["ok", "failed", "timeout", "skipped"]


class Record(msgspec.Struct, kw_only=True):
    """The content of a file that a later version may write otherwise."""

    schema: int = SCHEMA


class Timing(msgspec.Struct):
    """One variant's times of one pass, in microseconds: for each repeat the slowest rank, then order statistics."""

    median_us: float
    q1_us: float
    q3_us: float
    samples_us: list[float]


class DefaultTiming(msgspec.Struct):
    """The library's own default overlap in every slot of the operator, measured at intervals within the sweep."""

    default: Timing
    none: Timing
    """The operator without overlap, measured in turns with it: comparisons go through this one."""
    measured: str
    """When, UTC, ISO 8601: several points may carry the same measurement."""


class PassTimes(msgspec.Struct):
    """One pass (`fwd` or `bwd`) of the point and of what it is compared with, measured side by side."""

    point: Timing
    none: Timing
    """The same operator, communication not overlapped."""
    floor: Timing
    """The same local GEMMs with no communication at all."""
    tp1: Timing | None = None
    """The whole, unsharded operator on one rank: the baseline of TP scaling."""
    default: DefaultTiming | None = None
    """Only of backends that have defaults."""


class VariantTimes(msgspec.Struct, kw_only=True):
    """One variant of a whole layer: the same layer and inputs under another overlap configuration."""

    times: dict[str, Timing]
    """By pass: `fwd`, `bwd`, `step` (the optimizer, where there is one), and `all`. The i-th samples of all variants
    were taken side by side, so they pair."""
    settings: dict[str, dict[str, Any]] = {}
    """The slots that the configuration names; the others ran at the library's default, if it has one. Which of them all
    were on, `switches` says."""
    switches: dict[str, bool] = {}
    """Megatron-Core's names: which classes of overlap were on; empty for `none` and `floor`."""
    relative_error: dict[str, float] = {}
    """Against `none`; empty for it and for `floor`, which computes nothing meaningful."""
    launch_bound: bool = False


class ImplementationTimes(msgspec.Struct, kw_only=True):
    """One implementation of a kernel, or one of `kernel_shape.BASELINES`, on the tensors that all of a point share."""

    time: Timing
    """The i-th samples of all implementations were taken side by side, so they pair."""
    setting: dict[str, Any] = {}
    """Its `method` and knobs, and whatever else a backend from elsewhere tells of it; empty for the baselines."""
    relative_error: float | None = None
    """Largest difference from the result in float32 over that one's largest magnitude; null for `gemm_only` and
    `comm_only`."""
    independent: bool = False
    """The GEMM neither needs what is gathered nor makes what is scattered, as in a bulk overlap: no way to compute the
    kernel, but to be had where a model has two that don't wait for each other."""
    launch_bound: bool = False


class TrainingRun(msgspec.Struct, kw_only=True):
    """What a training run measured; its telemetry lies beside it (telemetry.py)."""

    step: dict[str, Timing]
    """A whole step with all its micro batches and the optimizer, by variant: `point`; `none`, the same with every
    collective alone on the device; `floor`, the same computation without communication. Their i-th samples were taken
    side by side, so they pair."""
    host_us: dict[str, float]
    """By variant how long the host took to enqueue a step, without waiting for the device: median, slowest rank. Empty
    on a CPU; without a variant whose launches waited for the device."""
    samples_per_step: int
    """Of all ranks and micro batches."""
    parameters: int
    losses: list[float | None]
    """By step of the recorded run, mean over all ranks' samples; null where it is no number."""
    peak_memory_gb: float | None = None
    """Most that tensors took on a GPU of any rank, 10^9 bytes; null on a CPU."""
    compiled: str = "no"
    """`no`; the backend that compiled the layers; or `no: ` and why it could not."""
    telemetry: list[str] = []
    """File names in the run directory, one per rank."""


class TpTrainingStep(msgspec.Struct, kw_only=True):
    """One training step. Times are the slowest rank's, memory is that of the rank with the most, 10^9 bytes; null on a
    CPU."""

    step: int
    """Counted from 0."""
    warmup: bool
    """One of the first, which count in nothing but the comparison of losses."""
    loss: float | None
    """Mean over all ranks' tokens; null where it is no number."""
    grad_norm: float | None
    """Before clipping, over all ranks; null where it is no number (float16, whose step is then left out)."""
    step_us: float
    """From its first micro batch to the end of its optimizer, on the device."""
    forward_us: float
    """Of all micro batches together; so is the backward, to which the reduction of gradients belongs."""
    backward_us: float
    optimizer_us: float
    """With clipping, and with what the stack gathers after it."""
    memory_allocated_gb: float | None = None
    """When the host had enqueued the step."""
    memory_peak_gb: float | None = None
    """Most since the end of the warm-up."""


class TpTrainingRun(msgspec.Struct, kw_only=True):
    """What a run of workload=tp_training measured."""

    steps: list[TpTrainingStep]
    parameters: int
    """Of the whole model, up to norms, biases and the vocabulary's padding."""
    tokens_per_step: int
    """Of all data-parallel ranks and micro batches; likewise the next two."""
    samples_per_step: int
    flops_per_step: float
    """language_model.flops_per_token of all tokens."""
    host_ahead_us: float | None = None
    """How far the host was ahead of the device when it had enqueued a step's last backward: median over the timed
    steps, of the rank where it is least. Near zero it is the host that takes so long, or the stack waits for the
    device by itself. null on a CPU."""
    details: dict[str, Any] = {}
    """What the implementation tells of itself, such as who computes attention."""


class CopyTimes(msgspec.Struct, kw_only=True):
    """GEMMs and copies of workload=copy_engine."""

    times: dict[str, Timing]
    """`gemm` and `copy` each alone, `sequential` one after the other on one stream, `overlapped` on two. Their i-th
    samples pair."""
    launch_bound: dict[str, bool]
    bytes_copied: int
    """In each iteration."""
    flops: int


class FailedAttempt(msgspec.Struct, kw_only=True):
    """A try at the point that came to nothing."""

    status: Status
    error: str
    started: str
    """UTC, ISO 8601."""
    where: str
    """Host, and the Slurm job if it was in one."""


class Result(Record, kw_only=True, omit_defaults=False):
    """The content of result.json."""

    name: str
    point: dict[str, Any]
    """The resolved configuration."""
    status: Status
    error: str | None = None
    """Why the point is not ok: for `skipped` the reason, else the exception and the log's tail."""
    settings: dict[str, dict[str, Any]] = {}
    """Per overlapped slot the method and knobs that the backend was given."""
    times: dict[str, PassTimes] = {}
    """By pass: `fwd`, `bwd`, and `all` for both together. Of an operator."""
    variants: dict[str, VariantTimes] = {}
    """By name: `none`, `floor`, `default`, `file:<path>`. Of a layer."""
    implementations: dict[str, ImplementationTimes] = {}
    """By name, those of the backend and the baselines. Of a kernel."""
    left_out: dict[str, str] = {}
    """Of a kernel: by implementation, why it was not timed: refused, or wrong numbers."""
    training: TrainingRun | None = None
    """Of a training run."""
    copies: CopyTimes | None = None
    """Of workload=copy_engine."""
    tp_training: TpTrainingRun | None = None
    """Of workload=tp_training."""
    attention_backend: str | None = None
    """Of a layer with attention: who computed it, such as `fused (cuDNN 9.19.0)`."""
    warnings: list[str] = []
    """What a reader must know before believing the numbers, one sentence each."""
    objective_us: float | None = None
    """What a sweeper minimises. Of an operator the time of both passes, told through the `none` beside each, so that
    methods which overlap one pass and methods which overlap both compare."""
    relative_error: dict[str, float | None] = {}
    """Largest difference from the operator without overlap over the largest magnitude there: output, gradients; null
    where it is infinite. Of a failed layer by variant and tensor."""
    launch_bound: bool = False
    """The host could not enqueue as fast as the GPU ran: the times say nothing about the GPU."""
    environment: dict[str, Any] = {}
    conditions: dict[str, Any] = {}
    """What changes from moment to moment: clocks, temperatures, load, before and after."""
    traces: list[str] = []
    """File names in the run directory, one per rank and variant."""
    started: str | None = None
    """UTC, ISO 8601."""
    wall_s: float | None = None
    earlier_attempts: list[FailedAttempt] = []
    """Before this one, in the same sweep."""
    launch: str | None = None
    """In a sweep whose points are measured by several Slurm jobs, which launch has submitted them."""
    reused_from: str | None = None
    """Of a result that was not measured here but taken from a store: which, where and when it was measured."""


class LayerTrial(msgspec.Struct, kw_only=True):
    """A layer point of the tuner: configurations side by side at one TP size."""

    tp_size: int
    point: str
    """The name of its run directory, beside tuner.json."""
    variants: dict[str, str]
    """What they are called in reports, and the name of each in the point's `variants`. Of a proof: `none`, `default`,
    `tuned`, and `preset <file name>`. Of a trial before it: `best of each slot` and what was changed in the others."""


class TunerRecord(Record, kw_only=True):
    """The content of tuner.json: what belongs to what in a sweep of the tuner."""

    command: str
    started: str
    """UTC, ISO 8601."""
    wall_s: float
    """So far; from the command to the last layer point."""
    search_s: float = 0.0
    """The part of it that measured operators, with the start of the processes."""
    points: int = 0
    """Operator points that the search measured."""
    dropped: dict[str, str] = {}
    """By TP size or operator, in words, why it was not searched (to the end)."""
    together: list[LayerTrial] = []
    proofs: list[LayerTrial] = []


class TriedSetting(msgspec.Struct, kw_only=True):
    """One setting of a pass that a search measured."""

    setting: str
    """In a word, such as `dgrad bulk_sm4 + wgrad bulk_sm2`."""
    time_us: float | None = None
    noise_us: float | None = None
    measurements: int = 0


class PassSearch(msgspec.Struct, kw_only=True):
    """One search: a pass of an operator at one TP size. Times in microseconds."""

    model: str
    tp_size: int
    operator: str
    pass_name: str = msgspec.field(name="pass")
    chosen: dict[str, dict[str, Any]] = {}
    """By slot the fastest that was found; empty for no overlap."""
    time_us: float | None = None
    none_us: float | None = None
    floor_us: float | None = None
    evaluations: int = 0
    """Measurements of settings."""
    exhaustive: int = 0
    """Settings that there are."""
    stopped: str = ""
    """Why it ended."""
    notes: list[str] = []
    """What was dropped on the way, and why."""
    refused: dict[str, int] = {}
    """By reason, how many settings make no sense."""
    tried: list[TriedSetting] = []


class SearchRecord(Record, kw_only=True):
    """The content of search.json, which a search leaves beside its points."""

    points: int = 0
    """Baselines included."""
    reused: int = 0
    """How many of them an earlier run had measured."""
    elapsed_s: float = 0.0
    rounds: int = 0
    dropped: dict[str, str] = {}
    """By what was searched for, why it was not, or not to the end."""
    searches: list[PassSearch] = []


_Record = TypeVar("_Record", bound=Record)


def trace_file(rank: int, variant: str = "") -> str:
    """A layer has one per variant; an operator some of `none` beside its own."""
    return f"{_trace_start(variant)}{rank}.json.gz"


def is_trace_of(variant: str, name: str) -> bool:
    """Whether a file of that name is a trace of the variant."""
    return name.startswith(_trace_start(variant))


def _trace_start(variant: str) -> str:
    return f"trace_{_word(variant)}_rank" if variant else "trace_rank"


def metrics_file(rank: int) -> str:
    """A training run's telemetry: see telemetry.py."""
    return f"rank_{rank}_metrics.jsonl"


def find_metrics(directory: Path) -> dict[int, Path]:
    """By rank the telemetry that lies in this directory."""
    found = ((_METRICS.fullmatch(path.name), path) for path in directory.iterdir() if path.is_file())
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def settings_file(variant: str = "") -> str:
    """What the backend was given; a layer has one per variant."""
    return SETTINGS_FILE.replace(".yaml", f"_{_word(variant)}.yaml") if variant else SETTINGS_FILE


def _word(variant: str) -> str:
    """`file:/a/b.yaml` as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", variant)


def write_result(directory: Path, result: Result) -> Path:
    """Write result.json so that it is whole or absent, also after power loss."""
    return write_record(directory / RESULT_FILE, result)


def write_atomically(path: Path, content: bytes) -> Path:
    """Write to a temporary name beside `path`, flush to disk, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # In a directory from somebody else the name may be a link to anywhere.
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as file:
        file.write(content)
    return keep(temporary, path)


def keep(temporary: Path, path: Path) -> Path:
    """Give a file that was written beside `path` its name, so that after power loss it is whole or absent."""
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)
    return path


def flush(path: Path) -> None:
    """Have a file, or what a directory lists, on the disk before this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear(directory: Path) -> None:
    """Remove what an earlier attempt at the point left, but for its log."""
    leftovers = [directory / RESULT_FILE, *directory.glob(".*.tmp")]
    leftovers += [*directory.glob("trace_*.json.gz"), *directory.glob(".tmp_trace_*")]
    # Of a training run, made of its result.
    leftovers += directory.glob("results_*_tp*_dp*.json")
    leftovers += find_metrics(directory).values() if directory.is_dir() else ()
    for path in leftovers:
        path.unlink(missing_ok=True)
    for folder in PROFILERS_FOLDERS:
        shutil.rmtree(directory / folder, ignore_errors=True)


def read_result(path: Path) -> Result:
    """Read one result.json. UserError when it is no whole result of this or an earlier schema."""
    return read_record(path, Result, "remove it and measure the point again")


def write_tuner_record(directory: Path, record: TunerRecord) -> Path:
    return write_record(directory / TUNER_FILE, record)


def write_search_record(directory: Path, record: SearchRecord) -> Path:
    return write_record(directory / SEARCH_FILE, record)


def read_tuner_record(path: Path) -> TunerRecord:
    """Read one tuner.json. UserError when it is none of this or an earlier schema."""
    return read_record(path, TunerRecord, "remove it, or run the tuner again")


def read_search_record(path: Path) -> SearchRecord:
    """Read one search.json. UserError when it is none of this or an earlier schema."""
    return read_record(path, SearchRecord, "remove it, or search again")


def write_record(path: Path, record: Record) -> Path:
    """As JSON that people can read, whole or absent."""
    text = msgspec.json.format(msgspec.json.encode(record), indent=2)
    return write_atomically(path, text + b"\n")


def read_record(path: Path, kind: type[_Record], mend: str) -> _Record:
    """UserError, with `mend`, when it is none of this or an earlier schema."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); {mend}.") from None
    if record.schema > SCHEMA:
        raise UserError(f"{path} has schema {record.schema}, this version reads up to {SCHEMA}; update overlap_sweep.")
    return record


def find_points(directory: Path) -> list[Path]:
    """Run directories at or below `directory`, sorted: those with a result, and those that died before one."""
    found = {path.parent for path in directory.rglob(RESULT_FILE)}
    found |= {path.parent.parent for path in directory.rglob(".hydra/config.yaml")}
    return sorted(found)


def last_sweep(root: Path = Path("multirun")) -> Path:
    """The sweep below `root` that was last worked on. UserError when there is none."""
    found = [path for pattern in (f"*/{LOCK_FILE}", f"*/*/{LOCK_FILE}") for path in root.glob(pattern)]
    if not found:
        raise UserError(f"there is no sweep below {root}; give its directory: resume=<directory>.")
    return max(found, key=lambda path: path.stat().st_mtime).parent
