"""Has torch's optimizers call a recorder of this process's steps, through torch's public hooks.

torch is not imported before the script does so: variables that it sets before count.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from overlap_sweep.workloads.job.recording import Wanted, wanted_from
from overlap_sweep.workloads.job.step_recorder import StepRecorder

_OPTIMIZER = "torch.optim.optimizer"
_recorder: StepRecorder | None = None


def start(wanted: Wanted) -> None:
    """Records what is wanted of this process, once."""
    global _recorder
    if _recorder is not None:
        return
    _recorder = StepRecorder(wanted)
    atexit.register(_recorder.at_exit)
    os.register_at_fork(after_in_child=_recorder.forget)
    watch = _Watch(_recorder)
    if not watch.is_done():
        sys.meta_path.insert(0, watch)


def step() -> None:
    """Marks the end of a training step, for scripts whose steps don't end with a torch optimizer's.

    It counts for what records the script: `workload=job`, or `python -m overlap_sweep.attach`. Otherwise it does
    nothing.
    """
    if _recorder is None:
        wanted = _wanted()
        if wanted is None:
            return
        start(wanted)
        assert _recorder is not None
    _recorder.marked()


@functools.cache
def _wanted() -> Wanted | None:
    return wanted_from()


class _Watch:
    """Finds no module. Python asks it for each that is imported, so it knows when torch's parts are there."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._after: Callable[[Any], object] = recorder.after_optimizer
        self._is_hooked = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if self.is_done():
            # A new list, since this one is being gone through.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def is_done(self) -> bool:
        """Returns whether torch's optimizers call the recorder, and torch.compile does not compile what they call."""
        optimizer = sys.modules.get("torch.optim.optimizer")
        if not self._is_hooked and hasattr(optimizer, "register_optimizer_step_post_hook"):
            assert optimizer
            optimizer.register_optimizer_step_post_hook(lambda optimizer, *_: self._after(optimizer))
            self._is_hooked = True
        # The first optimizer that is made imports it.
        dynamo = sys.modules.get("torch._dynamo")
        if not self._is_hooked or not hasattr(dynamo, "disable"):
            return False
        assert dynamo
        self._after = dynamo.disable(self._after)
        return True
