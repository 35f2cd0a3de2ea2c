"""The contract between launching and analysis: the files of a point's run directory.

Launching writes one `result.json` per point, whole or not at all; analysis reads only these directories.
"""

import os
import re
import shutil
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from overlap_sweep.config import ResolvedPoint
from overlap_sweep.declared import FileName, Gb, Us, spelled
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import space
from overlap_sweep.results.checks import MEASURE_AGAIN, excess
from overlap_sweep.results.measured import Measured, Scalar, Slot, WholeSetting
from overlap_sweep.results.registry import Named, PointTypes, decoded_point, types_of
from overlap_sweep.trace.disk import TENSORBOARD_FOLDER

RESULT_SCHEMA = 2
RESULT_FILE = "result.json"
SETTINGS_FILE = "tp_comm_overlap_cfg.yaml"
LOG_FILE = "worker.log"
LOCK_FILE = ".lock"
"""Name of the lock in a sweep's directory; see runtime/lock.py."""
PROFILERS_FOLDERS = (TENSORBOARD_FOLDER, "rocprofv3")
"""Folders that profilers write next to the traces."""
NSYS_REPORT = "nsys"
"""Start of the names of Nsight Systems' reports, which end in the host."""
_METRICS = re.compile(r"rank_(\d+)_metrics\.jsonl")
LONGEST_REASON = 300
"""Longest reason why a file cannot be read, in characters."""

Status = Literal["ok", "failed", "timeout", "skipped"]

_Measured = TypeVar("_Measured", bound=Measured)
_Point = TypeVar("_Point", bound=ResolvedPoint)


class Attempt(msgspec.Struct, kw_only=True):
    """A failed try at the point."""

    status: Literal["lost", "failed", "timeout"]
    """Outcome; `lost` if its node was lost, which need not be the point's fault."""
    error: str = ""
    started: str
    """Start time, UTC, ISO 8601."""
    where: str
    """Host, and the Slurm job if there was one."""


class Environment(msgspec.Struct):
    """The part of a result's environment that analysis reads."""

    host: str | None = None
    hosts: list[str] | None = None
    gpu: str | None = None
    device: str | None = None
    gpu_count: Annotated[int, msgspec.Meta(ge=0)] | None = None
    memory_gb: Gb | None = None
    """Memory of a GPU, 10^9 bytes."""
    cpu: str | None = None
    cpu_count: Scalar = None
    driver: Scalar = None
    nccl: Scalar = None
    cuda: Scalar = None
    cudnn: Scalar = None
    packages: dict[str, Scalar] = {}
    variables: dict[str, Scalar] = {}


class Result(msgspec.Struct, kw_only=True, dict=True):
    """The content of result.json."""

    schema: int = RESULT_SCHEMA
    name: str
    recorded: dict[str, Any] = msgspec.field(name="point")
    """The resolved configuration, exactly as it is written: whether points are the same is decided by it. All else
    reads `point`."""
    status: Status
    error: str | None = None
    """Why the point is not ok: the reason if it was skipped, else the exception and the end of the log."""
    settings: dict[str, space.Setting] = {}
    """Method and knobs passed to the backend, by overlapped slot; empty if `measured` has them by variant."""
    measured: Any = None
    """The measurements, a `Measured` of the workload's own type; null unless the point is ok."""
    warnings: list[str] = []
    """Caveats of the numbers, one sentence each."""
    objective_us: Us | None = None
    """The time that a sweeper minimises. For an operator the time of both passes, relative to the none time of each,
    so that methods for one pass compare with methods for both."""
    relative_error: dict[str, float | None] = {}
    """Largest difference from the operator with no overlap, over its largest magnitude, by tensor (output, gradients);
    null if infinite. For a failed layer by variant and tensor."""
    launch_bound: bool = False
    """Whether the host could not enqueue as fast as the GPU ran, so that times say nothing about the GPU."""
    environment: dict[str, Any] = {}
    conditions: dict[str, Any] = {}
    """Clocks, temperatures and load before and after the measurement."""
    traces: list[FileName] = []
    """File names in the run directory, one per rank and variant."""
    started: str | None = None
    """Start time, UTC, ISO 8601."""
    wall_s: float | None = None
    earlier_attempts: list[Attempt] = []
    """Failed attempts before this one, in the same sweep."""
    reused_from: str | None = None
    """Origin of a result reused from a store: store, place and time of the measurement."""

    @cached_property
    def point(self) -> ResolvedPoint:
        return decoded_point(self.recorded)

    @cached_property
    def machine(self) -> Environment:
        """Returns what the environment says of the machine."""
        return msgspec.convert(self.environment, Environment)

    def point_as(self, kind: type[_Point]) -> _Point:
        """Returns the resolved configuration of a point of this workload."""
        assert isinstance(self.point, kind)
        return self.point

    @property
    def reason(self) -> str:
        """Returns why the point is not ok, in one line."""
        return (self.error or self.status).splitlines()[0]

    @property
    def has_wrong_numbers(self) -> bool:
        """Returns whether the point failed because it computed something else than it does with no overlap."""
        return self.status == "failed" and bool(self.relative_error)

    @property
    def gave_up(self) -> bool:
        """Returns whether the point was seen to be too slow and not measured to its end."""
        return self.measured is not None and self.measured.gave_up

    def measured_as(self, kind: type[_Measured]) -> _Measured:
        """Returns the measurements of an ok point."""
        assert isinstance(self.measured, kind)
        return self.measured


class _Moment(msgspec.Struct):
    gpus: list[dict[str, float]] = []


class _Parts(msgspec.Struct, Generic[_Point, _Measured]):
    """The parts of a result whose types depend on the workload."""

    point: _Point
    measured: _Measured | None = None
    settings: dict[Slot, WholeSetting] = {}
    environment: Environment = msgspec.field(default_factory=Environment)
    conditions: dict[str, _Moment] = {}


class _Composed(msgspec.Struct):
    workload: dict[str, object]


class _Head(msgspec.Struct):
    point: Named
    schema: int = RESULT_SCHEMA


def trace_file(rank: int, variant: str = "") -> str:
    """Returns the name of a rank's trace. Layers have one per variant, operators also some of `none`."""
    return f"{_trace_start(variant)}{rank}.json.gz"


def is_trace_of(variant: str, name: str) -> bool:
    return name.startswith(_trace_start(variant))


def _trace_start(variant: str) -> str:
    return f"trace_{_word(variant)}_rank" if variant else "trace_rank"


def write_trace(profiler: Any, path: Path) -> None:
    """Writes what torch's profiler has recorded, compressed, whole or absent."""
    # Compressed here: of a trace of 78 MB in 0.1 s instead of the 10 s that torch takes.
    plain = path.with_name(f".tmp_{path.stem}")
    try:
        profiler.export_chrome_trace(str(plain))
        copy_trace(plain, path)
    finally:
        plain.unlink(missing_ok=True)


def copy_trace(source: Path, target: Path) -> None:
    """Copies a trace; compressed if the target's name ends in .gz, whole or not at all."""
    from isal import igzip

    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    read, write = (igzip.open if path.suffix == ".gz" else open for path in (source, target))
    try:
        with read(source, "rb") as content, write(temporary, "wb") as copy:
            shutil.copyfileobj(content, copy, 1 << 20)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def metrics_file(rank: int) -> str:
    return f"rank_{rank}_metrics.jsonl"


def find_metrics(directory: Path) -> dict[int, Path]:
    found = ((_METRICS.fullmatch(path.name), path) for path in directory.iterdir() if path.is_file())
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def settings_file(variant: str = "") -> str:
    """Returns the name of the file with the backend's settings. Layers have one per variant."""
    return SETTINGS_FILE.replace(".yaml", f"_{_word(variant)}.yaml") if variant else SETTINGS_FILE


def _word(variant: str) -> str:
    """Returns the variant, such as `file:/a/b.yaml`, in a form for file names."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", variant)


def write_result(directory: Path, result: Result, *, durable: bool = True) -> Path:
    """Writes result.json so that it is whole or absent; also after power loss if `durable`."""
    return write_json(directory / RESULT_FILE, result, durable=durable)


def write_json(path: Path, content: msgspec.Struct, *, durable: bool = True) -> Path:
    """Writes the content as readable JSON, whole or absent."""
    return write_atomically(path, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n", durable=durable)


def write_atomically(path: Path, content: bytes, *, durable: bool = True) -> Path:
    """Writes to a temporary name next to `path`, flushes to disk if `durable`, and renames."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # In somebody else's directory the name may be a link to anywhere.
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:
            file.write(content)
        return keep(temporary, path, durable=durable)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def keep(temporary: Path, path: Path, *, durable: bool = True) -> Path:
    """Renames a file that was written next to `path`, so that it is whole or absent; also after power loss if
    `durable`."""
    if durable:
        flush(temporary)
    temporary.replace(path)
    if durable:
        flush(path.parent)
    return path


def make_durable(directory: Path) -> None:
    """Flushes a point's result and its backend's settings to disk."""
    for path in (directory / RESULT_FILE, *directory.glob(f"{Path(SETTINGS_FILE).stem}*"), directory):
        flush(path)


def flush(path: Path) -> None:
    """Flushes a file or the entries of a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def log_file(node: int) -> str:
    """Returns the name of the log of the ranks on a point's machine. Machines have a log each, since what several
    append to a file on a network file system is mixed."""
    return f"worker_node{node}.log" if node else LOG_FILE


def clear(directory: Path) -> None:
    """Removes the files of an earlier attempt at the point, except its log."""
    leftovers = [directory / RESULT_FILE, *directory.glob(".*.tmp")]
    leftovers += [*directory.glob("trace_*.json.gz"), *directory.glob(".tmp_trace_*")]
    leftovers += [directory / "job_recorder", directory / "job_steps", *directory.glob("job_rank*.json")]
    leftovers += directory.glob("job_levers_*")
    leftovers += directory.glob(f"{NSYS_REPORT}_*")
    # Written from the result of a training run.
    leftovers += directory.glob("results_*_tp*_dp*.json")
    leftovers += find_metrics(directory).values() if directory.is_dir() else ()
    for path in leftovers:
        path.unlink(missing_ok=True)
    for folder in PROFILERS_FOLDERS:
        shutil.rmtree(directory / folder, ignore_errors=True)


def read_result(path: Path) -> Result:
    """Returns the content of a result.json. UserError if it is damaged or of another schema."""
    try:
        text = path.read_bytes()
    except OSError as error:
        mend = "make it readable" if isinstance(error, PermissionError) else MEASURE_AGAIN
        raise UserError(f"{path} cannot be read ({error.strerror}); {mend}.") from None
    return decoded_result(text, str(path), MEASURE_AGAIN)


def decoded_result(text: bytes | str, where: str, mend: str) -> Result:
    """Returns the content of a result.json. UserError, which begins with `where`, if it is damaged or not a result."""
    try:
        content = msgspec.json.decode(text)
        head = msgspec.convert(content, _Head)
        if head.schema != RESULT_SCHEMA:
            mend = "update overlap_sweep" if head.schema > RESULT_SCHEMA else mend
            raise UserError(f"{where} was written by another version (it has schema {head.schema}); {mend}.")
        types = _types(head.point, where)
        result = msgspec.convert({**content, "measured": None}, Result)
        if reason := excess([result.recorded, result.settings, result.environment, result.conditions]):
            raise msgspec.ValidationError(reason)
        parts = msgspec.convert(content, _Parts[types.resolved, types.measured])  # type: ignore[name-defined]
        if parts.point.runtime.device == "auto":
            raise msgspec.ValidationError("no device that it ran on - at `$.point.runtime.device`")
        result.measured = parts.measured
        result.__dict__.update(point=parts.point, machine=parts.environment)
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


def _types(point: Named, where: str) -> PointTypes:
    """Returns the types of the workload's points. UserError, which begins with `where`, if it is unknown."""
    try:
        return types_of(point.workload.name)
    except UserError as error:
        reason, _, mend = one_line(error).rstrip(".").rpartition("; ")
        mend = "install the package that has it" if mend.startswith("choose") else mend
        raise UserError(f"{where} cannot be read ({reason}); {mend}.") from None


def asked_point(config: Any, path: Path) -> ResolvedPoint:
    """Returns a composed configuration with what its workload fills in whatever the machine. UserError if it is not one
    of a point."""
    try:
        types = _types(msgspec.convert(config, Named), str(path))
        # What is interpolated follows from other options.
        options = msgspec.convert(config, _Composed).workload
        plain = {name: value for name, value in options.items() if not str(value).startswith("${")}
        composed = msgspec.convert(spelled({**config, "workload": plain}, types.options), types.options)
        return msgspec.convert(types.measured.as_asked(composed), types.asked)
    except msgspec.ValidationError as error:
        raise UserError(
            f"{path} is not a point's configuration ({one_line(error)}); move {path.parent.parent} elsewhere."
        ) from None


def now() -> str:
    """Returns the current time in the format of results: ISO 8601, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def one_line(message: Exception | str) -> str:
    """Returns the text of an error or a file as one printable line of limited length."""
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(message))
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} ..."


def find_points(directory: Path) -> list[Path]:
    """Returns the run directories at or below `directory`, sorted, with or without a result."""
    found = {path.parent for path in directory.rglob(RESULT_FILE)}
    found |= {path.parent.parent for path in directory.rglob(".hydra/config.yaml")}
    return sorted(found)


def find_telemetry(directory: Path) -> list[Path]:
    """Returns the directories with telemetry at or below `directory`, sorted; links are not followed."""
    folders = (Path(folder) for folder, _, files in os.walk(directory) if any(map(_METRICS.fullmatch, files)))
    return sorted(folder for folder in folders if find_metrics(folder))


def last_sweep(root: Path = Path("multirun")) -> Path:
    """Returns the sweep below `root` that ran last. UserError if there is none."""
    found = [path for pattern in (f"*/{LOCK_FILE}", f"*/*/{LOCK_FILE}") for path in root.glob(pattern)]
    if not found:
        raise UserError(f"there is no sweep below {root}; give its directory: resume=<directory>.")
    return max(found, key=lambda path: path.stat().st_mtime).parent
