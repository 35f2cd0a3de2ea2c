"""Groups for points: kept alive from point to point, or one for each."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from overlap_sweep.results.run_directory import FailedAttempt
from overlap_sweep.runtime.group import GroupConfig, WorkerGroup

GROUP_LOG = "workers.log"


class WorkerPool:
    """At most one group is alive, the one that the last point needed: idle workers would disturb the next one's."""

    def __init__(self, log: Path) -> None:
        """`log` gets what the groups print outside of any point."""
        self._log = log
        self._stack = ExitStack()
        self._group: WorkerGroup | None = None

    def run(
        self,
        point: Mapping[str, Any],
        directory: Path,
        timeout_s: float,
        earlier_attempts: Sequence[FailedAttempt] = (),
    ) -> dict[str, Any]:
        """See `WorkerGroup.run`. Starts a group unless the one that is alive fits."""
        config = GroupConfig.of(point, directory)
        fits = self._group is not None and self._group.config == config and self._group.alive
        if self._group is None or not fits or point["runtime"]["isolate"]:
            self.close()
            self._group = self._stack.enter_context(WorkerGroup(config, self._log))
        return self._group.run(point, directory, timeout_s, earlier_attempts)

    def close(self) -> None:
        self._group = None
        self._stack.close()


_shared: WorkerPool | None = None


def share_pool(log: Path) -> None:
    """From now on every point of this process takes its group from one pool, which ends with the process."""
    global _shared
    if _shared is None:
        _shared = WorkerPool(log)
        atexit.register(_shared.close)


def close_shared() -> None:
    """End the groups of the shared pool, before the process does."""
    if _shared is not None:
        _shared.close()


@contextmanager
def pool_for_point(directory: Path) -> Iterator[WorkerPool]:
    """The shared pool, or where none is shared a pool that lives for this point only."""
    if _shared is not None:
        yield _shared
        return
    pool = WorkerPool(directory / GROUP_LOG)
    try:
        yield pool
    finally:
        pool.close()
