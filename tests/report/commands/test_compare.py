"""`analyze.py compare`, as one calls it."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from overlap_sweep.analysis.comparison.rows import POINT_COLUMNS, SLOT_COLUMNS
from overlap_sweep.analysis.comparison.trace_rows import PART_COLUMNS, QUANTITY_COLUMNS
from overlap_sweep.errors import UserError
from overlap_sweep.report.comparison.operands import label_and_path, short_names
from tests.analyze import analyze, on_terminal
from tests.make_point import make_point, operator_config, pass_times, variant
from tests.report.test_command_line import ROOT, assert_one_error
from tests.sweeps import SMALL, Launch

TRACES = ROOT / "tests" / "data" / "traces"
NONE = TRACES / "h200x4_llama3_70b_layer_none.json.gz"
DEFAULT = TRACES / "h200x4_llama3_70b_layer_te_default.json.gz"
PNG = b"\x89PNG\r\n\x1a\n"


def write_bulk(directory: Path, **times_us: float) -> Path:
    """fc1 backward, none 400, floor 300; `sm4=320.0` is bulk with 4 SMs."""
    for name, time_us in times_us.items():
        point = operator_config(2, "fc1", "all", "bulk", num_sm=int(name.removeprefix("sm")))
        make_point(
            "operator", directory, point, bwd=pass_times(time_us, 400.0, 300.0), started="2026-11-20T21:14:03+00:00"
        )
    return directory


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return write_bulk(tmp_path / "old", sm4=320.0, sm8=360.0)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return write_bulk(tmp_path / "new", sm4=400.0, sm8=310.0, sm16=330.0)


def lines_with(output: str, *parts: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if all(part in line for part in parts)]


def test_two_sweeps(old: Path, new: Path) -> None:
    process = analyze("compare", old, new)
    assert (process.returncode, process.stderr) == (0, "")
    lines = process.stdout.splitlines()
    assert lines[1] == "new against old"
    assert lines[2].strip().startswith("3 matching points: 1 faster, 1 slower, 1 same. Geometric means: ratio 1.025")
    assert any(line.startswith(f"  old: {old}, 2 points (2 ok)") for line in lines)
    assert lines_with(process.stdout, "fc1_dgrad") == [
        ["2", "fc1_dgrad", "bulk_sm4,", "bulk_sm8", "0.969", "faster", "+29.0%"]
    ]
    (slower,) = lines_with(process.stdout, "bulk_sm4", "400.0")
    assert " ".join(slower) == "2 fc1 bwd dgrad+wgrad bulk_sm4 320.0 400.0 0.0 1.250 slower 80% to 0% 1.000 1.000"
    assert "1 only in new, not in old: TP=2 fc1 bwd dgrad bulk_sm16 + wgrad bulk_sm16" in process.stdout


def test_labels_and_reference(old: Path, new: Path) -> None:
    process = analyze("compare", f"a={old}", f"b={new}", "--reference", "b")
    assert process.stdout.splitlines()[1] == "a against b"
    by_path = analyze("compare", f"a={old}", f"b={new}", "--reference", new)
    assert by_path.stdout == process.stdout
    assert_one_error(analyze("compare", old, new, "--reference", "c"), "--reference c", "choose among old, new")


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (("m/2026-11-20", "m/2026-11-21"), ["2026-11-20", "2026-11-21"]),
        (("m/2026-11-20/21-14-03", "m/2026-11-21/21-14-03"), ["2026-11-20", "2026-11-21"]),
        (("r4/r/tp4", "r6/r/tp4"), ["r4", "r6"]),
        (("m/2026-11-20", "m/2026-11-20/21-14-03"), ["2026-11-20", "21-14-03"]),
        (("llama3_8b_tp2_fc1_none", "llama3_8b_tp2_fc1_bulk_sm4"), ["none", "bulk_sm4"]),
        (("tp_2", "tp_4"), ["tp_2", "tp_4"]),
        (("a/x/t", "a/y/t", "b/x/t"), ["a/x/t", "a/y/t", "b/x/t"]),
        (("a/trace_rank0.json.gz", "b/trace_rank0.json.gz"), ["a", "b"]),
        (("layer_none.json.gz", "layer_te_default.json"), ["none", "te_default"]),
        (("only",), ["only"]),
    ],
)
def test_short_names(paths: tuple[str, ...], expected: list[str]) -> None:
    assert short_names([Path(path) for path in paths]) == expected


def test_a_path_may_hold_equals_signs(tmp_path: Path) -> None:
    directory = write_bulk(tmp_path / "seed=1", sm4=320.0)
    assert label_and_path(str(directory)) == (None, directory)
    assert label_and_path(f"a={directory}") == ("a", directory)
    assert label_and_path("m/a=b") == (None, Path("m/a=b"))
    with pytest.raises(UserError, match="no LABEL=PATH"):
        label_and_path("=here")


def test_formats_have_the_rows_and_nothing_else(old: Path, new: Path) -> None:
    process = analyze("compare", old, new, "--format", "json")
    rows = json.loads(process.stdout)
    assert [row.keys() for row in rows] == [POINT_COLUMNS.keys()] * 3
    assert {row["setting"]: row["ratio"] for row in rows}["none"] == 1.0
    frame = pd.read_csv(io.StringIO(analyze("compare", old, new, "--format", "csv").stdout))
    assert list(frame.columns) == list(POINT_COLUMNS)
    command = [sys.executable, "analyze.py", "compare", str(old), str(new), "--by", "slot", "--format", "parquet"]
    content = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60).stdout
    slots = pd.read_parquet(io.BytesIO(content))
    assert slots["slot"].tolist() == ["fc1_dgrad", "fc1_wgrad"]
    assert list(slots.columns) == list(SLOT_COLUMNS)


def test_fail_if(old: Path, new: Path) -> None:
    process = analyze("compare", old, new, "--fail-if", "ratio > 1.05")
    assert process.returncode == 3
    assert process.stderr == (
        "fail-if: ratio > 1.05 holds for 1 of 3 points, first dgrad bulk_sm4 + wgrad bulk_sm4 at TP=2 (ratio 1.250)\n"
    )
    assert analyze("compare", old, new, "--fail-if", "ratio > 1.3").returncode == 0
    assert analyze("compare", old, new, "--by", "slot", "--fail-if", "ratio > 1.05").returncode == 0
    assert analyze("compare", old, new, "--by", "slot", "--fail-if", "regret > 0.2").returncode == 3
    assert_one_error(analyze("compare", old, new, "--fail-if", "rato > 1"), "rato")


def test_files(old: Path, new: Path, tmp_path: Path) -> None:
    output = tmp_path / "reports" / "there"
    process = analyze("compare", old, new, "--output", output)
    assert (process.returncode, process.stderr) == (0, "")
    assert {path.name for path in output.iterdir()} == {
        *("comparison.json", "comparison.csv", "comparison.parquet"),
        *("ratios.png", "old_timeline.png", "new_timeline.png"),
    }
    assert all(path.read_bytes().startswith(PNG) for path in output.glob("*.png"))
    told = json.loads((output / "comparison.json").read_text())
    assert told["datasets"]["new"]["ratios"]["best"] == pytest.approx(310 / 320)
    assert told["aggregates"][-1]["ratio"] == pytest.approx((1.25 * 310 / 360) ** (1 / 3))
    assert list(pd.read_parquet(output / "comparison.parquet").columns) == list(POINT_COLUMNS)
    assert f"Written to {output}: comparison.json" in process.stdout
    as_json = analyze("compare", old, new, "--output", output, "--format", "json")
    assert len(json.loads(as_json.stdout)) == 3
    (tmp_path / "file").touch()
    assert_one_error(analyze("compare", old, new, "--output", tmp_path / "file"), "cannot be written to", "--output")


def test_the_results_are_left_alone(old: Path, new: Path) -> None:
    before = {path: path.read_bytes() for path in (*old.rglob("*"), *new.rglob("*")) if path.is_file()}
    analyze("compare", old, new)
    assert {path: path.read_bytes() for path in (*old.rglob("*"), *new.rglob("*")) if path.is_file()} == before


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_terminals_of_any_width(old: Path, new: Path, columns: int) -> None:
    for arguments in (("compare", old, new), ("compare", NONE, DEFAULT)):
        shown = on_terminal(columns, *arguments)
        assert max(map(len, shown.splitlines())) <= columns
        assert "…" not in shown
    assert "0.969" in on_terminal(columns, "compare", old, new)


def test_many_points_are_shortened_unless_asked_for(tmp_path: Path) -> None:
    times = {f"sm{number}": 300.0 + number for number in range(1, 25)}
    write_bulk(tmp_path / "old", **times)
    write_bulk(tmp_path / "new", **{name: time_us * (2 if name == "sm7" else 1) for name, time_us in times.items()})
    short = analyze("compare", tmp_path / "old", tmp_path / "new").stdout
    assert "... and 10 more; --by point prints all of them" in short
    # The slowest first.
    points = short[short.index("Matching points") :].splitlines()
    assert "bulk_sm7 " in points[4]
    everything = analyze("compare", tmp_path / "old", tmp_path / "new", "--by", "point").stdout
    assert len(lines_with(everything, "dgrad+wgrad")) == 24
    assert "more; --by" not in everything
    slots = analyze("compare", tmp_path / "old", tmp_path / "new", "--by", "slot").stdout
    assert "Matching points" not in slots
    assert "fc1_dgrad" in slots


def test_layers_alone(tmp_path: Path) -> None:
    for name, file_us in (("old", 57.0), ("new", 51.3)):
        make_point(
            "layer",
            tmp_path / name,
            variants={"none": variant([60.0] * 6), f"file:/{name}/best.yaml": variant([file_us] * 6)},
        )
    process = analyze("compare", tmp_path / "old", tmp_path / "new", "--output", tmp_path / "out")
    assert (process.returncode, process.stderr) == (0, "")
    assert lines_with(process.stdout, "file:best.yaml")[0][:4] == ["4", "transformer_layer", "all", "file:best.yaml"]
    assert "0.900" in process.stdout
    assert "slot" not in process.stdout.partition("Matching points")[2]


def test_two_traces(tmp_path: Path) -> None:
    process = analyze("compare", NONE, DEFAULT, "--output", tmp_path)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.splitlines()[1] == "te_default against none"
    assert ["span", "us", "34,346.5", "34,251.2", "-95.3", "0.997"] in lines_with(process.stdout, "span us")
    assert lines_with(process.stdout, "nccl comm")[0][:4] == ["3,583.2", "0.0", "-3,583.2", "0.000"]
    assert {path.name for path in tmp_path.iterdir()} == {
        *("comparison.json", "comparison.csv", "comparison.parquet"),
        *("ratios.png", "none_timeline.png", "te_default_timeline.png"),
    }
    told = json.loads((tmp_path / "comparison.json").read_text())
    assert told["datasets"]["te_default"]["ratios"]["all"]["exposed_comm_us"] == pytest.approx(611.7 / 2105.1, abs=1e-4)
    # What overlapped in one and not at all in the other has no ratio.
    assert told["datasets"]["te_default"]["ratios"]["fwd"]["overlap_us"] is None


@pytest.mark.parametrize(
    ("by", "columns"),
    [
        ("phase", QUANTITY_COLUMNS),
        ("rank", QUANTITY_COLUMNS),
        ("class", PART_COLUMNS),
        ("kernel", PART_COLUMNS),
        ("stream", PART_COLUMNS),
    ],
)
def test_traces_by(by: str, columns: dict[str, str]) -> None:
    frame = pd.read_csv(io.StringIO(analyze("compare", NONE, DEFAULT, "--by", by, "--format", "csv").stdout))
    assert list(frame.columns) == list(columns)
    assert len(frame)
    assert analyze("compare", NONE, DEFAULT, "--by", by).stdout


def test_traces_that_got_slower_fail(tmp_path: Path) -> None:
    slower = ("--by", "class", "--fail-if", "change == 'slower' and difference_us > 700")
    process = analyze("compare", NONE, DEFAULT, *slower)
    assert process.returncode == 3
    assert "cublas gemm" in process.stderr
    assert analyze("compare", DEFAULT, NONE, *slower).returncode == 0


def test_the_quantity_that_fails_is_named() -> None:
    process = analyze("compare", NONE, DEFAULT, "--fail-if", "difference > 1200 and phase == 'fwd'")
    assert process.returncode == 3
    assert "first fwd overlap_us (difference" in process.stderr


def test_directories_of_traces(tmp_path: Path) -> None:
    for name, trace in (("a", NONE), ("b", DEFAULT)):
        (tmp_path / name / "node0").mkdir(parents=True)
        shutil.copy(trace, tmp_path / name / "node0" / "trace_rank0.json.gz")
        (tmp_path / name / "notes.json").write_text('{"made_on": "Friday"}')
        analyze("timeline", trace, "--output", tmp_path / name / "timeline.json.gz")
    process = analyze("compare", tmp_path / "a", tmp_path / "b")
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.splitlines()[1:3] == ["b against a", "  matched by rank: 0"]


def test_wrong_input(old: Path, new: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert analyze("compare", old).returncode == 2
    assert_one_error(analyze("compare", old, tmp_path / "nowhere"), "nowhere does not exist")
    assert_one_error(analyze("compare", old, tmp_path / "empty"), "neither results nor traces")
    assert_one_error(analyze("compare", old, DEFAULT), f"{DEFAULT} is traces and {old} is results")
    (tmp_path / "notes.txt").write_text("hello")
    assert_one_error(analyze("compare", old, tmp_path / "notes.txt"), "notes.txt is neither results nor a trace")
    wrong = analyze("compare", old, new, "--output", tmp_path / "written", "--fail-if", "ratios > 1")
    assert_one_error(wrong, "ratios is no column")
    assert wrong.stdout == ""
    assert not (tmp_path / "written").exists()
    assert_one_error(analyze("compare", DEFAULT, NONE, "--fail-if", "ratio >"), "cannot be understood")
    assert_one_error(analyze("compare", old, old), "both called old", "give them labels")
    assert_one_error(analyze("compare", old, new, "--by", "kernel"), "--by kernel is not for results", "point, slot")
    assert_one_error(analyze("compare", NONE, DEFAULT, "--by", "slot"), "--by slot is not for traces")
    assert analyze("compare", old, new, "--by", "colour").returncode == 2
    (tmp_path / "cut.json").write_text("")
    assert_one_error(analyze("compare", DEFAULT, tmp_path / "cut.json"), "cut.json is empty")


def test_damaged_results_are_named_and_the_rest_is_compared(old: Path, new: Path) -> None:
    (new / "cut").mkdir()
    (new / "cut" / "result.json").write_text("{")
    process = analyze("compare", old, new)
    assert_one_error(process, "cut/result.json", "measure the point again")
    assert "3 matching points" in process.stdout


def test_help_and_imports() -> None:
    process = analyze("compare", "--help")
    assert "python analyze.py compare multirun/2026-11-20 multirun/2026-11-21" in process.stdout
    command = [sys.executable, "-X", "importtime", "analyze.py", "compare", "--help"]
    listed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60).stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in listed.splitlines()}
    assert not imported & {"torch", "pandas", "pyarrow", "numpy", "altair", "vl_convert"}


def test_analysis_of_traces_and_sweeps_imports_no_torch(old: Path, new: Path) -> None:
    for arguments in ((old, new), (NONE, DEFAULT)):
        command = [sys.executable, "-X", "importtime", "analyze.py", "compare", *map(str, arguments)]
        listed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60).stderr
        imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in listed.splitlines()}
        assert not imported & {"torch", "altair", "vl_convert"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of the product's own, on the CPU."""
    directory = tmp_path_factory.mktemp("measured")
    launched = Launch(directory).run("-m", *SMALL, "tp_size=2", "method=none,bulk", "num_sm=1,2")
    assert launched.returncode == 0, launched.stderr
    return directory


def test_a_sweep_with_itself_is_the_same(measured: Path) -> None:
    process = analyze("compare", f"one={measured}", f"other={measured}", "--format", "json")
    rows: list[dict[str, Any]] = json.loads(process.stdout)
    assert {(row["ratio"], row["verdict"], row["none_ratio"]) for row in rows} == {(1.0, "same", 1.0)}
    assert {row["setting"] for row in rows if row["pass"] == "bwd"} == {
        "none",
        *(f"dgrad bulk_sm{number} + wgrad bulk_sm{number}" for number in (1, 2)),
    }


def test_points_and_traces_of_a_sweep(measured: Path) -> None:
    one, two = (next(measured.glob(f"*bulk_sm{number}*")) for number in (1, 2))
    process = analyze("compare", one, two)
    assert process.returncode == 0
    assert "setting: " in process.stdout
    traces = analyze("compare", one / "trace_rank0.json.gz", two / "trace_rank0.json.gz", "--by", "class")
    assert (traces.returncode, traces.stderr) == (0, "")
    assert "gloo" in traces.stdout
