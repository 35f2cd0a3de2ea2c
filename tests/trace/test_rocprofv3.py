"""Files of rocprofv3, made by hand after the "JSON output schema" of ROCprofiler-SDK's documentation: none is of a
GPU."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.diagnosis.runs import diagnose
from overlap_sweep.errors import UserError
from overlap_sweep.trace import TraceRow
from overlap_sweep.trace.disk import find_traces
from overlap_sweep.trace.files import read_trace_file
from overlap_sweep.trace.kineto import read_trace

CPU, GPU, OTHER_GPU = 111, 222, 333
GEMM, RCCL, NORM = 7, 8, 9
NAMES = {
    GEMM: "Cijk_Ailk_Bljk_BBS_BH_MT256x256x64_UserArgs.kd",
    RCCL: "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>) [clone .kd]",
    NORM: "void at::native::vectorized_layer_norm_kernel<float>(int)",
}


def kernel(name: int, start: int, end: int, queue: int = 1, **changed: Any) -> dict[str, Any]:
    """A record of `kernel_dispatch`; times are nanoseconds."""
    return {
        **{"size": 136, "kind": 11, "operation": 1, "thread_id": 4242},
        "correlation_id": {"internal": start, "external": 0},
        **{"start_timestamp": start, "end_timestamp": end},
        "dispatch_info": {
            **{"size": 64, "agent_id": {"handle": GPU}, "queue_id": {"handle": queue}, "kernel_id": name},
            **{"dispatch_id": start, "private_segment_size": 0, "group_segment_size": 65536},
            **{"workgroup_size": {"x": 256, "y": 1, "z": 1}, "grid_size": {"x": 8192, "y": 1, "z": 1}},
        },
        **changed,
    }


def copy(source: int, target: int, start: int, end: int) -> dict[str, Any]:
    return {
        **{"size": 88, "kind": 12, "operation": 2, "correlation_id": {"internal": start, "external": 0}},
        **{"start_timestamp": start, "end_timestamp": end, "thread_id": 4242, "bytes": 1 << 20},
        **{"dst_agent_id": {"handle": target}, "src_agent_id": {"handle": source}},
    }


def process(kernels: list[Any], copies: list[Any]) -> dict[str, Any]:
    symbols = [
        {"kernel_id": number, "kernel_name": name, "demangled_kernel_name": "" if name.endswith(".kd") else name}
        for number, name in NAMES.items()
    ]
    return {
        "metadata": {"pid": 4242, "init_time": 0, "fini_time": 10**9},
        "agents": [{"size": 256, "id": {"handle": CPU}, "type": 1}]
        + [{"size": 256, "id": {"handle": handle}, "type": 2} for handle in (GPU, OTHER_GPU)],
        "strings": {"buffer_records": [{"kind": "NONE", "operations": []}], "marker_api": []},
        "kernel_symbols": symbols,
        "callback_records": {"counter_collection": []},
        "buffer_records": {"kernel_dispatch": kernels, "hip_api": [{"size": 1}], "memory_copy": copies},
    }


USUAL = process(
    [
        kernel(GEMM, 1_000_000, 1_080_000),
        kernel(RCCL, 1_050_000, 1_100_000, queue=2),
        kernel(NORM, 1_090_000, 1_095_000),
        kernel(GEMM, 1_100_000, 1_120_000, stream_id={"handle": 5}),
    ],
    [copy(GPU, OTHER_GPU, 1_120_000, 1_130_000), copy(CPU, GPU, 1_130_000, 1_140_000)],
)


def written(path: Path, *processes: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"rocprofiler-sdk-tool": processes}, indent=0))
    return path


def only_row(path: Path) -> TraceRow:
    file = read_trace_file(path, with_parts=True)
    assert not file.problem
    (row,) = file.rows
    return row


def test_kernels_and_copies_are_classified_and_measured(tmp_path: Path) -> None:
    path = written(tmp_path / "4242_results.json", USUAL)
    row = only_row(path)
    assert (row.phase, row.iteration, row.rank) == ("all", 0, None)
    assert (row.span_us, row.gemm_us, row.comm_us, row.overlap_us) == (140.0, 100.0, 60.0, 30.0)
    # The norm hides 5 us of it; a copy within a rank is neither.
    assert row.exposed_comm_us == 60.0 - 30.0 - 5.0
    kernels = {
        part.name: (part.kind, part.library) for part in read_trace_file(path, True).parts if part.by == "kernel"
    }
    assert kernels["Cijk_Ailk_Bljk_BBS_BH_MT256x256x64_UserArgs"] == ("gemm", "hipblaslt")
    assert kernels["ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"] == ("comm", "rccl")
    assert kernels["Memcpy PtoP"] == ("comm", "peer_copy")
    assert kernels["Memcpy HtoD"] == ("memory", "copy")
    assert set(read_trace(path).lanes) == {
        *(("GPU 0", name) for name in ("queue 0", "queue 1", "stream 5", "copies PtoP", "copies HtoD")),
    }


def test_a_diagnosis_says_what_is_unknown(tmp_path: Path) -> None:
    (diagnosis,) = diagnose([written(tmp_path / "4242_results.json", USUAL)])
    assert any("whether the host was too late is unknown" in note for note in diagnosis.notes)


def test_it_is_found_by_its_content_compressed_or_not(tmp_path: Path) -> None:
    path = written(tmp_path / "4242_results.json", process([], []), USUAL)
    packed = tmp_path / "5_results.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    (tmp_path / "summary.json").write_text("{}")
    assert find_traces(tmp_path) == [packed, path]
    # Earlier versions wrote no list of processes.
    single = tmp_path / "6_results.json"
    single.write_text(json.dumps({"rocprofiler-sdk-tool": USUAL}))
    assert len({only_row(one).overlap_ratio for one in (path, packed, single)}) == 1


def test_malformed_records_are_left_out_and_counted(tmp_path: Path) -> None:
    damaged = [kernel(GEMM, 1, 2, start_timestamp=-1), kernel(GEMM, 3, 4, correlation_id=7), kernel(GEMM, 5, 9)]
    file = read_trace_file(written(tmp_path / "a.json", process(damaged, [])), with_parts=False)
    assert file.rows[0].num_gemm_events == 1
    assert "2 malformed records were left out (Expected `int` >= 0" in file.warnings[0]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", json.dumps({"rocprofiler-sdk-tool": [process([], [])]}), "has neither kernels nor copies"),
        ("a.json", json.dumps({"rocprofiler-sdk-tool": [USUAL, USUAL]}), "has kernels of 2 processes"),
        ("a.json", json.dumps({"rocprofiler-sdk-tool": [USUAL]})[:-400], "is cut short; copy it again"),
        ("a.json", '{"rocprofiler-sdk-tool": 7}', "is JSON of rocprofv3 but not in a known form"),
        (
            "a.pftrace",
            "\x00",
            "is rocprofv3's Perfetto trace, which is not read; record with rocprofv3 --output-format",
        ),
    ],
)
def test_what_is_not_read_is_said_in_a_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        read_trace(path)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
