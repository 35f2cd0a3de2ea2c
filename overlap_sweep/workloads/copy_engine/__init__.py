"""GEMMs on one stream, copies on another: how much of the copies the copy engines can hide."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from overlap_sweep.errors import UserError
from overlap_sweep.overlap.models import CUSTOM, PRECISION_OF_DTYPE
from overlap_sweep.workloads import Workers, Workload, profilers, run_of
from overlap_sweep.workloads.copy_engine.config import Config, Resolved
from overlap_sweep.workloads.profilers import Profiler


def complete(config: Config) -> dict[str, object]:
    """Returns the point without the options that this workload does not use."""
    if config.backend != "auto":
        raise UserError(f"backend={config.backend}: workload=copy_engine has no backends; leave it out.")
    return {
        **config,
        # The same as workload.repeats.
        "copy_engine": replace(config.copy_engine, iterations=None),
        "profiling": config.profiling if config.profiling.rocprofv3 else Profiler(),
        "model": {"name": CUSTOM},
        "backend": "copy_engine",
        "precision": PRECISION_OF_DTYPE[config.copy_engine.dtype],
        "tp_size": 1,
    }


def refusal(point: Resolved) -> str | None:
    copy, on_cpu = point.copy_engine, point.runtime.device == "cpu"
    if on_cpu and copy.device:
        return f"copy_engine.device={copy.device} needs a GPU"
    if on_cpu and copy.direction != "device_to_device":
        return f"copy_engine.direction={copy.direction} needs a GPU"
    if copy.chunks and copy.chunks > copy.matrix_size:
        return f"copy_engine.chunks={copy.chunks} is larger than copy_engine.matrix_size={copy.matrix_size}"
    return None


def _workers(point: Resolved, directory: Path) -> Workers:
    wrapper = profilers.wrapper(point.profiling, directory)
    return Workers(max_connections=8, wrapper=wrapper, first_gpu=point.copy_engine.device)


def _fewer_gpus(config: Config) -> tuple[str, str]:
    if device := config.copy_engine.device:
        return f"copy_engine.device={device}", "a smaller number"
    return f"copy_engine.direction={config.copy_engine.direction}", "another direction"


def _subject(point: Resolved) -> str:
    copy = point.copy_engine
    return f"{copy.matrix_size} GEMM, {copy.copy_mb:g} MiB {copy.direction}"


def _words(config: Config, overrides: Sequence[str]) -> list[str]:
    copy = config.copy_engine
    return ["copy", copy.direction, f"gemm{copy.matrix_size}", f"{copy.copy_mb:g}mb"]


WORKLOAD = Workload(
    name="copy_engine",
    package=__name__,
    complete=complete,
    refusal=refusal,
    run=run_of(__name__),
    subject=_subject,
    words=_words,
    named={f"copy_engine.{name}" for name in ("matrix_size", "copy_mb", "direction")},
    # Those before the one that is used, or the one that receives the copies.
    idle_gpus=lambda point: max(point.copy_engine.device, int(point.copy_engine.direction == "peer")),
    fewer_gpus=_fewer_gpus,
    cost=lambda point: (point.copy_engine.gemms, point.copy_engine.copies, bool(point.copy_engine.chunks)),
    workers=_workers,
)
