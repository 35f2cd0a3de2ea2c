"""`analyze.py query` and `compare`: rows, columns, labels and names; golden files hold what is printed of many."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.commands.compare import label_and_path
from overlap_sweep.errors import UserError
from overlap_sweep.report.causes import cause_rows
from overlap_sweep.report.table import PointRow, Row
from tests.analyze import analyze, rows
from tests.golden.archives import unpack
from tests.golden.made_report import TRACES
from tests.made_sweeps import write_tuned_sweep
from tests.make_point import make_point, operator_config, pass_times
from tests.report.conftest import Made
from tests.report.page.reports import analysis_of

SLOTS = ("fc1_fprop", "fc1_dgrad", "fc1_wgrad", "fc2_fprop")


def test_rows_are_sorted_before_they_are_limited_with_missing_values_last(made: Made) -> None:
    sweep = made("operators")
    best = rows("query", sweep, "phase != 'wgrad'", "--sort", "tp_size,-speedup", "--limit", "2")
    both = "tp2_fc1_dgrad_bulk_sm4_wgrad_bulk_sm4"
    assert [row["config_id"] for row in best] == ["tp2_fc2_fprop_pipeline_sm8_split4", both]
    for sort in ("speedup", "-speedup"):
        assert rows("query", sweep, "--sort", sort)[-1]["speedup"] is None
    assert "2 of 13 rows" in analyze("query", sweep, "--limit", "2").stdout


def test_a_table_that_a_report_has_not_is_refused_with_those_that_it_has(made: Made, tmp_path: Path) -> None:
    assert analyze("report", made("operators"), "--output", tmp_path).returncode == 0
    elsewhere = analyze("query", tmp_path, "--kernels")
    assert (elsewhere.returncode, elsewhere.stdout) == (1, "")
    assert "has no kernels.parquet, only points.parquet; choose one of these tables." in elsewhere.stderr


def test_a_column_named_twice_is_one_column(made: Made) -> None:
    (row,) = rows("query", made("operators"), "speedup > 1.3", "--columns", "slot, num_sm,slot")
    assert row == {"slot": "fc2_fprop", "num_sm": 8}


def test_metrics_of_traces_are_columns_and_a_missing_trace_is_noted(tmp_path: Path) -> None:
    point = operator_config(2, "fc1", "fprop", "ring_exchange")
    directory = make_point("operator", tmp_path, point, traces=["t.json.gz", "gone.json.gz"])
    shutil.copy(TRACES / "h200x4_llama3_70b_layer_te_default.json.gz", directory / "t.json.gz")
    (row,) = rows("query", tmp_path, "fwd_overlap_ratio > 0 and note.notna()")
    assert row["note"] == "gone.json.gz is missing"


@pytest.mark.parametrize(
    ("name", "asked"),
    [("tuned", ()), ("tuned", ("--layers",)), ("kernels", ("--kernels",)), ("training", ("--training",))],
)
def test_a_report_has_the_rows_of_its_results(
    made: Made, tmp_path: Path, name: str, asked: tuple[str, ...], no_page: None
) -> None:
    raw = rows("query", made(name), *asked)
    assert raw
    for output in (tmp_path / "reports", shutil.copytree(made(name), tmp_path / "copy")):
        analyze(made(name) if output.name == "reports" else output, "--output", output)
        assert rows("query", output, *asked) == raw
    if name == "kernels":
        analyze("query", tmp_path / "reports", "--layers").assert_error("has no layers.parquet")


def test_the_device_and_the_model_are_columns_of_the_table_where_they_differ(tmp_path: Path) -> None:
    ring = operator_config(2, "fc1", "fprop", "ring_exchange")
    make_point("operator", tmp_path, ring)
    skipped = make_point("operator", tmp_path, {**ring, "operator": "fc2"}, status="skipped", environment={})
    assert {row["device"] for row in rows("query", tmp_path)} == {"NVIDIA H200", "cuda"}
    assert "model" not in analyze("query", tmp_path).stdout.split()
    assert skipped.name in {row["point"] for row in rows("query", tmp_path)}
    make_point("operator", tmp_path, {**ring, "tp_size": 4}, environment={"gpu": "another"})
    make_point("operator", tmp_path, operator_config(2, "fc1", "all", "bulk", model="qwen3_0_6b"), bwd=pass_times(80.0))
    shown = analyze("query", tmp_path).stdout
    assert {"device", "model", "qwen3_0_6b"} <= set(shown.split())
    assert "bf16" not in shown


@pytest.mark.parametrize(
    ("best", "final"),
    [
        ("none", dict.fromkeys(SLOTS, "none")),
        ("default", dict.fromkeys(SLOTS, "default")),
        ("preset preset_tp4", {**dict.fromkeys(SLOTS, "default"), "fc2_fprop": "pipeline_sm16"}),
        (
            "tuned",
            {"fc1_fprop": "none", "fc1_dgrad": "bulk_sm4", "fc1_wgrad": "bulk_sm4", "fc2_fprop": "pipeline_sm8_split4"},
        ),
    ],
)
def test_final_settings_are_those_of_the_fastest_layer(tmp_path: Path, best: str, final: dict[str, str]) -> None:
    """Whatever is fastest for the operators one by one."""
    slow = {"none": 1.0, "default": 0.99, "tuned": 1.02, "preset preset_tp4": 0.98, "floor": 0.85}
    directory = write_tuned_sweep(tmp_path, ratios={**slow, best: 0.9})
    (answered, *_) = (section.answered for section in analysis_of(directory).sections)
    frame = answered.frame.set_index("slot")
    assert frame["final_setting"].to_dict() == final
    assert frame.loc["fc1_dgrad", "setting"] == "bulk_sm4"
    assert (set(frame["proven"]), set(frame["recommended"])) == ({True}, {best})
    assert frame.loc["fc2_fprop", "default_us"] == 160.0
    assert frame["layer_ratio"].tolist() == pytest.approx([1.0 if best == "none" else 0.9] * 4)


# `analyze.py compare`

NONE = TRACES / "h200x4_llama3_70b_layer_none.json.gz"
DEFAULT = TRACES / "h200x4_llama3_70b_layer_te_default.json.gz"


def test_the_reference_is_named_by_its_label_or_its_path(made: Made) -> None:
    old, new = (made("compared") / name for name in ("old", "new"))
    by_label = analyze("compare", f"a={old}", f"b={new}", "--reference", "b").stdout
    assert "a against b" in by_label.splitlines()
    assert analyze("compare", f"a={old}", f"b={new}", "--reference", new).stdout == by_label


def test_a_path_may_hold_equals_signs(tmp_path: Path) -> None:
    directory = tmp_path / "seed=1"
    directory.mkdir()
    assert label_and_path(str(directory)) == (None, directory)
    assert label_and_path(f"a={directory}") == ("a", directory)
    assert label_and_path("m/a=b") == (None, Path("m/a=b"))
    with pytest.raises(UserError, match="not LABEL=PATH"):
        label_and_path("=here")


def test_every_point_is_printed_with_by_point(made: Made) -> None:
    many = (made("compared") / "many" / "old", made("compared") / "many" / "new")
    printed = analyze("compare", *many, "--by", "point").stdout
    points = [line for line in printed.partition("Matching points")[2].splitlines() if line.startswith(" 2  ")]
    assert (len(points), "changed less" in printed) == (25, False)


def test_traces_of_directories_are_matched_by_rank(tmp_path: Path) -> None:
    for name, trace in (("a", NONE), ("b", DEFAULT)):
        (tmp_path / name / "node0").mkdir(parents=True)
        shutil.copy(trace, tmp_path / name / "node0" / "trace_rank0.json.gz")
        (tmp_path / name / "notes.json").write_text('{"made_on": "Friday"}')
        analyze("timeline", trace, "--output", tmp_path / name / "timeline.json.gz")
    process = analyze("compare", tmp_path / "a", tmp_path / "b")
    assert (process.returncode, process.stderr) == (0, "")
    headline, *rest = process.stdout.splitlines()
    assert headline.startswith(("b is ", "b and a do not differ"))
    assert rest[1:3] == ["b against a", "  matched by rank: 0"]


def test_steps_of_different_work_are_neither_better_nor_worse(made: Made, tmp_path: Path) -> None:
    big, small = (made("compared") / "work" / f"m_training.batch_size={size}" for size in (64, 32))
    analyze("compare", f"big={big}", f"small={small}", "--output", tmp_path)
    (ratio,) = json.loads((tmp_path / "summary.json").read_text())["datasets"]["small"]["ratios"].values()
    assert ratio["different_work"] == ["training.batch_size"]
    assert ratio["settings_that_differ"]["training.batch_size"] == {"big": 64, "small": 32}
    assert ratio["quantities"]["step_ms"]["verdict"] == "lower"


def test_any_label_gives_a_safe_file_name(made: Made, tmp_path: Path) -> None:
    cuda, rocm = (made("compared") / name for name in ("cuda", "rocm"))
    process = analyze("compare", f"<b>'\"[red]\x1b[2J &..;={cuda}", f"a b={rocm}", "--output", tmp_path, "--plots")
    assert (process.returncode, "\x1b" in process.stdout) == (0, False)
    assert {path.name for path in tmp_path.glob("*_timeline.png")} == {"a-b_timeline.png", "b-red-2J_timeline.png"}
    labels = ("a b", "a:b", "A-B", "..", "x" * 300, "\u202e", "summary")
    analyze("compare", *(f"{label}={cuda}" for label in labels), "--output", tmp_path / "many", "--plots")
    assert {path.name for path in (tmp_path / "many").glob("*_timeline.png")} == {
        f"{name}_timeline.png" for name in ("a-b", "a-b-2", "A-B-3", "dataset", "x" * 120, "dataset-2", "summary")
    }


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four recorded training runs, with the traces of both ranks."""
    return unpack("fsdp", tmp_path_factory.mktemp("recorded") / "training")


@pytest.fixture
def diagnosed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The points that are diagnosed, in order."""
    points: list[str] = []

    def noted(rows: list[PointRow[Any]]) -> list[Row]:
        points.extend(row.point.name for row in rows)
        return cause_rows(rows)

    monkeypatch.setattr("overlap_sweep.report.causes.cause_rows", noted)
    return points


def test_why_communication_is_exposed_is_found_only_if_it_is_named(training: Path, diagnosed: list[str]) -> None:
    for given in ((), ("--columns", "all"), ("batch_size > 1",), ("status != 'cause'",)):
        assert not [name for name in rows("query", training, *given)[0] if name.startswith("cause")]
    assert diagnosed == []
    assert [row["cause"] for row in rows("query", training, "--columns", "cause")] == ["straggler"] * 4
    assert len(diagnosed) == 4


def test_a_condition_on_causes_needs_all_points_other_conditions_come_first(
    training: Path, diagnosed: list[str]
) -> None:
    every = [row["cause_share"] for row in rows("query", training, "--columns", "cause_share")]
    diagnosed.clear()
    asked = f"cause == 'straggler' and cause_share > {min(every)}"
    (first, *_) = found = rows("query", training, asked, "--sort=-cause_share")
    assert len(diagnosed) == 4
    assert len(found) == 3
    assert first["cause_share"] == max(row["cause_share"] for row in found)
    assert {"cause", "cause_share", "time_us"} <= set(first)
    assert "cause_try" not in first
    diagnosed.clear()
    (row,) = rows(
        "query", training, "forward_prefetch == 1 and reshard_after_forward == 'true'", "--columns", "cause_try"
    )
    assert row["cause_try"]
    assert len(diagnosed) == 1


def test_variants_have_their_own_causes(tmp_path: Path) -> None:
    found = rows("query", unpack("layer", tmp_path), "--layers", "--columns", "variant,cause")
    assert found[0] == {"variant": "none", "cause": "dependency"}
    assert {"variant": "floor", "cause": "none"} in found


def test_the_cause_of_an_operator_is_that_of_the_pass(tmp_path: Path) -> None:
    sweep = unpack("operators", tmp_path)
    found = rows("query", sweep, "point.str.contains('fc1_bulk_sm4')", "--columns", "slot,cause")
    # What its forward pass waits for is not overlapped, and no part of it.
    assert found == [{"slot": "fc1_dgrad", "cause": "none"}, {"slot": "fc1_wgrad", "cause": "none"}]


def test_causes_are_not_in_files_that_an_analysis_wrote(training: Path, tmp_path: Path, no_page: None) -> None:
    assert analyze(training, "--output", tmp_path).returncode == 0
    assert rows("query", tmp_path)
    analyze("query", tmp_path, "--columns", "cause").assert_error(
        f"{tmp_path} has no traces", "the directory of the sweep"
    )
