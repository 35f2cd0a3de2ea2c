"""Exports of Nsight Systems, written with the documented tables."""

import lzma
import os
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from overlap_sweep.diagnosis.calls import Call
from overlap_sweep.diagnosis.facts import facts_of
from overlap_sweep.errors import UserError
from overlap_sweep.trace import TraceRow
from overlap_sweep.trace.columns import Trace
from overlap_sweep.trace.disk import find_traces
from overlap_sweep.trace.files import RunRanks, ranks_of, read_trace_file, read_trace_files
from overlap_sweep.trace.kineto import read_trace
from overlap_sweep.trace.nsight_files import paths_in
from tests.analyze import analyze
from tests.trace.nsight_export import DOMAIN, MACHINE, START_END, Export

EPOCH_NS = 1_790_000_000_000_000_000
GEMM, NORM = "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "void <unnamed>::layer_norm_kernel<float>(int, T1 *)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"
ALL_GATHER, SEND_RECV = "ncclDevKernel_AllGather_RING_LL(x)", "ncclDevKernel_SendRecv(x)"
PID, MAIN, AUTOGRAD = 501, 501, 777
COMM = 0xFEDCBA9876543210
"""More than a signed number of 64 bits."""


@pytest.fixture
def export() -> Export:
    return Export(EPOCH_NS)


def launched(
    export: Export, name: str, start: int, took: int = 1000, *, tid: int = MAIN, pid: int = PID, **values: int
) -> None:
    """A kernel that starts 500 ns after its launch has begun, which takes 100."""
    correlation = len(export.rows["CUPTI_ACTIVITY_KIND_KERNEL"]) + 1
    export.call("cudaLaunchKernel_v7000", start, start + 100, pid, tid, correlation)
    export.kernel(name, start + 500, start + 500 + took, pid, correlationId=correlation, **values)


def step(export: Export, text: str, start: int, end: int, pid: int = PID) -> None:
    export.range(text, start, end, pid, pid)
    launched(export, GEMM, start + 10, pid=pid, tid=pid)


def read(export: Export, tmp_path: Path, **written: list[str]) -> Trace:
    return read_trace(export.write(tmp_path / "report.sqlite", **written))


def device(trace: Trace) -> list[tuple[str, str, int, int]]:
    """Label, start and end of what ran on the GPU."""
    events = trace.device
    return [
        (*trace.labels[label], int(events.start_ns[i]), int(events.end_ns[i])) for i, label in enumerate(events.label)
    ]


def host(trace: Trace) -> set[tuple[str, str]]:
    return {trace.labels[label] for label in trace.host.label}


def rows(trace_file: Path) -> list[TraceRow]:
    found = read_trace_file(trace_file, with_parts=False)
    assert found.problem is None
    return found.rows


def test_kernels_copies_and_calls_are_those_of_kineto(export: Export, tmp_path: Path) -> None:
    launched(export, NORM, 1000, gridX=8, blockX=256, blockY=2)
    moved = {"deviceId": 0, "contextId": 1, "streamId": 9, "globalPid": MACHINE | PID << 24, "bytes": 4096}
    for number, kinds in enumerate([(1, 0, 2), (2, 2, 1), (10, 2, 2), (77, 99, 2)]):
        copied = dict(zip(("copyKind", "srcKind", "dstKind"), kinds, strict=True))
        start = 3000 + 10 * number
        export.add("CUPTI_ACTIVITY_KIND_MEMCPY", start=start, end=start + 5, correlationId=50, **copied, **moved)
    export.add("CUPTI_ACTIVITY_KIND_MEMSET", start=4000, end=4001, value=0, memKind=2, **moved)
    trace = read(export, tmp_path)
    assert device(trace) == [
        ("kernel", "void (anonymous namespace)::layer_norm_kernel<float>(int, T1 *)", 1500, 2500),
        ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 3000, 3005),
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 3010, 3015),
        ("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 3020, 3025),
        ("gpu_memcpy", "Memcpy Unknown (Unknown -> Device)", 3030, 3035),
        ("gpu_memset", "Memset (Device)", 4000, 4001),
    ]
    details = [trace.details[number] for number in trace.device.detail]
    assert details[0].shape == "[8, 1, 1] [256, 2, 1]"
    assert {detail.bytes for detail in details[1:]} == {4096}
    assert [trace.lanes[lane] for lane in trace.device.lane] == [("0", "7")] + [("0", "9")] * 5
    assert trace.labels[trace.launches.label[0]] == ("cuda_runtime", "cudaLaunchKernel")
    assert trace.lanes[trace.launches.lane[0]] == (str(PID), str(MAIN))
    assert trace.base_time_ns == EPOCH_NS


def test_what_older_versions_do_not_export_is_left_out(export: Export, tmp_path: Path) -> None:
    step(export, "step 1", 1000, 4000)
    export.nccl("AllReduce", 1000, 1500, PID, MAIN, COMM, 64)
    older = ["textId", "binaryData", "greenContextId", "graphNodeId", "globalPid", "globalTid", "utcEpochNs"]
    trace = read(export, tmp_path, without=older[:-3])
    assert [row.iteration for row in rows(tmp_path / "report.sqlite")] == [1]
    assert trace.base_time_ns == EPOCH_NS
    # Before globalPid, exports had one process.
    export.rows["NVTX_EVENTS"].clear()
    trace = read(export, tmp_path, without=[*older[:-2], "utcEpochNs"])
    assert (len(trace.device), len(trace.launches), trace.base_time_ns) == (1, 1, 0)


def test_an_export_of_kernels_alone_is_one_iteration(export: Export, tmp_path: Path) -> None:
    export.kernel(GEMM, 1000, 2000, PID)
    export.kernel(ALL_REDUCE, 1500, 3000, PID, streamId=8)
    path = export.write(tmp_path / "report.sqlite")
    (row,) = rows(path)
    assert (row.iteration, row.phase, row.span_us, row.gemm_us, row.exposed_comm_us) == (0, "all", 2.0, 1.0, 1.0)
    (warning,) = read_trace(path).warnings
    assert "has no steps" in warning


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        (["ProfilerStep#7, op_id = 3", "ProfilerStep#8, op_id = 99"], [7, 8]),
        (["iteration 3", "iteration 4"], [3, 4]),
        (["Step_3", "Step_5"], [3, 5]),
        (["train_step", "train_step"], [0, 1]),
        (["[pl][profile]run_training_batch", "[pl][profile]run_training_batch"], [0, 1]),
        (["global step: 12", "global step: 12"], [0, 1]),
        (["Optimizer.step#AdamW.step, op_id = 4", "stepwise"], [0]),
        (["layer 1", "iterations of Newton"], [0]),
    ],
)
def test_ranges_that_are_called_like_steps_are_iterations(
    export: Export, tmp_path: Path, texts: list[str], numbers: list[int]
) -> None:
    for number, text in enumerate(texts):
        step(export, text, 10_000 * number, 10_000 * number + 9000)
    assert [row.iteration for row in rows(export.write(tmp_path / "report.sqlite"))] == numbers


def test_of_ranges_within_each_other_those_that_last_longest_are_steps(export: Export, tmp_path: Path) -> None:
    for number in range(2):
        step(export, f"iteration {number + 5}", 10_000 * number, 10_000 * number + 9000)
        export.range("step", 10_000 * number + 100, 10_000 * number + 200, PID, MAIN)
    path = export.write(tmp_path / "report.sqlite")
    assert [row.iteration for row in rows(path)] == [5, 6]
    assert ("user_annotation", "step") in host(read_trace(path))


def test_ranges_may_start_and_end_on_different_threads(export: Export, tmp_path: Path) -> None:
    for number in range(2):
        start = 10_000 * number
        export.range(f"step {number}", start, start + 9000, PID, 9, eventType=START_END, endGlobalTid=8)
        launched(export, GEMM, start + 10)
    export.range("never ended", 5, None, PID, MAIN)
    export.range("NCCL", 1, None, PID, MAIN, eventType=DOMAIN)
    path = export.write(tmp_path / "report.sqlite")
    assert [row.iteration for row in rows(path)] == [0, 1]
    assert host(read_trace(path)) == {("user_annotation", f"ProfilerStep#{number}") for number in range(2)}


def test_operators_of_emit_nvtx_tell_the_passes(export: Export, tmp_path: Path) -> None:
    export.range("aten::mm, seq = 3, op_id = 10, sizes = [[2, 3], [3, 2]]", 1000, 1400, PID, MAIN)
    launched(export, GEMM, 1100)
    backward = "autograd::engine::evaluate_function: MmBackward0, seq = 3, op_id = 11"
    export.range(backward, 3000, 4000, PID, AUTOGRAD)
    export.range("MmBackward0, seq = 3, op_id = 12", 3010, 3900, PID, AUTOGRAD)
    launched(export, NORM, 3100, tid=AUTOGRAD)
    export.range("FSDP::pre_backward (layers.1), op_id = 14", 5000, 5100, PID, MAIN)
    trace = read(export, tmp_path)
    assert [(row.phase, row.num_gemm_events) for row in rows(tmp_path / "report.sqlite")] == [
        *(("fwd", 1), ("bwd", 0), ("all", 1))
    ]
    assert host(trace) == {
        ("cpu_op", "aten::mm"),
        ("cpu_op", "autograd::engine::evaluate_function: MmBackward0"),
        ("cpu_op", "MmBackward0"),
        ("user_annotation", "FSDP::pre_backward (layers.1)"),
    }
    assert [trace.name(trace.host, i) for i in np.flatnonzero(trace.forward)] == ["aten::mm"]
    assert trace.warnings == []


def test_without_operators_the_threads_of_autograd_are_backward(export: Export, tmp_path: Path) -> None:
    export.add("ThreadNames", nameId=export.string("pt_autograd_0"), globalTid=MACHINE | PID << 24 | AUTOGRAD)
    for start in (0, 10_000):
        launched(export, GEMM, start)
        launched(export, GEMM, start + 2000, tid=AUTOGRAD)
        launched(export, NORM, start + 4000)
    found = rows(export.write(tmp_path / "report.sqlite"))
    assert [(row.iteration, row.phase, row.span_us) for row in found] == [
        *((0, "fwd", 1.0), (0, "bwd", 1.0), (0, "all", 10.0)),
        *((1, "fwd", 1.0), (1, "bwd", 1.0), (1, "all", 5.0)),
    ]


def calls(trace: Trace) -> list[Call]:
    return facts_of(trace).calls


def test_nccl_says_what_its_kernels_move(export: Export, tmp_path: Path) -> None:
    export.nccl("CommInitRankConfig", 10, 20, PID, MAIN, COMM, 4, 2, 0)
    for number, (call, kernel) in enumerate(
        [
            ("AllReduce", ALL_REDUCE),
            ("AllGather", ALL_GATHER),
            ("ReduceScatter", "ncclDevKernel_ReduceScatter_Sum_f32_X"),
        ]
    ):
        start = 1000 + 2000 * number
        export.nccl(call, start - 50, start + 150, PID, MAIN, COMM, 4096)
        launched(export, kernel, start)
    launched(export, ALL_REDUCE, 9000)
    trace = read(export, tmp_path)
    found = [(call.collective, call.sent, call.received, call.dtype, call.group_size) for call in calls(trace)]
    assert found == [
        ("all_reduce", 2048, 2048, "bfloat16", 4),
        ("all_gather", 4096, 4 * 4096, "bytes", 4),
        ("reduce_scatter", 4096, 1024, "float32", 4),
        ("all_reduce", None, None, None, None),
    ]
    assert [call.buffer_bytes() for call in calls(trace)] == [4096, 4 * 4096, 4 * 4096, None]
    assert (trace.rank, trace.world_size) == (2, 4)
    assert trace.groups[f"{COMM:x}"].size == 4


def test_calls_of_a_group_are_one_kernel(export: Export, tmp_path: Path) -> None:
    export.range("nccl:all_to_all, op_id = 4", 900, 2000, PID, MAIN)
    export.nccl("GroupStart", 1000, 1010, PID, MAIN)
    for number, call in enumerate(("Send", "Recv", "Send", "Recv")):
        export.nccl(call, 1020 + 10 * number, 1025 + 10 * number, PID, MAIN, COMM, 100)
    export.nccl("GroupEnd", 1100, 1500, PID, MAIN)
    launched(export, SEND_RECV, 1200)
    export.nccl("GroupStart", 5000, 5010, PID, MAIN)
    export.nccl("Send", 5020, 5030, PID, MAIN, COMM, 100)
    export.nccl("Recv", 5040, 5050, PID, MAIN, COMM, 300)
    export.nccl("GroupEnd", 5100, 5500, PID, MAIN)
    launched(export, SEND_RECV, 5200)
    found = [(call.collective, call.sent, call.received, call.group) for call in calls(read(export, tmp_path))]
    assert found == [("all_to_all", 200, 200, f"{COMM:x}"), ("send_recv", 100, 300, f"{COMM:x}")]


def test_without_payloads_sizes_are_unknown_and_it_is_said(export: Export, tmp_path: Path) -> None:
    step(export, "step 1", 0, 9000)
    export.nccl("Broadcast", 1000, 1500, PID, MAIN)
    launched(export, "ncclDevKernel_Generic", 1100)
    trace = read(export, tmp_path)
    (call,) = calls(trace)
    assert (call.collective, call.sent, call.group, call.dtype) == ("broadcast", None, "", None)
    (warning,) = trace.warnings
    assert warning.endswith("has no sizes of collectives; export with nsys export --include-blobs=true.")


@pytest.mark.parametrize("blob", [b"", b"\0" * 31, b"\1" * 40])
def test_payloads_of_another_form_are_left_out(export: Export, tmp_path: Path, blob: bytes) -> None:
    export.range("ncclAllReduce", 1000, 1500, PID, MAIN, domainId=1, binaryData=blob)
    launched(export, ALL_REDUCE, 1100)
    (call,) = calls(read(export, tmp_path))
    assert (call.collective, call.sent) == ("all_reduce", None)


def test_cuda_graphs_that_were_recorded_as_a_whole_are_said(export: Export, tmp_path: Path) -> None:
    step(export, "step 1", 0, 9000)
    export.add(
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
        **{"start": 4000, "end": 6000, "deviceId": 0, "streamId": 7, "graphId": 3, "globalPid": MACHINE | PID << 24},
    )
    trace = read(export, tmp_path)
    assert ("kernel", "CUDA graph", 4000, 6000) in device(trace)
    (warning,) = trace.warnings
    assert "--cuda-graph-trace=node" in warning


def test_kernels_of_cuda_graphs_repeat_with_their_launches(export: Export, tmp_path: Path) -> None:
    for correlation in (1, 2, 3):
        start = 10_000 * correlation
        export.call("cudaGraphLaunch_v10000", start, start + 100, PID, MAIN, correlation)
        for number, name in enumerate((GEMM, NORM)):
            at = start + 1000 * number
            export.kernel(name, at, at + 900, PID, correlationId=correlation, graphNodeId=40 + number)
    assert [row.iteration for row in rows(export.write(tmp_path / "report.sqlite"))] == [0, 1, 2]


def two_ranks(export: Export, first_pid: int = PID) -> Export:
    for device_id in (0, 1):
        pid = first_pid + device_id
        for number in range(2):
            start = 10_000 * number
            export.range(f"step {number}", start, start + 9000, pid, pid)
            launched(export, GEMM, start + 10 + device_id, pid=pid, tid=pid, deviceId=device_id)
    return export


def run_of(paths: list[Path]) -> RunRanks:
    (run,) = ranks_of(read_trace_files(paths))
    return run


def test_a_file_has_a_path_for_each_process_and_gpu(export: Export, tmp_path: Path) -> None:
    path = two_ranks(export).write(tmp_path / "report.sqlite")
    found = paths_in(path)
    assert found == [path / "gpu0", path / "gpu1"]
    assert [read_trace(one).rank for one in found] == [0, 1]
    assert [read_trace(one).device.start_ns.tolist() for one in found] == [[510, 10_510], [511, 10_511]]
    run = run_of(found)
    assert (run.name, run.ranks, run.missing) == (str(path / "gpu*"), [0, 1], [])
    # What all ranks lack is said once.
    export.rows["NVTX_EVENTS"].clear()
    found = paths_in(export.write(tmp_path / "other.sqlite"))
    assert [len(read_trace(one).warnings) for one in found] == [1, 0]


def test_a_process_with_a_few_kernels_on_another_gpu_is_one_rank(export: Export, tmp_path: Path) -> None:
    for number in range(200):
        launched(export, GEMM, 10_000 * number, deviceId=3)
    launched(export, NORM, 5)
    path = export.write(tmp_path / "report.sqlite")
    assert paths_in(path) == [path]
    assert len(read_trace(path).device) == 200


def test_a_process_that_works_on_two_gpus_is_two_ranks(export: Export, tmp_path: Path) -> None:
    for number in range(4):
        launched(export, GEMM, 10_000 * number, deviceId=number % 2)
    assert len(paths_in(export.write(tmp_path / "report.sqlite"))) == 2


def test_files_of_several_nodes_are_one_run(tmp_path: Path) -> None:
    files = [two_ranks(Export(EPOCH_NS)).write(tmp_path / f"job_node{node}.sqlite") for node in range(2)]
    run = run_of([path for file in files for path in paths_in(file)])
    assert (run.name, run.ranks) == (str(tmp_path / "job_node*.sqlite" / "gpu*"), [0, 1, 2, 3])


def test_files_of_one_rank_each_are_one_run(tmp_path: Path) -> None:
    files = []
    for rank in range(2):
        export = Export(EPOCH_NS)
        step(export, "step 1", 0, 9000)
        files.append(export.write(tmp_path / f"report.rank{rank}.sqlite"))
    assert run_of(find_traces(tmp_path)).ranks == [0, 1]


@pytest.mark.parametrize(
    ("name", "variables", "ranks", "expected"),
    [
        ("report", ['RANK="3"', "WORLD_SIZE=8", 'SLURM_PROCID="0"'], 4, (3, 8)),
        ("report", ['SLURM_PROCID="5"', 'HOME="/root"'], 0, (5, None)),
        ("report", ['RANK="none"'], 4, (2, 4)),
        ("report_rank1", [], 4, (None, None)),
        ("report", [], 0, (None, None)),
    ],
)
def test_the_rank_of_a_process(
    export: Export, tmp_path: Path, name: str, variables: list[str], ranks: int, expected: tuple[int | None, int | None]
) -> None:
    """From the environment that nsys was started in, else the file's name, else NCCL, of which this is rank 2."""
    step(export, "step 1", 0, 9000)
    for variable in variables:
        export.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value=variable)
    if ranks:
        export.nccl("CommInitRank", 1, 2, PID, MAIN, COMM, ranks, 2, 0)
    trace = read_trace(export.write(tmp_path / f"{name}.sqlite"))
    assert (trace.rank, trace.world_size) == expected


def test_ranks_of_a_file_are_those_that_nccl_numbered(export: Export, tmp_path: Path) -> None:
    two_ranks(export)
    for place, rank in enumerate((6, 7)):
        export.nccl("CommInitRank", 1, 2, PID + place, PID + place, COMM, 8, rank, place)
        # Of tensor parallelism: smaller.
        export.nccl("CommSplit", 3, 4, PID + place, PID + place, COMM + 1, 2, place, place)
    found = [read_trace(path) for path in paths_in(export.write(tmp_path / "report.sqlite"))]
    assert [(trace.rank, trace.world_size) for trace in found] == [(6, 8), (7, 8)]


@pytest.mark.parametrize(("names", "expected"), [(["NVIDIA H200"] * 2, "NVIDIA H200"), (["A", "B"], ""), ([], "")])
def test_the_kind_of_gpu(export: Export, tmp_path: Path, names: list[str], expected: str) -> None:
    step(export, "step 1", 0, 9000)
    for number, name in enumerate(names):
        export.add("TARGET_INFO_GPU", id=number, name=name)
    assert read(export, tmp_path).device_name == expected


def test_times_that_count_from_1970_have_no_other_origin(export: Export, tmp_path: Path) -> None:
    step(export, "step 1", 0, 9000)
    export.add("META_DATA_EXPORT", name="EXPORT_PARAM_TIME_NORMALIZE", value="true")
    assert read(export, tmp_path).base_time_ns == 0


def test_traces_in_a_directory(export: Export, tmp_path: Path) -> None:
    """A report next to its export is not read twice, and other programs' databases are not read."""
    path = two_ranks(export).write(tmp_path / "report.sqlite")
    (tmp_path / "report.nsys-rep").write_bytes(b"")
    with sqlite3.connect(tmp_path / "study.sqlite") as database:
        database.execute("CREATE TABLE trials (id INTEGER)")
    database.close()
    assert find_traces(tmp_path) == [path / "gpu0", path / "gpu1"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda whole: b"", "is no SQLite file; export it again with nsys export --type sqlite."),
        (lambda whole: b"{}", "is no SQLite file"),
        (lambda whole: whole[: len(whole) // 2], "is damaged"),
    ],
)
def test_a_damaged_export(export: Export, tmp_path: Path, content: Callable[[bytes], bytes], said: str) -> None:
    path = two_ranks(export).write(tmp_path / "report.sqlite")
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(UserError, match=re.escape(said)):
        read_trace(path)


def test_names_that_are_no_text_and_times_that_are_no_numbers(export: Export, tmp_path: Path) -> None:
    step(export, "step 1", 0, 9000)
    path = export.write(tmp_path / "report.sqlite")

    def change(query: str) -> None:
        with sqlite3.connect(path) as database:
            database.execute(query)
        database.close()

    change("UPDATE NVTX_EVENTS SET text = CAST(x'737465702032ff' AS TEXT)")
    assert host(read_trace(path)) == {("user_annotation", "step 2\ufffd")}
    change("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'now'")
    with pytest.raises(UserError, match="is damaged"):
        read_trace(path)


def test_an_export_without_kernels(export: Export, tmp_path: Path) -> None:
    export.range("step 1", 0, 10, PID, MAIN)
    with pytest.raises(UserError, match="has no kernels; record with nsys profile --trace=cuda,nvtx"):
        read(export, tmp_path)


NSYS = """#!/bin/sh
echo "$@" >> "{log}"
{refuse}
while [ "$1" != --output ]; do shift; done
cp "{export}" "$2"
"""


@pytest.fixture
def nsys(export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a stand-in for nsys into PATH, which exports two ranks; returns the log of how it was called."""
    monkeypatch.setenv("OVERLAP_SWEEP_CACHE", str(tmp_path / "cache"))
    made = two_ranks(export).write(tmp_path / "exported.sqlite")

    def put(refuse: str) -> Path:
        log, program = tmp_path / "log", tmp_path / "bin" / "nsys"
        program.parent.mkdir()
        program.write_text(NSYS.format(log=log, export=made, refuse=refuse))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")
        return log

    return put


def test_a_report_is_exported_once(tmp_path: Path, nsys: Callable[[str], Path]) -> None:
    log, report = nsys(""), tmp_path / "job.nsys-rep"
    report.write_bytes(b"report")
    found = paths_in(report)
    assert found == [report / "gpu0", report / "gpu1"]
    assert [read_trace(path).rank for path in found] == [0, 1]
    (line,) = log.read_text().splitlines()
    assert re.fullmatch(rf"export --type sqlite --output \S+ --include-blobs=true {report}", line)


def test_versions_of_nsys_without_blobs_export_too(tmp_path: Path, nsys: Callable[[str], Path]) -> None:
    nsys('case "$*" in *--include-blobs*) echo "unrecognised option" >&2; exit 1;; esac')
    report = tmp_path / "job.nsys-rep"
    report.write_bytes(b"report")
    assert read_trace(report / "gpu1").rank == 1


def test_a_report_that_nsys_cannot_export(tmp_path: Path, nsys: Callable[[str], Path]) -> None:
    nsys('echo "progress" >&2; echo "The report is from a newer version." >&2; exit 1')
    report = tmp_path / "job.nsys-rep"
    report.write_bytes(b"report")
    with pytest.raises(
        UserError, match=r"cannot be read \(.*nsys does not export it: The report is from a newer version\.\); run"
    ):
        read_trace(report)


def test_a_report_without_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nsys: Callable[[str], Path]) -> None:
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    report = tmp_path / "job.nsys-rep"
    report.write_bytes(b"report")
    remedy = f"run `nsys export --type sqlite --include-blobs=true {report}`"
    assert remedy in analyze("trace", report).stderr
    assert report in find_traces(tmp_path)
    # It is not kept that there was none.
    monkeypatch.setenv("PATH", path)
    nsys("")
    assert len(analyze("trace", report, "--format", "json").rows) == 4


def test_commands_read_exports(export: Export, tmp_path: Path) -> None:
    path = two_ranks(export).write(tmp_path / "report.sqlite")
    ran = analyze("trace", path, "--by", "rank", "--format", "json")
    assert [(row["num_ranks"], row["slowest_rank"]) for row in ran.rows] == [(2, 0)]
    assert analyze("trace", path / "gpu1", "--format", "json").rows[0]["rank"] == 1
    assert "matched by rank: 0, 1" in analyze("compare", path, tmp_path).stdout
    timeline = analyze("timeline", path, "--output", tmp_path / "timeline.json")
    assert "2 ranks, 2 iterations" in timeline.stdout
    for missing in ("missing.sqlite", "missing.nsys-rep"):
        assert "cannot be read (No such file or directory)" in analyze("trace", tmp_path / missing).stderr
    assert "choose one of gpu0 to gpu1" in analyze("trace", path / "gpu7").stderr


REAL = Path(__file__).parent.parent / "data" / "nsight" / "h100x2_nsys_2026.2.sqlite.xz"


def test_a_real_export(tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    path.write_bytes(lzma.decompress(REAL.read_bytes()))
    with closing(sqlite3.connect(path)) as database:
        counts = "SELECT globalPid, count(*), sum(end - start) FROM CUPTI_ACTIVITY_KIND_KERNEL GROUP BY 1 ORDER BY 1"
        expected = [(count, took) for _, count, took in database.execute(counts)]
    found = [read_trace(one) for one in paths_in(path)]
    for trace, (count, took_ns) in zip(found, expected, strict=True):
        is_kernel = np.array([category == "kernel" for category, _ in trace.labels])[trace.device.label]
        assert (is_kernel.sum(), (trace.device.end_ns - trace.device.start_ns)[is_kernel].sum()) == (count, took_ns)
        assert {("cpu_op", "aten::addmm"), ("cpu_op", "c10d::alltoall_base_")} <= host(trace)
        assert trace.forward.any()
    assert [[call.collective for call in calls(trace)] for trace in found] == [["all_to_all"] * 5] * 2
    assert [row.phase for row in rows(path / "gpu0")] == ["fwd", "all"]


def test_steps_of_a_thread_that_launches_nothing_are_not_the_programs(export: Export, tmp_path: Path) -> None:
    export.range("batch 1", 0, 90_000, PID, 9)
    for number in range(2):
        step(export, f"step {number}", 10_000 * number, 10_000 * number + 9000)
    assert [row.iteration for row in rows(export.write(tmp_path / "report.sqlite"))] == [0, 1]
