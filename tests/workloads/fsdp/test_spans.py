"""Marks and spans of a step, what follows from them, and the file of its lines."""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from overlap_sweep.measure.timing import Anchor, Mark
from overlap_sweep.results.run_directory import find_metrics, metrics_file
from overlap_sweep.workloads.fsdp.collectives import Queue, Recorder, Span, launch_between, resolve
from overlap_sweep.workloads.fsdp.ranking_model import Unit
from overlap_sweep.workloads.fsdp.telemetry import Segment, StepRecord, overlap_of, write_metrics

CPU = torch.device("cpu")
MS = 1_000_000


def spans(**by_stream: list[tuple[int, int]]) -> dict[str, Any]:
    """Given in milliseconds, of a step of 20."""
    in_ns = {name: [(start * MS, end * MS) for start, end in found] for name, found in by_stream.items()}
    return overlap_of(in_ns, 20 * MS)


def record(step: int, **changes: Any) -> StepRecord:
    fields = {"step": step, "rank": 0, "started": 1.0, "loss": 0.5, "learning_rate": 0.1, "grad_norm": 1.0}
    return StepRecord(**{**fields, **spans(compute=[(0, 10)]), **changes})


def test_times_are_unions() -> None:
    found = spans(compute=[(0, 6), (4, 8)], auxiliary=[(6, 10), (7, 9)])
    assert found["streams_ms"] == {"compute": 8.0, "all_reduce": 0.0, "reduce_scatter": 0.0, "auxiliary": 4.0}
    assert (found["overlap_ms"], found["exposed_comm_ms"], found["overlap_ratio"]) == (2.0, 2.0, 0.5)
    assert found["utilisation"]["compute"] == 0.4


def test_two_collectives_at_once_are_hidden_once() -> None:
    found = spans(compute=[(0, 10)], auxiliary=[(5, 15)], reduce_scatter=[(8, 12)], all_reduce=[(9, 10)])
    of_each = ("compute_auxiliary_ms", "compute_reducescatter_ms", "compute_allreduce_ms")
    assert [found[name] for name in of_each] == [5.0, 2.0, 1.0]
    assert (found["overlap_ms"], found["exposed_comm_ms"]) == (5.0, 5.0)
    assert (found["max_concurrency"], found["mean_concurrency"]) == (4, pytest.approx(25 / 15))


def test_segments_say_who_was_active() -> None:
    found = spans(compute=[(0, 4), (6, 8)], auxiliary=[(2, 7)])
    assert found["active_segments"] == [
        Segment(start_ms=start, end_ms=end, streams=streams)
        for start, end, streams in [
            (0.0, 2.0, ["compute"]),
            (2.0, 4.0, ["compute", "auxiliary"]),
            (4.0, 6.0, ["auxiliary"]),
            (6.0, 7.0, ["compute", "auxiliary"]),
            (7.0, 8.0, ["compute"]),
        ]
    ]


def test_without_communication_there_is_no_ratio_and_without_anything_no_segment() -> None:
    found = spans(compute=[(0, 4)])
    assert found["overlap_ratio"] is None
    assert (found["overlap_ms"], found["exposed_comm_ms"], found["max_concurrency"]) == (0.0, 0.0, 1)
    found = spans()
    assert (found["mean_concurrency"], found["max_concurrency"], found["active_segments"]) == (0.0, 0, [])


def test_every_line_is_a_record_and_is_added(tmp_path: Path) -> None:
    path = tmp_path / metrics_file(3)
    write_metrics(path, [record(0), record(1, grad_norm=None)])
    write_metrics(path, [record(2)])
    *lines, end = path.read_bytes().split(b"\n")
    found = [msgspec.json.decode(line, type=StepRecord) for line in lines]
    assert (found, end) == ([record(0), record(1, grad_norm=None), record(2)], b"")
    assert find_metrics(tmp_path) == {3: path}


def at(ns: int) -> Mark:
    mark = Mark(CPU)
    mark.host_ns = ns
    return mark


@pytest.mark.parametrize(
    ("servers", "times", "expected"),
    [
        (1, [(0, 10), (2, 15), (20, 25)], [(0, 10), (10, 15), (20, 25)]),
        (2, [(0, 10), (1, 12), (2, 20)], [(0, 10), (1, 12), (10, 20)]),
        (2, [(0, 30), (1, 5), (2, 9), (3, 12)], [(0, 30), (1, 5), (5, 9), (9, 12)]),
    ],
)
def test_a_queue_runs_as_many_at_once_as_it_has_servers(
    servers: int, times: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    """(handed over, ended) in the order in which they were handed over."""
    queue = Queue(servers)
    queue.spans = [Span("all_reduce", at(start), at(end), queue) for start, end in times]
    assert resolve(queue.spans, at(0), Anchor(CPU)) == {"all_reduce": expected}


def test_what_an_idle_stream_waits_for_begins_when_it_is_launched() -> None:
    """The host's clock is 1000 ahead of the device's."""
    anchor = Anchor(CPU)
    anchor.host_ns = 50
    anchor.after_ns = lambda origin: 50 - 1000 - origin.host_ns  # type: ignore[method-assign]
    spans = [
        Span("auxiliary", at(start), at(end), launched_ns=1000 + launched)
        for start, end, launched in ((0, 100, 30), (0, 100, 120), (40, 100, 20))
    ]
    assert resolve(spans, at(0), anchor) == {"auxiliary": [(30, 100), (100, 100), (40, 100)]}


def test_a_launch_is_guessed_between_the_mark_and_the_call_s_return() -> None:
    assert launch_between(1000, 1200) == 1140
    recorder = Recorder(CPU)
    span = recorder.begin("auxiliary")
    recorder.device = torch.device("cuda")
    before_ns = span.start.host_ns
    recorder.launched(span)
    assert span.launched_ns is not None
    assert before_ns <= span.launched_ns <= time.perf_counter_ns()


def test_spans_are_only_kept_while_the_recorder_is_on() -> None:
    recorder = Recorder(CPU)
    for on, kept in ((False, []), (True, ["compute"]), (False, [])):
        recorder.on = on
        recorder.end(recorder.begin("compute"))
        assert [span.stream for span in recorder.take()] == kept


def test_a_unit_marks_its_own_computation() -> None:
    seen: list[str] = []
    recorder = Recorder(CPU, on=True)
    linear = nn.Linear(4, 4)
    linear.register_forward_hook(lambda *_: seen.append("computes forward"))
    linear.register_full_backward_hook(lambda *_: seen.append("computes backward"))
    unit = Unit(linear, recorder)
    begin, end = recorder.begin, recorder.end

    def begins(stream: str, queue: Any = None) -> Span:
        seen.append("begins")
        return begin(stream, queue)

    def ends(span: Span) -> None:
        seen.append("ends")
        end(span)

    recorder.begin, recorder.end = begins, ends  # type: ignore[method-assign]
    unit.forward_ended = lambda: seen.append("forward is over")
    unit.backward_ended = lambda: seen.append("backward is over")
    output = unit(torch.ones(2, 4, requires_grad=True))
    # As FSDP2 waits for the parameters: a hook of the tensor.
    output.register_hook(lambda _: seen.append("the gradient is there"))
    output.sum().backward()
    assert seen == [
        *("begins", "computes forward", "ends", "forward is over"),
        *("the gradient is there", "begins", "computes backward", "ends", "backward is over"),
    ]
    assert [span.stream for span in recorder.take()] == ["compute", "compute"]
