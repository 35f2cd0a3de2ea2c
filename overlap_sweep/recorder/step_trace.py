"""Profiles some steps of a training run from within its process.

Two profilers at once end a process by a segmentation fault (torch 2.13), so one that the script has comes first.
"""

import gc
import sys
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from overlap_sweep.results.run_directory import write_trace

IN_USE = "The script's own torch.profiler was running, so there is no trace; turn it off, or diagnose its traces."
ON_ROCM = "There is no trace: exporting one is known to crash on ROCm."


class NoTrace(Exception):
    """Why there is no trace, in one sentence."""


class StepTrace:
    """The trace of `steps` steps of this process, the first of which begins two steps after this is made.

    The recording starts a step before them and stops a step after: it starts and stops later on some ranks than on
    others, which wait for those. torch's own schedule is not used, since it stops, and exports, also what another
    profiler has taken over.
    """

    def __init__(self, steps: int, *, on_gpu: bool) -> None:
        """NoTrace if nothing can be profiled."""
        if torch.version.hip:
            raise NoTrace(ON_ROCM)
        if _other_profiler(steps + 3):
            raise NoTrace(IN_USE)
        self._steps = steps
        self.ends = 0
        """Ends of steps so far."""
        self._range: record_function | None = None
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            # Sizes of gloo's messages; NCCL's are in the trace without it.
            record_shapes=not on_gpu,
            # What begins within a backward pass, where optimizers may step, would end with it; and they may step in
            # autograd's own thread.
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profiler.prepare_trace()
        self._is_lost = False
        self._profilers = _count_profilers()

    def end_of_step(self) -> bool:
        """Returns whether all has been recorded, or lost."""
        if self._has_lost():
            return True
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        self.ends += 1
        if self.ends == 1:
            self._profiler.start_trace()
        elif self.ends <= 1 + self._steps:
            # As torch's schedule names them.
            self._range = record_function(f"ProfilerStep#{self.ends - 1}")
            self._range.__enter__()
        return self.ends > 2 + self._steps

    def write(self, path: Path) -> None:
        """Writes the steps, after the end of the last one, whole or absent. NoTrace if they were lost."""
        if self._is_lost:
            raise NoTrace(IN_USE)
        self._profiler.stop_trace()
        write_trace(self._profiler, path)

    def discard(self) -> None:
        if self._has_lost():
            return
        if self._range is not None:
            self._range.__exit__(None, None, None)
        if not self.ends:
            # What is only prepared cannot be stopped.
            self._profiler.start_trace()
        self._profiler.stop_trace()

    def _has_lost(self) -> bool:
        """Returns whether another profiler has taken over. A range that it finds open must be left open."""
        count = _count_profilers()
        if count != self._profilers and not self._is_lost:
            self._profilers = count
            self._is_lost = _other_profiler(0, besides=self._profiler)
            if self._is_lost:
                _left_open.append(self._range)
        return self._is_lost


_left_open: list[record_function | None] = []
"""Ranges that live until the process ends: their end would write into what is gone."""


def _count_profilers() -> int:
    """Returns a number that is another one when a profiler has been made: every object refers to its class."""
    return sys.getrefcount(torch.autograd.profiler.profile)


def _other_profiler(steps: int, besides: profile | None = None) -> bool:
    """Returns whether the script's own profiler runs, or will within the next steps by its schedule."""
    if besides is None and torch.autograd._profiler_enabled():
        return True
    ours = (besides, getattr(besides, "profiler", None))
    # By type: asking an object for its class may run its code.
    others = [each for each in gc.get_objects() if not any(each is own for own in ours)]
    started = (each for each in others if issubclass(type(each), profile) and each.step_rec_fn is not None)
    # One that is switched off has none of the other attributes.
    made = (each for each in others if issubclass(type(each), torch.autograd.profiler.profile) and each.enabled)
    running = (each for each in made if each.entered)
    return any(each.kineto_results is None for each in running) or any(
        each.schedule(each.step_num + step) != ProfilerAction.NONE for each in started for step in range(steps + 1)
    )
