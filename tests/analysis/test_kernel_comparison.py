"""Kernels of two sweeps beside each other, and of a store over versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.analysis.comparison.datasets import read_dataset
from overlap_sweep.analysis.comparison.rows import POINT_COLUMNS, point_rows
from overlap_sweep.analysis.comparison.sweeps import SweepComparison, compare_sweeps
from overlap_sweep.analysis.history import history_rows
from overlap_sweep.errors import UserError
from overlap_sweep.kernel_shape import SEQUENTIAL
from overlap_sweep.run_directory import Result
from tests.analysis.test_history import NEW, OLD, of, verdicts
from tests.make_point import (
    ENVIRONMENT,
    baselines,
    implementation,
    kernel_config,
    make_point,
    operator_config,
    pass_times,
)


def compared(*directories: Path) -> SweepComparison:
    return compare_sweeps([read_dataset(path.name, path) for path in directories], directories[0].name)


def test_the_same_implementations_match(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    make_point("kernel", old, implementations={"ring": implementation(150.0), "gone": implementation(160.0)})
    make_point("kernel", old, kernel_config(backend="symm_mem"), implementations={"ring": implementation(120.0)})
    make_point("kernel", new, implementations=baselines(220.0) | {"ring": implementation(165.0)})
    # The name of a model is not what makes a kernel.
    make_point(
        "kernel", new, kernel_config(backend="symm_mem", operator=None), implementations={"ring": implementation(90.0)}
    )
    make_point("kernel", new, kernel_config(2048), implementations={"ring": implementation(150.0)})
    found = compared(old, new)
    ratios = {(match.ours.key.backend, match.ours.key.setting): match.ratio for match in found.matches}
    # Baselines, which both backends measured, are no points of their own.
    assert ratios == {("torch", "ring"): pytest.approx(1.1), ("symm_mem", "ring"): 0.75}
    assert found.configuration == []
    only = {one.only_in: one.names for one in found.unmatched}
    assert only["old"] == ["torch 1024 tokens TP=4 ag_gemm n=57344 k=8192 all gone"]
    assert only["new"] == ["torch 2048 tokens TP=4 ag_gemm n=57344 k=8192 all ring"]
    rows = point_rows(found)
    assert rows[0].keys() == POINT_COLUMNS.keys()
    ring = next(row for row in rows if row["backend"] == "torch" and row["setting"] == "ring")
    assert (ring["operator"], ring["tokens"], ring["verdict"]) == ("ag_gemm n=57344 k=8192", 1024, "slower")
    assert (ring["none_us"], ring["floor_us"], ring["none_ratio"]) == (220.0, 100.0, pytest.approx(1.1))
    assert ring["hidden_fraction"] == pytest.approx(55 / 120)


def test_what_was_launch_bound_is_left_out(tmp_path: Path) -> None:
    for name, launch_bound in (("old", False), ("new", True)):
        measured = {"ring": implementation(150.0, launch_bound=launch_bound), "split": implementation(160.0)}
        make_point("kernel", tmp_path / name, implementations=measured)
    settings = {match.ours.key.setting for match in compared(tmp_path / "old", tmp_path / "new").matches}
    assert settings == {"split"}


def test_two_backends_are_compared_by_the_names_of_their_implementations(tmp_path: Path) -> None:
    for backend, time_us in (("torch", 150.0), ("symm_mem", 120.0)):
        make_point(
            "kernel",
            tmp_path / backend,
            kernel_config(backend=backend),
            implementations={"ring": implementation(time_us)},
        )
    found = compared(tmp_path / "torch", tmp_path / "symm_mem")
    assert found.compared == {"backend": {"torch": "torch", "symm_mem": "symm_mem"}}
    assert {match.ours.key.setting: match.ratio for match in found.matches}["ring"] == 0.8


def test_operators_beside_kernels_match_operators(tmp_path: Path) -> None:
    for name, time_us in (("old", 320.0), ("new", 400.0)):
        bulk = operator_config(2, "fc1", "all", "bulk", num_sm=4)
        make_point("operator", tmp_path / name, bulk, bwd=pass_times(time_us, 400.0, 300.0))
        make_point("kernel", tmp_path / name, implementations={"ring": implementation(150.0)})
    found = compared(tmp_path / "old", tmp_path / "new")
    ratios = {(match.ours.key.operator, match.ours.key.setting): match.ratio for match in found.matches}
    assert ratios["fc1", "dgrad bulk_sm4 + wgrad bulk_sm4"] == 1.25
    assert ratios["ag_gemm n=57344 k=8192", "ring"] == 1.0
    assert "None" not in str([match.ours.key.case(found.telling) for match in found.matches])


def test_other_sizes_are_no_match(tmp_path: Path) -> None:
    for n in (8192, 4096):
        make_point("kernel", tmp_path / str(n), kernel_config(n=n), implementations={"ring": implementation(150.0)})
    with pytest.raises(UserError, match="No point of one is also in another"):
        compared(tmp_path / "8192", tmp_path / "4096")


def kept(time_us: float, on: dict[str, object], launch_bound: bool = False) -> Result:
    measured = {"ring": implementation(time_us), "bulk": implementation(90.0, launch_bound=launch_bound)}
    return Result(
        name="kernel",
        point=kernel_config(),
        status="ok",
        implementations={**baselines(), **measured},
        objective_us=time_us,
        launch_bound=launch_bound,
        environment=on,
    )


def test_a_kernel_has_a_history_of_each_implementation() -> None:
    found = of(kept(150.0, OLD), kept(120.0, NEW, launch_bound=True))
    assert {series.setting for series in found.series} == {"ring", "bulk", SEQUENTIAL}
    assert verdicts(found)[0] == [None, "faster"]
    assert (found.problems, found.left_out) == ([], {})
    rows = [row for row in history_rows(found.series) if row["setting"] == "ring"]
    assert [(row["time_us"], row["none_us"], row["verdict"]) for row in rows] == [
        (150.0, 200.0, None),
        (120.0, 200.0, "faster"),
    ]
    assert (rows[0]["operator"], rows[0]["pass"]) == ("ag_gemm 1024x57344x8192", "fwd")
    # What was launch-bound has no time.
    assert len([row for row in history_rows(found.series) if row["setting"] == "bulk"]) == 1


def test_a_kernel_that_is_none_is_named() -> None:
    broken = kept(150.0, ENVIRONMENT)
    broken.implementations.pop(SEQUENTIAL)
    found = of(broken)
    assert found.series == []
    assert "without whole times of its implementations" in found.problems[0]


def test_connections_that_were_given_are_part_of_a_name(tmp_path: Path) -> None:
    of_eight = kept(150.0, OLD)
    of_eight.point["runtime"] = {**of_eight.point["runtime"], "max_connections": 8}
    found = of(kept(150.0, OLD), of_eight)
    assert {series.setting for series in found.series} == {"ring", "bulk", "ring_conn8", "bulk_conn8", SEQUENTIAL}
