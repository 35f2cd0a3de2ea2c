"""Asserts which implementation of a kernel is chosen. Tables and sentences: kernel and made/kernel_answers among the
golden files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.results.points import read_points
from overlap_sweep.workloads.kernel.answer import ImplementationRow, ShapeAnalysis, analyse_kernels
from overlap_sweep.workloads.kernel.result import ImplementationTimes
from tests.make_point import ENVIRONMENT, baselines, implementation, kernel_config, make_point


def measure(directory: Path, implementations: Mapping[str, ImplementationTimes | float], **changes: Any) -> None:
    """A point of a kernel; a number is an implementation's time."""
    times = {name: implementation(one) if isinstance(one, float) else one for name, one in implementations.items()}
    make_point("kernel", directory, kernel_config(**changes), implementations=times)


def only_shape(directory: Path) -> ShapeAnalysis:
    (analysis,) = analyse_kernels(read_points(directory).points)
    (shape,) = analysis.shapes
    return shape


def chosen(shape: ShapeAnalysis) -> ImplementationRow:
    assert shape.chosen
    return shape.chosen


def implementations(shape: ShapeAnalysis) -> list[ImplementationRow]:
    return [row for row in shape.rows if row.backend]


def test_backends_are_compared_through_the_sequential_beside_them(tmp_path: Path) -> None:
    # The machine was 1.5 times slower when it measured the second.
    measure(tmp_path, {"ring": 150.0}, backend="symm_mem")
    measure(tmp_path, {**baselines(300.0, 150.0, 120.0), "ring": 180.0}, backend="transformer_engine")
    shape = only_shape(tmp_path)
    assert chosen(shape).label == "transformer_engine ring"
    assert (shape.rows[0].time_us, shape.rows[0].bound_us) == (250.0, pytest.approx(125.0))
    times_us = {row.label: row.time_us for row in implementations(shape)}
    assert times_us == pytest.approx({"transformer_engine ring": 150.0, "symm_mem ring": 187.5})


def test_repetitions_of_a_backend_are_put_together(tmp_path: Path) -> None:
    for repetition, time_us in enumerate((150.0, 160.0)):
        measure(tmp_path, {"ring": time_us}, repetition=repetition)
    (row,) = implementations(only_shape(tmp_path))
    assert (row.time_us, row.estimate.repeats, len(row.points)) == (155.0, 10, 2)


def test_connections_that_were_given_make_another_implementation(tmp_path: Path) -> None:
    wrong = {"left_out": {"agg": "wrong numbers: x"}, "relative_error": {"agg": 0.5}}
    measure(tmp_path, {"ring": 150.0})
    for connections, time_us in ((1, 160.0), (8, 110.0)):
        given = kernel_config(runtime={"max_connections": connections})
        make_point("kernel", tmp_path, given, implementations={"ring": implementation(time_us)}, **wrong)
    shape = only_shape(tmp_path)
    times_us = {row.name: row.time_us for row in implementations(shape)}
    assert times_us == {"ring": 150, "ring_conn1": 160, "ring_conn8": 110}
    assert chosen(shape).label == "torch ring_conn8"
    assert sorted(shape.left_out) == ["torch agg_conn1", "torch agg_conn8"]


@pytest.mark.parametrize(
    ("spread_us", "times", "expected", "reason"),
    [
        (3.0, {"flux": 104.0, "mine": 100.0, "transformer_engine": 103.0}, "transformer_engine a", "simplest within"),
        (3.0, {"torch": 140.0, "mine": 100.0, "symm_mem": 130.0}, "mine a", "fastest of 4"),
        # Points differ from each other, whatever the noise within each.
        (0.0, {"torch": 153.0, "flux": 150.0}, "flux a", "fastest of 3"),
        (0.0, {"torch": 198.0}, "torch a", "fastest of 2"),
    ],
)
def test_a_tie_goes_to_the_simpler(
    tmp_path: Path, spread_us: float, times: dict[str, float], expected: str, reason: str
) -> None:
    for backend, time_us in times.items():
        measure(tmp_path, {**baselines(spread_us=spread_us), "a": implementation(time_us, spread_us)}, backend=backend)
    shape = only_shape(tmp_path)
    assert shape.advice == expected
    assert reason in shape.reason


def test_another_point_may_have_a_sequential_that_was_not_launch_bound(tmp_path: Path) -> None:
    measure(tmp_path, {**baselines(launch_bound=True), "ring": 50.0})
    measure(tmp_path, {"ring": 150.0}, backend="symm_mem")
    shape = only_shape(tmp_path)
    assert (chosen(shape).label, shape.rows[0].time_us) == ("symm_mem ring", 200.0)


def test_what_is_another_kernel_is_another_case(tmp_path: Path) -> None:
    for changes in ({}, {"kernel": "gemm_rs"}, {"n": 8192}, {"k": 4096}, {"tp_size": 8}, {"precision": "fp16"}):
        measure(tmp_path, {"ring": 150.0}, **changes)
    make_point("kernel", tmp_path, environment={**ENVIRONMENT, "gpu": "NVIDIA H100"})
    # The same sizes, whoever has them.
    measure(tmp_path, {"ring": 150.0}, backend="symm_mem", operator=None)
    analyses = analyse_kernels(read_points(tmp_path).points)
    assert len(analyses) == len({analysis.case for analysis in analyses}) == 7
    assert sum(len(analysis.points) for analysis in analyses) == 8
