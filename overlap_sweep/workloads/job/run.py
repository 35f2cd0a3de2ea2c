"""Runs a point's command until its steps are recorded, and returns what was measured. Without torch: that is in the
user's processes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlap_sweep.errors import PointFailed, UserError
from overlap_sweep.recorder.recording import (
    ATTACH,
    LEAST_STEPS,
    RECORDER_FILE,
    STEPS_FILE,
    Recording,
    Wanted,
    read_recordings,
    reason_not_to_record,
    recording_file,
)
from overlap_sweep.results.run_directory import LOG_FILE
from overlap_sweep.workloads import Here, nodes
from overlap_sweep.workloads.job import command
from overlap_sweep.workloads.job.nodes import RunningOnNodes, commands_of
from overlap_sweep.workloads.job.output import Output, last_words
from overlap_sweep.workloads.job.snapshots import hint, snapshots
from overlap_sweep.workloads.job.snapshots import warnings as warnings_of
from overlap_sweep.workloads.job.steps import fields_of

POLL_S = 0.1
ASK_ANEW_S = 1.0
"""Time between such looks at the run directory that ask the file server."""
SETTLE_S = 10.0
"""Least time for which recordings of steps are waited for once the metric was printed often enough; and for which the
command may go on after ranks have recorded less than was asked, as they do when a script ends."""
_UNREACHED = f"put -m {ATTACH} in front of the script if it ignores PYTHONPATH, as python -I and containers do"


def run(point: Mapping[str, Any], directory: Path, here: Here) -> dict[str, Any]:
    """Returns the measured fields of the point's Result. PointFailed if nothing was measured. No process of the command
    is left."""
    job = point["job"]
    wanted = Wanted(
        directory=str(directory.resolve()),
        skip_steps=job["skip_steps"],
        steps=job["steps"],
        profile_steps=job["profile_steps"],
        optimizer_steps=job["optimizer_steps"],
    )
    command.link_handed(point, directory)
    folder = command.working_folder(point, directory)
    before = snapshots(folder, directory)
    with RunningOnNodes(commands_of(point, directory, here, wanted), here) as running:
        watched = Watched(point, directory, running.log_starts, hint(before))
        watched.until_measured(running, here.limit_s)
    warnings = [
        *warnings_of(before, snapshots(folder, directory)),
        *(
            f"Processes {processes} were killed and do not end{f' on node {node}' if nodes(point) > 1 else ''}."
            for node, processes in running.left.items()
        ),
    ]
    fields = fields_of(point, directory, watched.recordings, watched.output)
    return {**fields, "warnings": warnings + fields["warnings"]}


def _ask_anew(directory: Path) -> None:
    """Changes the directory, upon which a network file system asks for its names again. Otherwise it may take them from
    its memory for a minute, while ranks of other nodes have recorded."""
    probe = directory / ".asked"
    probe.touch()
    probe.unlink()


class Watched:
    """What a command has recorded and printed so far."""

    def __init__(self, point: Mapping[str, Any], directory: Path, log_starts: Mapping[Path, int], hint: str) -> None:
        """`log_starts`: the logs of all nodes, with the bytes that were there before. `hint`: why the command may end
        without a step."""
        self._job, self._directory = point["job"], directory
        self._log_starts, self._hint = log_starts, hint
        self._timeout_s = point["runtime"]["timeout_s"]
        self._asks_anew = nodes(point) > 1
        self._asked_s = -math.inf
        self._since_s: dict[str, float] = {}
        self.recordings: list[Recording] = []
        self.output = Output(self._job, log_starts) if self._job["metric"] else None

    def until_measured(self, running: RunningOnNodes, limit_s: float) -> None:
        """Returns when all is recorded, or the command has ended with enough. PointFailed if it has not."""
        started = time.monotonic()
        while (status := running.wait(POLL_S)) is None:
            self._look()
            running_s = time.monotonic() - started
            printed_s = self._seconds("printed", self._is_printed)
            gave_up_s = self._seconds("short", self._is_short)
            if not self._job["finish"] and self._is_measured(running_s, printed_s):
                return
            if not self.output and gave_up_s > SETTLE_S:
                break
            if running_s > limit_s:
                raise PointFailed(self._too_late(limit_s), timed_out=True)
        self._look(ended=status is not None)
        if status and (self._job["finish"] or not self._is_measured(0.0, 0.0)):
            raise running.failure()
        self._check_enough()

    def _seconds(self, name: str, is_so: bool) -> float:
        """Returns for how long something has been so, looked at again and again; 0 if it is not."""
        if not is_so:
            self._since_s.pop(name, None)
            return 0.0
        return time.monotonic() - self._since_s.setdefault(name, time.monotonic())

    def _look(self, *, ended: bool = False) -> None:
        if self._asks_anew and (ended or time.monotonic() - self._asked_s > ASK_ANEW_S):
            self._asked_s = time.monotonic()
            _ask_anew(self._directory)
        if not self.output and (reason := reason_not_to_record(self._directory)):
            raise PointFailed(f"nothing is recorded: {reason}", final=True)
        if len(list(self._directory.glob(recording_file("*")))) > len(self.recordings):  # type: ignore[arg-type]
            try:
                self.recordings = read_recordings(self._directory)
            except UserError as error:
                raise PointFailed(str(error)) from None
            self._check_ranks()
            if self.output:
                self.output.disturbed_s = [one.profiled_s for one in self.recordings if one.profiled_s]
        if self.output:
            self.output.read(ended=ended)

    @property
    def _is_printed(self) -> bool:
        return self.output is not None and self.output.count >= self._job["skip_steps"] + self._job["steps"]

    @property
    def _is_recorded(self) -> bool:
        return all(len(one.host_us) >= self._job["steps"] for one in self.recordings) and not self._missing

    @property
    def _is_short(self) -> bool:
        """Returns whether all ranks have recorded, but not as many steps as were asked for."""
        return not self._missing and not self._is_recorded

    @property
    def _missing(self) -> int:
        """Returns how many ranks have not recorded anything."""
        return self._job["ranks"] - len(self.recordings)

    def _is_measured(self, running_s: float, printed_s: float) -> bool:
        """`printed_s`: time since the metric was printed often enough. Steps may have been recognised wrongly, so that
        their recordings would come late: the metric is not given up for them."""
        if not self.output or self._is_recorded:
            return self._is_recorded and (not self.output or self._is_printed)
        comes = (self._directory / STEPS_FILE).exists()
        return self._is_printed and (not comes or printed_s > max(SETTLE_S, running_s - printed_s))

    def _check_ranks(self) -> None:
        started = self.recordings[0].world_size
        if started != self._job["ranks"]:
            raise PointFailed(
                f"the command started {started} training processes, but job.ranks={self._job['ranks']}; set "
                f"job.ranks={started}, or start as many with {{ranks}} in job.command",
                final=True,
            )

    def _too_late(self, limit_s: float) -> str:
        """Returns what is missing after the time limit."""
        wanted = self._job["skip_steps"] + self._job["steps"]
        if self.output and not self._is_printed:
            have = f"job.metric was found {self.output.count} times of {wanted}"
        elif self.recordings and self._missing:
            have = f"{len(self.recordings)} of {self._job['ranks']} ranks had recorded their steps"
        elif self._is_recorded:
            have = "all steps were recorded, but job.finish=true waits for the end of the command"
        else:
            have = f"no rank had finished all of {wanted} steps"
            have += f" and {self._job['profile_steps']} profiled ones" if self._job["profile_steps"] else ""
        learnt = limit_s < self._timeout_s
        limit = "runtime.timeout_factor (similar points took less)" if learnt else "runtime.timeout_s"
        first = "" if self._is_reached or self.output else f"{_UNREACHED}, or "
        return f"not measured within {limit_s:g} s: {have}; {first}raise {limit}, or lower job.steps"

    def _check_enough(self) -> None:
        """Raises PointFailed if a command that ended well has recorded or printed too little."""
        skip, wanted = self._job["skip_steps"], self._job["steps"]
        if self.output:
            timed, what = max(self.output.count - skip, 0), "numbers of job.metric"
            if not self.output.found:
                raise PointFailed(
                    f"job.metric={self._job['metric']} was not found in the command's output; compare it with "
                    f"{LOG_FILE}{self._last_words}{self._hint}",
                    final=True,
                )
        else:
            timed, what = min((len(one.host_us) for one in self.recordings), default=0), "timed steps"
            self._check_recorded()
        if timed < LEAST_STEPS:
            problems = (problem for one in self.recordings for problem in one.problems)
            more = f"Let the command run for more steps, or lower job.skip_steps={skip}."
            raise PointFailed(
                f"there are only {timed} {what} of {wanted}. {next(problems, more)}",
                final=True,
            )

    @property
    def _last_words(self) -> str:
        said = next(filter(None, (last_words(*log) for log in self._log_starts.items())), "")
        return f"; it printed last: {said}" if said else ""

    def _check_recorded(self) -> None:
        if self.recordings and self._missing:
            ranks = [one.rank for one in self.recordings]
            raise PointFailed(f"the command ended, but only ranks {ranks} of {self._job['ranks']} recorded their steps")
        if not self.recordings:
            missing, first = "no step of torch's optimizers", "if it trains without them, "
            if not self._is_reached:
                missing, first = "no Python with the recorder has imported torch", f"{_UNREACHED}, or "
            raise PointFailed(
                f"the command ended with exit status 0, but {missing}{self._last_words}{self._hint}; {first}call "
                "overlap_sweep.step() at the end of each step, or give job.metric",
                final=True,
            )

    @property
    def _is_reached(self) -> bool:
        """Returns whether a process of the command has the recorder, as far as is known."""
        return any((self._directory / name).exists() for name in (RECORDER_FILE, STEPS_FILE))
