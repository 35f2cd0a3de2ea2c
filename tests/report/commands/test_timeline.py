"""`analyze.py timeline`: what it writes is checked as Perfetto reads it, and against the overlaps of each trace."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overlap_sweep.intervals import intersect, length, merge
from overlap_sweep.report.timeline.ranks import read_rank
from overlap_sweep.report.timeline.trace_file import build
from overlap_sweep.trace.overlap import analyse_trace
from overlap_sweep.trace.search import find_traces, is_timeline
from tests.analysis.test_trace_comparison import write_trace
from tests.analyze import analyze
from tests.make_point import make_point, operator_config
from tests.trace.conftest import TRACES, HandMadeTrace

DEFAULT = TRACES / "h200x4_llama3_70b_layer_te_default.json.gz"
CPU = TRACES / "cpu_gloo_tp2_rank0.json.gz"

Events = list[dict[str, Any]]


def events_of(content: bytes) -> Events:
    found: Events = json.loads(content)["traceEvents"]
    return found


def written(path: Path) -> Events:
    return events_of(gzip.decompress(path.read_bytes()))


def timeline_of(*paths: Path) -> Events:
    return events_of(build([read_rank(path)[0] for path in paths]).content)


def interval(event: dict[str, Any]) -> tuple[int, int]:
    start_ns = round(event["ts"] * 1000)
    return start_ns, start_ns + round(event["dur"] * 1000)


def names(events: Events, kind: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == kind}


def union(events: Iterable[dict[str, Any]]) -> Any:
    return merge(np.array([interval(event) for event in events], np.int64).reshape(-1, 2))


@pytest.mark.parametrize("trace", sorted(TRACES.glob("*.json.gz")), ids=lambda path: path.name)
def test_unions_of_each_class_are_those_of_the_trace_and_no_track_has_two_spans_at_once(trace: Path) -> None:
    spans = [event for event in timeline_of(trace) if event["ph"] == "X"]
    for row in analyse_trace(trace):
        of_kernels = [e for e in spans if "kernel" in e.get("args", {})]
        here = [e for e in of_kernels if e["args"]["iteration"] == row.iteration]
        # What is recomputed is part of the backward pass.
        within = {"bwd": {"bwd", "recompute"}, "all": {"fwd", "bwd", "recompute", ""}}.get(row.phase, {row.phase})
        here = [e for e in here if e["args"]["phase"] in within]
        unions = {kind: union(event for event in here if event["cat"] == kind) for kind in ("gemm", "comm", "wait")}
        assert length(unions["gemm"]) / 1000 == row.gemm_busy_us
        assert length(unions["comm"]) / 1000 == row.comm_busy_us
        assert length(unions["wait"]) / 1000 == row.wait_us
        assert length(intersect(unions["gemm"], unions["comm"])) / 1000 == row.overlap_us
        assert sum(event["cat"] == "gemm" for event in here) == row.num_gemm_events
        assert sum(event["cat"] == "comm" for event in here) == row.num_comm_events
    tracks = defaultdict(list)
    for event in spans:
        tracks[event["pid"], event["tid"]].append(interval(event))
    for on_track in tracks.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(on_track)))


def test_tracks_are_named_in_order_and_coloured_by_class() -> None:
    events = timeline_of(DEFAULT)
    assert names(events, "process_name") == {(1, 0): "rank 0 (NVIDIA H200, device 0)"}
    tracks = names(events, "thread_name")
    titles = [name.partition(" · ")[0] for _, name in sorted(tracks.items())]
    assert list(dict.fromkeys(titles)) == [
        *("iterations", "passes", "GEMM", "computation", "communication", "wait", "copies"),
    ]
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert sorted(order, key=lambda tid: order[tid]) == sorted(order)
    colours = defaultdict(set)
    for event in events:
        if event["ph"] == "X":
            title = tracks[event["pid"], event["tid"]].partition(" · ")[0]
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
    iterations = [e for e in events if e.get("cat") == "iteration"]
    assert [(e["name"], e["dur"]) for e in iterations] == [
        (f"iteration {number}", rows[number, "all"].span_us) for number in (0, 1)
    ]
    passes = [e for e in events if e.get("cat") == "pass"]
    assert [(e["name"], e["args"]["iteration"], e["dur"]) for e in passes] == [
        (name, number, rows[number, phase].span_us)
        for number in (0, 1)
        for name, phase in (("forward", "fwd"), ("backward", "bwd"))
    ]
    counted = [e for e in events if e["ph"] == "C"]
    on, off = counted[::2], counted[1::2]
    assert {e["args"]["both"] for e in on} == {1}
    assert {e["args"]["both"] for e in off} == {0}
    at_once_us = sum(round((b["ts"] - a["ts"]) * 1000) for a, b in zip(on, off, strict=True)) / 1000
    assert at_once_us == pytest.approx(sum(row.overlap_us for (_, phase), row in rows.items() if phase == "all"))


def test_the_file_is_flat_json_with_three_decimals(tmp_path: Path) -> None:
    output = tmp_path / "t.json.gz"
    for _ in range(2):
        assert analyze("timeline", DEFAULT, "--output", output).returncode == 0
    text = gzip.decompress(output.read_bytes()).decode()
    assert set(re.findall(r'"(?:ts|dur)":(?!-?\d+\.\d{3}[,}])', text)) == set()
    assert all(event["ts"] >= 0 for event in written(output) if "ts" in event)
    analyze("timeline", DEFAULT, "--output", tmp_path / "t.json")
    assert (tmp_path / "t.json").read_text() == text


def test_one_iteration(tmp_path: Path) -> None:
    output = tmp_path / "t.json.gz"
    analyze("timeline", DEFAULT, "--iteration", "1", "--output", output)
    spans = [event for event in written(output) if event["ph"] == "X"]
    assert {event["args"]["iteration"] for event in spans if "kernel" in event.get("args", {})} == {1}
    assert min(event["ts"] for event in spans) == 0.0


def by_rank(events: Events, pid: int) -> list[float]:
    return [e["ts"] for e in events if e.get("cat") == "iteration" and e["pid"] == pid]


def test_ranks_that_share_a_clock_keep_their_skew(tmp_path: Path) -> None:
    for rank, delay_us in ((1, 30.0), (0, 0.0)):
        made = HandMadeTrace(tmp_path / f"{rank}.json")
        made.annotation("ProfilerStep#3", delay_us, delay_us + 900)
        made.launch(delay_us + 1, 1)
        made.kernel("nvjet_a", delay_us + 5, delay_us + 105, 1)
        made.write(distributedInfo={"rank": rank, "world_size": 2}, baseTimeNanoseconds=1790857026000000000)
    timeline = build([read_rank(tmp_path / f"{rank}.json")[0] for rank in (1, 0)])
    events = events_of(timeline.content)
    assert timeline.notes == []
    assert names(events, "process_name") == {(1, 0): "rank 0 (device 0)", (2, 0): "rank 1 (device 0)"}
    assert (by_rank(events, 1), by_rank(events, 2)) == ([0.0], [30.0])


@pytest.mark.parametrize("base_ns", [0, 1790857026000000000])
def test_ranks_of_different_clocks_are_aligned_at_their_first_common_iteration(tmp_path: Path, base_ns: int) -> None:
    for rank, first in ((0, 3), (1, 4)):
        made = HandMadeTrace(tmp_path / f"{rank}.json")
        for number in range(first, 6):
            at = 1e6 * rank + 1000.0 * number
            made.annotation(f"ProfilerStep#{number}", at, at + 900)
            made.launch(at + 1, number)
            made.kernel("nvjet_a", at + 5, at + 105, number)
        made.write(distributedInfo={"rank": rank, "world_size": 2}, baseTimeNanoseconds=base_ns)
    timeline = build([read_rank(tmp_path / f"{rank}.json")[0] for rank in (0, 1)])
    events = events_of(timeline.content)
    assert [note.partition(":")[0] for note in timeline.notes] == ["The ranks' clocks don't agree"]
    assert "aligned at the start of iteration 4" in timeline.notes[0]
    assert (by_rank(events, 1), by_rank(events, 2)) == ([0.0, 1000.0, 2000.0], [1000.0, 2000.0])


def test_spans_that_overlap_on_a_stream_get_a_track_of_their_own(tmp_path: Path) -> None:
    made = HandMadeTrace(tmp_path / "t.json")
    made.launch(1, 1)
    for start, end in ((0.0, 10.0), (8.0, 20.0), (10.0, 12.0)):
        made.kernel("nvjet_a", start, end, 1)
    made.kernel("nvjet_b", 30.0, 40.0, 1, stream=9)
    made.kernel("nvjet_b", 35.0, 45.0, 1, stream=10)
    tracks = names(timeline_of(made.write()), "thread_name")
    assert [name for name in tracks.values() if name.startswith("GEMM")] == [
        *("GEMM · streams 7, 9", "GEMM · streams 7, 9 (2)", "GEMM · stream 10"),
    ]


def test_a_run_directory_of_real_ranks(tmp_path: Path) -> None:
    point = operator_config(2, "fc1", "all", "bulk", num_sm=4)
    traces = ["trace_rank0.json.gz"]
    directory = make_point("operator", tmp_path, point, name="one", traces=traces)
    shutil.copy(CPU, directory / traces[0])
    output = tmp_path / "t.json.gz"
    for given in (directory, tmp_path):
        process = analyze("timeline", given, "--output", output)
        assert process.returncode == 0
        assert process.stderr == "warning: 1 of 2 ranks is missing: 1.\n"
    assert names(written(output), "process_name") == {(1, 0): "rank 0 (CPU)"}


def test_the_default_output_is_here_and_no_rank_of_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "traces"
    directory.mkdir()
    shutil.copy(DEFAULT, directory / "trace_rank0.json.gz")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert analyze("timeline", directory).returncode == 0
    made = tmp_path / "timeline.json.gz"
    assert is_timeline(made)
    shutil.copy(made, directory / "timeline.json.gz")
    assert find_traces(directory) == [directory / "trace_rank0.json.gz"]
    assert not is_timeline(DEFAULT)


def test_what_is_no_timeline_is_overwritten_by_force_alone(tmp_path: Path) -> None:
    output = tmp_path / "mine.json.gz"
    output.write_text("mine")
    assert analyze("timeline", DEFAULT, "--output", output).returncode == 1
    assert output.read_text() == "mine"
    assert analyze("timeline", DEFAULT, "--output", output, "--force").returncode == 0
    assert is_timeline(output)


def test_an_operators_own_traces_are_drawn_not_those_without_overlap_beside_them(tmp_path: Path) -> None:
    for name, length_us in (("rank0", 100.0), ("none_rank0", 200.0)):
        write_trace(tmp_path / f"trace_{name}.json", 0, [length_us], 50.0)
    process = analyze("timeline", tmp_path, "--output", tmp_path / "t.json.gz")
    assert (process.returncode, process.stderr) == (0, "warning: 1 of 2 ranks is missing: 1.\n")
    assert {e["dur"] for e in written(tmp_path / "t.json.gz") if e.get("cat") == "gemm"} == {100.0}
