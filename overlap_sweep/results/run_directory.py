"""The contract between launching and analysing: what lies in a point's run directory.

Launching writes one `result.json` per point, whole or not at all; analysis reads nothing but these directories.
"""

from __future__ import annotations

import os
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.results.checks import MEASURE_AGAIN, excess
from overlap_sweep.results.measured import (
    ComposedConfig,
    FileName,
    Measured,
    Scalar,
    Slot,
    Us,
    WholeSetting,
    WorkloadConfig,
)
from overlap_sweep.workloads import measured_type

RESULT_SCHEMA = 2
RESULT_FILE = "result.json"
SETTINGS_FILE = "tp_comm_overlap_cfg.yaml"
LOG_FILE = "worker.log"
LOCK_FILE = ".lock"
"""Of a sweep's directory: see runtime/lock.py."""

PROFILERS_FOLDERS = ("torch_profiler", "rocprofv3")
"""What profilers write beside the traces."""

_METRICS = re.compile(r"rank_(\d+)_metrics\.jsonl")

LONGEST_REASON = 300
"""Characters of why a file cannot be read."""

Status = Literal["ok", "failed", "timeout", "skipped"]


_Measured = TypeVar("_Measured", bound=Measured)


class Attempt(msgspec.Struct, kw_only=True):
    """A failed try at the point."""

    status: Literal["lost", "failed", "timeout"]
    """`lost`: its node was, which need not be the point's fault."""
    error: str = ""
    started: str
    """UTC, ISO 8601."""
    where: str
    """Host, and the Slurm job if it was in one."""


class Result(msgspec.Struct, kw_only=True):
    """The content of result.json."""

    schema: int = RESULT_SCHEMA
    name: str
    point: dict[str, Any]
    """The resolved configuration."""
    status: Status
    error: str | None = None
    """Why the point is not ok: for `skipped` the reason, else the exception and the log's tail."""
    settings: dict[str, dict[str, Any]] = {}
    """Per overlapped slot the method and knobs that the backend was given; empty where it is told by variant."""
    measured: Any = None
    """A `Measured`, the workload's own; null unless the point is ok."""
    warnings: list[str] = []
    """What a reader must know before believing the numbers, one sentence each."""
    objective_us: Us | None = None
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
    traces: list[FileName] = []
    """File names in the run directory, one per rank and variant."""
    started: str | None = None
    """UTC, ISO 8601."""
    wall_s: float | None = None
    earlier_attempts: list[Attempt] = []
    """Before this one, in the same sweep."""
    reused_from: str | None = None
    """Of a result that was not measured here but taken from a store: which, where and when it was measured."""

    @property
    def reason(self) -> str:
        """Returns in a line why the point is not ok."""
        return (self.error or self.status).splitlines()[0]

    def measured_as(self, kind: type[_Measured]) -> _Measured:
        """Returns what a point that is ok measured."""
        assert isinstance(self.measured, kind)
        return self.measured


class _Environment(msgspec.Struct):
    """The part of the environment that analysis reads."""

    host: str | None = None
    gpu: str | None = None
    device: str | None = None
    gpu_count: Scalar = None
    cpu: Scalar = None
    cpu_count: Scalar = None
    driver: Scalar = None
    nccl: Scalar = None
    cuda: Scalar = None
    cudnn: Scalar = None
    packages: dict[str, Scalar] = {}
    variables: dict[str, Scalar] = {}


class _Moment(msgspec.Struct):
    gpus: list[dict[str, float]] = []


_Config = TypeVar("_Config", bound=ComposedConfig)


class _Parts(msgspec.Struct, Generic[_Config, _Measured]):
    """The parts of a result of one workload that Result leaves open."""

    point: _Config
    measured: _Measured | None = None
    settings: dict[Slot, WholeSetting] = {}
    environment: _Environment = msgspec.field(default_factory=_Environment)
    conditions: dict[str, _Moment] = {}


class _Named(msgspec.Struct):
    workload: WorkloadConfig


class _Head(msgspec.Struct):
    point: _Named
    schema: int = RESULT_SCHEMA


def trace_file(rank: int, variant: str = "") -> str:
    """Returns the name of a rank's trace. A layer has one per variant; an operator some of `none` beside its own."""
    return f"{_trace_start(variant)}{rank}.json.gz"


def is_trace_of(variant: str, name: str) -> bool:
    """Returns whether a file of that name is a trace of the variant."""
    return name.startswith(_trace_start(variant))


def _trace_start(variant: str) -> str:
    return f"trace_{_word(variant)}_rank" if variant else "trace_rank"


def metrics_file(rank: int) -> str:
    """Returns the name of a rank's telemetry of a training run."""
    return f"rank_{rank}_metrics.jsonl"


def find_metrics(directory: Path) -> dict[int, Path]:
    """Returns by rank the telemetry files in this directory."""
    found = ((_METRICS.fullmatch(path.name), path) for path in directory.iterdir() if path.is_file())
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def settings_file(variant: str = "") -> str:
    """Returns the name of the file with the backend's settings; a layer has one per variant."""
    return SETTINGS_FILE.replace(".yaml", f"_{_word(variant)}.yaml") if variant else SETTINGS_FILE


def _word(variant: str) -> str:
    """Returns the variant, such as `file:/a/b.yaml`, as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", variant)


def write_result(directory: Path, result: Result) -> Path:
    """Writes result.json so that it is whole or absent, also after power loss."""
    return write_json(directory / RESULT_FILE, result)


def write_json(path: Path, content: msgspec.Struct) -> Path:
    """Writes the content as readable JSON, whole or absent."""
    return write_atomically(path, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def write_atomically(path: Path, content: bytes) -> Path:
    """Writes to a temporary name beside `path`, flushes to disk, and renames."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # In a directory from somebody else the name may be a link to anywhere.
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as file:
        file.write(content)
    return keep(temporary, path)


def keep(temporary: Path, path: Path) -> Path:
    """Gives a file that was written beside `path` its name, so that after power loss it is whole or absent."""
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)
    return path


def flush(path: Path) -> None:
    """Flushes a file, or a directory's entries, to the disk before this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear(directory: Path) -> None:
    """Removes what an earlier attempt at the point left, except its log."""
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
    """Reads one result.json. UserError where it is no whole result of a point, of this schema."""
    try:
        text = path.read_bytes()
    except PermissionError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable, or remove it.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {MEASURE_AGAIN}.") from None
    return decoded_result(text, str(path), MEASURE_AGAIN)


def decoded_result(text: bytes | str, where: str, mend: str) -> Result:
    """Returns the content of a result.json. UserError, which begins with `where`, for anything else: damaged, edited by
    hand, or made by another program."""
    try:
        content = msgspec.json.decode(text)
        head = msgspec.convert(content, _Head)
        if head.schema != RESULT_SCHEMA:
            mend = "update overlap_sweep" if head.schema > RESULT_SCHEMA else mend
            raise UserError(f"{where} was written by another version (it has schema {head.schema}); {mend}.")
        kind = _workload_type(head.point, where)
        result = msgspec.convert({**content, "measured": None}, Result)
        if reason := excess([result.point, result.settings, result.environment, result.conditions]):
            raise msgspec.ValidationError(reason)
        parts = msgspec.convert(content, _Parts[kind.resolved, kind])  # type: ignore[name-defined,valid-type]
        result.measured = parts.measured
        if result.status == "ok":
            if result.measured is None:
                raise msgspec.ValidationError("ok, but nothing measured - at `$.measured`")
            _check(result)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} cannot be read ({one_line(error)}); {mend}.") from None
    return result


def _check(result: Result) -> None:
    try:
        result.measured.check(result)
    except ValueError as error:
        raise msgspec.ValidationError(f"{error} - at `$.measured`") from None


def _workload_type(point: _Named, where: str) -> type[Measured]:
    """Returns the type of the workload's measurements. UserError, which begins with `where`, for an unknown one."""
    try:
        return measured_type(point.workload.name)
    except UserError as error:
        reason, _, mend = one_line(error).rstrip(".").rpartition("; ")
        mend = "install the package that has it" if mend.startswith("choose") else mend
        raise UserError(f"{where} cannot be read ({reason}); {mend}.") from None


def check_composed(config: Any, path: Path) -> type[Measured]:
    """Returns the type of what a point measures that was composed so; UserError when it is no point's configuration."""
    try:
        kind = _workload_type(msgspec.convert(config, _Named), str(path))
        msgspec.convert(config, kind.composed)
    except msgspec.ValidationError as error:
        raise UserError(
            f"{path} describes no point ({one_line(error)}), so none was measured; remove {path.parent.parent}."
        ) from None
    return kind


def now() -> str:
    """Returns the time as results have it: ISO 8601, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def one_line(said: Exception | str) -> str:
    """Returns the text of an error or a file, fit to be shown in a line."""
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(said))
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} ..."


def find_points(directory: Path) -> list[Path]:
    """Returns the run directories at or below `directory`, sorted: with a result, or dead before one."""
    found = {path.parent for path in directory.rglob(RESULT_FILE)}
    found |= {path.parent.parent for path in directory.rglob(".hydra/config.yaml")}
    return sorted(found)


def find_telemetry(directory: Path) -> list[Path]:
    """Returns the directories with telemetry at or below `directory`, sorted; links to elsewhere are not followed."""
    folders = (Path(folder) for folder, _, files in os.walk(directory) if any(map(_METRICS.fullmatch, files)))
    return sorted(folder for folder in folders if find_metrics(folder))


def last_sweep(root: Path = Path("multirun")) -> Path:
    """Returns the sweep below `root` that was last worked on. UserError when there is none."""
    found = [path for pattern in (f"*/{LOCK_FILE}", f"*/*/{LOCK_FILE}") for path in root.glob(pattern)]
    if not found:
        raise UserError(f"there is no sweep below {root}; give its directory: resume=<directory>.")
    return max(found, key=lambda path: path.stat().st_mtime).parent
