"""Traces in the shapes that other versions, devices and tools write, with numbers worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.report.iterations import typical_iteration
from overlap_sweep.trace import PartRow, TraceRow
from overlap_sweep.trace.files import read_trace_file

Written = dict[str, Any]


def found(path: Path, events: list[Written] | Written) -> tuple[dict[tuple[int, str], TraceRow], list[PartRow]]:
    """Rows by iteration and phase, and parts, of a trace of which nothing may be lost."""
    path.write_text(json.dumps(events))
    of_trace = read_trace_file(path, with_parts=True)
    assert (of_trace.problem, of_trace.warnings) == (None, [])
    return {(row.iteration, row.phase): row for row in of_trace.rows}, of_trace.parts


def numbers(row: TraceRow) -> tuple[float, ...]:
    """Span, GEMM, communication, wait, overlap, exposed, idle."""
    times = (row.span_us, row.gemm_us, row.comm_us, row.wait_us)
    return (*times, row.overlap_us, row.exposed_comm_us, row.idle_us)


def libraries(parts: list[PartRow]) -> set[tuple[str, str]]:
    return {(part.kind, part.library) for part in parts if part.by == "class"}


def event(cat: str, name: str, start: float, dur: float, pid: Any, tid: Any, **args: Any) -> Written:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": dur, "args": args}


def on_stream(name: str, start: float, dur: float, stream: int, correlation: int, device: int = 0) -> Written:
    """A kernel as Kineto writes it since 2022."""
    args = {"External id": correlation, "queued": 0, "device": device, "context": 1, "stream": stream}
    args |= {"correlation": correlation, "registers per thread": 32, "grid": [1, 2, 3], "est. achieved occupancy %": 12}
    return event("kernel", name, start, dur, device, stream, **args)


def launched(name: str, start: float, correlation: int, thread: int = 1, cat: str = "cuda_runtime") -> Written:
    return event(cat, name, start, 1, 4242, thread, cbid=211, correlation=correlation)


def backward(start: float, dur: float, thread: int = 2) -> Written:
    name = "autograd::engine::evaluate_function: MmBackward0"
    return event("cpu_op", name, start, dur, 4242, thread, **{"Sequence number": 3, "Fwd thread id": 1})


def test_pytorch_before_1_12(path: Path) -> None:
    """Whole microseconds, words of their own for categories, threads and streams as text."""
    all_reduce = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"
    host: list[Written] = [
        event("Operator", "aten::mm", 100, 40, 31, "31", **{"Device": 31, "External id": 2, "Trace name": "PyTorch"}),
        event("Runtime", "cudaLaunchKernel", 110, 9, "31", "31", cbid=211, correlation="335"),
        event("Runtime", "cudaLaunchKernel", 130, 9, "31", "31", cbid=211, correlation=336),
        event("Operator", "autograd::engine::evaluate_function: MmBackward", 200, 90, 31, "78"),
        event("Runtime", "cudaLaunchKernel", 210, 9, "31", "78", cbid=211, correlation=337),
        event("Runtime", "cudaMemcpyAsync", 230, 9, "31", "78", cbid=41, correlation=338),
        event("Python", "train.py(7): step", 0, 900, "31", "31"),
        event("user_annotation", "[pytorch|profiler] something", 90, 300, 31, "31"),
    ]
    device: list[Written] = [
        event("Kernel", "volta_sgemm_128x64_nn", 1000, 60, 0, "stream 7", correlation=335, stream=7),
        event("Kernel", all_reduce, 1040, 50, 0, "stream 16", correlation=336, stream=16),
        event("Kernel", "volta_sgemm_128x32_nt", 1100, 30, 0, "stream 7", correlation=337, stream=7),
        event("Memcpy", "Memcpy DtoD (Device -> Device)", 1140, 10, 0, "stream 7", correlation=338, stream=7),
    ]
    rows, parts = found(path, {"schemaVersion": 1, "traceEvents": host + device})
    assert {which: numbers(row) for which, row in rows.items()} == {
        (0, "fwd"): (90.0, 60.0, 50.0, 0.0, 20.0, 30.0, 0.0),
        (0, "bwd"): (50.0, 30.0, 0.0, 0.0, 0.0, 0.0, 10.0),
        (0, "all"): (150.0, 90.0, 50.0, 0.0, 20.0, 30.0, 20.0),
    }
    assert libraries(parts) == {("gemm", "cublas"), ("comm", "nccl"), ("memory", "copy")}
    assert {part.name for part in parts if part.by == "stream"} == {"0 stream 7", "0 stream 16"}


def test_rocm(path: Path) -> None:
    """HIP's calls are filed under cuda_runtime; devices are numbered behind the processes' numbers in some versions."""
    events = [launched("hipExtModuleLaunchKernel", 10, 1), launched("hipLaunchKernel", 20, 2)]
    events += [backward(100, 100), launched("hipModuleLaunchKernel", 110, 3, thread=2)]
    events += [launched("hipMemcpyAsync", 120, 4, thread=2), launched("hipMemcpyWithStream", 130, 5, thread=2)]
    events += [
        on_stream("Cijk_Ailk_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1_SN", 1000.5, 100.25, 0, 1, 2),
        on_stream("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", 1050.5, 100.0, 3, 2, 2),
        on_stream("Cijk_Alik_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1_SE_1LDSB0", 1200.0, 50.0, 0, 3, 2),
        event("gpu_memcpy", "CopyDeviceToDevice", 1250.0, 10.0, 2, 0, correlation=4),
        event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 1240.0, 30.0, 2, 4, correlation=5),
        event("gpu_memset", "Memset (Device)", 1100.0, 1.0, 2, 0, correlation=77),
    ]
    rows, parts = found(path, {"traceEvents": events, "roctracer_version": 4.1})
    # The Memset, of which no launch is known, is with the kernel before it on its stream.
    assert {which: numbers(row) for which, row in rows.items()} == {
        (0, "fwd"): (150.0, 100.25, 100.0, 0.0, 50.25, 49.75, 0.0),
        (0, "bwd"): (70.0, 50.0, 30.0, 0.0, 10.0, 20.0, 0.0),
        (0, "all"): (269.5, 150.25, 130.0, 0.0, 60.25, 69.75, 49.5),
    }
    assert libraries(parts) == {
        ("gemm", "hipblaslt"),
        ("gemm", "tensile"),
        ("comm", "rccl"),
        ("comm", "peer_copy"),
        ("memory", "copy"),
    }


def test_intels_devices(path: Path) -> None:
    events = [launched("urEnqueueKernelLaunch", 10, 1, cat="xpu_runtime"), backward(50, 50, thread=1)]
    events += [launched("zeCommandListAppendLaunchKernel", 60, 2, cat="xpu_driver")]
    events += [on_stream("gemm_kernel", 100.0, 10.0, 3, 1), on_stream("gemm_kernel", 120.0, 10.0, 3, 2)]
    rows, _ = found(path, {"traceEvents": events})
    counts = {phase: (row.num_gemm_events, row.span_us) for (_, phase), row in rows.items()}
    assert counts == {"fwd": (1, 10.0), "bwd": (1, 10.0), "all": (2, 30.0)}


def core() -> list[Written]:
    """A step: GEMM 1000-1100 and all-gather 1050-1150 forward, GEMM 1200-1230 backward."""
    return [
        launched("cudaLaunchKernel", 10, 1),
        launched("cudaLaunchKernel", 20, 2),
        backward(100, 50),
        launched("cudaLaunchKernel", 110, 3, thread=2),
        on_stream("nvjet_hsh_64x8", 1000.0, 100.0, 7, 1),
        on_stream("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1050.0, 100.0, 20, 2),
        on_stream("nvjet_hsh_128x8", 1200.0, 30.0, 7, 3),
    ]


OTHERS: dict[str, list[Written]] = {
    "ranges on the device": [
        event("gpu_user_annotation", "nccl:all_gather", 1050.0, 100.0, 0, 20, correlation=2),
        event("gpu_user_annotation", "ProfilerStep#3", 900.0, 900.0, 0, 7),
        event("gpu_user_annotation", "Optimizer.step#AdamW.step", 900.0, 900.0, 0, 7),
    ],
    "stacks": [
        event("python_function", "torch/nn/modules/linear.py(130): forward", 5, 60, 4242, 1, **{"Python id": 1}),
        event("python_function", "<built-in method run_backward>", 90, 80, 4242, 1, **{"Python parent id": 1}),
    ],
    "the profiler's own cost": [
        event("overhead", "Activity Buffer Request", 1000, 500, -1, 0),
        event("overhead", "Instrumentation", 900, 5, -1, 0),
        event("Trace", "PyTorch Profiler (0)", 0, 5000, "Spans", "PyTorch Profiler"),
    ],
    "synchronisation": [
        event("cuda_sync", "Stream Wait Event", 1000, 0, 0, 7, correlation=1, wait_on_stream=20),
        event("cuda_sync", "Context Sync", 1000, 400, 0, -1, correlation=9),
        event("cuda_runtime", "cudaDeviceSynchronize", 500, 900, 4242, 1, correlation=9),
        event("cuda_runtime", "cudaEventRecord", 12, 1, 4242, 1, correlation=0),
    ],
    "counters": [
        {"ph": "C", "name": "GPU 0 Utilization", "pid": 0, "ts": 1000, "args": {"GPU Utilization": 100}},
        {"ph": "C", "cat": "kernel", "name": "nvjet_hsh", "pid": 0, "tid": 7, "ts": 1000, "args": {"v": 1.5}},
    ],
    "begins and ends": [
        {"ph": "B", "cat": "kernel", "name": "nvjet_hsh", "pid": 0, "tid": 7, "ts": 1},
        {"ph": "E", "cat": "kernel", "name": "nvjet_hsh", "pid": 0, "tid": 7, "ts": 5000},
        {"ph": "b", "cat": "cpu_op", "id": 1, "name": "async", "pid": 1, "tid": 7, "ts": 1},
        {"ph": "E", "ts": 5000},
    ],
    "memory and instants": [
        {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 4242, "tid": 1, "ts": 11}
        | {"args": {"Total Reserved": 0, "Bytes": -512, "Addr": 140_000_000_000_000}},
        {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": 3000},
    ],
    "gloo beside a device": [
        event("user_annotation", "gloo:all_reduce", 0, 9000, 4242, 9),
        event("cpu_op", "aten::mm", 0, 9, 1, 1),
    ],
    "names and colours": [
        {"name": "process_labels", "ph": "M", "ts": 1, "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        {"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": 7, "args": {"sort_index": 7}},
        {"cname": "good", "ph": "X", "name": "a range of another tool", "pid": 5, "tid": 5, "ts": 1, "dur": 9000},
        {"ph": "X", "cat": "", "name": "of no category", "pid": 5, "tid": 5, "ts": 1, "dur": 9000},
        {"ph": "X", "cat": "nvtx,kernel", "name": "nvtx range", "pid": 5, "tid": 5, "ts": 1, "dur": 9000},
    ],
    "flows": [
        {"ph": "s", "cat": "ac2g", "id": 1, "name": "ac2g", "pid": 4242, "tid": 1, "ts": 1000},
        {"ph": "f", "cat": "ac2g", "id": 1, "name": "ac2g", "pid": 0, "tid": 7, "ts": 1000, "bp": "e"},
        {"ph": "s", "cat": "fwdbwd", "id": 1, "name": "fwdbwd", "ts": 1},
    ],
}


@pytest.mark.parametrize("others", [*OTHERS, "all of them"])
@pytest.mark.parametrize("reverse", [False, True])
def test_what_other_tools_and_settings_add_changes_nothing_in_any_order(path: Path, others: str, reverse: bool) -> None:
    added = OTHERS.get(others) or [event for of_kind in OTHERS.values() for event in of_kind]
    events = (added + core())[:: -1 if reverse else 1]
    rows, parts = found(path, {"traceEvents": events})
    assert {which: numbers(row) for which, row in rows.items()} == {
        (0, "fwd"): (150.0, 100.0, 100.0, 0.0, 50.0, 50.0, 0.0),
        (0, "bwd"): (30.0, 30.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        (0, "all"): (230.0, 130.0, 100.0, 0.0, 50.0, 50.0, 50.0),
    }
    assert [part.num_events for part in parts if part.by == "stream" and part.phase == "all"] == [2, 1]
    assert len(typical_iteration(path).spans) == 3


def test_two_devices_in_one_trace(path: Path) -> None:
    """Streams of the same number on two devices are two streams."""
    events = [launched("cudaLaunchKernel", 10, 1), launched("cudaLaunchKernel", 20, 2)]
    events += [on_stream("nvjet_a", 1000.0, 100.0, 7, 1, device=0), on_stream("nvjet_a", 1050.0, 100.0, 7, 2, device=1)]
    rows, parts = found(path, {"traceEvents": events})
    assert (rows[0, "fwd"].gemm_us, rows[0, "fwd"].num_gemm_events) == (150.0, 2)
    streams = [part for part in parts if part.by == "stream" and part.phase == "fwd"]
    assert [(part.name, part.busy_us, part.alone_us) for part in streams] == [
        ("0 7", 100.0, 50.0),
        ("1 7", 100.0, 50.0),
    ]
