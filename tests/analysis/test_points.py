from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from overlap_sweep.analysis.points import group_cases, read_points
from overlap_sweep.errors import UserError
from overlap_sweep.run_directory import VariantTimes
from tests.make_point import default_timing, layer_config, make_point, operator_config, pass_times, variant


def test_dates_sweeps_and_single_points_are_all_directories_of_points(tmp_path: Path) -> None:
    first = make_point("operator", tmp_path / "10-00-00", operator_config(), name="a")
    make_point("operator", tmp_path / "11-00-00", operator_config(), name="b")
    assert [point.name for point in read_points(tmp_path).points] == ["a", "b"]
    assert [point.name for point in read_points(tmp_path / "11-00-00").points] == ["b"]
    assert [point.name for point in read_points(first).points] == ["a"]


def test_a_point_that_died_without_a_result_is_missing(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config())
    (tmp_path / "died" / ".hydra").mkdir(parents=True)
    composed = {**operator_config(4, "qkv", "fprop", "ring_exchange"), "precision": None}
    composed["workload"] = {"name": "operator", "tokens": None}
    (tmp_path / "died" / ".hydra" / "config.yaml").write_text(yaml.safe_dump(composed))
    died = next(point for point in read_points(tmp_path).points if point.name == "died")
    assert died.status == "missing"
    assert died.config["operator"] == "qkv"
    assert died.result is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "Input data was truncated"),
        ('{"schema": 1, "name": "x"', "truncated"),
        ("{}", "missing required field"),
        ('{"name": "x", "status": "ok", "point": {"operator": "fc1"}}', "describes no point"),
    ],
)
def test_one_unreadable_result_is_named_and_the_others_are_read(tmp_path: Path, content: str, reason: str) -> None:
    make_point("operator", tmp_path, operator_config(), name="good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "result.json").write_text(content)
    reading = read_points(tmp_path)
    assert [point.name for point in reading.points] == ["good"]
    (problem,) = reading.problems
    assert str(tmp_path / "bad" / "result.json") in problem
    assert reason in problem
    assert "measure the point again" in problem


def test_an_ok_result_without_times_is_unreadable(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config(), name="good")
    directory = make_point("operator", tmp_path, operator_config(), fwd=pass_times(0.0), name="bad")
    (problem,) = read_points(tmp_path).problems
    assert problem.startswith(f"{directory}/result.json is ok without whole fwd times")


def test_nothing_to_analyse_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no results; measure some"):
        read_points(tmp_path)
    with pytest.raises(UserError, match="does not exist; give a directory"):
        read_points(tmp_path / "nowhere")
    (tmp_path / "trace.json").touch()
    with pytest.raises(UserError, match="is a file; give its directory"):
        read_points(tmp_path / "trace.json")


def test_only_what_may_be_compared_is_one_case(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config())
    make_point("operator", tmp_path, operator_config(tp_size=4, operator="qkv"))
    for change in ({"tokens": 4096}, {"precision": "fp16"}, {"backend": "torch"}, {"model": "Qwen/Qwen3-0.6B"}):
        make_point("operator", tmp_path, operator_config(**change))
    make_point("operator", tmp_path, operator_config(tokens=1024), status="failed")
    cases = group_cases(read_points(tmp_path).points)
    assert sorted(len(points) for points in cases.values()) == [1, 1, 1, 1, 2]
    assert "Qwen3-0.6B_transformer_engine_NVIDIA-H200_bf16_tokens8192" in {case.name for case in cases}


def test_a_default_must_be_whole_too(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config(), bwd=pass_times(90.0, default=default_timing(90.0, none_us=0.0)))
    (problem,) = read_points(tmp_path).problems
    assert "is ok without whole bwd times" in problem


def test_layers_are_points_but_no_cases_of_operators(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config())
    make_point("layer", tmp_path, variants={"none": variant([100.0, 101.0])}, name="a_layer")
    make_point("layer", tmp_path, variants={}, name="failed_layer", status="failed", error="boom")
    (tmp_path / "lost_layer" / ".hydra").mkdir(parents=True)
    (tmp_path / "lost_layer" / ".hydra" / "config.yaml").write_text(yaml.safe_dump(layer_config()))
    reading = read_points(tmp_path)
    assert reading.problems == []
    found = {point.name: point.status for point in reading.points if point.is_layer}
    assert found == {"a_layer": "ok", "failed_layer": "failed", "lost_layer": "missing"}
    ((operator,),) = group_cases(reading.points).values()
    assert not operator.is_layer


def test_a_layer_need_not_say_which_operator(tmp_path: Path) -> None:
    point = {key: value for key, value in layer_config().items() if key not in ("operator", "phase", "method")}
    make_point("layer", tmp_path, point, variants={"none": variant([100.0, 101.0])})
    assert read_points(tmp_path).problems == []


def without(name: str) -> VariantTimes:
    whole = variant([100.0, 101.0])
    return VariantTimes(times={key: timing for key, timing in whole.times.items() if key != name})


@pytest.mark.parametrize(
    "variants",
    [
        {},
        {"none": variant([100.0, 101.0]), "default": without("bwd")},
        {"none": variant([100.0, 101.0]), "default": without("all")},
        {"none": variant([100.0, 101.0]), "default": variant([100.0, 101.0, 102.0])},
        {"none": variant([100.0, 101.0]), "default": variant([0.0, 101.0])},
        {"none": variant([100.0, 101.0]), "default": variant([100.0, 101.0], step_us=0.0)},
    ],
    ids=["no variant", "no backward", "no whole", "unequal rounds", "a sample of 0", "a step of 0"],
)
def test_an_ok_layer_needs_whole_variants(tmp_path: Path, variants: dict[str, VariantTimes]) -> None:
    directory = make_point("layer", tmp_path, variants=variants)
    (problem,) = read_points(tmp_path).problems
    assert problem.startswith(f"{directory}/result.json is ok without whole times of its variants")
    assert problem.endswith("measure the point again.")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"workload": {"name": "model", "tokens": 1}}, "says model, which is none of operator, layer, kernel, fsdp"),
        ({"workload": {"tokens": 1}}, "describes no point"),
        ({"layer": {"kind": "linear"}}, "describes no point"),
    ],
)
def test_what_a_later_version_wrote_is_named(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    make_point("layer", tmp_path, {**layer_config(), **change}, variants={"none": variant([100.0, 101.0])})
    (problem,) = read_points(tmp_path).problems
    assert reason in problem
