"""Results and configurations of training runs and copies: read where they are whole, one sentence where not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from overlap_sweep.analysis.points import Point, group_cases, read_points
from overlap_sweep.run_directory import RESULT_FILE, Status
from overlap_sweep.training_config import CopyEngine
from tests.made_sweeps import write_sweep_of_copies, write_sweep_of_training
from tests.make_point import copy_config, make_point, resolved

Change = Callable[[dict[str, Any]], Any]


def only_problem(directory: Path, change: Change) -> str:
    """What is said of the only result after the change."""
    (path,) = directory.rglob(RESULT_FILE)
    result = json.loads(path.read_text())
    change(result)
    path.write_text(json.dumps(result))
    reading = read_points(directory)
    assert not reading.points
    (problem,) = reading.problems
    return problem


def missing(directory: Path, config: dict[str, Any]) -> Point:
    (directory / "missing" / ".hydra").mkdir(parents=True)
    (directory / "missing" / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    (point,) = read_points(directory).points
    return point


def test_both_are_read_beside_each_other(tmp_path: Path) -> None:
    write_sweep_of_training(tmp_path / "training")
    write_sweep_of_copies(tmp_path / "copies")
    reading = read_points(tmp_path)
    assert reading.problems == []
    assert sum(point.is_training for point in reading.points) == 9
    assert sum(point.is_copy for point in reading.points) == 9
    assert group_cases(reading.points) == {}


@pytest.mark.parametrize("status", ["failed", "timeout", "skipped"])
def test_what_is_not_ok_is_read(tmp_path: Path, status: Status) -> None:
    make_point("fsdp", tmp_path, status=status, error="a reason\nand more")
    make_point("copy_engine", tmp_path, status=status, error="a reason\nand more")
    points = read_points(tmp_path).points
    assert {point.why_not_ok for point in points} == {"a reason"}
    assert {point.case.backend for point in points} == {"fsdp2", "copy_engine"}


@pytest.mark.parametrize(("asked", "precision"), [("bf16", "bf16"), ("none", "fp32"), (None, None)])
def test_a_missing_training_point_is_as_hydra_composed_it(
    tmp_path: Path, asked: str | None, precision: str | None
) -> None:
    composed = resolved("fsdp", backend="auto", precision=None, tp_size=2)
    composed["training"] |= {"batch_size": None, "mixed_precision": asked}
    composed["workload"] |= {"tokens": None}
    composed["distributed"]["env"] = {"NCCL_ALGO": None}
    composed["fsdp"]["forward_prefetch"] = False
    point = missing(tmp_path, composed)
    assert (point.status, point.is_training) == ("missing", True)
    assert point.case == ("ranking", "fsdp2", "cuda", precision, None)
    assert point.config["tp_size"] == 1


def test_a_missing_copy_point_has_its_tokens_from_the_matrix(tmp_path: Path) -> None:
    composed = copy_config(model={"name": "qwen3_0_6b"}, backend="auto", precision=None, tp_size=2)
    composed["workload"] |= {"tokens": "${copy_engine.matrix_size}", "repeats": "${copy_engine.iterations}"}
    composed["copy_engine"] |= {"iterations": CopyEngine().iterations}
    point = missing(tmp_path, composed)
    assert point.is_copy
    assert point.case == ("custom", "copy_engine", "cuda", "bf16", 4096)


BAD_TRAINING: dict[str, tuple[Change, str]] = {
    "nothing measured": (lambda r: r.update(training=None), "ok without whole times of its steps"),
    "no none": (lambda r: r["training"]["step"].pop("none"), "ok without whole times of its steps"),
    "samples": (lambda r: r["training"]["step"]["none"]["samples_us"].pop(), "ok without whole times"),
    "negative": (lambda r: r["training"]["step"]["floor"].update(samples_us=[-1.0] * 5), "ok without whole times"),
    "zero": (lambda r: r["training"]["step"]["floor"]["samples_us"].__setitem__(0, 0.0), "ok without whole times"),
    "huge": (lambda r: r["training"]["step"]["point"].update(median_us=1e300), "ok without whole times"),
    "quartiles": (lambda r: r["training"]["step"]["point"].update(q1_us=1600.0), "outside of its quartiles"),
    "outside": (
        lambda r: r["training"]["step"]["point"].update(samples_us=[1.0] * 5),
        "outside of its samples",
    ),
    "variant": (
        lambda r: r["training"]["step"].update({"\x1b[2J": r["training"]["step"]["none"]}),
        "too long or not printable",
    ),
    "variants": (
        lambda r: r["training"]["step"].update({f"v{i}": r["training"]["step"]["none"] for i in range(30)}),
        "33 variants, more than 20",
    ),
    "batch": (lambda r: r["point"]["training"].update(batch_size=None), "ok without a batch size"),
    "count": (lambda r: r["training"].update(samples_per_step=1), "1 samples in a step of 256"),
    "parameters": (lambda r: r["training"].update(parameters=-1), "-1 parameters"),
    "tokens": (lambda r: r["point"]["workload"].update(tokens=None), "no tokens"),
    "host": (lambda r: r["training"].update(host_us={"point": -1.0}), "a host without a time"),
    "host's variant": (lambda r: r["training"].update(host_us={"x" * 101: 1.0}), "too long or not printable"),
    "losses": (lambda r: r["training"].update(losses=[]), "losses that are none"),
    "loss": (lambda r: r["training"].update(losses=["0.5"]), "cannot be read"),
    "memory": (lambda r: r["training"].update(peak_memory_gb=-2.0), "a peak memory of -2 GB"),
    "compiled": (lambda r: r["training"].update(compiled="x" * 20_000), "20000 characters about its compilation"),
    "telemetry": (lambda r: r["training"].update(telemetry=["../../etc/passwd"]), "telemetry files that are none"),
    "files": (lambda r: r["training"].update(telemetry=["a"] * 5), "telemetry files that are none"),
    "strategy": (lambda r: r["point"]["distributed"].update(strategy="zero3"), "zero3, which is none of fsdp2, ddp"),
    "ranks": (lambda r: r["point"]["distributed"].update(dp_size=0), "describes no point"),
    "prefetch": (lambda r: r["point"]["fsdp"].update(forward_prefetch=[1]), "describes no point"),
    "variable": (lambda r: r["point"]["distributed"].update(env={"A": "x" * 200}), "too long or not printable"),
    "variable's name": (lambda r: r["point"]["distributed"].update(env={"\x07": 1}), "too long or not printable"),
    "knob": (lambda r: r["point"]["fsdp"].update(backward_prefetch="\u202egnp"), "too long or not printable"),
    "variables": (
        lambda r: r["point"]["distributed"].update(env={f"NCCL_{i}": 1 for i in range(101)}),
        "sets 101 variables and options",
    ),
    "options": (lambda r: r["point"]["compile"].update(options={"a": ["b" * 99] * 50}), "or very long ones"),
    "no section": (lambda r: r["point"].pop("streams"), "describes no point"),
    "precision": (lambda r: r["point"].update(precision=None), "no result of a point"),
}


@pytest.mark.parametrize(("change", "said"), BAD_TRAINING.values(), ids=BAD_TRAINING)
def test_a_damaged_training_point_is_one_sentence(tmp_path: Path, change: Change, said: str) -> None:
    make_point("fsdp", tmp_path)
    problem = only_problem(tmp_path, change)
    assert said in problem
    assert problem.isprintable()
    assert len(problem) < 1000


BAD_COPIES: dict[str, tuple[Change, str]] = {
    "nothing measured": (lambda r: r.update(copies=None), "ok without whole times of GEMMs and copies"),
    "no copy": (lambda r: r["copies"]["times"].pop("copy"), "ok without whole times of GEMMs and copies"),
    "samples": (lambda r: r["copies"]["times"]["copy"]["samples_us"].pop(), "ok without whole times"),
    "zero": (lambda r: r["copies"]["times"]["gemm"].update(samples_us=[0.0] * 5), "ok without whole times"),
    "quartiles": (lambda r: r["copies"]["times"]["gemm"].update(q3_us=1.0), "outside of its quartiles"),
    "bytes": (lambda r: r["copies"].update(bytes_copied=0), "bytes_copied=0"),
    "operations": (lambda r: r["copies"].update(flops=-1), "flops=-1"),
    "variant": (lambda r: r["copies"]["launch_bound"].update({"\x00": True}), "too long or not printable"),
    "direction": (lambda r: r["point"]["copy_engine"].update(direction="x" * 200), "too long or not printable"),
    "size": (lambda r: r["point"]["copy_engine"].update(matrix_size=0), "describes no point"),
    "MiB": (lambda r: r["point"]["copy_engine"].update(copy_mb=-1.0), "describes no point"),
    "no section": (lambda r: r["point"].pop("copy_engine"), "describes no point"),
    "tokens": (lambda r: r["point"]["workload"].update(tokens="${x}"), "no result of a point"),
}


@pytest.mark.parametrize(("change", "said"), BAD_COPIES.values(), ids=BAD_COPIES)
def test_a_damaged_copy_point_is_one_sentence(tmp_path: Path, change: Change, said: str) -> None:
    make_point("copy_engine", tmp_path)
    problem = only_problem(tmp_path, change)
    assert said in problem
    assert problem.isprintable()


def test_what_a_later_version_adds_is_no_reason_to_refuse(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path)
    (path,) = tmp_path.rglob(RESULT_FILE)
    result = json.loads(path.read_text())
    result["point"]["fsdp"]["something_new"] = {"a": 1}
    result["training"]["step"]["another"] = result["training"]["step"]["none"]
    path.write_text(json.dumps(result))
    assert read_points(tmp_path).problems == []
