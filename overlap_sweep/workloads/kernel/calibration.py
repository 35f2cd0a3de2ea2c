"""What `predict` needs to know of collectives beside GEMMs, from points that measured it."""

import re
import shlex
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import msgspec

from overlap_sweep.predict.calibration import Calibration, RateSeen, SlowdownSeen, kept_folder
from overlap_sweep.predict.costs import cost_of
from overlap_sweep.report.section import File
from overlap_sweep.workloads.kernel.answer import ImplementationRow
from overlap_sweep.workloads.kernel.collectives import CollectivesAnalysis, blocks_of, by_collective, largest_of

LEAST_SLOWDOWN = 0.001
"""Smaller ones are noise, and have no logarithm."""


def calibration_file(analysis: CollectivesAnalysis, root: Path) -> File | None:
    """Returns the file of the case's calibration, in the analysed directory."""
    case, found = analysis.case, calibration_of(analysis)
    device = re.sub(r"[^A-Za-z0-9]+", "_", case.device)
    name = f"calibration_{device}_x{case.ranks}_{case.m}x{case.n}x{case.k}_{case.precision}.yaml"
    return File(root, name, partial(msgspec.yaml.encode, [found])) if found else None


def how_to_keep(file: File) -> str:
    """Returns the sentence with the command by which `predict` gets to know the file."""
    folder, path = (shlex.quote(str(one)) for one in (kept_folder(), file.directory / file.name))
    return f"predict reads this calibration once it is kept: mkdir -p {folder} && cp {path} {folder}/"


def calibration_of(analysis: CollectivesAnalysis) -> Calibration | None:
    """Returns the calibration of the case's GPUs; None of CPUs, of several nodes, and of too few numbers of thread
    blocks."""
    case, result = analysis.case, analysis.points[0].result
    assert result
    trusted = by_collective(row for row in analysis.rows if not row.launch_bound)
    rates = {collective: _rates_seen(rows) for collective, rows in trusted.items()}
    largest = [row for rows in trusted.values() for row in largest_of(rows)]
    gemms, comm = (
        [SlowdownSeen(blocks_of(row), max(0.0, round(getattr(row, name), 3)), row.points[0]) for row in largest]
        for name in ("gemm_slowdown", "comm_slowdown")
    )
    gemms = [one for one in gemms if one.share >= LEAST_SLOWDOWN]
    known = len({one.blocks for one in gemms}) > 1 and all(len(seen) > 1 for seen in rates.values())
    if result.point.runtime.device != "cuda" or case.nodes > 1 or not known:
        return None
    return Calibration(case.device, case.ranks, str(result.machine.nccl), rates, gemms, comm)


def _rates_seen(rows: Sequence[ImplementationRow]) -> list[RateSeen]:
    """Returns the rate of one collective by its thread blocks, each fitted to the times of all sizes."""
    found = []
    for blocks, same in groupby(sorted(rows, key=lambda row: (blocks_of(row), row.size_mb)), key=blocks_of):
        *_, largest = own = list(same)
        cost = cost_of({round(row.size_mb * 2**20): row.time_us * 1e3 for row in own})
        rate = largest.link_gb_per_s * largest.time_us * 1e3 / (cost.ns_per_byte * largest.size_mb * 2**20)
        found.append(RateSeen(blocks, round(rate, 1), round(largest.size_mb * 2**20 / 1e6, 1), largest.points[0]))
    return found
