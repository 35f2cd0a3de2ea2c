"""Where the host was while it started nothing."""

from pathlib import Path

import numpy as np
import pytest

from overlap_sweep.diagnosis.host import Pause, paused_ns
from overlap_sweep.trace.kineto import read_trace
from tests.timeline import Timeline, diagnosed


def paused() -> Timeline:
    """A host that launches two kernels, and between them pauses for 20 ms."""
    trace = Timeline()
    trace.operator("aten::mm", 0, 20)
    trace.kernel(50, 100, launch=10)
    trace.operator("aten::add", 20_020, 20_040)
    trace.kernel(20_050, 20_100, launch=20_030)
    return trace


LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


@pytest.mark.parametrize(
    ("around", "expected"),
    [
        ((), "between aten::mm and aten::add"),
        ((("train.py(3): main", 0, 30_000),), "in train.py(3): main"),
        ((("train.py(3): main", 0, 90_000),), "in train.py(3): main, between aten::mm and aten::add"),
        (
            (("train.py(9): augment", 20, 20_020), ("<built-in function sleep>", 22, 20_019)),
            "in sleep(), called by train.py(9): augment",
        ),
        (
            (
                ("data/load.py(4): batch", 20, 20_020),
                ("torch/serialization.py(99): load", 22, 20_019),
                ("pickle.py(7): load", 23, 20_018),
                ("<built-in method read of _io.BufferedReader object at 0x7f>", 24, 20_017),
            ),
            "in read(), called by data/load.py(4): batch",
        ),
        # Too short to say where 20 ms went.
        ((("train.py(9): augment", 20, 20_020), ("<built-in function print>", 22, 9_000)), "in train.py(9): augment"),
        # Annotations: of a program, of torch's loader, and others of torch, which name no function.
        ((("# running sparse arch", 20, 20_020),), "in # running sparse arch"),
        (((LOADER, 20, 90_000),), f"in {LOADER}"),
        ((("ProfilerStep#1", 0, 30_000),), "between aten::mm and aten::add"),
        ((("DistributedDataParallel.forward", 20, 20_020),), "between aten::mm and aten::add"),
        ((("FSDP::pre_forward", 20, 20_020),), "between aten::mm and aten::add"),
        ((("Optimizer.step#Adam.step", 20, 20_020),), "between aten::mm and aten::add"),
    ],
)
def test_where_the_host_was(tmp_path: Path, around: list[tuple[str, float, float]], expected: str) -> None:
    trace = paused()
    for name, start, end in around:
        add = trace.python if "): " in name or "<" in name else trace.annotation
        add(name, start, end)
    (pause,) = trace.facts(tmp_path).pauses
    assert (pause.place, pause.loads) == (expected, LOADER in expected)
    assert pause.end_ns - pause.start_ns == 20_000_000


@pytest.mark.parametrize("waits_us", [50, 5000])
def test_pauses_of_a_late_rank_are_listed_unless_the_straggler_is(tmp_path: Path, waits_us: float) -> None:
    ranks = [Timeline(rank) for rank in range(2)]
    for rank, made in enumerate(ranks):
        for start in (0, 30_000):
            made.step(start // 30_000, start - 600, start + 29_000)
            made.kernel(start, start + (500 if rank else 21_000 - waits_us), launch=start - 500)
            begins = start + (21_000 if rank else 300)
            made.collective("all_reduce", begins, start + 21_100, launch=begins - (10 if rank else 700))
            made.kernel(start + 21_100, start + 29_500, launch=begins - (5 if rank else 690))
    found = diagnosed(tmp_path, *ranks).findings
    late = {finding.cause: finding.rank for finding in found}
    assert late.get("straggler") == (1 if waits_us == 5000 else None)
    assert late.get("host_bound") == (None if waits_us == 5000 else 1)


def test_waiting_for_the_device_is_no_pause(tmp_path: Path) -> None:
    trace = paused()
    trace.wait(21, 20_015)
    assert not trace.facts(tmp_path).pauses


def test_a_thread_that_launches_ends_the_pause_of_another(tmp_path: Path) -> None:
    trace = paused()
    for start in range(500, 20_000, 500):
        trace.kernel(start, start + 10, launch=start - 10, thread=2)
    assert not trace.facts(tmp_path).pauses


def test_a_pause_after_a_wait_is_not_the_waits(tmp_path: Path) -> None:
    """Many short gaps are another finding than one long pause, and name no place."""
    trace = Timeline()
    for i in range(20):
        trace.kernel(300 * i + 15, 300 * i + 115, launch=300 * i)
    trace.wait(5720, 5820, "cudaDeviceSynchronize")
    trace.operator("aten::add", 25_820, 25_900)
    trace.kernel(25_850, 25_900, launch=25_835)
    findings = {(each.cause, each.where): each.lost_us for each in diagnosed(tmp_path, trace).findings}
    assert findings["host_bound", "between cudaDeviceSynchronize and aten::add"] == pytest.approx(20_000, abs=20)
    assert findings["host_bound", ""] == pytest.approx(19 * 200, abs=50)
    assert ("host_sync", "cudaDeviceSynchronize") not in findings


def test_pauses_count_as_far_as_the_host_was_late() -> None:
    pauses = [Pause(0, 100, "in a"), Pause(200, 300, "in b"), Pause(400, 500, "in a")]
    late = np.array([(-10, 20), (90, 110), (250, 450)], np.int64)
    assert paused_ns(pauses, late) == {"in a": 80, "in b": 50}
    assert not paused_ns(pauses, np.empty((0, 2), np.int64))


def test_short_functions_are_not_read(tmp_path: Path) -> None:
    trace = paused()
    for i in range(100):
        trace.python(f"short.py({i}): f", 100 * i, 100 * i + 90)
    trace.python("train.py(3): main", 0, 30_000)
    read = read_trace(trace.write(tmp_path / "trace_rank0.json"))
    assert [read.labels[label][1] for label in read.functions.label] == ["train.py(3): main"]
    assert not any("short.py" in name for _, name in read.labels)
