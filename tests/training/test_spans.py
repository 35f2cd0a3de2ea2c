"""Marks, queues and units, on the CPU's clock."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from overlap_sweep.training.spans import Anchor, Mark, Queue, Recorder, Span, Unit, launch_between, resolve

CPU = torch.device("cpu")


def at(ns: int) -> Mark:
    mark = Mark(CPU)
    mark.host_ns = ns
    return mark


def queued(servers: int, *times: tuple[int, int]) -> list[tuple[int, int]]:
    """(handed over, ended) in the order in which they were handed over."""
    queue = Queue(servers)
    queue.spans = [Span("all_reduce", at(start), at(end), queue) for start, end in times]
    return resolve(queue.spans, at(0), Anchor(CPU))["all_reduce"]


def test_one_server_works_off_one_after_the_other() -> None:
    assert queued(1, (0, 10), (2, 15), (20, 25)) == [(0, 10), (10, 15), (20, 25)]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([(0, 10), (1, 12), (2, 20)], [(0, 10), (1, 12), (10, 20)]),
        ([(0, 30), (1, 5), (2, 9), (3, 12)], [(0, 30), (1, 5), (5, 9), (9, 12)]),
    ],
)
def test_two_servers_take_two_at_once(times: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    assert queued(2, *times) == expected


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
    recorder.end(recorder.begin("compute"))
    assert recorder.take() == []
    recorder.on = True
    recorder.end(recorder.begin("compute"))
    assert [span.stream for span in recorder.take()] == ["compute"]
    assert recorder.take() == []


class Told(nn.Module):
    """A linear layer that says when it computes."""

    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self.linear, self.told = nn.Linear(4, 4), told
        self.linear.register_full_backward_hook(lambda *_: told.append("computes backward"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.told.append("computes forward")
        return self.linear(x)


def test_a_unit_marks_its_own_computation() -> None:
    told: list[str] = []
    recorder = Recorder(CPU, on=True)
    unit = Unit(Told(told), recorder)
    begin, end = recorder.begin, recorder.end

    def begins(stream: str, queue: Any = None) -> Span:
        told.append("begins")
        return begin(stream, queue)

    def ends(span: Span) -> None:
        told.append("ends")
        end(span)

    recorder.begin, recorder.end = begins, ends  # type: ignore[method-assign]
    unit.forward_ended = lambda: told.append("forward is over")
    unit.backward_ended = lambda: told.append("backward is over")
    output = unit(torch.ones(2, 4, requires_grad=True))
    # As FSDP2 waits for the parameters: a hook of the tensor.
    output.register_hook(lambda _: told.append("the gradient is there"))
    output.sum().backward()
    assert told == [
        *("begins", "computes forward", "ends", "forward is over"),
        *("the gradient is there", "begins", "computes backward", "ends", "backward is over"),
    ]
    assert [span.stream for span in recorder.take()] == ["compute", "compute"]
