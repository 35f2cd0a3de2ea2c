from __future__ import annotations

import io
import math
from pathlib import Path

import pandas as pd
import pytest

from overlap_sweep.analysis.frame import to_frame
from overlap_sweep.analysis.kernel_frame import ANSWER_COLUMNS, COLUMNS, answer_rows, kernel_rows
from overlap_sweep.analysis.kernel_warnings import warnings
from overlap_sweep.analysis.kernels import (
    ImplementationRow,
    KernelAnalysis,
    ShapeAnalysis,
    analyse_kernels,
    answers_in_words,
)
from overlap_sweep.analysis.points import group_cases, read_points
from overlap_sweep.kernel_shape import COMM_ONLY, GEMM_ONLY, SEQUENTIAL
from tests.make_point import (
    ENVIRONMENT,
    PIPELINE,
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


def row_of(shape: ShapeAnalysis, label: str) -> ImplementationRow:
    return next(row for row in shape.rows if row.label == label)


def frame_of(directory: Path) -> pd.DataFrame:
    points = read_points(directory).points
    return to_frame(kernel_rows(points, analyse_kernels(points), directory), COLUMNS)


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
    assert shape.chosen
    assert shape.chosen.label == "transformer_engine ring"
    assert shape.sequential.time_us == 250.0
    assert row_of(shape, "transformer_engine ring").time_us == pytest.approx(150.0)
    assert row_of(shape, "symm_mem ring").time_us == pytest.approx(187.5)
    assert shape.bound_us == pytest.approx(125.0)
    assert shape.reason == "fastest of 3, sequential included"


def test_repetitions_of_a_backend_are_put_together(tmp_path: Path) -> None:
    for repetition, time_us in enumerate((150.0, 160.0)):
        make_point(
            "kernel", tmp_path, kernel_config(repetition=repetition), implementations={"ring": implementation(time_us)}
        )
    (row,) = only_shape(tmp_path).implementations
    assert (row.time_us, row.estimate.repeats, len(row.points)) == (155.0, 10, 2)


def test_connections_that_were_given_make_another_implementation(tmp_path: Path) -> None:
    usual, wrong = kernel_config(), {"left_out": {"agg": "wrong numbers: x"}, "relative_error": {"agg": 0.5}}
    make_point("kernel", tmp_path, usual, implementations={"ring": implementation(150.0)})
    for connections, time_us in ((1, 160.0), (8, 110.0)):
        given = {**usual, "runtime": {**usual["runtime"], "max_connections": connections}}
        make_point("kernel", tmp_path, given, implementations={"ring": implementation(time_us)}, **wrong)
    shape = only_shape(tmp_path)
    assert {row.name: row.time_us for row in shape.implementations} == {
        "ring": 150,
        "ring_conn1": 160,
        "ring_conn8": 110,
    }
    assert shape.chosen is not None
    assert shape.chosen.label == "torch ring_conn8"
    assert sorted(shape.wrong) == ["torch agg_conn1", "torch agg_conn8"]
    frame = frame_of(tmp_path)
    assert list(frame[frame["chosen"].fillna(False)]["implementation"]) == ["ring_conn8"]
    assert {"ring_conn1", "agg_conn8", SEQUENTIAL} <= set(frame["implementation"])


@pytest.mark.parametrize(
    ("times", "expected", "reason"),
    [
        ({"torch": 195.0, "symm_mem": 205.0}, "don't overlap", "the best overlap, torch a, is no faster beyond the"),
        ({"torch": 260.0, "symm_mem": 250.0}, "don't overlap", "the best overlap, symm_mem a, is 25.0% slower"),
        ({"torch": 104.0, "symm_mem": 100.0, "flux": 103.0}, "torch a", "simplest of those within the noise of the"),
        ({"flux": 104.0, "mine": 100.0, "transformer_engine": 103.0}, "transformer_engine a", "simplest of those"),
        ({"torch": 140.0, "mine": 100.0, "symm_mem": 130.0}, "mine a", "fastest of 4, sequential included"),
    ],
)
def test_a_tie_goes_to_the_simpler(tmp_path: Path, times: dict[str, float], expected: str, reason: str) -> None:
    for backend, time_us in times.items():
        measured = baselines(spread_us=3.0) | {"a": implementation(time_us, 3.0)}
        make_point("kernel", tmp_path, kernel_config(backend=backend), implementations=measured)
    shape = only_shape(tmp_path)
    assert shape.chosen
    assert shape.chosen.advice == expected
    assert shape.reason.startswith(reason)


@pytest.mark.parametrize(
    ("times", "expected", "reason"),
    [
        (
            {"torch": 150.4, "flux": 150.0},
            "torch a",
            "simplest of those within 0.5% of the fastest, flux a (0.4 us faster, noise 0.0)",
        ),
        ({"torch": 151.0, "flux": 150.0}, "flux a", "fastest of 3, sequential included"),
        (
            {"torch": 199.5, "flux": 199.2},
            "don't overlap",
            "the best overlap, flux a, is within 0.5% of it (0.8 us faster, noise 0.0)",
        ),
        ({"torch": 198.0}, "torch a", "fastest of 2, sequential included"),
    ],
)
def test_half_a_percent_is_a_tie_whatever_the_noise(
    tmp_path: Path, times: dict[str, float], expected: str, reason: str
) -> None:
    """Other process groups differ by as much."""
    for backend, time_us in times.items():
        make_point("kernel", tmp_path, kernel_config(backend=backend), implementations={"a": implementation(time_us)})
    shape = only_shape(tmp_path)
    assert shape.chosen
    assert (shape.chosen.advice, shape.reason) == (expected, reason)


def test_of_one_backend_the_first_wins_a_tie(tmp_path: Path) -> None:
    measured = {"simple": implementation(101.0, 3.0), "complex": implementation(100.0, 3.0)}
    make_point("kernel", tmp_path, implementations=measured)
    chosen = only_shape(tmp_path).chosen
    assert chosen
    assert chosen.name == "simple"


def test_what_cannot_be_used_is_no_answer(tmp_path: Path) -> None:
    measured = {
        "bulk": implementation(90.0, independent=True),
        "fast": implementation(95.0, launch_bound=True),
        "wrong": implementation(96.0),
        "ring": implementation(150.0),
    }
    make_point("kernel", tmp_path, implementations=measured)
    # What was right once computed wrong numbers when it was measured again.
    again = {"ring": implementation(150.0)}
    make_point(
        "kernel",
        tmp_path,
        kernel_config(repetition=1),
        implementations=again,
        left_out={"wrong": "wrong numbers: relative error 0.5, tolerance 0.01"},
        relative_error={"wrong": 0.5},
    )
    shape = only_shape(tmp_path)
    assert shape.chosen
    assert shape.chosen.label == "torch ring"
    assert {row.label for row in shape.contenders} == {"torch ring"}
    assert [row.name for row in shape.rows][3:] == ["bulk", "fast", "wrong", "ring"]
    said = "\n".join(warnings(only(tmp_path)))
    assert "m=1024: 2 of 4 beat the bound, torch bulk by 10.0%: its GEMM is the one that was measured alone, so" in said
    assert "torch fast was launch-bound at m=1024, and is left out of the choice there." in said
    assert "torch wrong computed wrong numbers at m=1024 (relative error 0.5, tolerance 0.01): don't trust" in said


def test_with_nothing_to_use_the_answer_is_not_to_overlap(tmp_path: Path) -> None:
    make_point("kernel", tmp_path, implementations={"bulk": implementation(110.0, independent=True)})
    shape = only_shape(tmp_path)
    assert shape.chosen is shape.sequential
    assert shape.reason == "nothing else can be used: torch bulk is independent of its communication"


def test_without_a_sequential_that_was_measured_there_is_no_answer(tmp_path: Path) -> None:
    make_point("kernel", tmp_path, implementations=baselines(launch_bound=True) | {"ring": implementation(50.0)})
    shape = only_shape(tmp_path)
    assert shape.chosen is None
    assert "launch-bound" in shape.reason
    assert answers_in_words(only(tmp_path)) == "m=1024: no answer"
    assert warnings(only(tmp_path))[0].startswith("sequential was launch-bound at m=1024")
    # Another point knows better.
    make_point("kernel", tmp_path, kernel_config(backend="symm_mem"), implementations={"ring": implementation(150.0)})
    shape = only_shape(tmp_path)
    assert shape.chosen
    assert (shape.chosen.label, shape.sequential.time_us) == ("symm_mem ring", 200.0)


def test_the_bound_is_none_where_communication_is_faster_than_the_library(tmp_path: Path) -> None:
    make_point(
        "kernel", tmp_path, implementations=baselines(300.0, 100.0, 180.0) | {"ring": implementation(150.0, 1.0)}
    )
    (sentence,) = warnings(only(tmp_path))
    assert sentence.startswith("m=1024: torch ring beats the bound by 16.7%: its communication is faster than the lib")


def test_what_beats_the_bound_is_a_sentence_for_each_m(tmp_path: Path) -> None:
    for m in (1024, 2048):
        faster = {f"ring{i}": implementation(80.0 + i) for i in range(9)}
        make_point(
            "kernel", tmp_path, kernel_config(m, "flux"), implementations=faster | {"slow": implementation(110.0)}
        )
    make_point("kernel", tmp_path, kernel_config(2048), implementations={"ring": implementation(90.0)})
    first, second = warnings(only(tmp_path))
    assert first.startswith("m=1024: 9 of 10 beat the bound, flux ring0 by 20.0%: its GEMM is faster than torch's")
    assert second == (
        "m=2048: 10 of 11 beat the bound, flux ring0 by 20.0%, torch ring among them: its GEMM is the one that was "
        "measured alone, so that baseline is doubtful; measure it again."
    )


def test_answers_along_m_in_words(tmp_path: Path) -> None:
    fastest = {1024: "symm_mem", 2048: "symm_mem", 4096: "torch", 8192: "transformer_engine", 16384: None}
    for m, wins in fastest.items():
        for backend in ("torch", "symm_mem", "transformer_engine"):
            time_us = 150.0 if backend == wins else 250.0
            make_point("kernel", tmp_path, kernel_config(m, backend), implementations={"ring": implementation(time_us)})
    analysis = only(tmp_path)
    assert answers_in_words(analysis) == (
        "m=1024 to 2048: symm_mem ring; 4096: torch ring; 8192: transformer_engine ring; 16384: don't overlap"
    )
    assert str(analysis.case) == "ag_gemm n=57344 k=8192 TP=4 bf16 on NVIDIA H200"
    assert analysis.subjects == ["llama3_70b fc1"]


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


def test_a_row_for_each_point_and_implementation(tmp_path: Path) -> None:
    asked = {"ring_exchange": RING, "pipeline": PIPELINE | {"schedule": "x"}}
    measured = {
        "ring_exchange": implementation(125.0, 1.0, RING),
        "bulk": implementation(110.0, independent=True),
    }
    make_point(
        "kernel",
        tmp_path,
        kernel_config(implementations=asked),
        implementations=measured,
        name="a",
        left_out={"pipeline": "refused: too large"},
    )
    make_point(
        "kernel",
        tmp_path,
        kernel_config(backend="flux"),
        implementations={},
        name="b",
        status="skipped",
        error="flux is not installed",
    )
    frame = frame_of(tmp_path)
    rows = {(row["point"], row["implementation"]): row for _, row in frame.iterrows() if row["point"] == "a"}
    assert list(rows) == [
        ("a", name) for name in (SEQUENTIAL, GEMM_ONLY, COMM_ONLY, "ring_exchange", "bulk", "pipeline")
    ]
    ring = rows["a", "ring_exchange"]
    expected = {
        "model": "llama3_70b", "operator": "fc1", "kernel": "ag_gemm", "m": 1024, "n": 57344, "k": 8192, "tp_size": 4,
        "device": "NVIDIA H200", "backend": "torch", "method": "ring_exchange", "aggregate": False, "num_sm": 1,
        "time_us": 125.0, "q1_us": 124.0, "q3_us": 126.0, "repeats": 5, "sequential_us": 200.0, "gemm_only_us": 100.0,
        "comm_only_us": 80.0, "bound_us": 100.0, "hidden_fraction": 0.75, "speedup": 1.6, "over_bound": 0.25,
        "relative_error": 1e-3, "independent": False, "launch_bound": False, "chosen": True, "status": "ok",
    }  # fmt: skip
    assert {name: ring[name] for name in expected} == expected
    assert rows["a", "bulk"]["independent"]
    assert not rows["a", "bulk"]["chosen"]
    assert pd.isna(rows["a", COMM_ONLY]["tflops"])
    left_out = rows["a", "pipeline"]
    assert (left_out["status"], left_out["error"]) == ("left_out", "refused: too large")
    assert (left_out["num_splits"], left_out["other_knobs"]) == (4, "schedule=x")
    skipped = frame[frame["point"] == "b"].iloc[0]
    assert (skipped["status"], skipped["error"], skipped["m"]) == ("skipped", "flux is not installed", 1024)
    assert pd.isna(skipped["implementation"])


def test_a_row_for_each_answer(tmp_path: Path) -> None:
    make_point("kernel", tmp_path, implementations={"ring_exchange": implementation(125.0, setting=RING)})
    make_point(
        "kernel", tmp_path, kernel_config(2048), implementations={"ring_exchange": implementation(250.0, setting=RING)}
    )
    make_point(
        "kernel",
        tmp_path,
        kernel_config(4096),
        implementations=baselines(launch_bound=True) | {"a": implementation(1.0)},
    )
    frame = to_frame(answer_rows([only(tmp_path)]), ANSWER_COLUMNS)
    first, second, third = (frame.iloc[i] for i in range(3))
    assert (first["m"], first["backend"], first["implementation"], first["num_sm"]) == (
        1024,
        "torch",
        "ring_exchange",
        1,
    )
    assert (second["implementation"], second["speedup"]) == (SEQUENTIAL, 1.0)
    assert pd.isna(second["backend"])
    assert pd.isna(third["implementation"])
    assert "launch-bound" in third["reason"]


def test_columns_and_types_do_not_depend_on_what_was_measured(tmp_path: Path) -> None:
    make_point("kernel", tmp_path, implementations={}, status="failed", error="boom")
    frame = frame_of(tmp_path)
    assert {name: str(kind) for name, kind in frame.dtypes.items()} == COLUMNS
    stream = io.BytesIO()
    frame.to_parquet(stream)
    assert {name: str(kind) for name, kind in pd.read_parquet(stream).dtypes.items()} == COLUMNS


def test_a_missing_point_is_what_hydra_composed(tmp_path: Path) -> None:
    composed = {
        **{"kernel": None, "m": 64, "n": 512, "k": 256, "operator": "fc1", "precision": None, "tp_size": 2},
        **{"model": {"name": "llama3_8b"}, "backend": "auto", "implementations": None, "runtime": {"device": "auto"}},
        "workload": {"name": "kernel", "tokens": "${m}", "repeats": "${iters}"},
    }
    (tmp_path / "missing" / ".hydra").mkdir(parents=True)
    (tmp_path / "missing" / ".hydra" / "config.yaml").write_text(str(composed).replace("None", "null"))
    make_point("kernel", tmp_path, implementations={"ring": implementation(150.0)})
    row = frame_of(tmp_path).set_index("point").loc["missing"]
    assert (row["status"], row["m"], row["n"], row["model"]) == ("missing", 64, 512, "custom")
    assert pd.isna(row["kernel"])
