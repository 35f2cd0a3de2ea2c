"""`analyze.py trace`: which rows, of which files and ranks."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from statistics import median

import pytest

from overlap_sweep.report.trace_rows import LONGEST_NAME, short_names
from overlap_sweep.trace.overlap import analyse_trace
from tests.analyze import analyze, rows
from tests.golden.made_report import TRACES, write_rank
from tests.made_sweeps import write_sweep
from tests.report.conftest import Made

TRACE = TRACES / "h200x4_llama3_70b_layer_te_default.json.gz"
CPU_TRACE = TRACES / "cpu_gloo_tp2_rank0.json.gz"


def test_a_row_for_each_iteration_and_phase_and_their_medians() -> None:
    found, expected = rows("trace", TRACE), analyse_trace(TRACE)
    for name in ("iteration", "phase", "span_us", "exposed_comm_us", "num_gemm_events"):
        assert [row[name] for row in found] == [getattr(row, name) for row in expected]
    medians = rows("trace", TRACE, "--median")
    assert [row["phase"] for row in medians] == ["fwd", "bwd", "all"]
    spans = [row["span_us"] for row in rows("trace", TRACE, "--phase", "all")]
    assert (medians[2]["iterations"], medians[2]["span_us"]) == (len(spans), median(spans))
    assert {row["phase"] for row in rows("trace", TRACE, "--phase", "fwd", "--phase", "bwd")} == {"fwd", "bwd"}


@pytest.mark.parametrize("by", ["class", "kernel", "stream"])
def test_parts_with_the_longest_first(by: str) -> None:
    found = rows("trace", TRACE, "--by", by, "--phase", "bwd")
    assert {(row["by"], row["phase"]) for row in found} == {(by, "bwd")}
    longest, *_ = rows("trace", TRACE, "--by", by, "--phase", "bwd", "--median")
    same = [row["busy_us"] for row in found if row["name"] == longest["name"]]
    assert longest["busy_us"] == pytest.approx(median(same))
    top = rows("trace", TRACE, "--by", by, "--phase", "bwd", "--top", "2")
    for iteration in {row["iteration"] for row in found}:
        of_iteration = [row for row in found if row["iteration"] == iteration]
        assert [row for row in top if row["iteration"] == iteration] == of_iteration[:2]


def test_kernels_of_one_function_can_be_told_apart_by_their_short_names() -> None:
    assert max(len(row["name"]) for row in rows("trace", TRACE, "--by", "kernel")) > LONGEST_NAME
    elementwise = [f"void at::native::elementwise_kernel<128, {n}, at::native::{'x' * 80}>(int, T{n})" for n in (2, 4)]
    alone = f"void cutlass::Kernel2<{'y' * 100}>(Params)"
    short = short_names([*elementwise, alone, "nvjet_tst"])
    assert short[alone] == "cutlass::Kernel2"
    assert "nvjet_tst" not in short
    assert len({short[name] for name in elementwise}) == 2
    assert all(len(name) <= LONGEST_NAME for name in short.values())


def test_directories(tmp_path: Path, no_page: None) -> None:
    """Each trace once, whatever it is called, and nothing that is none."""
    write_sweep(tmp_path)
    run = next(path.parent for path in sorted(tmp_path.glob("*/result.json")))
    shutil.copy(CPU_TRACE, run / "trace_rank0.json.gz")
    (tmp_path / "elsewhere").mkdir()
    for name in ("worker0.1234.pt.trace.json", "named_anyhow.json"):
        (tmp_path / "elsewhere" / name).write_bytes(gzip.decompress(CPU_TRACE.read_bytes()))
    (tmp_path / "elsewhere" / "points.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    analyze(tmp_path)
    arguments = ("trace", tmp_path, run / "trace_rank0.json.gz", "--phase", "all", "--median", "--format", "json")
    process = analyze(*arguments)
    assert [Path(row["file"]).relative_to(tmp_path).as_posix() for row in process.rows] == [
        "elsewhere/named_anyhow.json", "elsewhere/worker0.1234.pt.trace.json", f"{run.name}/trace_rank0.json.gz",
    ]  # fmt: skip
    assert "2 other runs" in process.stderr


def test_ranks_of_a_run(made: Made) -> None:
    """Of four the third is missing; times of the second and the fourth are stretched."""
    directory = made("ranks") / "ranks"
    process = analyze("trace", directory, "--by", "rank", "--format", "json")
    assert process.stderr == f"warning: {directory}/trace_rank*.json: nothing of rank 2.\n"
    (row,) = (row for row in process.rows if row["phase"] == "all")
    assert {name: row[name] for name in ("run", "num_ranks", "world_size", "missing", "slowest_rank")} == {
        **{"run": f"{directory}/trace_rank*.json", "num_ranks": 3, "world_size": 4, "missing": "2", "slowest_rank": 1},
    }
    assert row["skew_us"] == pytest.approx(row["slowest_us"] / 2)
    assert [row] == rows("trace", directory, "--by", "rank", "--phase", "all")


def test_all_ranks_are_there(tmp_path: Path) -> None:
    for rank in range(4):
        write_rank(tmp_path, rank)
    process = analyze("trace", tmp_path, "--by", "rank", "--format", "json", "--fail-if", "missing.notna()")
    assert {(row["num_ranks"], row["missing"]) for row in process.rows} == {(4, None)}


def test_one_rank_of_several(made: Made) -> None:
    path = made("ranks") / "alone" / "trace_rank2.json"
    process = analyze("trace", path)
    assert (process.returncode, process.stderr, "Ranks of" in process.stdout) == (0, "", False)
    assert "Only rank 2 of 4" in process.stdout
    assert "Only rank" not in analyze("trace", path, "--format", "csv").stdout
    assert "only rank 2 of 4, 3 missing" in analyze("trace", path.parent).stderr
    assert rows("trace", path.parent) == rows("trace", path)
    process = analyze("trace", path, "--by", "rank", "--format", "json")
    assert json.loads(process.stdout) == []


def test_a_rank_that_only_the_name_tells(tmp_path: Path) -> None:
    content = json.loads(gzip.decompress(CPU_TRACE.read_bytes()))
    del content["distributedInfo"]
    path = tmp_path / "trace_rank5.json"
    path.write_text(json.dumps(content))
    for options in ((), ("--median",), ("--by", "class"), ("--by", "class", "--median")):
        assert {row["rank"] for row in rows("trace", path, *options)} == {5}
