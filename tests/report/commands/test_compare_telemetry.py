"""`analyze.py compare` over training runs, as one calls it."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from overlap_sweep.analysis.comparison.telemetry import read_telemetry_dataset
from overlap_sweep.analysis.comparison.telemetry_rows import COLUMNS
from overlap_sweep.analysis.telemetry_steps import QUANTITIES
from overlap_sweep.report.comparison.telemetry_charts import distinct_names, timeline_files
from overlap_sweep.report.comparison.telemetry_text import describe_dip
from tests.analysis.telemetry_logs import SLOW_DEVICE, USUAL_DEVICE, write_run
from tests.analyze import analyze, on_terminal
from tests.make_point import make_point, operator_config, resolved
from tests.report.hostile_sweeps import PAYLOAD
from tests.report.test_command_line import ROOT, assert_one_error
from tests.sweeps import Launch

pytestmark = pytest.mark.end_to_end

TRACE = ROOT / "tests" / "data" / "traces" / "h200x4_llama3_70b_layer_none.json.gz"
PNG = b"\x89PNG\r\n\x1a\n"
POINT = resolved("fsdp", **{"distributed.dp_size": 2})
SLOW = {"compute_ms": 96.0, "hidden_ms": 17.0, "exposed_ms": 24.0, "device": SLOW_DEVICE}
EXPOSED = {"hidden_ms": 10.0, "exposed_ms": 30.0}


@pytest.fixture
def cuda(tmp_path: Path) -> Path:
    return write_run(tmp_path / "logs_a", profiled=2)


@pytest.fixture
def rocm(tmp_path: Path) -> Path:
    return write_run(tmp_path / "logs_b", factor=1.1, dips={(17, 1): SLOW, (25, 0): EXPOSED})


def test_logs_alone(cuda: Path, rocm: Path, tmp_path: Path) -> None:
    output = tmp_path / "reports" / "x"
    arguments = (f"rocm={rocm}", f"cuda={cuda}", "--reference", "cuda", "--candidate", "rocm", "--output", output)
    process = analyze("compare", *arguments)
    assert (process.returncode, process.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in process.stdout.splitlines()]
    assert lines[1] == "rocm against cuda"
    assert lines[2].startswith("step time: ratio 1.100 (worse); hidden share 79.9% to 79.9% (same)")
    assert f"cuda: {cuda}, 2 ranks, 29 steps (1 warm-up, 2 profiled left out), on an unrecorded machine" in lines
    assert any(line.startswith("step ms 88.") and line.endswith("worse") for line in lines)
    assert (
        "step 17, rank 1: 41% hidden (median 80%), 36% slower; "
        "SM clock 1,410 MHz (median 1,980), 690 W, 71 C (the hottest step): SW power cap" in lines
    )
    assert (
        "step 25, rank 0: 25% hidden (median 80%), 25% slower; "
        "not explained by the device: SM clock 1,980 MHz, 640 W, 61 C, as always" in lines
    )
    assert {path.name for path in output.iterdir()} == {
        *("summary.json", "comparison.csv", "comparison.parquet"),
        *("rocm_timeline.png", "cuda_timeline.png", "overlay.png"),
    }
    for path in output.glob("*.png"):
        content = path.read_bytes()
        assert content.startswith(PNG)
        width, height = struct.unpack(">II", content[16:24])
        assert width > 1200
        assert height > 400
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["reference"], summary["candidates"]) == ("cuda", ["rocm"])
    ratios = summary["datasets"]["rocm"]["ratios"]["logs_b"]["quantities"]
    assert ratios["step_ms"]["ratio"] == pytest.approx(1.1, rel=1e-3)
    assert summary["datasets"]["rocm"]["mean_ratios"]["exposed_comm_ms"] == pytest.approx(1.1, rel=1e-3)
    assert [dip["step"] for dip in summary["datasets"]["rocm"]["runs"]["logs_b"]["dips"]] == [17, 25]
    assert list(pd.read_parquet(output / "comparison.parquet").columns) == list(COLUMNS)


def test_other_work_is_said_first(tmp_path: Path) -> None:
    half = resolved("fsdp", **{"distributed.dp_size": 2, "training.batch_size": 32})
    one = write_run(make_point("fsdp", tmp_path, POINT, step_us=1500.0, name="m_training.batch_size=64", spread_us=5.0))
    two = write_run(
        make_point("fsdp", tmp_path, half, step_us=700.0, name="m_training.batch_size=32", spread_us=5.0), factor=0.8
    )
    process = analyze("compare", f"big={one}", f"small={two}", "--output", tmp_path / "out")
    assert process.returncode == 0, process.stderr
    answer = " ".join(process.stdout.splitlines()[2].split())
    assert answer.startswith("not the same work (training.batch_size big=64, small=32); samples/s ")
    assert "step time: ratio 0.800 (lower)" in answer
    ratios = json.loads((tmp_path / "out" / "summary.json").read_text())["datasets"]["small"]["ratios"]
    (ratio,) = ratios.values()
    assert ratio["different_work"]["training.batch_size"] == {"big": 64, "small": 32}


def test_kernels_are_believed_where_marks_disagree() -> None:
    runs = ROOT / "tests" / "data" / "h200x2_fsdp"
    process = analyze("compare", f"ddp={runs / 'ddp_one_connection'}", f"fsdp={runs / 'fsdp2'}")
    assert process.returncode == 0
    assert "believe the kernels" in process.stderr
    answer = " ".join(process.stdout.splitlines()[2].split())
    assert "marks and kernels disagree, in the profiled steps kernels hidden share 0.0% to " in answer
    assert "exposed comm ms 0.000" not in answer


def test_copies_of_two_machines(tmp_path: Path) -> None:
    for name, copy_us in (("a", 400.0), ("b", 200.0)):
        make_point("copy_engine", tmp_path / name, overlapped_us=1100.0, copy_us=copy_us)
    process = analyze("compare", tmp_path / "a", tmp_path / "b")
    assert (process.returncode, process.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in process.stdout.splitlines()]
    assert any("host_to_device, 4 GEMMs of 4096, 4 x 64 MiB all copy 400.0 200.0" in line for line in lines)


def test_training_results_whose_telemetry_was_not_copied(cuda: Path, tmp_path: Path) -> None:
    make_point("fsdp", tmp_path / "bare")
    bare = (tmp_path / "bare", f"b={tmp_path / 'bare'}")
    assert_one_error(analyze("compare", *bare), "copy the rank_<r>_metrics.jsonl of their run directories, too")
    assert_one_error(analyze("compare", cuda, tmp_path / "bare"), "copy the rank_<r>_metrics.jsonl, too")


def test_names_in_charts_tell_runs_apart() -> None:
    swept = [
        f"ranking_dp2_profile=none_fsdp.backward_prefetch=BACKWARD_POST_fsdp.forward_prefetch={on}_training.batch_size=4"
        for on in (False, True)
    ]
    assert distinct_names(swept) == ["fsdp.forward_prefetch=False", "fsdp.forward_prefetch=True"]
    assert distinct_names(["logs_a", "logs_b"]) == ["logs_a", "logs_b"]
    assert distinct_names([swept[0]] * 2) == [distinct_names(swept[:1])[0]] * 2
    long = [f"{'x' * 200}{end}" for end in "ab"]
    assert len(set(distinct_names(long))) == 2
    assert max(map(len, distinct_names(long))) <= 90


def test_a_sweep_of_points(tmp_path: Path) -> None:
    for side, factor in (("a", 1.0), ("b", 0.8)):
        for i in range(4):
            point = resolved(
                "fsdp",
                **{"distributed.dp_size": 2, "fsdp.forward_prefetch": i, "distributed.enable_overlap": side == "b"},
            )
            write_run(
                make_point("fsdp", tmp_path / side, point, step_us=1500.0 * factor, name=f"fsdp_{i}", spread_us=5.0),
                factor=factor,
            )
    write_run(tmp_path / "b" / "fsdp_more")
    process = analyze("compare", tmp_path / "a", tmp_path / "b")
    assert (process.returncode, process.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in process.stdout.splitlines()]
    assert lines[2].startswith("4 matching runs, by step time 4 better. Geometric means of the ratios: step ms 0.800")
    assert sum(line.startswith("fsdp_") for line in lines) == 4
    assert "distributed.enable_overlap: a=false, b=true" in lines
    assert not any("forward_prefetch" in line for line in lines)
    assert "1 only in b, not in a: fsdp_more." in lines
    assert "--by point prints every quantity of each run." in lines
    everything = analyze("compare", tmp_path / "a", tmp_path / "b", "--by", "point").stdout
    assert everything.count("hidden fraction") == 4


def test_the_help_names_every_column_and_quantity() -> None:
    words = analyze("compare", "--help").stdout.split()
    assert {*COLUMNS, *QUANTITIES} <= set(words)


def test_formats_and_fail_if(cuda: Path, rocm: Path) -> None:
    both = (f"cuda={cuda}", f"rocm={rocm}")
    rows = json.loads(analyze("compare", *both, "--format", "json").stdout)
    assert {tuple(row) for row in rows} == {tuple(COLUMNS)}
    frame = pd.read_csv(io.StringIO(analyze("compare", *both, "--format", "csv").stdout))
    assert frame.set_index("quantity").loc["dips", "value"] == 2
    worse = ("--fail-if", "quantity == 'step_ms' and verdict == 'worse'")
    process = analyze("compare", *both, *worse)
    assert process.returncode == 3
    assert "step_ms" in process.stderr
    assert analyze("compare", *both, *worse, "--reference", "rocm").returncode == 0


def test_candidate_and_reference(cuda: Path, rocm: Path, tmp_path: Path) -> None:
    third = write_run(tmp_path / "third")
    three = (f"cuda={cuda}", f"rocm={rocm}", f"old={third}")
    told = analyze("compare", *three, "--candidate", "cuda").stdout
    assert told.splitlines()[1] == "cuda against rocm"
    assert "old against" not in told
    assert f"  old: {third}, 2 ranks" in told
    assert "old against cuda" in analyze("compare", *three).stdout
    assert_one_error(
        analyze("compare", *three, "--candidate", "hip"), "--candidate hip is none of", "choose among cuda, rocm, old"
    )
    assert_one_error(analyze("compare", *three, "--reference", "hip"), "--reference hip is none of")
    same = analyze("compare", *three, "--reference", "cuda", "--candidate", "cuda")
    assert_one_error(same, "--candidate cuda is the reference, too")


def test_the_candidate_of_results(tmp_path: Path) -> None:
    for label in ("a", "b", "c"):
        make_point("operator", tmp_path / label, operator_config(2, "fc1", "all", "bulk", num_sm=4))
    told = analyze("compare", *(tmp_path / label for label in ("a", "b", "c")), "--candidate", "c").stdout
    assert "c against a" in told
    assert "b against" not in told


def test_mixed_kinds_and_what_is_no_directory(cuda: Path, tmp_path: Path) -> None:
    make_point("operator", tmp_path / "sweep", operator_config(2, "fc1", "all", "bulk", num_sm=4))
    assert_one_error(
        analyze("compare", cuda, tmp_path / "sweep"),
        f"{cuda} is telemetry of training runs and {tmp_path / 'sweep'} is results without any",
    )
    assert_one_error(analyze("compare", TRACE, cuda), f"{TRACE} is traces and {cuda} is telemetry")
    file = cuda / "rank_0_metrics.jsonl"
    assert_one_error(analyze("compare", file, cuda), f"is the telemetry of one rank; give its directory: {cuda}.")
    assert_one_error(analyze("compare", cuda, f"b={cuda}", "--by", "kernel"), "--by kernel is not for telemetry")


def test_damaged_logs_are_named_and_the_rest_is_compared(cuda: Path, rocm: Path) -> None:
    path = rocm / "rank_1_metrics.jsonl"
    lines = path.read_bytes().splitlines()
    lines[4] = PAYLOAD.encode().replace(b"\n", b" ")
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    process = analyze("compare", f"cuda={cuda}", f"rocm={rocm}")
    assert_one_error(process, f"{path}: line 5 is no telemetry of a step")
    assert "warning: rocm: logs_b: step 4 left out: not all ranks recorded it." in process.stderr
    assert "rocm against cuda" in process.stdout


def test_odd_labels_are_no_odd_files(cuda: Path, rocm: Path, tmp_path: Path) -> None:
    labels = ("a b", "a:b", "A-B", "..", "x" * 300, "\u202e", "summary")
    files = timeline_files(labels)
    assert list(files.values())[:4] == [
        "a-b_timeline.png",
        "a-b-2_timeline.png",
        "A-B-3_timeline.png",
        "dataset_timeline.png",
    ]
    assert len({name.lower() for name in files.values()}) == len(labels)
    assert all(len(name) < 200 for name in files.values())
    output = tmp_path / "out"
    odd = "<b>'\"[red]\x1b[2J &..;"
    process = analyze("compare", f"{odd}={cuda}", f"a b={rocm}", "--output", output)
    assert process.returncode == 0
    assert "\x1b" not in process.stdout
    assert sorted(path.name for path in output.glob("*_timeline.png")) == ["a-b_timeline.png", "b-red-2J_timeline.png"]


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_terminals_of_any_width(cuda: Path, rocm: Path, columns: int) -> None:
    shown = on_terminal(columns, "compare", cuda, rocm)
    assert max(map(len, shown.splitlines())) <= columns
    assert "…" not in shown
    assert "1.100" in shown


def test_the_logs_are_left_alone_and_torch_is_not_needed(cuda: Path, rocm: Path) -> None:
    before = {path: path.read_bytes() for path in (*cuda.iterdir(), *rocm.iterdir())}
    command = [sys.executable, "-X", "importtime", "analyze.py", "compare", str(cuda), str(rocm)]
    listed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60).stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in listed.splitlines()}
    assert not imported & {"torch", "altair", "vl_convert"}
    assert {path: path.read_bytes() for path in (*cuda.iterdir(), *rocm.iterdir())} == before


def test_a_dip_in_words(tmp_path: Path) -> None:
    elsewhere = {(9, 0): EXPOSED, (9, 1): {"device": SLOW_DEVICE}}
    (measured,) = read_telemetry_dataset("a", write_run(tmp_path / "a", dips=elsewhere)).runs
    assert [describe_dip(dip) for dip in measured.dips] == [
        "step 9, rank 0: 25% hidden (median 80%), 25% slower; "
        "rank 1's SM clock 1,410 MHz (median 1,980), 690 W, 71 C (the hottest step): SW power cap"
    ]
    capped = {(9, 0): {**EXPOSED, "device": {**USUAL_DEVICE, "sm_clock_mhz": 1965.0, "throttle_reasons": 4.0}}}
    (measured,) = read_telemetry_dataset("c", write_run(tmp_path / "c", dips=capped)).runs
    assert describe_dip(measured.dips[0]).endswith(
        "25% slower; not explained by the device: SM clock 1,965 MHz (median 1,980), 640 W, 61 C; "
        "SW power cap, but the clock is as usual"
    )
    little = {(9, 0): {"compute_ms": 400.0, "device": {**SLOW_DEVICE, "sm_clock_mhz": 1900.0, "temperature_c": 61.0}}}
    (measured,) = read_telemetry_dataset("d", write_run(tmp_path / "d", dips=little)).runs
    assert describe_dip(measured.dips[0]).endswith("; SW power cap, but the clock fell too little")
    near = {(9, 0): {**EXPOSED, "device": {**USUAL_DEVICE, "sm_clock_mhz": 1950.0, "temperature_c": 66.0}}}
    (measured,) = read_telemetry_dataset("e", write_run(tmp_path / "e", dips=near)).runs
    assert describe_dip(measured.dips[0]).endswith("1,950 MHz (median 1,980), 640 W, 66 C (the hottest step)")
    blind = {(9, 0): {**EXPOSED, "device": {}}}
    (measured,) = read_telemetry_dataset("b", write_run(tmp_path / "b", dips=blind)).runs
    assert describe_dip(measured.dips[0]).endswith("25% slower; no sample of the device")


def test_a_sweep_of_the_products_own(tmp_path: Path) -> None:
    small = ("workload=fsdp", "model=ranking_tiny", "runtime.device=cpu", "training.max_steps=6", "profile=none")
    launched = Launch(tmp_path / "sweep").run("-m", *small, "workload.repeats=3", "fsdp.forward_prefetch=false,true")
    assert launched.returncode == 0, launched.stderr
    one, two = sorted(path.parent for path in (tmp_path / "sweep").rglob("result.json"))
    process = analyze("compare", f"a={tmp_path / 'sweep'}", f"b={tmp_path / 'sweep'}", "--format", "json")
    assert process.returncode == 0, process.stderr
    rows = json.loads(process.stdout)
    assert {row["run"] for row in rows} == {one.name, two.name}
    assert {row["verdict"] for row in rows} == {"same", None}
    assert {"step_ms", "hidden_share", "samples_per_s", "final_loss", "point_ms", "none_ms", "floor_ms"} <= {
        row["quantity"] for row in rows
    }
    pair = analyze("compare", f"a={one}", f"b={two}", "--output", tmp_path / "out")
    assert pair.returncode == 0, pair.stderr
    assert "fsdp.forward_prefetch: " in pair.stdout
    aggregates = json.loads((tmp_path / "out" / "summary.json").read_text())["datasets"]["a"]["runs"][one.name]
    medians = {name: known["median"] for name, known in aggregates["aggregates"].items()}
    assert 0 < medians["compute_ms"] < medians["step_ms"]
    assert 0 <= medians["hidden_share"] < 1
    assert medians["samples_per_s"] == pytest.approx(8e3 / medians["step_ms"], rel=0.2)
