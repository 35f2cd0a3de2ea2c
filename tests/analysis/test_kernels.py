"""Which implementation of a kernel to use. How it is told: made/kernel_answers and kernel among the golden files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from overlap_sweep.analysis.kernels import ImplementationRow, KernelAnalysis, ShapeAnalysis, analyse_kernels
from overlap_sweep.analysis.points import group_cases, read_points
from overlap_sweep.kernel_shape import COMM_ONLY, GEMM_ONLY
from overlap_sweep.run_directory import ImplementationTimes
from tests.make_point import (
    ENVIRONMENT,
    RING,
    baselines,
    implementation,
    kernel_config,
    make_point,
    operator_config,
)


def only(directory: Path) -> KernelAnalysis:
    (analysis,) = analyse_kernels(read_points(directory).points)
    return analysis


def only_shape(directory: Path) -> ShapeAnalysis:
    (shape,) = only(directory).shapes
    return shape


def chosen(shape: ShapeAnalysis) -> ImplementationRow:
    assert shape.chosen
    return shape.chosen


def row_of(shape: ShapeAnalysis, label: str) -> ImplementationRow:
    return next(row for row in shape.rows if row.label == label)


def test_the_numbers_of_an_implementation(tmp_path: Path) -> None:
    ring = implementation(125.0, setting=RING, relative_error=2e-3)
    make_point("kernel", tmp_path, kernel_config(1024, "symm_mem"), implementations={"ring_exchange": ring})
    shape = only_shape(tmp_path)
    row = row_of(shape, "symm_mem ring_exchange")
    # 2 x 1024 x 57344 x 8192 / 4 floating-point operations, and 3/4 of 1024 x 8192 x 2 bytes, in 125 us.
    assert row.tflops == pytest.approx(2 * 1024 * 57344 * 8192 / 4 / 125e-6 / 1e12)
    assert row.link_gb_per_s == pytest.approx(1024 * 8192 * 2 * 0.75 / 125e-6 / 1e9)
    assert (row.hidden_fraction, row.speedup, row.over_bound) == (0.75, 1.6, pytest.approx(0.25))
    assert (row.relative_error, row.setting) == (2e-3, RING)
    assert (shape.bound_us, shape.binding.name) == (100.0, GEMM_ONLY)
    assert math.isnan(row_of(shape, COMM_ONLY).tflops)
    assert row_of(shape, COMM_ONLY).link_gb_per_s == pytest.approx(1024 * 8192 * 2 * 0.75 / 80e-6 / 1e9)
    assert math.isnan(row_of(shape, GEMM_ONLY).link_gb_per_s)
    assert math.isnan(row_of(shape, GEMM_ONLY).speedup)


def test_backends_are_compared_through_the_sequential_beside_them(tmp_path: Path) -> None:
    # The machine was 1.5 times slower when it measured the second.
    make_point("kernel", tmp_path, kernel_config(backend="symm_mem"), implementations={"ring": implementation(150.0)})
    slow = baselines(300.0, 150.0, 120.0) | {"ring": implementation(180.0)}
    make_point("kernel", tmp_path, kernel_config(backend="transformer_engine"), implementations=slow)
    shape = only_shape(tmp_path)
    assert chosen(shape).label == "transformer_engine ring"
    assert (shape.sequential.time_us, shape.bound_us) == (250.0, pytest.approx(125.0))
    assert row_of(shape, "transformer_engine ring").time_us == pytest.approx(150.0)
    assert row_of(shape, "symm_mem ring").time_us == pytest.approx(187.5)


def test_repetitions_of_a_backend_are_put_together(tmp_path: Path) -> None:
    for repetition, time_us in enumerate((150.0, 160.0)):
        ring = {"ring": implementation(time_us)}
        make_point("kernel", tmp_path, kernel_config(repetition=repetition), implementations=ring)
    (row,) = only_shape(tmp_path).implementations
    assert (row.time_us, row.estimate.repeats, len(row.points)) == (155.0, 10, 2)


def test_connections_that_were_given_make_another_implementation(tmp_path: Path) -> None:
    wrong = {"left_out": {"agg": "wrong numbers: x"}, "relative_error": {"agg": 0.5}}
    make_point("kernel", tmp_path, implementations={"ring": implementation(150.0)})
    for connections, time_us in ((1, 160.0), (8, 110.0)):
        given = kernel_config(runtime={"max_connections": connections})
        make_point("kernel", tmp_path, given, implementations={"ring": implementation(time_us)}, **wrong)
    shape = only_shape(tmp_path)
    times_us = {row.name: row.time_us for row in shape.implementations}
    assert times_us == {"ring": 150, "ring_conn1": 160, "ring_conn8": 110}
    assert chosen(shape).label == "torch ring_conn8"
    assert sorted(shape.wrong) == ["torch agg_conn1", "torch agg_conn8"]


@pytest.mark.parametrize(
    ("spread_us", "times", "expected", "reason"),
    [
        (3.0, {"torch": 195.0, "symm_mem": 205.0}, "don't overlap", "torch a, is no faster"),
        (3.0, {"torch": 260.0, "symm_mem": 250.0}, "don't overlap", "symm_mem a, is 25.0% slower"),
        (3.0, {"torch": 104.0, "symm_mem": 100.0, "flux": 103.0}, "torch a", "simplest of those"),
        (3.0, {"flux": 104.0, "mine": 100.0, "transformer_engine": 103.0}, "transformer_engine a", "simplest of those"),
        (3.0, {"torch": 140.0, "mine": 100.0, "symm_mem": 130.0}, "mine a", "fastest of 4"),
        # Other process groups differ by half a percent, whatever the noise.
        (0.0, {"torch": 150.4, "flux": 150.0}, "torch a", "flux a (0.4 us faster, noise 0.0)"),
        (0.0, {"torch": 151.0, "flux": 150.0}, "flux a", "fastest of 3"),
        (0.0, {"torch": 199.5, "flux": 199.2}, "don't overlap", "flux a, is within 0.5% of it (0.8 us faster"),
        (0.0, {"torch": 198.0}, "torch a", "fastest of 2"),
    ],
)
def test_a_tie_goes_to_the_simpler(
    tmp_path: Path, spread_us: float, times: dict[str, float], expected: str, reason: str
) -> None:
    for backend, time_us in times.items():
        measured = baselines(spread_us=spread_us) | {"a": implementation(time_us, spread_us)}
        make_point("kernel", tmp_path, kernel_config(backend=backend), implementations=measured)
    shape = only_shape(tmp_path)
    assert chosen(shape).advice == expected
    assert reason in shape.reason


@pytest.mark.parametrize(
    ("measured", "name", "contenders"),
    [
        # Of one backend the first wins a tie.
        ({"a": implementation(101.0, 3.0), "b": implementation(100.0, 3.0)}, "a", ["a", "b"]),
        ({"a": implementation(90.0, independent=True), "b": implementation(150.0)}, "b", ["b"]),
        ({"a": implementation(95.0, launch_bound=True), "b": implementation(150.0)}, "b", ["b"]),
        # With nothing to use the answer is not to overlap.
        ({"a": implementation(110.0, independent=True)}, "sequential", []),
        (baselines(launch_bound=True) | {"a": implementation(50.0)}, None, []),
    ],
    ids=["a tie", "independent", "launch-bound", "nothing", "no sequential"],
)
def test_what_cannot_be_used_is_no_answer(
    tmp_path: Path, measured: Mapping[str, ImplementationTimes], name: str | None, contenders: list[str]
) -> None:
    make_point("kernel", tmp_path, implementations=measured)
    shape = only_shape(tmp_path)
    assert (shape.chosen.name if shape.chosen else None) == name
    assert [row.name for row in shape.contenders] == contenders


def test_what_computed_wrong_numbers_once_is_not_used(tmp_path: Path) -> None:
    measured = {"wrong": implementation(96.0), "ring": implementation(150.0)}
    make_point("kernel", tmp_path, implementations=measured)
    again = {"left_out": {"wrong": "wrong numbers: relative error 0.5"}, "relative_error": {"wrong": 0.5}}
    ring = {"ring": implementation(150.0)}
    make_point("kernel", tmp_path, kernel_config(repetition=1), implementations=ring, **again)
    shape = only_shape(tmp_path)
    assert (chosen(shape).name, [row.name for row in shape.contenders]) == ("ring", ["ring"])
    assert [row.name for row in shape.rows][3:] == ["wrong", "ring"]


def test_another_point_may_have_a_sequential_that_says_something(tmp_path: Path) -> None:
    make_point("kernel", tmp_path, implementations=baselines(launch_bound=True) | {"ring": implementation(50.0)})
    make_point("kernel", tmp_path, kernel_config(backend="symm_mem"), implementations={"ring": implementation(150.0)})
    shape = only_shape(tmp_path)
    assert (chosen(shape).label, shape.sequential.time_us) == ("symm_mem ring", 200.0)


def test_what_is_another_kernel_is_another_case(tmp_path: Path) -> None:
    ring = {"ring": implementation(150.0)}
    for changes in ({}, {"kernel": "gemm_rs"}, {"n": 8192}, {"k": 4096}, {"tp_size": 8}, {"precision": "fp16"}):
        make_point("kernel", tmp_path, kernel_config(**changes), implementations=ring)
    make_point("kernel", tmp_path, implementations=ring, environment={**ENVIRONMENT, "gpu": "NVIDIA H100"})
    # The same sizes, whoever has them.
    make_point("kernel", tmp_path, kernel_config(backend="symm_mem", operator=None), implementations=ring)
    analyses = analyse_kernels(read_points(tmp_path).points)
    assert len(analyses) == len({analysis.case.name for analysis in analyses}) == 7
    assert sum(len(analysis.points) for analysis in analyses) == 8


def test_kernels_are_neither_operators_nor_layers(tmp_path: Path) -> None:
    make_point("kernel", tmp_path, implementations={"ring": implementation(150.0)})
    make_point("operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4))
    points = read_points(tmp_path).points
    assert {(point.workload, point.is_operator, point.is_layer, point.is_kernel) for point in points} == {
        ("kernel", False, False, True),
        ("operator", True, False, False),
    }
    (of_case,) = group_cases(points).values()
    assert [point.workload for point in of_case] == ["operator"]
