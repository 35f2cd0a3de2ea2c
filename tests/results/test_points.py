"""Points as they are read, grouped into cases, and put into tables. What the rows of a table hold: made/statuses and
the tables of recorded sweeps, among the golden files."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import pytest
from omegaconf import OmegaConf

from overlap_sweep import workloads
from overlap_sweep.errors import UserError
from overlap_sweep.results.estimate import hidden_fraction
from overlap_sweep.results.points import Point, group_cases, read_points
from overlap_sweep.results.provenance import describe_machine
from overlap_sweep.results.run_directory import Environment, Status
from overlap_sweep.results.traces import TraceReading, on_nodes, ranks_of_each, ranks_of_each_trace
from overlap_sweep.workloads import sections_of_points
from overlap_sweep.workloads.copy_engine.config import CopyEngine
from overlap_sweep.workloads.fsdp.runs import Run
from overlap_sweep.workloads.operator.answer import OperatorAnalysis
from overlap_sweep.workloads.operator.section import TABLE, point_rows
from tests.composed import configuration
from tests.made_sweeps import write_sweep_of_copies, write_sweep_of_training
from tests.make_point import (
    ENVIRONMENT,
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
from tests.results.reading import operator_rows


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


# Points on several nodes.


TWO = {"runtime.nodes": 2}


def test_ranks_of_a_node_follow_from_the_point() -> None:
    assert ranks_of_each(resolved("fsdp", **{**TWO, "distributed.dp_size": 16})) == 8
    assert ranks_of_each(stack_config("megatron", 2, 4, **TWO)) == 4
    for nodes in (None, 1):
        assert ranks_of_each(resolved("fsdp", **{"runtime.nodes": nodes})) is None
    assert (on_nodes(1), on_nodes(3)) == ("", " over 3 nodes")


def test_traces_next_to_a_result_have_its_nodes(tmp_path: Path) -> None:
    two, one = (make_point("fsdp", tmp_path, resolved("fsdp", **changes)) for changes in (TWO, {}))
    traces = [folder / f"trace_rank{rank}.json.gz" for folder in (two, one, tmp_path) for rank in (0, 1)]
    found, problems = ranks_of_each_trace(traces)
    assert found == {two / "trace_rank0.json.gz": 2, two / "trace_rank1.json.gz": 2}
    assert problems == []
    (two / "result.json").write_text("{")
    found, (problem,) = ranks_of_each_trace(traces)
    assert found == {}
    assert problem.startswith(f"{two / 'result.json'} cannot be read")
    assert problem.endswith("unknown.")


def test_runs_with_telemetry_say_that_their_nodes_differ(tmp_path: Path) -> None:
    folder = make_point("fsdp", tmp_path, resolved("fsdp", **TWO))
    (point,) = read_points(folder).points
    assert Run("run", point.directory, {}, point).settings["runtime.nodes"] == 2


def test_all_hosts_are_named() -> None:
    machine = msgspec.convert(ENVIRONMENT, Environment)
    assert describe_machine(msgspec.structs.replace(machine, hosts=["node7", "node9"])).startswith("node7 and node9; ")
    assert describe_machine(machine).startswith("node7; ")


@pytest.mark.parametrize(
    ("profile", "measured", "why"),
    [
        ("none", {}, "profile=none"),
        ("best", {}, "profile=best: not among the fastest when it was measured"),
        # Of none beside it.
        ("best", {"traces": ["trace_none_rank0.json.gz"]}, "profile=best: not among the fastest"),
        ("all", {"traces": ["trace_rank0.json.gz"]}, "traces missing or unreadable"),
        ("all", {"reused_from": "somewhere"}, "reused from the store, which keeps no traces"),
    ],
)
def test_a_point_without_figures_from_its_trace_says_why(
    tmp_path: Path, profile: str, measured: dict[str, Any], why: str
) -> None:
    make_point("operator", tmp_path, {**operator_config(2), "profile": profile}, **measured)
    for row in operator_rows(tmp_path):
        assert row["profiled"] is False
        assert row["not_profiled_because"].startswith(why)
        assert row["total_overlap_ratio"] is None


def test_a_point_with_figures_has_no_reason_and_one_that_failed_has_neither(tmp_path: Path) -> None:
    profiled = make_point("operator", tmp_path, operator_config(2), traces=["trace_rank0.json.gz"])
    make_point("operator", tmp_path, operator_config(4), status="failed", error="out of memory")
    traces = {profiled: TraceReading({"total_overlap_ratio": 0.5})}
    rows = point_rows(read_points(tmp_path).points, tmp_path, OperatorAnalysis([], [], traces))
    told = {row["tp_size"]: (row["profiled"], row["not_profiled_because"]) for row in TABLE.records(rows)}
    assert told == {2: (True, None), 4: (None, None)}
