"""What times steps: events on a GPU, of which there is a stand-in here, and the time of garbage collections."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from overlap_sweep.recorder.clocks import CollectionClock
from overlap_sweep.recorder.recording import Recording, Wanted, read_recordings
from overlap_sweep.recorder.step_recorder import StepRecorder
from tests.recorder.trainings import Model, Recorded, recording


class Gpu:
    """The parts of torch.cuda that the recorder uses."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.stream = "stream 7"
        self.is_capturing = False
        self.made = self.recorded = self.asked = 0
        self.error: RuntimeError | None = None

    def current_stream(self) -> str:
        self.asked += 1
        return self.stream

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        assert not self.is_capturing
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at_ms = gpu, -1.0

    def record(self, stream: str) -> None:
        assert stream == "stream 7"
        self.gpu.recorded += 1
        self.at_ms = self.gpu.now_ms

    def synchronize(self) -> None:
        if self.gpu.error:
            raise self.gpu.error

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    for name in ("current_stream", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3e9)
    # There is no GPU to describe.
    monkeypatch.setitem(sys.modules, "overlap_sweep.measure.environment", None)
    return made


class Steps:
    """Steps that a script marks, of 1, 2, 3... ms on the GPU."""

    def __init__(self, directory: Path, gpu: Gpu, skip_steps: int = 2, steps: int = 4) -> None:
        self.directory, self.gpu, self.count = directory, gpu, 0
        self.recorder = StepRecorder(
            Wanted(directory=str(directory), skip_steps=skip_steps, steps=steps, profile_steps=0)
        )

    def run(self, count: int = 1) -> None:
        for _ in range(count):
            self.count += 1
            self.gpu.now_ms += self.count
            self.recorder.marked()

    def recording(self) -> Recording:
        (found,) = read_recordings(self.directory)
        return found


def problems(recording: Recording) -> list[str]:
    return [each for each in recording.problems if "could not be described" not in each]


def test_times_are_between_events_that_were_made_before_the_first_timed_step(tmp_path: Path, gpu: Gpu) -> None:
    steps = Steps(tmp_path, gpu)
    steps.run(1)
    assert (gpu.made, gpu.asked) == (0, 0)
    steps.run(1)
    # One more than there are times; each is recorded once so that CUDA makes it.
    assert (gpu.made, gpu.recorded) == (5, 5 + 1)
    steps.run(4)
    assert (gpu.made, gpu.recorded) == (5, 5 + 5)
    found = steps.recording()
    assert found.gpu_us == [3000, 4000, 5000, 6000]
    assert (len(found.host_us), found.device, found.peak_memory_gb, problems(found)) == (4, "cuda", 3.0, [])


def test_many_steps_ask_for_their_stream_rarely(tmp_path: Path, gpu: Gpu) -> None:
    steps = Steps(tmp_path, gpu, skip_steps=1, steps=200)
    steps.run(201)
    # At the start, after 1, 2, 4 ... 128 marks, and after the last.
    assert gpu.asked == 1 + 8 + 1
    assert steps.recording().gpu_us == [1000.0 * step for step in range(2, 202)]


def test_steps_that_become_a_cuda_graph_are_not_timed_and_none_is_the_first(tmp_path: Path, gpu: Gpu) -> None:
    steps = Steps(tmp_path, gpu)
    gpu.is_capturing = True
    steps.run(3)
    assert (gpu.made, gpu.asked) == (0, 0)
    gpu.is_capturing = False
    steps.run(2)
    gpu.is_capturing = True
    steps.run(2)
    gpu.is_capturing = False
    steps.run(3)
    found = steps.recording()
    # The fourth step is where times begin. The sixth and seventh ran nothing.
    assert found.gpu_us == [5000, 6000 + 7000 + 8000, 9000, 10000]
    assert len(found.host_us) == 4


@pytest.mark.parametrize("moved_after", [3, 6])
def test_without_its_stream_only_the_hosts_times_count(tmp_path: Path, gpu: Gpu, moved_after: int) -> None:
    steps = Steps(tmp_path, gpu, steps=5)
    steps.run(moved_after)
    gpu.stream = "stream 0"
    steps.run(7 - moved_after)
    found = steps.recording()
    assert (len(found.host_us), found.gpu_us) == (5, [])
    assert "changed its CUDA stream" in problems(found)[0]


def test_an_idle_gpu_and_one_that_fails_leave_the_hosts_times(tmp_path: Path, gpu: Gpu) -> None:
    for problem in ("nothing to do in some steps", "could not be read (an illegal memory access)"):
        steps = Steps(tmp_path, gpu)
        steps.run(5)
        if "nothing" in problem:
            steps.recorder.marked()
        else:
            gpu.error = RuntimeError("an illegal memory access\nand more")
            steps.run(1)
        found = steps.recording()
        assert (len(found.host_us), found.gpu_us) == (4, [])
        assert problem in problems(found)[0]


def test_a_script_that_ends_early_has_the_gpus_times_so_far(tmp_path: Path, gpu: Gpu) -> None:
    steps = Steps(tmp_path, gpu)
    steps.run(2)
    steps.recorder.at_exit()
    assert steps.recording().gpu_us == []
    steps = Steps(tmp_path, gpu)
    steps.run(4)
    steps.recorder.at_exit()
    assert steps.recording().gpu_us == [3000, 4000]


def test_the_time_of_garbage_collections_is_known_by_step(recorder: Recorded, tmp_path: Path) -> None:
    recorder(skip_steps=2, steps=4)
    model = Model()
    gc.disable()
    try:
        for step in range(6):
            if step in (1, 3):
                cycles: list[object] = [[] for _ in range(300_000)]
                cycles.append(cycles)
                gc.collect()
            model.step()
    finally:
        gc.enable()
    found = recording(tmp_path)
    # What was collected before the first timed step counts nowhere.
    assert [time_us > 1000 for time_us in found.collecting_us] == [False, True, False, False]
    assert found.collecting_us[1] < found.host_us[1]


def test_a_collection_that_had_begun_before_counts_nowhere() -> None:
    clock = CollectionClock()
    clock._collects("stop", {})
    time.sleep(0.001)
    assert clock.spent_s == 0.0
    clock.stop()
    assert clock._collects not in gc.callbacks


def test_no_clock_is_left_when_times_are_over(recorder: Recorded, tmp_path: Path) -> None:
    before = len(gc.callbacks)
    made = recorder(skip_steps=1, steps=2)
    model = Model()
    model.steps(2)
    assert len(gc.callbacks) == before + 1
    model.steps(1)
    assert made.is_over
    assert len(gc.callbacks) == before
    second = recorder(skip_steps=1, steps=9)
    model.steps(3)
    second.at_exit()
    assert len(gc.callbacks) == before
