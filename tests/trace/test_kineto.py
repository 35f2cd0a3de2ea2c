from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlap_sweep.errors import UserError
from overlap_sweep.trace.findings import find
from overlap_sweep.trace.kineto import Trace, read_trace
from overlap_sweep.trace.overlap import analyse_trace
from overlap_sweep.trace.spans import typical_iteration


def kernel(**changes: object) -> dict[str, object]:
    return {"ph": "X", "cat": "kernel", "name": "k", "ts": 1.0, "dur": 2.0, "pid": 0, "tid": 7, **changes}


def test_reads_rank_and_events(gpu_trace: Path) -> None:
    trace = read_trace(gpu_trace)
    assert (trace.rank, trace.world_size) == (0, 4)
    assert len(trace.device) in (180, 328, 356)
    assert {category for category, _ in trace.labels} >= {"kernel", "gpu_memset", "cuda_runtime", "cpu_op"}
    assert not any(category == "gpu_user_annotation" for category, _ in trace.labels)


def test_gzip_and_plain_are_told_apart_by_content(tmp_path: Path, gpu_trace: Path) -> None:
    plain, misnamed = tmp_path / "plain.json", tmp_path / "gzipped.json"
    plain.write_bytes(gzip.decompress(gpu_trace.read_bytes()))
    misnamed.write_bytes(gpu_trace.read_bytes())
    expected = [row.span_us for row in analyse_trace(gpu_trace)]
    assert [row.span_us for row in analyse_trace(plain)] == expected
    assert [row.span_us for row in analyse_trace(misnamed)] == expected


@pytest.mark.parametrize(
    ("ts", "dur", "start_ns", "end_ns"),
    [
        (4348705713594.057, 21.549, 4348705713594057, 4348705713615606),
        ("12.5", "0.001", 12500, 12501),
        # Whole microseconds since 1970: not exact if multiplied as floats.
        (1690000000000001, 3, 1690000000000001000, 1690000000000004000),
        (5, None, 5000, 5000),
        (5, -1, 5000, 5000),
        (-2.5, 1, -2500, -1500),
        ("1707252829123456", "0.5", 1707252829123456000, 1707252829123456500),
        ("1707252829123456.789", 0.001, 1707252829123456789, 1707252829123456790),
        ("1707252829123456.789", None, 1707252829123456789, 1707252829123456789),
        ("-1707252829123456.789", 3, -1707252829123456789, -1707252829123453789),
    ],
)
def test_times(tmp_path: Path, ts: object, dur: object, start_ns: int, end_ns: int) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [kernel(ts=ts, dur=dur)]}))
    device = read_trace(path).device
    assert (device.start_ns[0], device.end_ns[0]) == (start_ns, end_ns)


def written(ns: int, how: str) -> str:
    """Nanoseconds as JSON's microseconds."""
    sign, (whole, thousandths) = "-" * (ns < 0), divmod(abs(ns), 1000)
    if how == "whole":
        return f"{sign}{whole}"
    decimal = f"{sign}{whole}.{thousandths:03}"
    return f'"{decimal}"' if how == "string" else decimal


since_1970 = st.integers(1_500_000_000_000_000_000, 2_200_000_000_000_000_000)
since_boot = st.integers(-(10**9), 8_000_000_000_000_000)
spelling = st.sampled_from(["decimal", "string", "whole"])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    times=st.lists(
        st.tuples(since_1970 | since_boot, st.integers(0, 10**12), spelling, spelling), min_size=1, max_size=8
    )
)
def test_any_time_is_exact_to_the_nanosecond(tmp_path: Path, times: list[tuple[int, int, str, str]]) -> None:
    path = tmp_path / "trace.json"
    events, expected = [], []
    for start, duration, how_start, how_duration in times:
        start -= start % 1000 if how_start == "whole" else 0
        duration -= duration % 1000 if how_duration == "whole" else 0
        spelled = f'"ts": {written(start, how_start)}, "dur": {written(duration, how_duration)}'
        events.append(f'{{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, {spelled}}}')
        expected.append([start, start + duration])
    path.write_text(f"[{', '.join(events)}]")
    trace = read_trace(path)
    assert trace.device.intervals.tolist() == expected
    assert trace.warnings == []


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"{", "is cut short"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1', "is cut short"),
        (b"Segmentation fault", "is no valid JSON"),
        (b"\x1f\x8b\x08\x00garbage that is no gzip", "is damaged"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (gzip.compress(b"[]", mtime=0)[:4], "is cut short"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'"a string"', "is JSON but no profiler trace"),
        (b"{}", "is JSON but no profiler trace"),
        (b'{"traceEvents": 3}', "is JSON but no profiler trace"),
        (b'{"traceEvents": [3]}', "is JSON but no profiler trace"),
        (b'{"traceEvents": [{"ph": "X", "ts": [1]}]}', "is JSON but no profiler trace"),
        (b'{"traceEvents": []}', "holds neither GPU kernels nor CPU operators"),
        (b"[]", "holds neither GPU kernels nor CPU operators"),
        (b'{"traceEvents": [{"ph": "M", "name": "process_name"}]}', "holds neither GPU kernels nor CPU operators"),
        (b'[{"ph": "X", "cat": "kernel", "ts": "soon"}]', "is JSON but no profiler trace (malformed number"),
        (b'[{"ph": "X", "cat": "kernel", "ts": 1e300}]', "is JSON but no profiler trace (malformed number"),
        (b'[{"ph": "X", "cat": "kernel", "ts": "nan"}]', "is JSON but no profiler trace (malformed number"),
        (b'[{"ph": "X", "cat": "kernel", "ts": NaN}]', "is JSON but no profiler trace (malformed number"),
        (b'[{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 1, "dur": 9}]', "holds no work"),
    ],
)
def test_bad_files_get_one_sentence_with_the_mend(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        analyse_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path} {complaint}")
    assert "; " in message
    assert message.endswith(".")
    assert "\n" not in message


def columns(trace: Trace) -> dict[str, list[Any]]:
    """All that was read of the device events."""
    names = [trace.labels[label][1] for label in trace.device.label]
    return {"name": names, "start": trace.device.start_ns.tolist(), "end": trace.device.end_ns.tolist()}


def test_a_truncated_gzip_gives_what_it_holds(tmp_path: Path, gpu_trace: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gpu_trace.read_bytes()[:40000])
    trace, whole = read_trace(path), read_trace(gpu_trace)
    (warning,) = trace.warnings
    assert warning.startswith(f"{path} is cut short: ")
    count = len(trace.device)
    assert count > 50
    assert columns(trace) == {name: column[:count] for name, column in columns(whole).items()}
    assert analyse_trace(path)
    assert whole.warnings == []


def test_a_malformed_event_is_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    bad: list[Any] = [kernel(ts="soon"), kernel(ts=[1]), kernel(ts=1e300), 3, kernel(args={"correlation": "x"})]
    path.write_text(json.dumps([kernel(name="first"), *bad, kernel(name="last")]))
    trace = read_trace(path)
    assert columns(trace)["name"] == ["first", "last"]
    (warning,) = trace.warnings
    assert warning.startswith(f"{path}: 5 malformed events were left out (")


def test_a_damaged_middle_ends_the_trace_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [json.dumps(kernel(name=f"k{number}")) for number in range(9)]
    events[6] = '{"ph": X}'
    path.write_text(f'{{"distributedInfo": {{"rank": 3}}, "traceEvents": [{", ".join(events)}]}}')
    trace = read_trace(path)
    assert (trace.rank, columns(trace)["name"]) == (3, [f"k{number}" for number in range(6)])
    assert "is no valid JSON (JSON is malformed: invalid character)" in trace.warnings[0]


@pytest.mark.parametrize("spelled", ["1", '"1"'])
def test_rank_and_base_time_after_the_events(tmp_path: Path, spelled: str) -> None:
    path = tmp_path / "trace.json"
    events = json.dumps([kernel()])
    after = f'"distributedInfo": {{"rank": {spelled}, "world_size": 2}}, "baseTimeNanoseconds": 1707252829123456789'
    path.write_text(f'{{"traceEvents": {events}, {after}}}')
    trace = read_trace(path)
    assert (trace.rank, trace.world_size, trace.base_time_ns) == (1, 2, 1707252829123456789)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_trace(tmp_path / "nowhere.json")
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(tmp_path)


odd_number = st.sampled_from([0, 3, -1, 2**70, 1.5, 1e300, 2.0**51 - 1, -(2**51) + 1, 2**50, float("nan"), "7", "x"])
number = st.none() | odd_number | st.integers(0, 50)
names = ["nvjet_x", "gloo:send", "aten::mm", "ncclDevKernel_X", "_Z9x", "f<", "\ud800", ""]
names += ["ProfilerStep#1", "ProfilerStep#", f"ProfilerStep#{2**64}", "cudaGraphLaunch"]
names += ["autograd::engine::evaluate_function: X", "Optimizer.step#X"]
argument_names = ["correlation", "Sequence number", "Fwd thread id"]
event = st.fixed_dictionaries(
    {},
    optional={
        "ph": st.sampled_from(["X", "X", "M", "B", None]),
        "cat": st.sampled_from(["kernel", "gpu_memcpy", "cuda_runtime", "cpu_op", "user_annotation", "Kernel", ""]),
        "name": st.sampled_from(names),
        "ts": number,
        "dur": number,
        "pid": number,
        "tid": number,
        "args": st.none() | st.fixed_dictionaries({}, optional=dict.fromkeys(argument_names, number)),
    },
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(event, max_size=12), cut=st.integers(0, 400) | st.none())
def test_fuzzed_traces_are_analysed_or_refused(tmp_path: Path, events: list[object], cut: int | None) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(json.dumps({"traceEvents": events}).encode()[:cut])
    found = find(path, with_parts=True)
    assert bool(found.rows) == (found.problem is None)
    assert all(0 <= row.overlap_us <= row.gemm_busy_us <= row.span_us for row in found.rows)
    assert all(0 <= part.alone_us <= part.busy_us <= part.total_us for part in found.parts)
    if found.rows:
        assert typical_iteration(path).spans
