"""A point's command on all of its nodes: started on each, ended on all when one ends badly."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from overlap_sweep.errors import NodeLost, PointFailed
from overlap_sweep.keeper import Command, NotStarted, OwnKeeper, Program, Start
from overlap_sweep.program import ATTACH, environment_with_package, environment_with_recorder
from overlap_sweep.recorder.recording import Wanted
from overlap_sweep.results.run_directory import log_file
from overlap_sweep.workloads import Here
from overlap_sweep.workloads.job import command
from overlap_sweep.workloads.job.command import ALONE, Place
from overlap_sweep.workloads.job.config import Resolved
from overlap_sweep.workloads.job.output import ending

START_S = 60.0
"""Time in which keepers say whether the command has started; they need hundredths of a second."""

SETTLE_S = 5.0
"""Time that the command has to end on the other nodes after it has ended badly on one: that may not be the cause."""

LEAST_FREE_BYTES = 2**16
"""Free space below which a disk is full: blocks of a few kB may be left where nothing fits in."""

_OF_ANOTHER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|ncclRemoteError|Dist(Network|Store|Backend)Error"
)
"""Errors of ranks that have lost another one."""


class RunningOnNodes:
    """`with RunningOnNodes(...) as running: running.wait(1.0)`: no process of the command outlives the block."""

    def __init__(self, programs: Sequence[Program], here: Here) -> None:
        self._programs, self._host_names = programs, here.host_names
        self._starts: list[Start] = [OwnKeeper, *here.start_on_others]
        self._commands: list[Command] = []

    def __enter__(self) -> RunningOnNodes:
        """PointFailed if the command cannot be started on one of them, NodeLost if a node is lost."""
        try:
            # All at once, since they wait for one another.
            for program, start in zip(self._programs, self._starts, strict=True):
                self._commands.append(Command(program, start))
            for node, running in enumerate(self._commands):
                with self._named(node):
                    running.confirm(START_S)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def log_starts(self) -> dict[Path, int]:
        """Returns the logs, by node, with the bytes that were there before."""
        return {running.log: running.log_start for running in self._commands}

    @property
    def left(self) -> dict[int, list[int]]:
        """Returns by node the processes that were killed and do not end."""
        return {node: running.left for node, running in enumerate(self._commands) if running.left}

    def wait(self, timeout_s: float) -> int | None:
        """Waits for the command to end by itself. Returns a status other than 0 once it has ended so on one node, 0
        when it has ended on all, None before. NodeLost if a node is lost."""
        for node, running in enumerate(self._commands):
            if running.status is None:
                with self._named(node):
                    running.wait(timeout_s)
                timeout_s = 0.0
        statuses = [running.status for running in self._commands]
        return next(filter(None, statuses), None if None in statuses else 0)

    def failure(self) -> PointFailed:
        """Ends the command on all nodes; returns how it ended on the one that failed first, as far as is known."""
        until = time.monotonic() + SETTLE_S
        for node, running in enumerate(self._commands):
            with self._named(node):
                running.wait(max(0.0, until - time.monotonic()))
        # Before the logs are read: until then another node may keep what was printed.
        self.end()
        endings = {
            node: ending(running.status, running.log, running.log_start)
            for node, running in enumerate(self._commands)
            if running.status
        }
        node = min(endings, key=lambda node: bool(_OF_ANOTHER.search(endings[node])))
        said = f"{self._prefix(node)}the command {endings[node]}"
        directory = self._commands[0].log.parent
        if shutil.disk_usage(directory).free < LEAST_FREE_BYTES:
            # Then the log may lack what was said last.
            said = f"there is no space left in {directory}; free some, or give another directory: {said}"
        return PointFailed(said, final=f"{ATTACH}: error: " in endings[node], node=node)

    def end(self) -> None:
        """Ends all processes of the command on all nodes, and waits until they have ended."""
        for running in self._commands:
            running.stop()
        for running in self._commands:
            running.end()

    @contextmanager
    def _named(self, node: int) -> Iterator[None]:
        """Names the node in what is raised. PointFailed if nothing can be started on another one."""
        try:
            yield
        except NodeLost:
            raise
        except PointFailed as failure:
            raise PointFailed(f"{self._prefix(node)}{failure}", final=failure.final, node=node) from None
        except NotStarted as error:
            reason = f"job.command starts {self._programs[node].words[0]}, which cannot be run ({error.strerror})"
            hint = "install it, give its whole path, or put its interpreter before it"
            raise PointFailed(f"{self._prefix(node)}{reason}; {hint}", final=True, node=node) from None
        except OSError as error:
            if node == 0:
                raise
            raise PointFailed(
                f"the command cannot be started ({error}); job.directory must be there on all nodes",
                final=True,
                node=node,
            ) from None

    def _prefix(self, node: int) -> str:
        return f"on node {node} ({self._host_names[node]}) " if len(self._programs) > 1 else ""


def commands_of(point: Resolved, directory: Path, here: Here, wanted: Wanted) -> list[Program]:
    """Returns the point's command for each node, not yet started. PointFailed if its folder does not exist."""
    if not here.start_on_others:
        places = [Place(port=here.port or ALONE.port)]
    else:
        places = [Place(node, here.host, here.port) for node in range(1 + len(here.start_on_others))]
    folders = [command.working_folder(point, directory, place) for place in places]
    if not folders[0].is_dir():
        raise PointFailed(f"job.directory={point.job.directory} is not a folder; give one that exists", final=True)
    return [
        Program(
            command.arguments(point, directory, place),
            # As after a shell's cd: otherwise shells say what a link leads to, a name that programs may parse.
            _environment(point, directory, place, here, interface) | wanted.as_environment() | {"PWD": str(folder)},
            directory / log_file(node),
            folder,
        )
        for node, (place, folder, interface) in enumerate(zip(places, folders, here.interfaces, strict=True))
    ]


def _environment(point: Resolved, directory: Path, place: Place, here: Here, interface: str | None) -> dict[str, str]:
    own = command.environment(point, directory, place)
    # What a process has not written yet is lost when it is ended: the reason for a hang, or the last step's metric.
    found = {"PYTHONUNBUFFERED": "1", **here.environment, **own}
    if "PYTHONPATH" in own:
        found = environment_with_package(found, last=True)
    if point.job.attach:
        found = environment_with_recorder(found)
    if interface:
        # By itself gloo takes the interface of the machine's name, which may be that of 127.0.0.1.
        found.setdefault("GLOO_SOCKET_IFNAME", interface)
    return found
