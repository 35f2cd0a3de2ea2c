"""Profiles some of the training's steps from within its process.

Two profilers at once end a process by a segmentation fault (torch 2.13), so one that the script has comes first.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from overlap_sweep.results.run_directory import write_trace

IN_USE = "The script's own torch.profiler was at work, so there is no trace; switch it off, or profile its traces."
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
        import torch
        from torch.profiler import ProfilerActivity, profile

        if torch.version.hip:
            raise NoTrace(ON_ROCM)
        if _other_profiler(steps + 3):
            raise NoTrace(IN_USE)
        self._steps = steps
        self._ends = 0
        self._range: Any = None
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            # Sizes of gloo's messages; NCCL's are in the trace without it.
            record_shapes=not on_gpu,
        )
        self._profiler.prepare_trace()

    def end_of_step(self) -> bool:
        """Returns whether all has been recorded."""
        from torch.profiler import record_function

        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        self._ends += 1
        if self._ends == 1:
            self._profiler.start_trace()
        elif self._ends <= 1 + self._steps:
            # As torch's schedule names them.
            self._range = record_function(f"ProfilerStep#{self._ends - 1}")
            self._range.__enter__()
        return self._ends > 2 + self._steps

    def write(self, path: Path) -> None:
        """Writes the steps, after the end of the last one, whole or absent. NoTrace if they were lost."""
        if not self._stopped():
            raise NoTrace(IN_USE)
        write_trace(self._profiler, path)

    def discard(self) -> None:
        """Ends the profile where it is."""
        if not self._ends:
            # What is only prepared cannot be stopped.
            self._profiler.start_trace()
        self._stopped()

    def _stopped(self) -> bool:
        """Stops the profile if it is still this one that runs."""
        import torch

        if not torch.autograd._profiler_enabled() or _other_profiler(0, besides=self._profiler):
            return False
        self._profiler.stop_trace()
        return True


def _other_profiler(steps: int, besides: Any = None) -> bool:
    """Returns whether the script's own profiler runs, or will within the next steps by its schedule."""
    import torch
    from torch.profiler import ProfilerAction, profile

    if besides is None and torch.autograd._profiler_enabled():
        return True
    # By type: asking an object for its class may run its code.
    others = (each for each in gc.get_objects() if issubclass(type(each), profile) and each is not besides)
    return any(
        other.schedule(other.step_num + step) != ProfilerAction.NONE
        for other in others
        # Scheduled, started, and not stopped.
        if other.step_rec_fn is not None
        for step in range(steps + 1)
    )
