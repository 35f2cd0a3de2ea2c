"""`analyze.py trace`, beside what golden files hold of it, and `analyze.py timeline`, as Perfetto reads it."""

import gzip
import json
import re
import shutil
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from overlap_sweep.report.timeline import build, read_rank
from overlap_sweep.trace.disk import is_timeline
from overlap_sweep.trace.intervals import intersect, length, merge
from tests.analyze import analyze, rows
from tests.golden.made_report import TRACES, write_rank
from tests.made_sweeps import write_sweep
from tests.make_point import make_point, operator_config
from tests.report.conftest import Made
from tests.timeline import Timeline
from tests.trace.conftest import analyse_trace

DEFAULT = TRACES / "h200x4_llama3_70b_layer_te_default.json.gz"
CPU = TRACES / "cpu_gloo_tp2_rank0.json.gz"
BASE_NS = 1790857026000000000


def test_parts_of_the_given_phases_are_listed_longest_first_and_the_top_ones_of_each_iteration() -> None:
    arguments = ("trace", DEFAULT, "--by", "kernel", "--phase", "bwd", "--phase", "fwd")
    found, top = rows(*arguments), rows(*arguments, "--top", "2")
    assert {(row["by"], row["phase"]) for row in found} == {("kernel", "fwd"), ("kernel", "bwd")}
    for iteration, phase in {(row["iteration"], row["phase"]) for row in found}:
        parts, first = (
            [row for row in of if (row["iteration"], row["phase"]) == (iteration, phase)] for of in (found, top)
        )
        assert parts == sorted(parts, key=lambda row: -row["busy_us"])
        assert first == parts[:2]
    for row in rows(*arguments, "--median", "--top", "1"):
        same = [part["busy_us"] for part in found if (part["phase"], part["name"]) == (row["phase"], row["name"])]
        assert (row["iterations"], row["busy_us"]) == (len(same), pytest.approx(median(same)))


def test_each_trace_of_a_directory_is_read_once_and_nothing_else(tmp_path: Path, no_page: None) -> None:
    write_sweep(tmp_path)
    run = next(path.parent for path in sorted(tmp_path.glob("*/result.json")))
    shutil.copy(CPU, run / "trace_rank0.json.gz")
    (tmp_path / "elsewhere").mkdir()
    for name in ("worker0.1234.pt.trace.json", "named_anyhow.json"):
        (tmp_path / "elsewhere" / name).write_bytes(gzip.decompress(CPU.read_bytes()))
    (tmp_path / "elsewhere" / "points.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    analyze(tmp_path)
    arguments = ("trace", tmp_path, run / "trace_rank0.json.gz", "--phase", "all", "--median", "--format", "json")
    process = analyze(*arguments)
    assert [Path(row["file"]).relative_to(tmp_path).as_posix() for row in process.rows] == [
        *("elsewhere/named_anyhow.json", "elsewhere/worker0.1234.pt.trace.json", f"{run.name}/trace_rank0.json.gz")
    ]
    assert "and 2 more" in process.stderr


def test_the_row_of_a_run_has_the_slowest_rank_the_skew_and_what_is_missing(made: Made, tmp_path: Path) -> None:
    """Times of ranks 1 and 3 are stretched, rank 2 is missing."""
    directory = made("ranks") / "ranks"
    (row,) = rows("trace", directory, "--by", "rank", "--phase", "all")
    assert {name: row[name] for name in ("run", "num_ranks", "world_size", "missing", "slowest_rank")} == {
        **{"run": f"{directory}/trace_rank*.json", "num_ranks": 3, "world_size": 4, "missing": "2", "slowest_rank": 1}
    }
    assert row["skew_us"] == pytest.approx(row["slowest_us"] / 2)
    for rank in range(4):
        write_rank(tmp_path, rank)
    process = analyze("trace", tmp_path, "--by", "rank", "--format", "json", "--fail-if", "missing.notna()")
    assert {(row["num_ranks"], row["missing"]) for row in process.rows} == {(4, None)}


def test_the_file_name_gives_the_rank_where_the_trace_does_not(tmp_path: Path) -> None:
    content = json.loads(gzip.decompress(CPU.read_bytes()))
    del content["distributedInfo"]
    path = tmp_path / "trace_rank5.json"
    path.write_text(json.dumps(content))
    for options in ((), ("--median",), ("--by", "class"), ("--by", "class", "--median")):
        assert {row["rank"] for row in rows("trace", path, *options)} == {5}


# `analyze.py timeline`


Events = list[dict[str, Any]]


def events_of(content: bytes | str) -> Events:
    found: Events = json.loads(content)["traceEvents"]
    return found


def timeline_of(*paths: Path) -> Events:
    return events_of(build([read_rank(path) for path in paths]).content)


def interval(event: dict[str, Any]) -> tuple[int, int]:
    start_ns = round(event["ts"] * 1000)
    return start_ns, start_ns + round(event["dur"] * 1000)


def names(events: Events, kind: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == kind}


@pytest.mark.parametrize("trace", sorted(TRACES.glob("*.json.gz")), ids=lambda path: path.name)
def test_unions_of_each_class_are_those_of_the_trace_and_no_track_has_two_spans_at_once(trace: Path) -> None:
    spans = [event for event in timeline_of(trace) if event["ph"] == "X"]
    for row in analyse_trace(trace):
        # What is recomputed is part of the backward pass.
        phases = {"bwd": {"bwd", "recompute"}, "all": {"fwd", "bwd", "recompute", ""}}.get(row.phase, {row.phase})
        kernels = [e for e in spans if "kernel" in e.get("args", {}) and e["args"]["iteration"] == row.iteration]
        here = {
            kind: [interval(e) for e in kernels if e["cat"] == kind and e["args"]["phase"] in phases]
            for kind in ("gemm", "comm", "wait")
        }
        assert (len(here["gemm"]), len(here["comm"])) == (row.num_gemm_events, row.num_comm_events)
        gemm, comm, wait = (merge(np.array(intervals, np.int64).reshape(-1, 2)) for intervals in here.values())
        busy_us = tuple(length(union) / 1000 for union in (gemm, comm, wait, intersect(gemm, comm)))
        assert busy_us == (row.gemm_us, row.comm_us, row.wait_us, row.overlap_us)
    tracks = defaultdict(list)
    for event in spans:
        tracks[event["pid"], event["tid"]].append(interval(event))
    for on_track in tracks.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(on_track)))


def test_tracks_are_named_in_order_and_coloured_by_class() -> None:
    events = timeline_of(DEFAULT)
    assert names(events, "process_name") == {(1, 0): "rank 0 (device 0)"}
    tracks = names(events, "thread_name")
    titles = [name.partition(" (")[0] for _, name in sorted(tracks.items())]
    assert list(dict.fromkeys(titles)) == [
        *("iterations", "passes", "GEMM", "computation", "communication", "wait", "copies")
    ]
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert sorted(order, key=lambda tid: order[tid]) == sorted(order)
    colours = defaultdict(set)
    for event in events:
        if event["ph"] == "X":
            title = tracks[event["pid"], event["tid"]].partition(" (")[0]
            colours[title, event["cat"]].add(event.get("cname"))
    assert {title for title, _ in colours} == set(titles)
    assert all(len(of_class) == 1 for of_class in colours.values())
    assert len(colours) == len(set(titles))


def test_every_span_tells_what_it_is() -> None:
    kernels = [e for e in timeline_of(DEFAULT) if e["ph"] == "X" and "kernel" in e.get("args", {})]
    for event in kernels:
        assert event["args"].keys() == {"kernel", "library", "stream", "phase", "iteration"}
    pushed = next(e for e in kernels if "rr_rs_oop<4>" in e["args"]["kernel"])
    assert pushed["name"] == "userbuffers_fp16_sum_inplace_gpu_rr_rs_oop"
    assert (pushed["args"]["library"], pushed["cat"]) == ("userbuffers", "comm")


def test_iterations_passes_and_the_counter() -> None:
    events = timeline_of(DEFAULT)
    rows = {(row.iteration, row.phase): row for row in analyse_trace(DEFAULT)}
    drawn = [e for e in events if e.get("cat") in ("iteration", "pass")]
    bars = {(e["name"], e.get("args", {}).get("iteration")): e["dur"] for e in drawn}
    phases = {"forward": "fwd", "backward": "bwd"}
    assert len(drawn) == 6
    assert bars == {
        **{(f"iteration {number}", None): rows[number, "all"].span_us for number in (0, 1)},
        **{(name, number): rows[number, phase].span_us for number in (0, 1) for name, phase in phases.items()},
    }
    counted = [e for e in events if e["ph"] == "C"]
    on, off = counted[::2], counted[1::2]
    assert {e["args"]["both"] for e in on} == {1}
    assert {e["args"]["both"] for e in off} == {0}
    at_once_us = sum(round((b["ts"] - a["ts"]) * 1000) for a, b in zip(on, off, strict=True)) / 1000
    assert at_once_us == pytest.approx(sum(row.overlap_us for (_, phase), row in rows.items() if phase == "all"))


def write_hand_made(directory: Path, rank: int, base_ns: int, starts_us: dict[int, float]) -> Path:
    """A trace of one of two ranks, with an iteration of 900 us from each of the times on."""
    made = Timeline(rank)
    for number, start_us in starts_us.items():
        made.step(number, start_us, start_us + 900)
        made.kernel(start_us + 5, start_us + 105, launch=start_us + 1)
    return made.write(directory / f"{rank}.json", base_ns)


def iteration_starts(events: Events, pid: int) -> list[float]:
    return [e["ts"] for e in events if e.get("cat") == "iteration" and e["pid"] == pid]


def test_ranks_that_share_a_clock_keep_their_skew(tmp_path: Path) -> None:
    paths = [write_hand_made(tmp_path, rank, BASE_NS, {3: delay_us}) for rank, delay_us in ((1, 30.0), (0, 0.0))]
    timeline = build([read_rank(path) for path in paths])
    events = events_of(timeline.content)
    assert timeline.notes == []
    assert names(events, "process_name") == {(1, 0): "rank 0 (device 0)", (2, 0): "rank 1 (device 0)"}
    assert (iteration_starts(events, 1), iteration_starts(events, 2)) == ([0.0], [30.0])


@pytest.mark.parametrize("base_ns", [0, BASE_NS])
def test_ranks_of_different_clocks_are_aligned_at_their_first_common_iteration(tmp_path: Path, base_ns: int) -> None:
    starts_us = [{number: 1e6 * rank + 1000.0 * number for number in range(3 + rank, 6)} for rank in (0, 1)]
    paths = [write_hand_made(tmp_path, rank, base_ns, of_rank) for rank, of_rank in enumerate(starts_us)]
    timeline = build([read_rank(path) for path in paths])
    events = events_of(timeline.content)
    (note,) = timeline.notes
    assert note.startswith("The ranks have no common clock: aligned at the start of iteration 4")
    assert (iteration_starts(events, 1), iteration_starts(events, 2)) == ([0.0, 1000.0, 2000.0], [1000.0, 2000.0])


def test_spans_that_overlap_get_a_track_of_their_own(tmp_path: Path) -> None:
    made = Timeline(None, path=tmp_path / "t.json")
    made.launch(1, 1)
    for start, end in ((0.0, 10.0), (8.0, 20.0), (10.0, 12.0)):
        made.on_device("nvjet_a", start, end, 1)
    made.on_device("nvjet_b", 30.0, 40.0, 1, stream=9)
    tracks = names(timeline_of(made.write()), "thread_name")
    assert [name for name in tracks.values() if name.startswith("GEMM")] == ["GEMM", "GEMM (2)"]


def test_the_file_is_flat_json_with_three_decimals(tmp_path: Path) -> None:
    for name in ("t.json", "t.json.gz"):
        analyze("timeline", DEFAULT, "--output", tmp_path / name)
    text = (tmp_path / "t.json").read_text()
    assert set(re.findall(r'"(?:ts|dur)":(?!-?\d+\.\d{3}[,}])', text)) == set()
    assert all(event["ts"] >= 0 for event in events_of(text) if "ts" in event)
    assert gzip.decompress((tmp_path / "t.json.gz").read_bytes()).decode() == text


def test_one_iteration_starts_at_0(tmp_path: Path) -> None:
    analyze("timeline", DEFAULT, "--iteration", "1", "--output", tmp_path / "t.json")
    spans = [event for event in events_of((tmp_path / "t.json").read_text()) if event["ph"] == "X"]
    assert {event["args"]["iteration"] for event in spans if "kernel" in event.get("args", {})} == {1}
    assert min(event["ts"] for event in spans) == 0.0


def test_a_run_directory_has_the_timeline_of_its_own_traces_without_those_of_no_overlap(tmp_path: Path) -> None:
    traces = {"trace_rank0.json.gz": CPU, "trace_none_rank0.json.gz": DEFAULT}
    directory = make_point("operator", tmp_path, operator_config(2), name="one", traces=list(traces))
    for name, path in traces.items():
        shutil.copy(path, directory / name)
    output = tmp_path / "t.json"
    for given in (directory, tmp_path):
        process = analyze("timeline", given, "--output", output)
        assert (process.returncode, process.stderr) == (0, "warning: 1 of 2 ranks is missing: 1.\n")
    assert names(events_of(output.read_text()), "process_name") == {(1, 0): "rank 0 (CPU)"}


def test_a_timeline_is_replaced_and_another_file_only_by_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "timeline.json.gz"
    output.write_text("mine")
    for options, status in (((), 1), (("--force",), 0), ((), 0)):
        assert analyze("timeline", DEFAULT, *options).returncode == status
        assert is_timeline(output) == (status == 0)
    assert not is_timeline(DEFAULT)
