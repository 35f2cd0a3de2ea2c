"""A step's spans and what follows from them, and the file of its lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_sweep.results.run_directory import find_metrics, metrics_file
from overlap_sweep.workloads.fsdp.telemetry import Segment, StepRecord, overlap_of, write_metrics

MS = 1_000_000


def spans(**by_stream: list[tuple[int, int]]) -> dict[str, Any]:
    """Given in milliseconds, of a step of 20."""
    in_ns = {name: [(start * MS, end * MS) for start, end in found] for name, found in by_stream.items()}
    return overlap_of(in_ns, 20 * MS)


def record(step: int, **changes: Any) -> StepRecord:
    fields = {"step": step, "rank": 0, "started": 1.0, "loss": 0.5, "learning_rate": 0.1, "grad_norm": 1.0}
    return StepRecord(**{**fields, **spans(compute=[(0, 10)]), **changes})


def test_times_are_unions() -> None:
    found = spans(compute=[(0, 6), (4, 8)], auxiliary=[(6, 10), (7, 9)])
    assert found["streams_ms"] == {"compute": 8.0, "all_reduce": 0.0, "reduce_scatter": 0.0, "auxiliary": 4.0}
    assert (found["overlap_ms"], found["exposed_comm_ms"], found["overlap_ratio"]) == (2.0, 2.0, 0.5)
    assert found["utilisation"]["compute"] == 0.4


def test_two_collectives_at_once_are_hidden_once() -> None:
    found = spans(compute=[(0, 10)], auxiliary=[(5, 15)], reduce_scatter=[(8, 12)], all_reduce=[(9, 10)])
    of_each = ("compute_auxiliary_ms", "compute_reducescatter_ms", "compute_allreduce_ms")
    assert [found[name] for name in of_each] == [5.0, 2.0, 1.0]
    assert (found["overlap_ms"], found["exposed_comm_ms"]) == (5.0, 5.0)
    assert (found["max_concurrency"], found["mean_concurrency"]) == (4, pytest.approx(25 / 15))


def test_segments_say_who_was_active() -> None:
    found = spans(compute=[(0, 4), (6, 8)], auxiliary=[(2, 7)])
    assert found["active_segments"] == [
        Segment(start_ms=start, end_ms=end, streams=streams)
        for start, end, streams in [
            (0.0, 2.0, ["compute"]),
            (2.0, 4.0, ["compute", "auxiliary"]),
            (4.0, 6.0, ["auxiliary"]),
            (6.0, 7.0, ["compute", "auxiliary"]),
            (7.0, 8.0, ["compute"]),
        ]
    ]


def test_without_communication_there_is_no_ratio_and_without_anything_no_segment() -> None:
    found = spans(compute=[(0, 4)])
    assert found["overlap_ratio"] is None
    assert (found["overlap_ms"], found["exposed_comm_ms"], found["max_concurrency"]) == (0.0, 0.0, 1)
    found = spans()
    assert (found["mean_concurrency"], found["max_concurrency"], found["active_segments"]) == (0.0, 0, [])


def test_every_line_is_a_record_and_is_added(tmp_path: Path) -> None:
    path = tmp_path / metrics_file(3)
    write_metrics(path, [record(0), record(1, grad_norm=None)])
    write_metrics(path, [record(2)])
    *lines, end = path.read_bytes().split(b"\n")
    found = [msgspec.json.decode(line, type=StepRecord) for line in lines]
    assert (found, end) == ([record(0), record(1, grad_norm=None), record(2)], b"")
    assert find_metrics(tmp_path) == {3: path}
