"""Times and profiles the steps of a training run from within its process.

Between steps no GPU is waited for, and no collective is called. What goes wrong is printed and recorded: the training
goes on.
"""

from __future__ import annotations

import atexit
import functools
import os
import platform
import sys
import time
import traceback
import weakref
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from overlap_sweep.errors import first_line
from overlap_sweep.levers import process as levers
from overlap_sweep.recorder.clocks import CollectionClock, GpuClock, is_capturing, uses_gpu
from overlap_sweep.recorder.recording import (
    Recording,
    TrainingState,
    Wanted,
    wanted_from,
    write_progress,
    write_recording,
)
from overlap_sweep.recorder.step_calls import StepCalls
from overlap_sweep.startup.sitecustomize import NEEDED, say

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

    from overlap_sweep.recorder.step_trace import StepTrace
    from overlap_sweep.recorder.training_state import PendingState

MOST_CHANGES = 10
"""Changes of what makes up a step after which the sentence at its end asks for job.optimizer_steps."""

_UNKNOWN_STATE = "Norms and sums of gradients and parameters could not be taken"

_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    # Of a step, not of the job: a batch script has SLURM_NTASKS, too.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


@functools.cache
def of_process() -> StepRecorder | None:
    """Returns the recorder of this process; None if its environment asks for none. ImportError if it lacks what is
    imported only when there is something to write."""
    wanted = wanted_from()
    if wanted is None:
        return None
    for module in NEEDED:
        if find_spec(module) is None:
            raise ImportError(f"No module named {module!r}")
    recorder = StepRecorder(wanted)
    atexit.register(recorder.at_exit)
    os.register_at_fork(after_in_child=recorder.forget)
    return recorder


def step(loss: torch.Tensor | float | None = None) -> None:
    """Marks the end of a training step, for scripts whose steps don't end with a torch optimizer's.

    It counts for what records the script, `workload=job`. Otherwise it does nothing. `loss`: that of the step; settings
    whose losses differ are then said to train differently. No GPU is waited for.
    """
    recorder = of_process()
    if recorder is not None:
        recorder.marked(loss)


class StepRecorder:
    """The steps of this process so far: first skipped, then timed, then profiled."""

    _garbage: CollectionClock | None = None

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._skipped = max(wanted.skip_steps, 1)
        # A step before times begin, since ranks are not equally long at it and would wait for one another in the first
        # timed step; but not before the second, from which on levers are in force. The same whatever the levers.
        self._looks_at = min(max(self._skipped - 1, 2), self._skipped)
        self._rank: tuple[int, int] | None = None
        self._levers = levers.install()
        self.forget()

    def forget(self) -> None:
        self.is_over = False
        self._problems: list[str] = []
        self._calls = StepCalls(self._wanted.optimizer_steps)
        self._changes = 0
        self._marked_by: Literal["optimizer", "step"] = "optimizer"
        self._ends = 0
        self._has_begun = False
        self._trace: StepTrace | None = None
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        """Those that have stepped before steps were timed."""
        self._drop()

    def _drop(self) -> None:
        if self._trace is not None:
            self._trace.discard()
        self._trace = None
        self._stop_garbage()
        self._collected_s: list[float] = []
        self._profiled_from_s: float | None = None
        self._state: PendingState | None = None
        self._has_looked = False
        self._ends_s: list[float] = []
        self._gave_up = False
        self._clock: GpuClock | None = None
        self._peak_memory_gb: float | None = None

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """Counts a call. An optimizer within another counts like one beside it."""
        if self.is_over:
            return
        if not self._ends_s:
            self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        if self._marked_by == "step":
            return
        try:
            if self._calls.add(optimizer):
                if self._calls.changes != self._changes:
                    self._changes = self._calls.changes
                    self._drop()
                self._ends = self._calls.steps
                self._end_of_step()
        except Exception as error:
            self.give_up(error)

    def marked(self, loss: torch.Tensor | float | None = None) -> None:
        """Ends a step by hand, after which optimizers don't: what they have marked is forgotten, even if recorded."""
        is_first = self._marked_by == "optimizer"
        if self.is_over and not is_first:
            return
        try:
            if is_first:
                self.is_over, self._marked_by, self._ends, self._problems = False, "step", 0, []
                self._drop()
            self._ends += 1
            self._end_of_step(loss)
        except Exception as error:
            self.give_up(error)

    def _end_of_step(self, loss: torch.Tensor | float | None = None) -> None:
        self._note_progress()
        if self._levers:
            self._levers.at_end_of_step(self._ends)
        if self._trace is not None:
            if self._trace.end_of_step():
                self._finish()
        elif self._ends_s:
            self._take_time()
            self._gave_up = self._wanted.gives_up(self._ends_s)
            if self._gave_up or len(self._ends_s) > self._wanted.steps:
                self._end_of_times()
        else:
            self._skip(loss)

    def _note_progress(self) -> None:
        """Writes how far this rank is: each once, and the first one after each skipped step. What is timed waits for no
        file system."""
        if self._ends_s:
            return
        self._ask_rank()
        rank, ranks = self._rank or _rank_by_environment()
        if rank == 0 or not self._has_begun:
            write_progress(Path(self._wanted.directory), ranks, self._ends)
        self._has_begun = True

    def _skip(self, loss: torch.Tensor | float | None) -> None:
        if self._ends < self._looks_at or (uses_gpu() and is_capturing()):
            return
        if not self._has_looked:
            self._has_looked = True
            self._look_at_state(loss)
        if self._ends < self._skipped:
            return
        if self._levers:
            if self._levers.is_undecided:
                return
            self._levers.say_unmet()
        self._clock = GpuClock(self._wanted.steps + 1) if uses_gpu() else None
        self._garbage = CollectionClock()
        self._take_time()

    def _look_at_state(self, loss: torch.Tensor | float | None) -> None:
        if "torch" not in sys.modules:
            return
        from overlap_sweep.recorder.training_state import PendingState

        stepped = [each for ref in self._optimizers.values() if (each := ref())]
        try:
            self._state = PendingState(self._ends, stepped, loss, (self._rank or _rank_by_environment())[0])
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            # Parameters may be tensors of any library.
            self._problem(f"{_UNKNOWN_STATE} ({first_line(error)}).")

    def _state_read(self) -> TrainingState | None:
        try:
            return self._state.read() if self._state else None
        except RuntimeError as error:
            self._problem(f"{_UNKNOWN_STATE} ({first_line(error)}).")
            return None

    def _take_time(self) -> None:
        if self._clock is None or self._clock.mark():
            self._ends_s.append(time.perf_counter())
            self._collected_s.append(self._garbage.spent_s if self._garbage else 0.0)

    def _stop_garbage(self) -> None:
        if self._garbage is not None:
            self._garbage.stop()
        self._garbage = None

    def _end_of_times(self) -> None:
        self._stop_garbage()
        if self._clock is not None:
            self._peak_memory_gb = sys.modules["torch"].cuda.max_memory_allocated() / 1e9
        if self._wanted.profile_steps and not self._gave_up:
            self._begin_trace()
        if self._trace is None:
            self._finish()

    def _begin_trace(self) -> None:
        if "torch" not in sys.modules:
            return self._problem("torch is not imported, so there is no trace.")
        from overlap_sweep.recorder.step_trace import NoTrace, StepTrace

        self._profiled_from_s = time.time()
        try:
            self._trace = StepTrace(self._wanted.profile_steps, on_gpu=self._clock is not None)
        except NoTrace as error:
            self._problem(str(error))

    def _ask_rank(self) -> None:
        """Remembers the rank, which nobody knows any more when the process group is destroyed."""
        distributed = getattr(sys.modules.get("torch"), "distributed", None)
        if distributed and distributed.is_available() and distributed.is_initialized():
            self._rank = distributed.get_rank(), distributed.get_world_size()

    def _finish(self) -> None:
        """Writes trace and recording. The hooks stay, since torch is going through them; they return at once."""
        self.is_over = True
        self._ask_rank()
        trace, self._trace = self._trace, None
        self._write(trace)

    def _write(self, trace: StepTrace | None = None) -> None:
        # Imported here and below, for their 0.2 s, which the first step would wait for.
        from overlap_sweep.results.run_directory import trace_file

        self._stop_garbage()
        rank, world_size = self._rank or _rank_by_environment()
        directory = Path(self._wanted.directory)
        has_trace = trace is not None and self._writes(trace, directory / trace_file(rank))
        recording = Recording(
            rank=rank,
            world_size=world_size,
            host=platform.node(),
            device="cpu" if self._clock is None else "cuda",
            marked_by=self._marked_by,
            calls_per_step=1 if self._marked_by == "step" else self._calls.per_step,
            host_us=[(end_s - start_s) * 1e6 for start_s, end_s in pairwise(self._ends_s)],
            gpu_us=self._gpu_us(),
            collecting_us=[(end_s - start_s) * 1e6 for start_s, end_s in pairwise(self._collected_s)],
            peak_memory_gb=self._peak_memory_gb,
            state=self._state_read(),
            trace=trace_file(rank) if has_trace else None,
            profiled_s=None if self._profiled_from_s is None else (self._profiled_from_s, time.time()),
            environment=self._environment(),
            problems=self._problems,
            gave_up=self._gave_up,
        )
        write_recording(directory, recording)

    def _writes(self, trace: StepTrace, path: Path) -> bool:
        from overlap_sweep.recorder.step_trace import NoTrace

        try:
            trace.write(path)
        except NoTrace as error:
            self._problem(str(error))
        except (OSError, RuntimeError) as error:
            self._problem(f"The trace could not be written to {path} ({first_line(error)}).")
        else:
            return True
        return False

    def _gpu_us(self) -> list[float]:
        times_us, problem = self._clock.times_us() if self._clock else ([], "")
        if problem:
            self._problem(problem)
        # What went wrong between both clocks has left one of them a time ahead.
        return times_us if len(times_us) + 1 == len(self._ends_s) else []

    def _environment(self) -> dict[str, object]:
        from overlap_sweep.results.identity import packages

        torch = sys.modules.get("torch")
        found: dict[str, object] = {"packages": packages()}
        if torch is None:
            return found
        found["torch"] = str(torch.__version__)
        try:
            from overlap_sweep.measure.environment import environment

            return environment(torch.device("cpu" if self._clock is None else "cuda"), found)
        except Exception as error:
            # The times are worth more than what they were measured on.
            self._problem(f"The GPU could not be described ({type(error).__name__}: {first_line(error)}).")
            return found

    def _problem(self, sentence: str) -> None:
        self._problems.append(sentence)
        say(sentence)

    def give_up(self, error: Exception) -> None:
        """Prints the error, and records the steps that were timed before it."""
        self.is_over = True
        say("".join(traceback.format_exception(error)))
        self._end_early(f"Recording ended with an error ({type(error).__name__}: {first_line(error)}).")

    def at_exit(self) -> None:
        """Records the steps that were timed, if the script ends before the last one."""
        if self.is_over or not self._ends:
            return
        self.is_over = True
        self._end_early(self._ended_early())

    def _ended_early(self) -> str:
        wanted = self._wanted
        ended = f"The script ended after {self._ends} step{'' if self._ends == 1 else 's'}"
        if len(self._ends_s) < 2 and self._calls.changes > MOST_CHANGES:
            changes = f"its optimizers' calls changed {self._calls.changes} times; set job.optimizer_steps"
            return f"{ended}, none of them timed: {changes}."
        asked = {"skip_steps": self._skipped, "steps": wanted.steps, "profile_steps": wanted.profile_steps}
        options = " ".join(f"job.{name}={number}" for name, number in asked.items())
        fewer = wanted.fitting(self._ends)
        mend = f", or give {fewer}" if fewer else ""
        return f"{ended}, but {options} takes {wanted.needed}: let it train longer{mend}."

    def _end_early(self, reason: str) -> None:
        self._problem(reason)
        try:
            if self._trace is not None:
                self._trace.discard()
            self._write()
        except Exception:
            say(f"{traceback.format_exc()}Nothing is recorded, for the reason above.")


def _rank_by_environment() -> tuple[int, int]:
    for rank, world_size in _RANK_VARIABLES:
        if rank in os.environ and world_size in os.environ:
            return int(os.environ[rank]), int(os.environ[world_size])
    return 0, 1
