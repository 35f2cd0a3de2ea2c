"""What a kernel's result must be before anything else looks at it, whoever wrote it."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.overlap.kernel_shape import BASELINES, PRECISION_OF_DTYPE, KernelShape
from overlap_sweep.results.check_parts import (
    MEASURE_AGAIN,
    UPDATE,
    Count,
    SizedWorkload,
    Word,
    check_name,
    contradiction,
    is_whole,
)
from overlap_sweep.results.run_directory import ImplementationTimes, Result

_MOST_IMPLEMENTATIONS = 200
"""A chart has a row for each."""


class _Setting(msgspec.Struct):
    """Of one implementation. Those from elsewhere may have other knobs than ours, and no method that we know."""

    method: str | None = None
    num_sm: Count | None = None
    num_splits: Count | None = None
    cga_size: Count | None = None
    aggregate: bool | None = None
    set_sm_margin: bool | None = None
    use_ce: bool | None = None
    atomic_gemm: bool | None = None
    fp8_buf: bool | None = None


class _Point(msgspec.Struct):
    """As it was run."""

    kernel: str
    m: Count
    n: Count
    k: Count
    precision: str
    workload: SizedWorkload
    implementations: dict[str, dict[str, Word]]


def check_kernel(result: Result, path: Path) -> None:
    """UserError where it is none, whatever became of it."""
    try:
        asked = msgspec.convert(result.point, _Point).implementations
        for setting in (*asked.values(), *(one.setting for one in result.implementations.values())):
            msgspec.convert(setting, _Setting)
            msgspec.convert(setting, dict[str, Word])
    except msgspec.ValidationError as error:
        raise UserError(f"{path} is no result of a kernel ({error}); {MEASURE_AGAIN}.") from None
    names = [*asked, *result.implementations, *result.left_out]
    for name in names:
        check_name(name, path)
    if (count := len(set(names))) > _MOST_IMPLEMENTATIONS:
        raise UserError(f"{path} names {count} implementations, more than {_MOST_IMPLEMENTATIONS}; {MEASURE_AGAIN}.")
    for name in BASELINES:
        if name in result.left_out:
            raise UserError(f"{path} leaves out {name}, which is always measured; {MEASURE_AGAIN}.")


def check_implementations(result: Result, path: Path) -> None:
    """UserError where analysis could not rely on the times of a kernel that is ok."""
    precision, precisions = result.point["precision"], PRECISION_OF_DTYPE.values()
    if precision not in precisions:
        known = ", ".join(precisions)
        raise UserError(f"{path} says {str(precision)[:200]}, which is none of {known}; {UPDATE}.")
    if reason := KernelShape.of(result.point).refusal():
        raise UserError(f"{path} is ok, which it cannot be ({reason}); {MEASURE_AGAIN}.")
    measured = result.implementations
    timings = [one.time for one in measured.values()]
    rounds = {len(timing.samples_us) for timing in timings}
    if not measured.keys() > set(BASELINES) or len(rounds) != 1 or not all(map(is_whole, timings)):
        raise UserError(f"{path} is ok without whole times of its implementations and baselines; {MEASURE_AGAIN}.")
    for name, one in measured.items():
        if reason := _contradiction(name, one):
            raise UserError(f"{path} gives {name} {reason}, which there cannot be; {MEASURE_AGAIN}.")


def _contradiction(name: str, one: ImplementationTimes) -> str | None:
    error = one.relative_error
    if error is not None and not (isfinite(error) and error >= 0):
        return f"a relative error of {error}"
    if reason := contradiction(one.time):
        return reason
    return "as a baseline an independent GEMM" if one.independent and name in BASELINES else None
