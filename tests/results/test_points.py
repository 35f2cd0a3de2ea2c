"""Points as they are read, grouped into cases, and put into tables. What the rows of a table hold: made/statuses and
the tables of recorded sweeps, among the golden files."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from omegaconf import OmegaConf

from overlap_sweep import workloads
from overlap_sweep.errors import UserError
from overlap_sweep.results.estimate import hidden_fraction
from overlap_sweep.results.points import Point, group_cases, read_points
from overlap_sweep.results.run_directory import Status
from overlap_sweep.workloads import sections_of_points
from overlap_sweep.workloads.copy_engine.config import CopyEngine
from tests.composed import configuration
from tests.made_sweeps import write_sweep_of_copies, write_sweep_of_training
from tests.make_point import (
    MEASURED,
    layer_config,
    make_point,
    missing_point,
    operator_config,
    plain,
    resolved,
    rewrite,
    stack_config,
    variant,
)


def test_dates_sweeps_and_single_points_are_all_directories_of_points(tmp_path: Path) -> None:
    first = make_point("operator", tmp_path / "10-00-00", operator_config(), name="a")
    make_point("operator", tmp_path / "11-00-00", operator_config(), name="b")
    assert [point.name for point in read_points(tmp_path).points] == ["a", "b"]
    assert [point.name for point in read_points(tmp_path / "11-00-00").points] == ["b"]
    assert [point.name for point in read_points(first).points] == ["a"]


def test_nothing_to_analyse_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "trace.json").touch()
    for name, said in (("empty", "measure some"), ("nowhere", "does not exist"), ("trace.json", "give its directory")):
        with pytest.raises(UserError, match=said):
            read_points(tmp_path / name)


@pytest.mark.parametrize("workload", MEASURED)
@pytest.mark.parametrize("status", ["failed", "timeout", "skipped"])
def test_what_is_not_ok_is_read(tmp_path: Path, workload: str, status: Status) -> None:
    make_point(workload, tmp_path, status=status, error="a reason\nand more")
    (point,) = read_points(tmp_path).points
    assert (point.workload, point.status, point.why_not_ok) == (workload, status, "a reason")
    assert point.case.backend == resolved(workload)["backend"]


@pytest.mark.parametrize(
    ("schema", "mend"), [(1, "if it is a point's, measure that again with resume="), (3, "update overlap_sweep")]
)
def test_a_result_of_another_version_is_refused_in_a_sentence(tmp_path: Path, schema: int, mend: str) -> None:
    directory = make_point("operator", tmp_path)
    rewrite(directory, lambda result: result.update(schema=schema))
    (problem,) = read_points(tmp_path).problems
    assert problem.endswith(f"was written by another version (it has schema {schema}); {mend}.")


def test_only_what_may_be_compared_is_one_case(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config())
    make_point("operator", tmp_path, operator_config(tp_size=4, operator="qkv"))
    for change in ({"tokens": 4096}, {"precision": "fp16"}, {"backend": "torch"}, {"model": "Qwen/Qwen3-0.6B"}):
        make_point("operator", tmp_path, operator_config(**change))
    make_point("operator", tmp_path, operator_config(tokens=1024), status="failed")
    cases = group_cases(read_points(tmp_path).points, "operator")
    assert sorted(len(points) for points in cases.values()) == [1, 1, 1, 1, 2]
    assert "Qwen3-0.6B_transformer_engine_NVIDIA-H200_bf16_tokens8192" in {case.name for case in cases}


def test_only_operators_have_cases_of_settings(tmp_path: Path) -> None:
    make_point("operator", tmp_path / "operator", operator_config())
    variants = {"none": variant([100.0, 101.0])}
    make_point("layer", tmp_path, variants=variants, name="a_layer")
    # A layer need not say which operator.
    short = {key: value for key, value in layer_config().items() if key not in ("operator", "phase", "method")}
    make_point("layer", tmp_path, short, variants=variants, name="short_layer")
    missing_point(tmp_path, layer_config(), "lost_layer")
    write_sweep_of_training(tmp_path / "training")
    write_sweep_of_copies(tmp_path / "copies")
    make_point("kernel", tmp_path / "kernels")
    reading = read_points(tmp_path)
    assert reading.problems == []
    layers = {point.name: point.status for point in reading.points if point.workload == "layer"}
    assert layers == {"a_layer": "ok", "short_layer": "ok", "lost_layer": "missing"}
    assert sum(point.workload == "fsdp" for point in reading.points) == 9
    assert sum(point.workload == "copy_engine" for point in reading.points) == 9
    assert [point.workload for point in reading.points if point.workload == "kernel"] == ["kernel"]
    ((operator,),) = group_cases(reading.points, "operator").values()
    assert operator.workload == "operator"


def _without_tokens(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "precision": None, "workload": {**config["workload"], "tokens": None}}


def _training(mixed_precision: str | None) -> dict[str, Any]:
    knobs = {"fsdp.forward_prefetch": False, "distributed.env": {"NCCL_ALGO": None}}
    composed = _without_tokens(resolved("fsdp", **knobs, backend="auto", tp_size=2))
    composed["training"] |= {"batch_size": None, "mixed_precision": mixed_precision}
    return composed


def _stack(dtype: str | None) -> dict[str, Any]:
    composed = _without_tokens(dict(stack_config(backend="auto"))) | {"impl": None, "dp_size": None}
    composed["tp_training"] |= {"dtype": dtype, "seq_length": None, "num_training_steps": None, "warmup_steps": None}
    del composed["language_model"]
    return composed


_COPIES = plain(
    "copy_engine",
    model={"name": "qwen3_0_6b"},
    backend="auto",
    precision=None,
    tp_size=2,
    workload={"tokens": "${copy_engine.matrix_size}", "repeats": "${copy_engine.iterations}"},
    copy_engine={"iterations": CopyEngine().iterations},
)
_KERNEL = {
    **{"kernel": None, "m": 64, "n": 512, "k": 256, "operator": "fc1", "precision": None, "tp_size": 2},
    **{"model": {"name": "llama3_8b"}, "backend": "auto", "implementations": None, "runtime": {"device": "auto"}},
    "workload": {"name": "kernel", "tokens": "${m}", "repeats": "${iters}"},
}


def test_what_hydra_composes_describes_a_point_of_every_workload(tmp_path: Path) -> None:
    for name in workloads.names():
        config = configuration(f"workload={name}")
        del config.hydra
        missing_point(tmp_path, OmegaConf.to_container(config), name)
    reading = read_points(tmp_path)
    assert (reading.problems, {point.workload for point in reading.points}) == ([], set(workloads.names()))
    assert all(point.case.name for point in reading.points)


@pytest.mark.parametrize(
    ("composed", "case"),
    [
        (_without_tokens(operator_config(4, "qkv")), ("llama3_8b", "transformer_engine", "cuda", None, None)),
        (_KERNEL, ("custom", "auto", "auto", None, 64)),
        (_training("bf16"), ("ranking", "fsdp2", "cuda", "bf16", None)),
        (_training("none"), ("ranking", "fsdp2", "cuda", "fp32", None)),
        (_training(None), ("ranking", "fsdp2", "cuda", None, None)),
        (_COPIES, ("custom", "copy_engine", "cuda", "bf16", 4096)),
        (_stack("bfloat16"), ("qwen3_tiny", "fsdp_dtensor", "cuda", "bf16", None)),
        (_stack(None), ("qwen3_tiny", "fsdp_dtensor", "cuda", None, None)),
    ],
    ids=["operator", "kernel", "bf16", "fp32", "unknown", "copies", "stack", "unknown stack"],
)
def test_a_point_that_died_without_a_result_is_missing_as_hydra_composed_it(
    tmp_path: Path, composed: Mapping[str, Any], case: tuple[Any, ...]
) -> None:
    missing_point(tmp_path, composed)
    make_point("operator", tmp_path)
    died: Point = next(point for point in read_points(tmp_path).points if point.name == "missing")
    assert (died.status, died.result, died.case) == ("missing", None, (*case, 1, ""))
    assert died.config.tp_size == {"fsdp": 1, "copy_engine": 1}.get(died.workload, composed["tp_size"])
    assert died.recorded.get("operator") == {"operator": "qkv"}.get(died.workload)
    assert died.recorded.get("dp_size", 1) == 1


def types_of(workload: str) -> dict[str, str]:
    types: dict[str, str] = workloads.section_module(workload).TABLE.types
    return types


def frame_of(directory: Path) -> pd.DataFrame:
    return sections_of_points(read_points(directory).points)[0].frame


@pytest.mark.parametrize("workload", workloads.names())
def test_columns_and_types_do_not_depend_on_what_was_measured(tmp_path: Path, workload: str) -> None:
    make_point(workload, tmp_path, status="failed", error="boom")
    table = frame_of(tmp_path)
    assert {name: str(kind) for name, kind in table.dtypes.items()} == types_of(workload)
    assert (table["status"].tolist(), table["error"].tolist()) == (["failed"], ["boom"])
    stream = io.BytesIO()
    table.to_parquet(stream)
    assert {name: str(kind) for name, kind in pd.read_parquet(stream).dtypes.items()} == types_of(workload)


def test_hidden_fraction_is_undefined_where_communication_costs_nothing() -> None:
    fractions = [hidden_fraction(time_us, none_us=100.0, floor_us=40.0) for time_us in (70.0, 100.0, 130.0)]
    assert fractions == [0.5, 0.0, -0.5]
    assert pd.isna(hidden_fraction(100.0, none_us=100.0, floor_us=100.0))


@pytest.mark.parametrize(("phase", "rows"), [("all", ["fprop", "dgrad", "wgrad"]), ("dgrad", ["dgrad"])])
def test_none_has_a_row_for_each_phase_that_was_asked_for(tmp_path: Path, phase: str, rows: list[str]) -> None:
    make_point("operator", tmp_path, operator_config(phase=phase))
    table = frame_of(tmp_path)
    assert table["phase"].tolist() == rows
    assert set(table["method"]) == {"none"}
