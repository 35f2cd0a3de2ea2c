"""`analyze.py diagnose`, beside what golden files hold of it."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.commands.diagnose import Rows
from overlap_sweep.diagnosis import runs
from overlap_sweep.diagnosis.causes import CAUSES
from overlap_sweep.report.diagnosis import FINDINGS, GROUPS, STEPS
from tests.analyze import ROOT, analyze, rows, shown

TRACES = ROOT / "tests" / "data" / "traces"
FSDP = [TRACES / f"h200x2_fsdp2_checkpoint_rank{rank}.json.gz" for rank in (0, 1)]
GRAPH = [TRACES / f"h200x2_cuda_graph_rank{rank}.json.gz" for rank in (0, 1)]
TABLES = {Rows.finding: FINDINGS, Rows.group: GROUPS, Rows.step: STEPS}


def test_findings_are_objects_of_known_causes_the_most_worthwhile_first() -> None:
    found = rows("diagnose", *FSDP)
    assert found
    assert {row["cause"] for row in found} <= set(CAUSES)
    assert found == sorted(found, key=lambda row: -row["lost_us"])
    assert all(row["evidence"].endswith(".") and row["rank"] in (0, 1) for row in found)
    assert {row["run"] for row in found} == {f"{TRACES}/h200x2_fsdp2_checkpoint_rank*.json.gz"}


def test_steps_are_those_of_all_ranks_with_the_ones_that_are_left_out() -> None:
    found = rows("diagnose", *GRAPH, "--by", "step")
    assert {(row["rank"], row["step"]): row["startup"] for row in found} == {
        (rank, step): step == 0 for rank in (0, 1) for step in (0, 1, 2)
    }
    for row in found:
        assert row["exposed_comm_us"] <= row["comm_us"] <= row["step_us"]
        assert row["exposed_comm_us"] + row["idle_us"] <= row["step_us"]


def test_groups_are_named_as_findings_name_them() -> None:
    named = {row["process_group"] for row in rows("diagnose", *FSDP) if row["process_group"]}
    groups = rows("diagnose", *FSDP, "--by", "group")
    assert named <= {row["process_group"] for row in groups}
    assert {row["ranks"] for row in groups} == {"0,1"}


def test_a_directory_is_read_whole_and_each_run_apart(tmp_path: Path) -> None:
    for variant, traces in (("point/trace", FSDP), ("point/trace_none", GRAPH), ("other/trace", GRAPH)):
        (tmp_path / variant).parent.mkdir(exist_ok=True)
        for rank, path in enumerate(traces):
            shutil.copy(path, tmp_path / f"{variant}_rank{rank}.json.gz")
    found = rows("diagnose", tmp_path, tmp_path / "point", "--by", "step")
    runs = {row["run"]: {one["rank"] for one in found if one["run"] == row["run"]} for row in found}
    names = ("other/trace", "point/trace_none", "point/trace")
    assert runs == {f"{tmp_path}/{name}_rank*.json.gz": {0, 1} for name in names}


@pytest.mark.parametrize("traces", [FSDP, FSDP[:1], GRAPH])
def test_what_is_unknown_is_said_once(traces: list[Path]) -> None:
    (found,) = runs.diagnose(traces)
    said = [f"warning: {found.run}: {note}" for note in found.notes]
    assert analyze("diagnose", *traces).stderr.splitlines() == said
    assert any("Only rank 0 of 2" in line for line in said) == (traces == FSDP[:1])
    assert sum("left out" in line for line in said) == (traces == GRAPH)


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_a_terminal_shows_sentences_within_its_width(columns: int) -> None:
    text = shown(columns, "diagnose", *FSDP)
    title, *lines = text.strip("\n").splitlines()
    assert title == f"{TRACES}/h200x2_fsdp2_checkpoint_rank*.json.gz" or columns < len(str(TRACES)) + 40
    assert max(len(line) for line in lines if str(TRACES) not in line) <= columns
    found = rows("diagnose", *FSDP)
    words = " ".join(text.split())
    for number, row in enumerate(found, 1):
        assert f"{number}. {row['cause']}: " in words
        assert row["evidence"] in words
        assert row["try"] in words


HOSTILE = {
    "huge": {
        "In msg nelems": 10**30,
        "Out msg nelems": 2**61,
        "Group size": 10**25,
        "Process Group Ranks": f"[{10**30}]",
    },
    "largest": {
        "In msg nelems": 2**38 - 1,
        "Out msg nelems": 2**38 - 1,
        "Group size": 2**20 - 1,
        "dtype": "ComplexDouble",
    },
    "negative": {"In msg nelems": -5, "Out msg nelems": -1, "Group size": 0, "Process Group Ranks": "[-1]"},
    "types": {"In msg nelems": "x", "Group size": {}, "Process Group Name": 5, "Collective name": [7], "dtype": None},
    "texts": {"Process Group Name": "\x1b]0;x\x07[bold]", "Process Group Description": "=1+1\x1b[2J", "dtype": "=cmd"},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
def test_a_trace_with_any_fields_is_diagnosed(tmp_path: Path, changes: dict[str, Any]) -> None:
    content = json.loads(gzip.decompress(FSDP[0].read_bytes()))
    for event in content["traceEvents"]:
        if "Collective name" in event.get("args", {}):
            event["args"] |= changes
    trace = tmp_path / "trace_rank0.json"
    trace.write_text(json.dumps(content))
    for by in Rows:
        for form in ("table", "json", "csv", "parquet"):
            process = analyze("diagnose", trace, "--by", by, "--format", form)
            assert process.returncode == 0
            assert "\x1b" not in process.stderr + process.stdout * (form != "parquet")
