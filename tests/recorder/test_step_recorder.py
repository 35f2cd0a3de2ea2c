"""What is recorded of trainings in this process, with torch's own optimizers."""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, schedule
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlap_sweep.diagnosis.runs import read_runs
from overlap_sweep.recorder.recording import (
    NOT_FINITE,
    STEPS_FILE,
    Recording,
    TrainingState,
    Wanted,
    read_recordings,
    started_ranks,
)
from overlap_sweep.recorder.step_recorder import StepRecorder

Recorded = Callable[..., StepRecorder]


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorded]:
    """Makes recorders of this process, as `of_process` does, until the end of the test."""
    handles = []

    def make(**wanted: Any) -> StepRecorder:
        few = {"skip_steps": 2, "steps": 4, "profile_steps": 0, **wanted}
        made = StepRecorder(Wanted(directory=str(tmp_path), **few))
        handles.append(register_optimizer_step_post_hook(lambda optimizer, *_: made.after_optimizer(optimizer)))
        return made

    yield make
    for handle in handles:
        handle.remove()


class Model:
    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> None:
        self.layer = torch.nn.Linear(4, 4)
        self.optimizer = optimizer(self.layer.parameters(), lr=0.1, **options)  # type: ignore[call-arg]

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.layer(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    def step(self) -> None:
        self.loss()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def recording(directory: Path) -> Recording:
    (found,) = read_recordings(directory)
    return found


def test_times_are_of_whole_steps_after_those_skipped(recorder: Recorded, tmp_path: Path) -> None:
    made, model = recorder(skip_steps=3, steps=4), Model()
    for step in range(7):
        time.sleep(0.002 * step)
        model.step()
        if step < 6:
            assert read_recordings(tmp_path) == []
    found = recording(tmp_path)
    assert made.is_over
    assert [round(time_us / 2000) for time_us in found.host_us] >= [3, 4, 5, 6]
    assert (found.rank, found.world_size, found.device, found.gpu_us) == (0, 1, "cpu", [])
    assert (found.marked_by, found.calls_per_step, found.trace, found.profiled_s) == ("optimizer", 1, None, None)
    assert found.environment["torch"] == torch.__version__
    model.step()
    assert recording(tmp_path) == found


def test_with_no_step_to_skip_the_first_end_is_where_times_begin(recorder: Recorded, tmp_path: Path) -> None:
    recorder(skip_steps=0, steps=2)
    model = Model()
    model.steps(3)
    assert len(recording(tmp_path).host_us) == 2


def test_gradients_that_are_accumulated_make_one_step(recorder: Recorded, tmp_path: Path) -> None:
    recorder()
    model = Model()
    for _ in range(6):
        for _ in range(3):
            time.sleep(0.001)
            model.loss()
        model.optimizer.step()
    assert min(recording(tmp_path).host_us) > 3000


def test_times_of_what_was_no_whole_step_are_dropped(recorder: Recorded, tmp_path: Path) -> None:
    made = recorder(skip_steps=1, steps=10)
    critic, generator = Model(), Model()
    critic.steps(9)
    for _ in range(13):
        time.sleep(0.002)
        critic.step()
        generator.step()
    assert made.is_over
    found = recording(tmp_path)
    assert (len(found.host_us), found.calls_per_step) == (10, 2)
    assert min(found.host_us) > 2000


def test_an_optimizer_that_computes_the_loss_itself_steps_once(recorder: Recorded, tmp_path: Path) -> None:
    recorder()
    model = Model(torch.optim.LBFGS, max_iter=4)
    for _ in range(6):
        model.optimizer.step(model.loss)  # type: ignore[arg-type]
    assert len(recording(tmp_path).host_us) == 4


class Outer(torch.optim.Optimizer):
    """An optimizer that has another one do the work, as sharded ones do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(1))], {})
        self.inner, self.fails = inner, False

    def step(self, closure: Any = None) -> None:
        if self.fails:
            raise MemoryError
        self.inner.step()


def test_an_optimizer_within_another_is_part_of_its_step(recorder: Recorded, tmp_path: Path) -> None:
    recorder()
    outer = Outer(Model().optimizer)
    for step in range(8):
        outer.fails = step == 1
        if outer.fails:
            with pytest.raises(MemoryError):
                outer.step()
        else:
            outer.step()
    found = recording(tmp_path)
    assert (found.calls_per_step, len(found.host_us)) == (2, 4)


@pytest.mark.parametrize("before", [0, 2, 7, 11, 14], ids=["at once", "skipped", "timed", "profiled", "recorded"])
def test_steps_that_the_script_marks_win(recorder: Recorded, tmp_path: Path, before: int) -> None:
    made, model = recorder(skip_steps=3, steps=5, profile_steps=2), Model()
    model.steps(before)
    for _ in range(13):
        time.sleep(0.002)
        made.marked()
        model.step()
    found = recording(tmp_path)
    assert (found.marked_by, found.calls_per_step, len(found.host_us)) == ("step", 1, 5)
    assert found.trace
    assert min(found.host_us) > 2000


def test_the_trace_has_whole_steps_that_can_be_diagnosed(recorder: Recorded, tmp_path: Path) -> None:
    recorder(profile_steps=2)
    model = Model()
    # Two before and one after them, in which profilers start and stop.
    for step in range(6 + 2 + 2 + 1):
        assert read_recordings(tmp_path) == []
        model.step()
        time.sleep(0.001 * step)
    found = recording(tmp_path)
    assert found.trace == "trace_rank0.json.gz"
    assert found.profiled_s
    assert 0 < found.profiled_s[1] - found.profiled_s[0] < 60
    assert found.problems == []
    path = tmp_path / found.trace
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert [event["name"] for event in events if event["name"].startswith("ProfilerStep")] == [
        "ProfilerStep#1",
        "ProfilerStep#2",
    ]
    (run,) = read_runs([path])
    assert run.found
    assert [step.step for step in run.found.diagnosis.steps] == [1, 2]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["job_rank0.json", STEPS_FILE, "trace_rank0.json.gz"]


def test_an_optimizer_that_steps_in_another_thread_is_recorded_with_all_threads(
    recorder: Recorded, tmp_path: Path
) -> None:
    recorder(profile_steps=1)
    model = Model()
    with ThreadPoolExecutor(1) as autograd:
        for _ in range(10):
            model.loss()
            autograd.submit(model.optimizer.step).result()
    found = recording(tmp_path)
    assert found.problems == []
    events = json.loads(gzip.decompress((tmp_path / str(found.trace)).read_bytes()))["traceEvents"]
    threads = {event["name"]: event["tid"] for event in events if event.get("ph") == "X"}
    assert threads["aten::addmm"] != threads["ProfilerStep#1"] == threads["Optimizer.step#SGD.step"]


def test_optimizers_that_step_in_the_backward_pass_are_recorded(recorder: Recorded, tmp_path: Path) -> None:
    recorder(profile_steps=2)
    layers = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
    optimizers = {parameter: torch.optim.SGD([parameter]) for parameter in layers.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(13):
        layers(torch.ones(2, 4)).sum().backward()
    found = recording(tmp_path)
    assert (found.calls_per_step, len(found.host_us), found.problems) == (6, 4, [])
    (run,) = read_runs([tmp_path / str(found.trace)])
    assert run.found
    assert [step.step for step in run.found.diagnosis.steps] == [1, 2]


def test_a_profiler_of_the_script_comes_first(recorder: Recorded, tmp_path: Path) -> None:
    recorder(profile_steps=1)
    model = Model()
    # It would start while the steps are profiled.
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=8, warmup=1, active=2)) as own:
        for _ in range(12):
            model.step()
            own.step()
        assert len(own.events()) > 0
    found = recording(tmp_path)
    assert found.trace is None
    assert len(found.host_us) == 4
    assert "own torch.profiler" in found.problems[0]


def test_a_profiler_of_the_script_that_has_ended_or_is_off_is_none(recorder: Recorded, tmp_path: Path) -> None:
    recorder(profile_steps=1)
    model = Model()
    ended = profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=1, repeat=1))
    with ended:
        for _ in range(2):
            model.step()
            ended.step()
    with torch.autograd.profiler.profile(enabled=False):
        model.steps(8)
    found = recording(tmp_path)
    assert (found.trace, found.problems, ended.step_num) == ("trace_rank0.json.gz", [], 2)


def test_a_profiler_that_takes_over_keeps_what_it_has(recorder: Recorded, tmp_path: Path) -> None:
    model, own = Model(), profile(activities=[ProfilerActivity.CPU])
    recorder(profile_steps=3)
    for step in range(12):
        if step == 9:
            own.start()
        model.step()
    found = recording(tmp_path)
    assert (len(found.host_us), found.trace) == (4, None)
    assert "own torch.profiler" in found.problems[0]
    own.stop()
    assert "Optimizer.step#SGD.step" in {event.key for event in own.key_averages()}


def test_a_script_that_ends_early_has_recorded_what_there_was(recorder: Recorded, tmp_path: Path) -> None:
    made, model = recorder(), Model()
    model.steps(5)
    made.at_exit()
    found = recording(tmp_path)
    assert len(found.host_us) == 3
    assert found.problems == [
        "The script ended after 5 steps, but job.skip_steps=2 job.steps=4 job.profile_steps=0 takes 6: let it train "
        "longer, or give job.steps=3."
    ]


@pytest.mark.parametrize(
    ("has", "options"),
    [
        (20, "job.steps=9"),
        (14, "job.steps=3"),
        (10, "job.skip_steps=1 job.steps=3"),
        (8, "job.skip_steps=1 job.steps=3 job.profile_steps=1"),
        (7, ""),
    ],
)
def test_a_script_with_few_steps_has_options_that_fit(has: int, options: str) -> None:
    wanted = Wanted(directory="")
    assert wanted.fitting(has) == options
    changed = {name.removeprefix("job."): int(value) for name, value in (one.split("=") for one in options.split())}
    assert not options or Wanted(directory="", **changed).needed == has


@pytest.mark.parametrize(
    ("times_us", "gives_up"),
    [
        ([900.0] * 4, False),
        ([900.0] * 5, True),
        ([900.0, 900.0, 1.0, 1.0, 1.0], False),
        ([900.0] * 6, False),
        ([1.0] * 4 + [900.0] * 6, True),
        ([900.0] * 11, False),
    ],
)
def test_a_run_is_too_slow_by_its_median_after_few_steps(times_us: list[float], gives_up: bool) -> None:
    ends_s = [*accumulate([0.0, *(time_us / 1e6 for time_us in times_us)])]
    assert Wanted(directory="", give_up_us=100.0).gives_up(ends_s) == gives_up
    assert not Wanted(directory="").gives_up(ends_s)


def test_a_run_that_is_too_slow_is_no_longer_recorded_and_goes_on(recorder: Recorded, tmp_path: Path) -> None:
    made, model = recorder(steps=20, profile_steps=2, give_up_us=1.0), Model()
    model.steps(9)
    found = recording(tmp_path)
    assert made.is_over
    assert (found.gave_up, len(found.host_us), found.trace, found.problems) == (True, 5, None, [])


def test_a_process_without_steps_records_nothing(recorder: Recorded, tmp_path: Path) -> None:
    recorder().at_exit()
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_recorder_does_not_end_the_training(
    recorder: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made, model = recorder(steps=10), Model()
    model.steps(6)

    def fail(*_: Any) -> None:
        raise RuntimeError("no more\nthan this line")

    monkeypatch.setattr(made, "_end_of_step", fail)
    model.steps(3)
    found = recording(tmp_path)
    assert len(found.host_us) == 4
    assert found.problems == ["Recording ended with an error (RuntimeError: no more)."]
    assert capfd.readouterr().err.count("Traceback") == 1


def test_what_cannot_be_said_of_the_machine_costs_no_times(
    recorder: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "overlap_sweep.measure.environment", None)
    recorder()
    Model().steps(6)
    found = recording(tmp_path)
    assert len(found.host_us) == 4
    assert found.environment["torch"] == torch.__version__
    assert "could not be described" in found.problems[0]


def test_a_script_whose_optimizers_follow_no_order_is_told_what_to_set(recorder: Recorded, tmp_path: Path) -> None:
    made, models = recorder(skip_steps=5), [Model() for _ in range(14)]
    for model in models:
        model.step()
    made.at_exit()
    found = recording(tmp_path)
    assert found.host_us == []
    assert "set job.optimizer_steps" in found.problems[0]


def test_a_folder_that_is_gone_is_told_and_does_not_end_the_training(
    recorder: Recorded, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made, model = recorder(), Model()
    tmp_path.rmdir()
    model.steps(8)
    assert made.is_over
    assert "Nothing is recorded" in capfd.readouterr().err
    tmp_path.mkdir()


@pytest.mark.parametrize(
    ("variables", "rank", "world_size"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}, 1, 4),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}, 3, 8),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, 2, 3),
        # A batch script, which is none of the job's tasks.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, 0, 1),
    ],
)
def test_a_rank_without_a_process_group_is_in_the_environment(
    recorder: Recorded,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    rank: int,
    world_size: int,
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    recorder()
    model = Model()
    assert started_ranks(tmp_path) is None
    model.steps(1)
    assert started_ranks(tmp_path) == world_size
    model.steps(5)
    found = recording(tmp_path)
    assert (found.rank, found.world_size) == (rank, world_size)


@pytest.mark.gpu
def test_on_a_gpu_times_are_between_events(recorder: Recorded, tmp_path: Path) -> None:
    recorder(profile_steps=1)
    layer = torch.nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(12):
        for _ in range(5):
            layer(torch.ones(4096, 4096, device="cuda")).sum().backward()
        optimizer.step()
    found = recording(tmp_path)
    assert (found.device, found.problems) == ("cuda", [])
    assert found.trace
    # Ten GEMMs of 137 GFLOP each step; the host does not wait for them.
    assert all(time_us > 1000 for time_us in found.gpu_us)
    assert len(found.gpu_us) == len(found.host_us) == 4
    assert found.peak_memory_gb
    assert found.peak_memory_gb > 0.2
    assert found.environment["sm_count"] > 10


@pytest.mark.gpu
def test_on_a_gpu_no_step_waits_for_norms_and_losses(recorder: Recorded, tmp_path: Path) -> None:
    made = recorder(skip_steps=2, steps=4)
    layer = torch.nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(layer.parameters())
    inputs = torch.ones(8, 64, device="cuda", dtype=torch.bfloat16)
    for step in range(6):
        # All is read at the end of the last step.
        torch.cuda.set_sync_debug_mode("error" if step < 5 else "default")
        loss = layer(inputs).square().mean()
        loss.backward()
        optimizer.step()
        made.marked(loss)
        if step == 1:
            norm = torch.cat([one.detach().flatten() for one in layer.parameters()]).double().norm()
    found = states(tmp_path)
    assert found.parameters_norm == pytest.approx(float(norm), rel=1e-5)
    assert found.gradients_norm
    assert isinstance(found.loss, float)
    assert (found.step, found.is_short) == (2, True)


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


def states(directory: Path) -> TrainingState:
    found = recording(directory).state
    assert found
    return found


def test_norms_and_sums_are_of_all_that_stepped_at_the_end_of_the_skipped_steps(
    recorder: Recorded, tmp_path: Path
) -> None:
    recorder(skip_steps=3)
    models = Model(), Model(torch.optim.AdamW)
    for step in range(8):
        for model in models:
            model.step()
        if step == 2:
            parameters = [one for model in models for one in model.layer.parameters()]
            flat = torch.cat([one.detach().flatten() for one in parameters]).double()
            gradients = torch.cat([one.grad.flatten() for one in parameters if one.grad is not None]).double()
    found = states(tmp_path)
    assert found.parameters_norm == pytest.approx(float(flat.norm()))
    assert found.parameters_sum == pytest.approx(float(flat.sum()))
    assert found.gradients_norm == pytest.approx(float(gradients.norm()))
    assert found.gradients_sum == pytest.approx(float(gradients.sum()))
    assert (found.step, found.loss, found.is_short) == (3, None, False)


class LateLevers:
    """Levers that are decided at the end of a later step."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def at_end_of_step(self, step: int) -> None:
        self.left -= 1

    @property
    def is_undecided(self) -> bool:
        return self.left > 0

    def say_unmet(self) -> None:
        assert self.left == 0


def test_levers_that_are_decided_later_delay_times_but_not_what_is_compared(recorder: Recorded, tmp_path: Path) -> None:
    made = recorder(skip_steps=2)
    made._levers = LateLevers(4)  # type: ignore[assignment]
    model = Model()
    model.steps(7)
    assert not made.is_over
    model.steps(1)
    assert states(tmp_path).step == 2


@pytest.mark.parametrize("loss", [2.5, torch.tensor([2.0, 3.0], dtype=torch.bfloat16, requires_grad=True)])
def test_the_loss_is_that_of_the_last_skipped_step(recorder: Recorded, tmp_path: Path, loss: Any) -> None:
    made, model = recorder(skip_steps=2), Model()
    model.layer.bfloat16()
    for step in range(7):
        model.optimizer.zero_grad()
        made.marked(loss if step == 1 else 7.0)
        model.optimizer.step()
    found = states(tmp_path)
    assert (found.step, found.loss, found.gradients_norm) == (2, 2.5, None)
    assert found.parameters_norm
    assert found.is_short


def test_what_has_diverged_and_sparse_gradients_are_recorded(recorder: Recorded, tmp_path: Path) -> None:
    recorder()
    layer = torch.nn.Embedding(8, 2, sparse=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(7):
        optimizer.zero_grad()
        (layer(torch.tensor([1, 1])).sum() * (torch.inf if step == 1 else 1)).backward()
        optimizer.step()
    found = states(tmp_path)
    assert (found.gradients_norm, found.parameters_norm) == (NOT_FINITE, NOT_FINITE)


def test_of_sharded_parameters_it_is_the_ranks_own_shard(recorder: Recorded, tmp_path: Path) -> None:
    """A fake process group of four ranks, in which any collective would leave zeros."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,))
        whole = torch.arange(8.0)
        parameter = torch.nn.Parameter(DTensor.from_local(whole[2:4], mesh, [Shard(0)]))
        optimizer = torch.optim.SGD([parameter], lr=0.0)
        recorder()
        for _ in range(7):
            parameter.grad = DTensor.from_local(torch.tensor([3.0, 4.0]), mesh, [Shard(0)])
            optimizer.step()
    finally:
        dist.destroy_process_group()
    found = states(tmp_path)
    assert (found.parameters_norm, found.parameters_sum) == (pytest.approx(13**0.5), 5.0)
    assert (found.gradients_norm, found.gradients_sum) == (5.0, 7.0)


def test_parameters_of_no_known_kind_are_a_problem_and_no_end(recorder: Recorded, tmp_path: Path) -> None:
    recorder()
    model = Model()
    model.optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(1), requires_grad=False))
    model.optimizer.param_groups[0]["params"][-1].data = torch.ones(1, dtype=torch.float8_e4m3fn)
    model.steps(7)
    found = recording(tmp_path)
    assert found.state is None
    assert len(found.host_us) == 4
    assert found.problems[0].startswith("Norms and sums of gradients and parameters could not be taken (")
