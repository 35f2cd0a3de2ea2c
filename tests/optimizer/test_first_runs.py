"""How many steps the runs of the command as it is time."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.optimizer.first_runs import MOST_STEPS, base, first_runs, worth_timing
from overlap_sweep.results.run_directory import LOG_FILE, Result
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.search.measured import Measurements
from overlap_sweep.workloads.job.result import JobRun
from tests.make_point import made_result, resolved, timing_of
from tests.search.stand_in import sweep_of

COMMAND = ("workload=job", "job.command=python train.py", "runtime.device=cpu")


def run(step_us: float, steps: int, wall_s: float = 5.0, *, asked: int = 20, timed_by: str = "host") -> Result:
    samples_us = [step_us + 0.1 * (number % 2) for number in range(steps)]
    point = resolved("job", **{"job.steps": asked})
    return made_result("job", point, step=timing_of(samples_us), timed_by=timed_by, wall_s=wall_s)


@pytest.mark.parametrize(
    ("result", "steps"),
    [
        (run(200_000.0, 20), 20),
        (run(100_000.0, 8, asked=8), 20),
        (run(3_000.0, 20), 667),
        # A start of 40 s is worth 10 s of steps.
        (run(50_000.0, 20, 41.0), 200),
        (run(300.0, 20), MOST_STEPS),
        # It has no more of them, or what is printed is no step.
        (run(3_000.0, 12), 20),
        (run(3_000.0, 20, timed_by="metric"), 20),
    ],
)
def test_short_steps_are_timed_for_seconds(result: Result, steps: int) -> None:
    assert worth_timing(result) == pytest.approx(steps, abs=1)


@pytest.mark.parametrize(
    ("typed", "has", "asked", "timed"),
    [
        ((), 10**6, [20, 667], [20, 667]),
        # What is asked for is not changed.
        (("job.steps=8",), 10**6, [8, 8], [8, 8]),
        # A command with 300 steps has some for the profile, too.
        ((), 300, [20, 667, 294], [20, 294]),
        # One that ends just after the first run has as many again.
        ((), 22, [20, 667, 20], [20, 20]),
    ],
)
def test_runs_time_as_many_steps_as_the_command_has(
    tmp_path: Path, typed: tuple[str, ...], has: int, asked: list[int], timed: list[int]
) -> None:
    """The first run is only recorded if later ones time more."""
    with sweep_of(tmp_path, *COMMAND, *typed, answer=command_with(has)) as launcher:
        inputs = launcher.inputs(*COMMAND, *typed)
        measurements = Measurements.begin(inputs)
        space, first = first_runs(inputs, base(inputs), measurements)
        assert [point.job.steps for point in launcher.points] == asked  # type: ignore[attr-defined]
        assert [len(one.measured_as(JobRun).step.samples_us) for one in first] == timed
        assert space.point().job.steps == asked[-1]  # type: ignore[attr-defined]
        # Begun again, it comes to the same without a run.
        first_runs(inputs, base(inputs), Measurements.begin(inputs))
        assert len(launcher.points) == len(asked)


def test_a_command_that_fails_is_not_run_again_and_its_log_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "may_resume", True)
    fails = partial(made_result, "job", status="failed", error="the command ended with exit status 1: KeyError: 'a'")
    with sweep_of(tmp_path, *COMMAND, answer=fails) as launcher:
        inputs = launcher.inputs(*COMMAND)
        with pytest.raises(UserError) as caught:
            first_runs(inputs, base(inputs), Measurements.begin(inputs))
        (tried,) = launcher.points
    assert tried.runtime.retries == 0
    (log,) = (path / LOG_FILE for path in tmp_path.glob("train.py*"))
    assert str(caught.value).endswith(f": KeyError: 'a'; its output: {log}")
    assert not outcomes.may_resume


def test_a_recording_without_a_trace_says_the_reason_that_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "may_resume", True)
    short = partial(made_result, "job", traces=[], warnings=["Rank 0: it ended.", "A run wrote model.pt."])
    with sweep_of(tmp_path, *COMMAND, answer=short) as launcher:
        inputs = launcher.inputs(*COMMAND)
        with pytest.raises(UserError, match=r"^No trace was recorded: Rank 0: it ended\.$"):
            first_runs(inputs, base(inputs), Measurements.begin(inputs))
        assert len(launcher.points) == 1


def command_with(steps: int) -> Callable[..., Result]:
    """Returns what a run measures of a command that has so many steps after those that are skipped."""

    def answer(point) -> Result:  # type: ignore[no-untyped-def]
        asked = point.job.steps
        timed, profiled = min(asked, steps), steps >= asked + 3 + point.job.profile_steps
        # The first run of a short command is profiled in any case, as a script of another length would be.
        traces = ["trace_rank0.json.gz"] if profiled or asked == 20 else []
        step = timing_of([3_000.0] * timed)
        return made_result("job", point, step=step, timed_by="host", wall_s=4.0, traces=traces)

    return answer
