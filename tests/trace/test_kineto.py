from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlap_sweep.errors import UserError
from overlap_sweep.trace.kineto import read_trace
from overlap_sweep.trace.overlap import analyse_trace


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
    ],
)
def test_times(tmp_path: Path, ts: object, dur: object, start_ns: int, end_ns: int) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [kernel(ts=ts, dur=dur)]}))
    device = read_trace(path).device
    assert (device.start_ns[0], device.end_ns[0]) == (start_ns, end_ns)


def test_a_bare_list_in_the_words_of_old_pytorch(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [
        {"ph": "X", "cat": "Operator", "name": "aten::mm", "pid": 9, "tid": "9", "ts": 1, "dur": 5},
        {"ph": "X", "cat": "Runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9, "ts": 2, "dur": 1}
        | {"args": {"correlation": "33", "external id": 1}},
        {"ph": "X", "cat": "Kernel", "name": "volta_sgemm_128x64_nn", "pid": 0, "tid": "stream 7", "ts": 9, "dur": 4}
        | {"args": {"correlation": 33, "stream": 7}},
        {"ph": "X", "cat": "Memcpy", "name": "Memcpy DtoH (Device -> Pageable)", "pid": 0, "tid": "stream 7"}
        | {"ts": 20, "dur": 1, "args": None},
        {"ph": "f", "cat": "ac2g", "id": 1, "name": "ac2g", "pid": 0, "tid": "stream 7", "ts": 9, "bp": "e"},
        {"name": "PyTorch Profiler", "ph": "i", "s": "g", "pid": "Traces", "tid": "Trace", "ts": 30},
    ]
    path.write_text(json.dumps(events))
    trace = read_trace(path)
    assert (trace.rank, trace.world_size) == (None, None)
    assert len(trace.device) == 2
    assert trace.host.lane[0] == trace.launches.lane[0]
    row = analyse_trace(path)[0]
    assert (row.rank, row.num_gemm_events, row.gemm_busy_us, row.span_us) == (None, 1, 4.0, 12.0)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"{", "is cut short"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1', "is cut short"),
        (b"Segmentation fault", "is no valid JSON"),
        (b"\x1f\x8b\x08\x00garbage that is no gzip", "cannot be read"),
        (b'"a string"', "is JSON but no profiler trace"),
        (b"{}", "is JSON but no profiler trace"),
        (b'{"traceEvents": 3}', "is JSON but no profiler trace"),
        (b'{"traceEvents": [3]}', "is JSON but no profiler trace"),
        (b'{"traceEvents": [{"ph": "X", "ts": [1]}]}', "is JSON but no profiler trace"),
        (b'{"traceEvents": []}', "holds neither GPU kernels nor CPU operators"),
        (b"[]", "holds neither GPU kernels nor CPU operators"),
        (b'{"traceEvents": [{"ph": "M", "name": "process_name"}]}', "holds neither GPU kernels nor CPU operators"),
        (b'[{"ph": "X", "cat": "kernel", "ts": "soon"}]', "holds a malformed number"),
        (b'[{"ph": "X", "cat": "kernel", "ts": 1e300}]', "holds a malformed number"),
        (b'[{"ph": "X", "cat": "kernel", "ts": "nan"}]', "holds a malformed number"),
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


def test_truncated_gzip(tmp_path: Path, gpu_trace: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gpu_trace.read_bytes()[:20000])
    with pytest.raises(UserError, match="is cut short"):
        read_trace(path)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_trace(tmp_path / "nowhere.json")
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(tmp_path)


number = st.none() | st.sampled_from([0, 3, -1, 2**70, 1.5, 1e300, float("nan"), "7", "x"]) | st.integers(0, 50)
event = st.fixed_dictionaries(
    {},
    optional={
        "ph": st.sampled_from(["X", "M", "B", None]),
        "cat": st.sampled_from(["kernel", "gpu_memcpy", "cuda_runtime", "cpu_op", "user_annotation", "Runtime", ""]),
        "name": st.sampled_from(
            ["nvjet_x", "gloo:send", "ProfilerStep#1", "ProfilerStep#", "aten::mm", "_Z9x", "f<", ""]
        ),
        "ts": number,
        "dur": number,
        "pid": number,
        "tid": number,
        "args": st.none() | st.fixed_dictionaries({}, optional={"correlation": number}),
    },
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(event, max_size=12), cut=st.integers(0, 400) | st.none())
def test_fuzzed_traces_are_analysed_or_refused(tmp_path: Path, events: list[object], cut: int | None) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(json.dumps({"traceEvents": events}).encode()[:cut])
    try:
        rows = analyse_trace(path)
    except UserError:
        return
    assert all(0 <= row.overlap_us <= row.gemm_busy_us <= row.span_us for row in rows)
