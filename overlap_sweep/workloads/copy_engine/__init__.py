"""GEMMs on one stream, copies on another: how much of the copies the copy engines can hide."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlap_sweep.errors import UserError
from overlap_sweep.overlap.models import CUSTOM, PRECISION_OF_DTYPE
from overlap_sweep.workloads import Workers, Workload, profilers, run_of
from overlap_sweep.workloads.copy_engine.config import Resolved


def complete(point: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the point without the options that this workload does not use."""
    if point["backend"] != "auto":
        raise UserError(f"backend={point['backend']}: workload=copy_engine has no backends; leave it out.")
    copy = dict(point["copy_engine"])
    # The same as workload.repeats.
    del copy["iterations"]
    # Left out if it is the first: results of earlier versions don't have it.
    if not copy["device"]:
        del copy["device"]
    profiling = point["profiling"]
    return {
        **{name: point[name] for name in ("runtime", "profile", "repetition", "workload")},
        # Left out if off: results of earlier versions don't have it.
        **({"profiling": profiling} if profiling["rocprofv3"] else {}),
        "copy_engine": copy,
        "model": {"name": CUSTOM},
        "backend": "copy_engine",
        "precision": PRECISION_OF_DTYPE[copy["dtype"]],
        "tp_size": 1,
    }


def refusal(point: Mapping[str, Any]) -> str | None:
    copy, on_cpu = point["copy_engine"], point["runtime"]["device"] == "cpu"
    if on_cpu and copy.get("device"):
        return f"copy_engine.device={copy['device']} needs a GPU"
    if on_cpu and copy["direction"] != "device_to_device":
        return f"copy_engine.direction={copy['direction']} needs a GPU"
    if copy["chunks"] and copy["chunks"] > copy["matrix_size"]:
        return f"copy_engine.chunks={copy['chunks']} is larger than copy_engine.matrix_size={copy['matrix_size']}"
    return None


def _workers(point: Resolved, directory: Path) -> Workers:
    wrapper = profilers.wrapper(point.profiling, directory)
    return Workers(max_connections=8, wrapper=wrapper, first_gpu=_device(point))


def _device(point: Mapping[str, Any]) -> int:
    return int(point["copy_engine"].get("device") or 0)


def _fewer_gpus(point: Mapping[str, Any]) -> tuple[str, str]:
    if device := _device(point):
        return f"copy_engine.device={device}", "a smaller number"
    return f"copy_engine.direction={point['copy_engine']['direction']}", "another direction"


WORKLOAD = Workload(
    name="copy_engine",
    package=__name__,
    complete=complete,
    refusal=refusal,
    run=run_of(__name__),
    subject=lambda point: "{matrix_size} GEMM, {copy_mb:g} MiB {direction}".format(**point["copy_engine"]),
    words=lambda point, overrides: "copy {direction} gemm{matrix_size} {copy_mb:g}mb".format(
        **point["copy_engine"]
    ).split(),
    named={f"copy_engine.{name}" for name in ("matrix_size", "copy_mb", "direction")},
    # Those before the one that is used, or the one that receives the copies.
    idle_gpus=lambda point: max(_device(point), int(point["copy_engine"]["direction"] == "peer")),
    fewer_gpus=_fewer_gpus,
    cost=lambda point: (
        point["copy_engine"]["gemms"],
        point["copy_engine"]["copies"],
        bool(point["copy_engine"]["chunks"]),
    ),
    workers=_workers,
)
