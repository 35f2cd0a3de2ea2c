from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pandas as pd
import pytest

from overlap_sweep.report.trace_rows import LONGEST_NAME, short_names
from overlap_sweep.trace.overlap import analyse_trace
from tests.analyze import analyze, on_terminal
from tests.made_sweeps import write_sweep
from tests.report.test_command_line import ROOT, TRACE, assert_one_error

CPU_TRACE = TRACE.parent / "cpu_gloo_tp2_rank0.json.gz"

FIELDS = [
    *("file", "rank", "iteration", "phase", "span_us", "gemm_busy_us", "comm_busy_us", "wait_us", "overlap_us"),
    *("exposed_comm_us", "idle_us", "overlap_ratio", "num_gemm_events", "num_comm_events", "num_wait_events"),
    "num_compute_events",
]
PART_FIELDS = [
    *("file", "rank", "iteration", "phase", "by", "kind", "library", "name"),
    *("num_events", "busy_us", "total_us", "alone_us"),
]


RANK_FIELDS = [
    *("run", "phase", "num_ranks", "world_size", "missing", "slowest_rank", "slowest_us", "fastest_rank", "fastest_us"),
    *("skew_us", "exposed_comm_us", "wait_us", "overlap_ratio"),
]


def rows(*arguments: str | Path, warning: str = "") -> list[dict[str, object]]:
    process = analyze("trace", *arguments, "--format", "json")
    assert process.returncode == 0
    assert process.stderr.count("\n") == bool(warning)
    assert warning in process.stderr
    found: list[dict[str, object]] = json.loads(process.stdout)
    return found


def test_json_is_a_list_of_rows() -> None:
    found = rows(TRACE)
    assert all(list(row) == FIELDS for row in found)
    expected = analyse_trace(TRACE)
    assert [row["exposed_comm_us"] for row in found] == [row.exposed_comm_us for row in expected]
    assert [row["phase"] for row in found][:3] == ["fwd", "bwd", "all"]


def test_csv_and_table() -> None:
    found = list(csv.DictReader(analyze("trace", TRACE, "--format", "csv").stdout.splitlines()))
    table = analyze("trace", TRACE).stdout
    assert list(found[0]) == FIELDS
    for row in found:
        assert f"{float(row['span_us']):,.1f}" in table
    assert f"{float(found[0]['gemm_busy_us']):,.1f}" in on_terminal(60, "trace", TRACE)


def test_parquet_and_csv_round_trip() -> None:
    command = [sys.executable, "analyze.py", "trace", str(TRACE), str(CPU_TRACE), "--format", "parquet"]
    piped = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True)
    parquet = pd.read_parquet(io.BytesIO(piped.stdout))
    assert parquet.to_dict("records") == rows(TRACE, CPU_TRACE, warning="1 other run")
    text = analyze("trace", TRACE, CPU_TRACE, "--format", "csv").stdout
    pd.testing.assert_frame_equal(pd.read_csv(io.StringIO(text), dtype=parquet.dtypes.to_dict()), parquet)


def test_csv_needs_no_pandas() -> None:
    command = [sys.executable, "-X", "importtime", "analyze.py", "trace", str(CPU_TRACE), "--format", "csv"]
    process = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert process.returncode == 0
    assert "pandas" not in process.stderr


def test_medians() -> None:
    found = rows(TRACE, "--median")
    assert [row["phase"] for row in found] == ["fwd", "bwd", "all"]
    assert list(found[0]) == ["iterations" if name == "iteration" else name for name in FIELDS]
    spans = [float(str(row["span_us"])) for row in rows(TRACE, "--phase", "all")]
    assert found[2]["iterations"] == len(spans)
    assert found[2]["span_us"] == median(spans)
    with_medians, only_medians = analyze("trace", TRACE).stdout, analyze("trace", TRACE, "--median").stdout
    for shown, lines in ((with_medians, 3 * len(spans) + 3), (only_medians, 3)):
        assert f"{median(spans):,.1f}" in shown
        assert sum(line.split()[2:3] in (["fwd"], ["bwd"], ["all"]) for line in shown.splitlines()) == lines


def test_phases() -> None:
    assert {row["phase"] for row in rows(TRACE, "--phase", "fwd", "--phase", "bwd")} == {"fwd", "bwd"}
    assert analyze("trace", TRACE, "--phase", "forward").returncode == 2


@pytest.mark.parametrize("by", ["class", "kernel", "stream"])
def test_parts(by: str) -> None:
    found = rows(TRACE, "--by", by, "--phase", "bwd")
    assert all(list(row) == PART_FIELDS for row in found)
    assert {(row["by"], row["phase"]) for row in found} == {(by, "bwd")}
    medians = rows(TRACE, "--by", by, "--phase", "bwd", "--median")
    assert list(medians[0]) == ["iterations" if name == "iteration" else name for name in PART_FIELDS]
    longest = medians[0]
    same = [float(str(row["busy_us"])) for row in found if row["name"] == longest["name"]]
    assert longest["busy_us"] == pytest.approx(median(same))
    table = analyze("trace", TRACE, "--by", by, "--phase", "bwd").stdout
    assert f"{median(same):,.1f}" in table
    assert "medians over 2 iterations" in table
    assert f"{median(same):,.1f}" in on_terminal(60, "trace", TRACE, "--by", by, "--phase", "bwd")


def test_the_top_of_the_parts() -> None:
    everything = rows(TRACE, "--by", "kernel", "--phase", "all")
    top = rows(TRACE, "--by", "kernel", "--phase", "all", "--top", "3")
    for iteration in {row["iteration"] for row in everything}:
        assert [row for row in top if row["iteration"] == iteration] == [
            row for row in everything if row["iteration"] == iteration
        ][:3]
    assert len(rows(TRACE, "--by", "kernel", "--phase", "all", "--top", "3", "--median")) == 3
    process = analyze("trace", TRACE, "--top", "3")
    assert process.returncode == 2
    assert "--by class, kernel or stream" in process.stderr


def test_long_names_are_short_in_tables_only() -> None:
    whole = {str(row["name"]) for row in rows(TRACE, "--by", "kernel")}
    assert max(map(len, whole)) > LONGEST_NAME
    shown = on_terminal(160, "trace", TRACE, "--by", "kernel")
    assert max(map(len, shown.splitlines())) <= 160
    assert "transformer_engine::scaled_masked_softmax_warp_backward" in shown


def test_kernels_of_one_function_can_be_told_apart_by_their_short_names() -> None:
    elementwise = [f"void at::native::elementwise_kernel<128, {n}, at::native::{'x' * 80}>(int, T{n})" for n in (2, 4)]
    alone = f"void cutlass::Kernel2<{'y' * 100}>(Params)"
    short = short_names([*elementwise, alone, "nvjet_tst"])
    assert short[alone] == "cutlass::Kernel2"
    assert "nvjet_tst" not in short
    assert len({short[name] for name in elementwise}) == 2
    assert all(len(name) <= LONGEST_NAME for name in short.values())


def test_directories(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    run = next(path.parent for path in sorted(tmp_path.glob("*/result.json")))
    shutil.copy(CPU_TRACE, run / "trace_rank0.json.gz")
    (tmp_path / "elsewhere").mkdir()
    content = gzip.decompress(CPU_TRACE.read_bytes())
    (tmp_path / "elsewhere" / "worker0.1234.pt.trace.json").write_bytes(content)
    (tmp_path / "elsewhere" / "named_anyhow.json").write_bytes(content)
    (tmp_path / "elsewhere" / "points.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    analyze(tmp_path)
    found = rows(tmp_path, run / "trace_rank0.json.gz", "--phase", "all", "--median", warning="2 other runs")
    assert [row["file"] for row in found] == [
        str(tmp_path / "elsewhere" / "named_anyhow.json"),
        str(tmp_path / "elsewhere" / "worker0.1234.pt.trace.json"),
        str(run / "trace_rank0.json.gz"),
    ]


def write_rank(directory: Path, rank: int, slower: float = 1.0) -> Path:
    """The trace on CPUs, as if of another rank of four, its times stretched."""
    content = json.loads(gzip.decompress(CPU_TRACE.read_bytes()))
    content["distributedInfo"] |= {"rank": rank, "world_size": 4}
    for event in content["traceEvents"]:
        for name in event.keys() & {"ts", "dur"}:
            event[name] = float(event[name]) * slower
    path = directory / f"trace_rank{rank}.json"
    path.write_text(json.dumps(content))
    return path


def test_ranks(tmp_path: Path) -> None:
    for rank, slower in ((0, 1.0), (1, 2.0), (3, 1.5)):
        write_rank(tmp_path, rank, slower)
    process = analyze("trace", tmp_path, "--phase", "all")
    assert process.returncode == 0
    assert process.stderr == f"warning: {tmp_path}/trace_rank*.json: nothing of rank 2.\n"
    table = process.stdout[process.stdout.index(f"Ranks of {tmp_path}/trace_rank*.json") :]
    row = next(line.split() for line in table.splitlines() if line.split()[:1] == ["all"])
    assert row[:4] == ["all", "3", "1", "29,005.3"]
    assert row[4:7] == ["0", "14,502.6", "14,502.6"]
    narrow = " ".join(on_terminal(60, "trace", tmp_path, "--phase", "all").split())
    assert "all of 3 ranks: slowest 1, 29,005.3 us; fastest 0, 14,502.6 us; skew 14,502.6 us" in narrow


def test_ranks_as_rows(tmp_path: Path) -> None:
    for rank, slower in ((0, 1.0), (1, 2.0), (3, 1.5)):
        write_rank(tmp_path, rank, slower)
    found = rows(tmp_path, "--by", "rank", warning="nothing of rank 2")
    assert all(list(row) == RANK_FIELDS for row in found)
    (row,) = (row for row in found if row["phase"] == "all")
    assert {name: row[name] for name in RANK_FIELDS[:6]} == {
        **{"run": f"{tmp_path}/trace_rank*.json", "phase": "all", "num_ranks": 3},
        **{"world_size": 4, "missing": "2", "slowest_rank": 1},
    }
    assert row["skew_us"] == pytest.approx(float(str(row["slowest_us"])) / 2)
    assert [row] == rows(tmp_path, "--by", "rank", "--phase", "all", warning="nothing of rank 2")
    text = analyze("trace", tmp_path, "--by", "rank", "--format", "csv").stdout
    frame = pd.read_csv(io.StringIO(text))
    assert list(frame) == RANK_FIELDS
    assert frame["slowest_rank"].tolist() == [row["slowest_rank"] for row in found]
    table = analyze("trace", tmp_path, "--by", "rank").stdout
    assert table.startswith(f"\nRanks of {tmp_path}/trace_rank*.json")
    command = [sys.executable, "analyze.py", "trace", str(tmp_path), "--by", "rank", "--format", "parquet"]
    piped = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True)
    assert pd.read_parquet(io.BytesIO(piped.stdout)).to_dict("records") == found
    failing = analyze("trace", tmp_path, "--by", "rank", "--fail-if", "missing.notna()", "--format", "csv")
    assert failing.returncode == 3
    assert "fail-if: missing.notna() holds for " in failing.stderr
    assert analyze("trace", tmp_path, "--by", "rank", "--fail-if", "skew_us > slowest_us").returncode == 0
    assert analyze("trace", tmp_path, "--by", "rank", "--top", "3").returncode == 2


def test_nothing_is_missing(tmp_path: Path) -> None:
    for rank in range(4):
        write_rank(tmp_path, rank)
    found = rows(tmp_path, "--by", "rank")
    assert {(row["num_ranks"], row["missing"]) for row in found} == {(4, None)}
    assert analyze("trace", tmp_path, "--by", "rank", "--fail-if", "missing.notna()").returncode == 0


def test_ranks_need_two(tmp_path: Path) -> None:
    process = analyze("trace", write_rank(tmp_path, 2), "--by", "rank", "--format", "json")
    assert_one_error(process, "no run here has the traces of two ranks")
    assert json.loads(process.stdout) == []


def test_one_rank_of_several(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 2)
    process = analyze("trace", path)
    assert (process.returncode, process.stderr) == (0, "")
    assert "Ranks of" not in process.stdout
    assert process.stdout.count("Only rank 2 of 4;") == 1
    assert "Only rank" not in analyze("trace", path, "--format", "csv").stdout
    assert rows(tmp_path, warning=f"warning: {tmp_path}/trace_rank*.json: only rank 2 of 4, 3 missing. Other") == rows(
        path
    )


def test_a_rank_that_only_the_name_tells(tmp_path: Path) -> None:
    content = json.loads(gzip.decompress(CPU_TRACE.read_bytes()))
    del content["distributedInfo"]
    path = tmp_path / "trace_rank5.json"
    path.write_text(json.dumps(content))
    for options in ((), ("--median",), ("--by", "class"), ("--by", "class", "--median")):
        assert {row["rank"] for row in rows(path, *options)} == {5}


def test_a_trace_that_is_cut_short_is_read_with_a_warning(tmp_path: Path) -> None:
    whole = gzip.decompress(CPU_TRACE.read_bytes())
    (tmp_path / "cut.json").write_bytes(whole[: len(whole) * 3 // 4])
    process = analyze("trace", tmp_path / "cut.json", "--format", "json")
    assert process.returncode == 0
    assert process.stderr.startswith(f"warning: {tmp_path}/cut.json")
    assert process.stderr.count("\n") == 1
    assert json.loads(process.stdout)


def test_a_directory_without_traces_does_not_hide_the_others(tmp_path: Path) -> None:
    process = analyze("trace", tmp_path, CPU_TRACE, "--format", "json")
    assert_one_error(process, f"{tmp_path} holds no traces")
    assert {row["file"] for row in json.loads(process.stdout)} == {str(CPU_TRACE)}


def test_a_trace_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text('{"schemaVersion": 1}')
    process = analyze("trace", TRACE, tmp_path / "no.json", "--format", "json")
    assert_one_error(process, f"{tmp_path}/no.json")
    assert {row["file"] for row in json.loads(process.stdout)} == {str(TRACE)}
    assert_one_error(analyze("trace", tmp_path / "nowhere.json"), "does not exist")


def test_fail_if() -> None:
    failing = analyze("trace", CPU_TRACE, "--fail-if", "exposed_comm_us > 0.5 * span_us", "--format", "csv")
    assert failing.returncode == 3
    assert failing.stderr.startswith(
        "fail-if: exposed_comm_us > 0.5 * span_us holds for 4 of 6 rows, first iteration 0"
    )
    assert len(failing.stdout.splitlines()) == 7
    assert analyze("trace", CPU_TRACE, "--fail-if", "exposed_comm_us > span_us").returncode == 0
    wrong = analyze("trace", CPU_TRACE, "--fail-if", "exposed > 1")
    assert_one_error(wrong, "exposed is no column", "exposed_comm_us")
    assert wrong.stdout == ""


def test_fail_if_does_not_depend_on_the_format() -> None:
    checked = "num_events > 1 and kind == 'comm'"
    said = {
        analyze("trace", CPU_TRACE, "--by", "kernel", "--fail-if", checked, "--format", f).stderr
        for f in ("table", "csv")
    }
    assert len(said) == 1
    assert "fail-if: " in said.pop()


def test_unreadable_counts_before_fail_if(tmp_path: Path) -> None:
    process = analyze("trace", CPU_TRACE, tmp_path / "gone.json", "--fail-if", "span_us > 0")
    assert_one_error(process, "gone.json does not exist")


@pytest.mark.parametrize("command", ["report", "query", "trace", "compare"])
def test_help_is_quick_and_has_examples(command: str) -> None:
    started = time.monotonic()
    shown = analyze(command, "--help").stdout
    assert time.monotonic() - started < 2
    assert "Examples:\n    python analyze.py " in shown
    assert "3 a --fail-if holds" in " ".join(shown.split())


def test_help_names_every_column() -> None:
    assert {*FIELDS, *PART_FIELDS, *RANK_FIELDS} <= set(analyze("trace", "--help").stdout.split())


@pytest.mark.parametrize(
    ("command", "example"),
    [("trace", "exposed_comm_us > 0.1 * span_us"), ("compare", "ratio > 1.05"), ("query", "hidden_fraction < 0.3")],
)
def test_the_example_of_fail_if_is_of_the_commands_columns(command: str, example: str) -> None:
    shown = " ".join(analyze(command, "--help").stdout.replace("│", " ").split())
    assert f"holds for any row, such as '{example}'" in shown
