"""What is recorded of trainings in this process, with torch's own optimizers."""

from __future__ import annotations

import gzip
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from overlap_sweep.diagnosis.runs import read_runs
from overlap_sweep.recorder.recording import (
    STEPS_FILE,
    Wanted,
    progress,
    read_recordings,
)
from tests.recorder.trainings import Model, Recorded, recording


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
    assert progress(tmp_path) is None
    model.steps(1)
    assert progress(tmp_path) == (world_size, 1)
    model.steps(5)
    found = recording(tmp_path)
    assert (found.rank, found.world_size) == (rank, world_size)
    # One rank is enough to say how far the run is, and timed steps are not disturbed.
    assert progress(tmp_path) == (world_size, 1 if rank else 2)


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
