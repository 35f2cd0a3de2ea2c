"""`analyze.py compare`: what is compared with what, the numbers, and the files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.report.comparison.operands import label_and_path, short_names
from overlap_sweep.report.comparison.telemetry_charts import distinct_names, timeline_files
from tests.analyze import analyze, rows
from tests.golden.made_report import TRACES
from tests.make_point import make_point, operator_config
from tests.report.conftest import Made

NONE = TRACES / "h200x4_llama3_70b_layer_none.json.gz"
DEFAULT = TRACES / "h200x4_llama3_70b_layer_te_default.json.gz"
TABLES = {"comparison.csv", "comparison.parquet"}


def test_labels_reference_and_candidate(made: Made, tmp_path: Path) -> None:
    old, new = (made("compared") / name for name in ("old", "new"))
    by_label = analyze("compare", f"a={old}", f"b={new}", "--reference", "b").stdout
    assert by_label.splitlines()[1] == "a against b"
    assert analyze("compare", f"a={old}", f"b={new}", "--reference", new).stdout == by_label
    for label in ("a", "b", "c"):
        make_point("operator", tmp_path / label, operator_config(2, "fc1", "all", "bulk", num_sm=4))
    told = analyze("compare", *(tmp_path / label for label in ("a", "b", "c")), "--candidate", "c").stdout
    assert ("c against a" in told, "b against" in told) == (True, False)


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
    directory = tmp_path / "seed=1"
    directory.mkdir()
    assert label_and_path(str(directory)) == (None, directory)
    assert label_and_path(f"a={directory}") == ("a", directory)
    assert label_and_path("m/a=b") == (None, Path("m/a=b"))
    with pytest.raises(UserError, match="no LABEL=PATH"):
        label_and_path("=here")


def test_many_points_are_shortened_unless_asked_for(made: Made) -> None:
    many = (made("compared") / "many" / "old", made("compared") / "many" / "new")
    for by, shown, more in (((), 15, True), (("--by", "point"), 25, False), (("--by", "slot"), 0, False)):
        told = analyze("compare", *many, *by).stdout
        points = [line for line in told.partition("Matching points")[2].splitlines() if line.startswith("  2  ")]
        assert (len(points), "10 more" in told) == (shown, more)


def test_directories_of_traces(tmp_path: Path) -> None:
    for name, trace in (("a", NONE), ("b", DEFAULT)):
        (tmp_path / name / "node0").mkdir(parents=True)
        shutil.copy(trace, tmp_path / name / "node0" / "trace_rank0.json.gz")
        (tmp_path / name / "notes.json").write_text('{"made_on": "Friday"}')
        analyze("timeline", trace, "--output", tmp_path / name / "timeline.json.gz")
    process = analyze("compare", tmp_path / "a", tmp_path / "b")
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.splitlines()[1:3] == ["b against a", "  matched by rank: 0"]


# Training runs.


def test_other_work_has_no_better_or_worse_step(made: Made, tmp_path: Path) -> None:
    big, small = (made("compared") / "work" / f"m_training.batch_size={size}" for size in (64, 32))
    analyze("compare", f"big={big}", f"small={small}", "--output", tmp_path)
    (ratio,) = json.loads((tmp_path / "summary.json").read_text())["datasets"]["small"]["ratios"].values()
    assert ratio["different_work"]["training.batch_size"] == {"big": 64, "small": 32}
    assert ratio["quantities"]["step_ms"]["verdict"] == "lower"


def test_names_in_charts_tell_runs_apart() -> None:
    run = "ranking_dp2_profile=none_fsdp.backward_prefetch=BACKWARD_POST_fsdp.forward_prefetch={}_training.batch_size=4"
    swept = [run.format(on) for on in (False, True)]
    assert distinct_names(swept) == ["fsdp.forward_prefetch=False", "fsdp.forward_prefetch=True"]
    assert distinct_names(["logs_a", "logs_b"]) == ["logs_a", "logs_b"]
    assert distinct_names([swept[0]] * 2) == [distinct_names(swept[:1])[0]] * 2
    long = distinct_names([f"{'x' * 200}{end}" for end in "ab"])
    assert len(set(long)) == 2
    assert max(map(len, long)) <= 90


def test_odd_labels_are_no_odd_files(made: Made, tmp_path: Path) -> None:
    labels = ("a b", "a:b", "A-B", "..", "x" * 300, "\u202e", "summary")
    names = list(timeline_files(labels).values())
    assert names[:4] == [f"{name}_timeline.png" for name in ("a-b", "a-b-2", "A-B-3", "dataset")]
    assert len({name.lower() for name in names}) == len(labels)
    assert all(len(name) < 200 for name in names)
    cuda, rocm = (made("compared") / name for name in ("cuda", "rocm"))
    process = analyze("compare", f"<b>'\"[red]\x1b[2J &..;={cuda}", f"a b={rocm}", "--output", tmp_path)
    assert (process.returncode, "\x1b" in process.stdout) == (0, False)
    assert {path.name for path in tmp_path.glob("*_timeline.png")} == {"a-b_timeline.png", "b-red-2J_timeline.png"}


def test_results_with_themselves_are_the_same(made: Made) -> None:
    for name in ("operators", "tuned", "kernels", "copies", "stacks"):
        found: list[dict[str, Any]] = rows("compare", f"one={made(name)}", f"other={made(name)}")
        assert {(row["ratio"], row["verdict"]) for row in found} <= {(1.0, "same"), (None, None)}
        assert {row["verdict"] for row in found} >= {"same"}
