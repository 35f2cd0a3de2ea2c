import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlap_sweep.errors import UserError
from overlap_sweep.report.iterations import typical_iteration
from overlap_sweep.trace import MOST_RANKS
from overlap_sweep.trace.columns import Trace
from overlap_sweep.trace.files import read_trace_file
from overlap_sweep.trace.kineto import read_trace
from tests.trace.conftest import analyse_trace


def kernel(**changes: object) -> dict[str, object]:
    return {"ph": "X", "cat": "kernel", "name": "k", "ts": 1.0, "dur": 2.0, "pid": 0, "tid": 7, **changes}


def written(ns: int, how: str) -> str:
    """Nanoseconds as JSON's microseconds, or no number at all."""
    if how == "null":
        return how
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
        st.tuples(since_1970 | since_boot, st.integers(-5000, 10**12), spelling, spelling | st.just("null")),
        min_size=1,
        max_size=8,
    )
)
def test_any_time_is_exact_to_the_nanosecond(path: Path, times: list[tuple[int, int, str, str]]) -> None:
    events, expected = [], []
    for start, duration, how_start, how_duration in times:
        start -= start % 1000 if how_start == "whole" else 0
        duration -= duration % 1000 if how_duration == "whole" else 0
        # A damaged file may hold negative durations.
        lasts = 0 if how_duration == "null" else max(0, duration)
        spelled = f'"ts": {written(start, how_start)}, "dur": {written(duration, how_duration)}'
        events.append(f'{{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, {spelled}}}')
        expected.append([start, start + lasts])
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
        (b"Segmentation fault", "is not valid JSON"),
        (b"\x1f\x8b\x08\x00garbage that is no gzip", "is damaged"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (gzip.compress(b"[]", mtime=0)[:4], "is cut short"),
        (b'"a string"', "is JSON but not a profiler trace"),
        (b"{}", "is JSON but not a profiler trace"),
        (b'{"traceEvents": 3}', "is JSON but not a profiler trace"),
        (b'{"traceEvents": [3]}', "is JSON but not a profiler trace"),
        (b'{"traceEvents": []}', "has neither GPU kernels nor CPU operators"),
        (b"[]", "has neither GPU kernels nor CPU operators"),
        (b'[{"ph": "X", "cat": "kernel", "ts": "soon"}]', "is JSON but not a profiler trace (malformed number"),
        (b'[{"ph": "X", "cat": "kernel", "ts": "nan"}]', "is JSON but not a profiler trace (malformed number"),
        (b'[{"ph": "X", "cat": "kernel", "ts": NaN}]', "is JSON but not a profiler trace (malformed number"),
        (b'[{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 1, "dur": 9}]', "has no work"),
    ],
)
def test_bad_files_get_one_sentence_with_the_mend(path: Path, content: bytes, complaint: str) -> None:
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        analyse_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path} {complaint}")
    assert "; " in message
    assert message.endswith(".")
    assert "\n" not in message


def names(trace: Trace) -> list[str]:
    """Of the device events."""
    return [trace.labels[label][1] for label in trace.device.label]


def test_a_malformed_event_is_left_out_and_counted(path: Path) -> None:
    bad: list[Any] = [kernel(ts="soon"), kernel(ts=[1]), kernel(ts=1e300), 3, kernel(args={"correlation": "x"})]
    path.write_text(json.dumps([kernel(name="first"), *bad, kernel(name="last")]))
    trace = read_trace(path)
    assert names(trace) == ["first", "last"]
    (warning,) = trace.warnings
    assert warning.startswith(f"{path}: 5 malformed events were left out (")


def test_a_damaged_middle_ends_the_trace_there(path: Path) -> None:
    events = [json.dumps(kernel(name=f"k{number}")) for number in range(9)]
    events[6] = '{"ph": X}'
    path.write_text(f'{{"distributedInfo": {{"rank": 3}}, "traceEvents": [{", ".join(events)}]}}')
    trace = read_trace(path)
    assert (trace.rank, names(trace)) == (3, [f"k{number}" for number in range(6)])
    assert "is not valid JSON (JSON is malformed: invalid character)" in trace.warnings[0]


@pytest.mark.parametrize(
    ("written", "number"),
    [
        *((3, 3), ("3", 3), (0, 0), (MOST_RANKS - 1, MOST_RANKS - 1)),
        *((odd, None) for odd in (MOST_RANKS, 10**18, 2**70, "9" * 5000, -1, "²", "x", 1e9, 1e300, None, [0])),
    ],
)
def test_a_rank_that_there_cannot_be_is_none(path: Path, written: Any, number: int | None) -> None:
    path.write_text(
        json.dumps({"traceEvents": [kernel()], "distributedInfo": {"rank": written, "world_size": written}})
    )
    trace = read_trace(path)
    assert (trace.rank, trace.world_size) == (number, number)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_trace(tmp_path / "nowhere.json")
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(tmp_path)


odd_number = st.sampled_from([0, 3, -1, 2**70, 1.5, 1e300, 2.0**51 - 1, -(2**51) + 1, 2**50, float("nan"), "7", "x"])
number = st.none() | odd_number | st.integers(0, 50)
event_names = ["nvjet_x", "gloo:send", "aten::mm", "ncclDevKernel_X", "_Z9x", "f<", "\ud800", ""]
event_names += ["ProfilerStep#1", "ProfilerStep#", f"ProfilerStep#{2**64}", "cudaGraphLaunch"]
event_names += ["autograd::engine::evaluate_function: X", "Optimizer.step#X"]
argument_names = ["correlation", "Sequence number", "Fwd thread id"]
event = st.fixed_dictionaries(
    {},
    optional={
        "ph": st.sampled_from(["X", "X", "M", "B", None]),
        "cat": st.sampled_from(["kernel", "gpu_memcpy", "cuda_runtime", "cpu_op", "user_annotation", "Kernel", ""]),
        "name": st.sampled_from(event_names),
        "ts": number,
        "dur": number,
        "pid": number,
        "tid": number,
        "args": st.none() | st.fixed_dictionaries({}, optional=dict.fromkeys(argument_names, number)),
    },
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(event, max_size=12), cut=st.integers(0, 400) | st.none())
def test_fuzzed_traces_are_analysed_or_refused(path: Path, events: list[object], cut: int | None) -> None:
    path.write_bytes(json.dumps({"traceEvents": events}).encode()[:cut])
    found = read_trace_file(path, with_parts=True)
    assert bool(found.rows) == (found.problem is None)
    assert all(0 <= row.overlap_us <= row.gemm_us <= row.span_us for row in found.rows)
    assert all(0 <= part.alone_us <= part.busy_us <= part.total_us for part in found.parts)
    if found.rows:
        assert typical_iteration(path).spans
