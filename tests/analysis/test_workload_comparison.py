"""What is special about comparing sweeps of kernels, copies, stacks and training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.analysis.comparison.datasets import read_dataset
from overlap_sweep.analysis.comparison.rows import POINT_COLUMNS, point_rows
from overlap_sweep.analysis.comparison.sweeps import SweepComparison, compare_sweeps
from overlap_sweep.errors import UserError
from tests.make_point import (
    ENVIRONMENT,
    baselines,
    copy_config,
    falling,
    implementation,
    kernel_config,
    make_point,
    operator_config,
    pass_times,
    stack_config,
)

NEWER = {**ENVIRONMENT, "gpu": "NVIDIA B200"}
AG_GEMM = "ag_gemm n=57344 k=8192"


def compared(directory: Path) -> SweepComparison:
    return compare_sweeps([read_dataset(label, directory / label) for label in ("old", "new")], "old")


def ring(directory: Path, time_us: float, **changes: Any) -> None:
    make_point("kernel", directory, kernel_config(**changes), implementations={"ring": implementation(time_us)})


def test_the_same_implementations_match(tmp_path: Path) -> None:
    measured = {"ring": implementation(150.0), "gone": implementation(160.0)}
    make_point("kernel", tmp_path / "old", implementations=measured)
    ring(tmp_path / "old", 120.0, backend="symm_mem")
    make_point("kernel", tmp_path / "new", implementations=baselines(220.0) | {"ring": implementation(165.0)})
    # The name of a model is not what makes a kernel.
    ring(tmp_path / "new", 90.0, backend="symm_mem", operator=None)
    ring(tmp_path / "new", 150.0, m=2048)
    found = compared(tmp_path)
    ratios = {(match.ours.key.backend, match.ours.key.setting): match.ratio for match in found.matches}
    # Baselines, which both backends measured, are no points of their own.
    assert ratios == {("torch", "ring"): pytest.approx(1.1), ("symm_mem", "ring"): 0.75}
    assert found.configuration == []
    assert {one.only_in: one.names for one in found.unmatched} == {
        "old": [f"torch 1024 tokens TP=4 {AG_GEMM} all gone"],
        "new": [f"torch 2048 tokens TP=4 {AG_GEMM} all ring"],
    }
    row = next(row for row in point_rows(found) if row["backend"] == "torch" and row["setting"] == "ring")
    assert row.keys() == POINT_COLUMNS.keys()
    assert (row["operator"], row["tokens"], row["verdict"]) == (AG_GEMM, 1024, "slower")
    assert (row["none_us"], row["floor_us"], row["none_ratio"]) == (220.0, 100.0, pytest.approx(1.1))
    assert row["hidden_fraction"] == pytest.approx(55 / 120)


def test_two_backends_are_compared_by_the_names_of_their_implementations(tmp_path: Path) -> None:
    ring(tmp_path / "old", 150.0, backend="torch")
    ring(tmp_path / "new", 120.0, backend="symm_mem")
    found = compared(tmp_path)
    assert found.compared == {"backend": {"old": "torch", "new": "symm_mem"}}
    assert {match.ours.key.setting: match.ratio for match in found.matches}["ring"] == 0.8


def test_operators_beside_kernels_match_operators(tmp_path: Path) -> None:
    for name, time_us in (("old", 320.0), ("new", 400.0)):
        bulk = operator_config(2, "fc1", "all", "bulk", num_sm=4)
        make_point("operator", tmp_path / name, bulk, bwd=pass_times(time_us, 400.0, 300.0))
        ring(tmp_path / name, 150.0)
    found = compared(tmp_path)
    ratios = {(match.ours.key.operator, match.ours.key.setting): match.ratio for match in found.matches}
    assert ratios["fc1", "dgrad bulk_sm4 + wgrad bulk_sm4"] == 1.25
    assert ratios[AG_GEMM, "ring"] == 1.0
    assert "None" not in str([match.ours.key.case(found.telling) for match in found.matches])


def test_kernels_of_other_sizes_are_no_match(tmp_path: Path) -> None:
    ring(tmp_path / "old", 150.0, n=8192)
    ring(tmp_path / "new", 150.0, n=4096)
    with pytest.raises(UserError, match="No point of one is also in another"):
        compared(tmp_path)


def test_copy_engines_of_two_machines(tmp_path: Path) -> None:
    """The new one's copies take half as long, and hide as well."""
    for name, overlapped_us, copy_us, environment in (
        ("old", 1080.0, 400.0, ENVIRONMENT),
        ("new", 1040.0, 200.0, NEWER),
    ):
        machine = {"environment": environment}
        make_point("copy_engine", tmp_path / name, overlapped_us=overlapped_us, copy_us=copy_us, **machine)
        inside = copy_config("device_to_device")
        make_point("copy_engine", tmp_path / name, inside, overlapped_us=1000.0, copy_us=100.0, **machine)
    both = compared(tmp_path)
    of_host = {m.ours.key.setting: m for m in both.matches if m.ours.key.operator.startswith("host_to_device")}
    assert of_host.keys() == {"gemm", "copy", "sequential", "overlapped"}
    assert (of_host["copy"].ratio, of_host["copy"].verdict, of_host["gemm"].verdict) == (0.5, "faster", "same")
    overlapped = of_host["overlapped"]
    assert [of.hidden_fraction for of in (overlapped.ours, overlapped.theirs)] == [pytest.approx(0.8)] * 2
    assert (overlapped.none_ratio, overlapped.floor_ratio) == (pytest.approx(1200 / 1400), 1)
    assert both.compared["device"] == {"old": "NVIDIA H200", "new": "NVIDIA B200"}
    assert (len(both.matches), both.unmatched) == (8, [])


def test_what_was_not_launch_bound_of_copies_is_compared(tmp_path: Path) -> None:
    bound = dict.fromkeys(("copy", "sequential"), True)
    make_point("copy_engine", tmp_path / "old", launch_bound=bound)
    make_point("copy_engine", tmp_path / "new")
    both = compared(tmp_path)
    assert [match.ours.key.setting for match in both.matches] == ["gemm", "overlapped"]
    assert both.matches[1].theirs.none_us is None


def test_training_without_telemetry_is_to_be_copied_not_measured_again(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path)
    with pytest.raises(UserError, match=r"copy the rank_<r>_metrics\.jsonl"):
        read_dataset("old", tmp_path)


def stack(directory: Path, impl: str = "fsdp_dtensor", tp_size: int = 2, dp_size: int = 1, **run: Any) -> None:
    changes = {f"tp_training.{name}": value for name, value in run.pop("options", {}).items()}
    make_point("tp_training", directory, stack_config(impl, tp_size, dp_size, **changes), **run)


def test_a_sweep_of_one_stack_against_a_sweep_of_another(tmp_path: Path) -> None:
    for tp_size in (2, 4):
        stack(tmp_path / "old", "autotp", tp_size, step_us=10_000.0)
        stack(tmp_path / "new", "megatron", tp_size, step_us=5_000.0)
    both = compared(tmp_path)
    assert [match.ratio for match in both.matches] == [0.5, 0.5]
    assert both.compared == {"backend": {"old": "autotp", "new": "megatron"}}


def test_several_stacks_against_another_one_are_refused_with_their_names(tmp_path: Path) -> None:
    for impl in ("autotp", "megatron"):
        stack(tmp_path / "old", impl)
    stack(tmp_path / "new", "async_tp")
    with pytest.raises(UserError, match=r"old has .*backend autotp/megatron; new has .*backend async_tp\."):
        compared(tmp_path)


@pytest.mark.parametrize(
    ("run", "deviates"),
    [
        ({"losses": falling(off={4: 6.3})}, True),
        # Losses of other data are not compared.
        ({"losses": falling(times=2.0), "options": {"seed": 1}}, False),
        ({"losses": falling(times=2.0), "options": {"learning_rate": 0.1}}, False),
        # Another device rounds otherwise.
        ({"losses": falling(times=1.003), "environment": NEWER}, False),
    ],
    ids=["losses", "seed", "learning rate", "device"],
)
def test_a_version_that_computes_something_else_is_told(tmp_path: Path, run: dict[str, Any], deviates: bool) -> None:
    stack(tmp_path / "old", "megatron")
    stack(tmp_path / "new", "megatron", **run)
    both = compared(tmp_path)
    assert (len(both.matches), len(both.deviations)) == (1, int(deviates))
    assert all("TP=2 DP=1 megatron deviates from step 4 on" in said for said in both.deviations)
    assert list(both.compared) == (["device"] if "environment" in run else [])


def test_other_sizes_and_settings_of_stacks_do_not_match(tmp_path: Path) -> None:
    for label in ("old", "new"):
        stack(tmp_path / label, "autotp")
    stack(tmp_path / "old", "autotp", options={"zero_stage": 2})
    stack(tmp_path / "new", "autotp", 2, 2)
    both = compared(tmp_path)
    (match,) = both.matches
    assert (match.ours.key.setting, match.ours.key.operator) == ("defaults", "DP=1, 2 layers, batch 2")
    names = {found.only_in: found.names for found in both.unmatched}
    assert "zero2" in names["old"][0]
    assert "DP=2" in names["new"][0]
