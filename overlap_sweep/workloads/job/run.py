"""Runs a point's command until its steps are recorded. Without torch: that is in the user's processes."""

import math
import os
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from overlap_sweep import levers
from overlap_sweep.errors import PointFailed, Refused, UserError
from overlap_sweep.levers import status
from overlap_sweep.program import ATTACH
from overlap_sweep.recorder import recording
from overlap_sweep.report.numbers import some_of
from overlap_sweep.results.run_directory import LOG_FILE
from overlap_sweep.workloads import Here
from overlap_sweep.workloads.job import command
from overlap_sweep.workloads.job.config import Resolved
from overlap_sweep.workloads.job.nodes import RunningOnNodes, commands_of
from overlap_sweep.workloads.job.output import Output, last_words, printed_losses
from overlap_sweep.workloads.job.steps import fields_of

POLL_S = 0.1
ASK_ANEW_S = 1.0
"""Time between such looks at the run directory that ask the file server."""
SETTLE_S = 10.0
"""Least time for which recordings of steps are waited for once the metric was printed often enough; and for which the
command may go on after ranks have recorded less than was asked, as they do when a script ends."""
GIVE_UP_S = 2.0
"""Time in which other ranks may still record once one has given up."""
ENDINGS = (".pt", ".pth", ".ckpt", ".safetensors", "_model.bin", "optimizer.bin", ".distcp", ".pth.tar", ".pt.tar")
"""How names of snapshots end."""
MOST_ENTRIES = 10_000
"""Names that are looked at in a working folder, the nearest first."""
DEEPEST = 4
"""Levels of folders that are looked at."""

Listing = dict[str, tuple[int, int]]
"""Size and time of change of each file, by its path in the working folder."""
_UNREACHED = f"put -m {ATTACH} in front of the script if it ignores PYTHONPATH, as python -I and containers do"


def run(point: Resolved, directory: Path, here: Here) -> dict[str, object]:
    """Returns the measured fields of the point's Result, or raises PointFailed. No process of the command is left."""
    asked = {name: getattr(point.job, name) for name in ("skip_steps", "steps", "profile_steps", "optimizer_steps")}
    chosen = levers.chosen(point.job.levers)
    wanted = recording.Wanted(
        directory=str(directory.resolve()),
        levers=chosen,
        levers_override=point.job.levers_override,
        inspect=here.inspects,
        # What the metric says may be of other steps, and what is to finish would take as long.
        give_up_us=None if point.job.metric or point.job.finish else here.give_up_us,
        **asked,
    )
    command.link_handed(point, directory)
    command.write_files(point, directory)
    folder = command.working_folder(point, directory)
    before = _snapshots(folder, directory)
    with RunningOnNodes(commands_of(point, directory, here, wanted), here) as running:
        watched = Watched(point, directory, running.log_starts, _left(before))
        watched.until_measured(running, here.limit_s)
        watched.check_levers()
    warnings = [
        *_written(before, _snapshots(folder, directory)),
        *(
            f"Processes {processes} were killed and do not end{f' on node {node}' if point.nodes > 1 else ''}."
            for node, processes in running.left.items()
        ),
    ]
    losses = printed_losses(point.job, running.log_starts)
    if point.job.loss and not losses:
        warnings.append(f"job.loss={point.job.loss} was not found in the command's output.")
    return fields_of(point, directory, watched.recordings, watched.output, losses, warnings)


def _snapshots(folder: Path, directory: Path) -> Listing:
    """Returns what looks like a snapshot in a working folder, without hidden folders, in which environments and caches
    are, and run directories, where no other run loads it. `directory`: that of the point."""
    found: Listing = {}
    root, run = folder.resolve(), directory.resolve()
    seen, waiting = 0, deque([] if root.is_relative_to(run) else [(root, 1)])
    while waiting:
        place, level = waiting.popleft()
        entries: list[os.DirEntry[str]] = []
        # Others' folders may be unreadable, and files just removed or renamed.
        with suppress(OSError):
            entries += islice(os.scandir(place), MOST_ENTRIES - seen)
        seen += len(entries)
        for entry in entries:
            path = place / entry.name
            if entry.is_dir(follow_symlinks=False):
                if level < DEEPEST and not entry.name.startswith(".") and path not in (run, run.parent):
                    waiting.append((path, level + 1))
            elif entry.name.endswith(ENDINGS):
                with suppress(OSError):
                    found[path.relative_to(root).as_posix()] = (entry.stat().st_size, entry.stat().st_mtime_ns)
    return found


def _written(before: Listing, after: Listing) -> list[str]:
    new = some_of(name for name in after if name not in before)
    again = some_of(name for name in after if name in before and after[name] != before[name])
    instead = "give each run its own by {run} in an argument, or by job.directory={run} and the script's whole path."
    found = {
        f"A run found {again} in job.directory and wrote it anew: it may have gone on where an earlier run ended, so "
        f"runs may not be alike; {instead}": again,
        f"A run wrote {new} into job.directory, which a later one may load; {instead}": new,
    }
    return [sentence for sentence, names in found.items() if names]


def _left(before: Listing) -> str:
    """Returns why a command may have had nothing left to train; empty if there was no snapshot."""
    return f"; it found {some_of(before)} in job.directory, perhaps of a finished training run" if before else ""


class Watched:
    """What a command has recorded and printed so far."""

    def __init__(self, point: Resolved, directory: Path, log_starts: Mapping[Path, int], hint: str) -> None:
        """`log_starts`: bytes of the logs that were there before. `hint`: why the command may end without a step."""
        self._job, self._directory = point.job, directory
        self._log_starts, self._hint = log_starts, hint
        self._timeout_s = point.runtime.timeout_s
        self._asks_anew = point.nodes > 1
        self._asked_s = -math.inf
        self._since_s: dict[str, float] = {}
        self.recordings: list[recording.Recording] = []
        self.output = Output(self._job, log_starts) if self._job.metric else None

    def until_measured(self, running: RunningOnNodes, limit_s: float) -> None:
        """Returns when all is recorded, or the command has ended with enough. PointFailed if it has not."""
        started = time.monotonic()
        while (status := running.wait(POLL_S)) is None:
            self._look()
            running_s = time.monotonic() - started
            printed_s = self._seconds("printed", self._is_printed)
            # All ranks have recorded, but not as many steps as were asked for.
            short_s = self._seconds("short", not self._missing and not self._is_recorded)
            if not self._job.finish and self._is_measured(running_s, printed_s):
                return
            # The times of other ranks may be shorter than the limit.
            if self._seconds("given up", any(one.gave_up for one in self.recordings)) > GIVE_UP_S:
                return
            if not self.output and short_s > SETTLE_S:
                break
            if running_s > limit_s:
                raise PointFailed(self._too_late(limit_s), timed_out=True)
        self._look(ended=status is not None)
        if status and (self._job.finish or not self._is_measured(0.0, 0.0)):
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
            # Upon a change a network file system asks for names again, instead of taking them from its memory for a
            # minute, while ranks of other nodes have recorded.
            probe = self._directory / ".asked"
            probe.touch()
            probe.unlink()
        if reason := status.skipped(self._directory):
            raise Refused(reason)
        if not self.output and (reason := recording.reason_not_to_record(self._directory)):
            raise PointFailed(f"nothing is recorded: {reason}", final=True)
        if progress := recording.progress(self._directory):
            self._check_ranks(progress[0])
        if len(list(self._directory.glob(recording.recording_file("*")))) > len(self.recordings):
            try:
                self.recordings = recording.read_recordings(self._directory)
            except UserError as error:
                raise PointFailed(str(error)) from None
            self._check_ranks(self.recordings[0].world_size)
            if self.output:
                self.output.disturbed_s = [one.profiled_s for one in self.recordings if one.profiled_s]
        if self.output:
            self.output.read(ended=ended)

    def _check_ranks(self, started: int) -> None:
        if started != self._job.ranks:
            raise PointFailed(
                f"the command started {started} training processes, but job.ranks={self._job.ranks}; set "
                f"job.ranks={started}, or start as many with {{ranks}} in job.command",
                final=True,
            )

    @property
    def _is_printed(self) -> bool:
        return self.output is not None and self.output.count >= self._job.skip_steps + self._job.steps

    @property
    def _is_recorded(self) -> bool:
        whole = (one.gave_up or len(one.host_us) >= self._job.steps for one in self.recordings)
        return all(whole) and not self._missing

    @property
    def _missing(self) -> int:
        return self._job.ranks - len(self.recordings)

    def _is_measured(self, running_s: float, printed_s: float) -> bool:
        """`printed_s`: time since the metric was printed often enough. Steps may have been recognised wrongly, so that
        their recordings would come late: the metric is not given up for them."""
        if not self.output or self._is_recorded:
            return self._is_recorded and (not self.output or self._is_printed)
        comes = (self._directory / recording.STEPS_FILE).exists()
        return self._is_printed and (not comes or printed_s > max(SETTLE_S, running_s - printed_s))

    def _too_late(self, limit_s: float) -> str:
        wanted = self._job.skip_steps + self._job.steps
        if self.output and not self._is_printed:
            have = f"job.metric was found {self.output.count} times of {wanted}"
        elif self.recordings and self._missing:
            have = f"{len(self.recordings)} of {self._job.ranks} ranks had recorded their steps"
        elif self._is_recorded:
            have = "all steps were recorded, but job.finish=true waits for the end of the command"
        else:
            have = f"no rank had finished all of {wanted} steps"
            have += f" and {self._job.profile_steps} profiled ones" if self._job.profile_steps else ""
            progress = recording.progress(self._directory)
            have += f", a rank had ended at least {progress[1]}" if progress else ", none was seen to end its first"
        by_others = limit_s < self._timeout_s
        limit = "runtime.timeout_factor (similar points took less)" if by_others else "runtime.timeout_s"
        first = "" if self._is_reached or self.output else f"{_UNREACHED}, or "
        return f"not measured within {limit_s:g} s: {have}; {first}raise {limit}, or lower job.steps"

    def check_levers(self) -> None:
        """Raises PointFailed if not all ranks have applied the levers that they apply themselves, Refused if one could
        not: it may have said so since the last look."""
        if reason := status.skipped(self._directory):
            raise Refused(reason)
        known, chosen = levers.levers(), levers.chosen(self._job.levers)
        asked = [name for name in chosen if known[name].is_in_process]
        if lacking := status.lacking(self._directory, asked, self._job.ranks):
            raise PointFailed(lacking, final=True)

    def _check_enough(self) -> None:
        """Raises PointFailed if a command that ended well has recorded or printed too little."""
        skip, wanted = self._job.skip_steps, self._job.steps
        said = next(filter(None, (last_words(*log) for log in self._log_starts.items())), "")
        ended = f"{f'; it printed last: {said}' if said else ''}{self._hint}"
        if self.output and not self.output.found:
            raise PointFailed(
                f"job.metric={self._job.metric} was not found in the command's output; compare it with "
                f"{LOG_FILE}{ended}",
                final=True,
            )
        if not self.output and self.recordings and self._missing:
            ranks = [one.rank for one in self.recordings]
            raise PointFailed(f"the command ended, but only ranks {ranks} of {self._job.ranks} recorded their steps")
        if not self.output and not self.recordings:
            missing, first = "no step of torch's optimizers", "if it trains without them, "
            if not self._is_reached:
                missing, first = "no Python with the recorder has imported torch", f"{_UNREACHED}, or "
            raise PointFailed(
                f"the command ended with exit status 0, but {missing}{ended}; {first}call overlap_sweep.step() at the "
                "end of each step, or give job.metric",
                final=True,
            )
        timed = max(self.output.count - skip, 0) if self.output else min(len(one.host_us) for one in self.recordings)
        if timed < recording.LEAST_STEPS:
            what = "numbers of job.metric" if self.output else "timed steps"
            problems = (problem for one in self.recordings for problem in one.problems)
            more = f"Let the command run for more steps, or lower job.skip_steps={skip}."
            raise PointFailed(f"there are only {timed} {what} of {wanted}. {next(problems, more)}", final=True)

    @property
    def _is_reached(self) -> bool:
        """Returns whether a process of the command has the recorder, as far as is known."""
        return any((self._directory / name).exists() for name in (recording.RECORDER_FILE, recording.STEPS_FILE))
