"""When what is logged: each point as it ends, and in the end all of a directory, of a launch or of an analysis.

A run is recognised by the key of its directory, which a small file in it keeps: so the same sweep, also moved or
copied, is one run with the same points however often it is logged.
"""

import os
import re
import shlex
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from overlap_sweep.errors import UserError
from overlap_sweep.program import analyze_program
from overlap_sweep.report.console import SUMMARY_FILE
from overlap_sweep.report.numbers import counted, visible
from overlap_sweep.report.page import FILE_NAME
from overlap_sweep.report.section import Analysis, Answer, Section
from overlap_sweep.results.checks import check_place
from overlap_sweep.results.points import Point, read_points
from overlap_sweep.results.provenance import SWEEP_CONFIG, launch_commands
from overlap_sweep.results.run_directory import LOCK_FILE, write_atomically
from overlap_sweep.trackers import Run, Tracker, called, check, load
from overlap_sweep.trackers.runs import rows_by_point, run_of, secrets_of, without
from overlap_sweep.workloads import sections_of_points

KEY_FILE = ".tracking"
"""The file with the key of a sweep, or of a point that ran alone, and with the sweep's name."""


class Tracking:
    """Logs the points and sweeps at or below a directory. Methods raise UserError if that is not possible."""

    def __init__(self, name: str, root: Path) -> None:
        """UserError if there is no such tracker, or it is not installed."""
        check(name)
        self.name, self.root = name, _normal(root)
        self.points: dict[Path, Run] = {}
        """What was logged, by run directory."""
        self._sweeps: dict[Path, Run] = {}

    @cached_property
    def tracker(self) -> Tracker:
        return load(self.name)()

    def _call(self, call: Callable[[], Callable[..., None]], *arguments: object) -> None:
        # Also to connect may fail.
        called(self.name, lambda: call()(*arguments))

    def log_point(self, directory: Path) -> None:
        """Logs a point that has ended, with what can be said of it alone."""
        reading = read_points(directory)
        if reading.problems:
            raise UserError(reading.problems[0])
        self._log(sections_of_points(reading.points))

    def log_all(self, analysis: Analysis, written: Sequence[Path] = ()) -> None:
        """Logs all points of the directory that have a result and are not logged so yet, and finishes their sweeps.
        `written`: files of the analysis; else those that are there."""
        self._log(analysis.sections)
        for folder, started in self._sweeps.items():
            points = [one for one in analysis.sources.reading.points if self._sweep_of(one) == folder]
            whole = folder == self.root
            files = written if whole and written else _in_place(folder)
            finished = _finished(started, points, files, analysis.answers if whole else [])
            self._call(lambda: self.tracker.finish_sweep, finished)

    def _log(self, sections: Sequence[Section]) -> None:
        for section in sections:
            for directory, rows in rows_by_point(section).items():
                if not rows[0].point.result:
                    continue
                folder = self._sweep_of(rows[0].point)
                place = _normal(directory)
                sweep = self._started(folder) if folder else None
                key = f"{sweep.key}/{place.relative_to(folder).as_posix()}" if folder and sweep else _identity(place)[0]
                run = run_of(rows, section.points.table, key)
                if self.points.get(place) != run:
                    self._call(lambda: self.tracker.log_point, run, sweep)
                    self.points[place] = run

    def _started(self, folder: Path) -> Run:
        if folder not in self._sweeps:
            key, name = _identity(folder)
            sweep = Run(key=key, name=name)
            self._call(lambda: self.tracker.start_sweep, sweep)
            self._sweeps[folder] = sweep
        return self._sweeps[folder]

    def _sweep_of(self, point: Point) -> Path | None:
        """Returns the directory of the point's sweep; None if it ran alone."""
        folders = (folder for folder in _normal(point.directory).parents if folder.is_relative_to(self.root))
        return next(filter(_is_sweep, folders), None)

    def interrupted(self) -> None:
        """Finishes the sweeps that were started, as incomplete."""
        for sweep in self._sweeps.values():
            self._call(lambda: self.tracker.finish_sweep, replace(sweep, ok=False, texts={"status": "interrupted"}))


class LaunchTracking:
    """Logs what a launch measures. The first problem ends that: the launch itself goes on."""

    def __init__(self, tracking: Tracking) -> None:
        self._tracking, self._problem = tracking, ""

    def add(self, directory: Path) -> None:
        self._try(lambda: self._tracking.log_point(directory))

    def interrupt(self) -> None:
        self._try(self._tracking.interrupted)

    def conclude(self, analysis: Callable[[], Analysis], measured: int) -> None:
        """Logs all that is there in the end, and prints where it is; or what is not tracked, and how to do it later.
        `measured`: number of points that have a result."""
        self._try(lambda: self._tracking.log_all(analysis()))
        logged = len(self._tracking.points)
        if self._problem:
            missing = f"{measured - logged} of {measured} points" if measured > logged else "the sweep's report"
            where = shlex.join([*analyze_program().split(), str(self._tracking.root), "--track", self._tracking.name])
            print(f"warning: not tracked: {missing}. {self._problem} Later: {where}", file=sys.stderr)
        elif logged:
            print(tracked(self._tracking))

    def _try(self, call: Callable[[], None]) -> None:
        if not self._problem:
            try:
                call()
            except UserError as error:
                self._problem = str(error)


def tracked(tracking: Tracking) -> str:
    """Returns how many points are logged where, in a line."""
    return f"tracked: {counted(len(tracking.points), 'point')} in {tracking.name} ({tracking.tracker.place})"


def _normal(path: Path) -> Path:
    return Path(os.path.normpath(path.absolute()))


def _is_sweep(directory: Path) -> bool:
    return any((directory / name).exists() for name in (LOCK_FILE, SWEEP_CONFIG))


def _in_place(directory: Path) -> list[Path]:
    """Returns the files of a sweep's directory. UserError if one that would be logged leads out of it."""
    found = [path for path in directory.iterdir() if _is_reported(path)]
    for path in found:
        check_place(path, directory)
    return found


def _is_reported(path: Path) -> bool:
    return path.name in (FILE_NAME, SUMMARY_FILE) or path.name.startswith("optimal_")


def check_is_whole(directory: Path) -> None:
    """Raises UserError for the directory of a point that belongs to a sweep: it would become another run."""
    sweep = _normal(directory).parent
    if _is_sweep(sweep):
        raise UserError(f"{directory} is a point of a sweep; track the sweep, {sweep}.")


def _finished(started: Run, points: Sequence[Point], files: Sequence[Path], answers: Sequence[Answer]) -> Run:
    """Returns what is logged of a sweep in the end."""
    secrets = {secret for point in points for secret in secrets_of(point)}
    counts = Counter(point.status for point in points)
    wanted = list(filter(_is_reported, files))
    shown = {path for path in wanted if any(secret.encode() in path.read_bytes() for secret in secrets)}
    missing = counts["missing"]
    headlines = (f"{answer.title}: {card.headline}" for answer in answers for card in answer.shown_cards)
    return Run(
        key=started.key,
        name=started.name,
        ok=not missing,
        metrics={f"points_{status}": float(count) for status, count in counts.items()},
        texts={
            "status": "incomplete" if missing else "ok",
            "command": without(secrets, "\n".join(launch_commands(points))),
            **({"left_out": f"for a secret in it: {', '.join(sorted(path.name for path in shown))}"} if shown else {}),
        },
        about=without(secrets, "\n\n".join(headlines)),
        files=tuple(path for path in wanted if path not in shown),
    )


def _identity(directory: Path) -> tuple[str, str]:
    """Returns the key and the name of a sweep, or of a point that ran alone, as they were when it was first tracked."""
    path = directory / KEY_FILE
    if not (path.exists() or path.is_symlink()):
        try:
            name = visible("/".join(directory.parts[-2:]))
            write_atomically(path, f"{uuid.uuid4().hex} {name}\n".encode())
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); track a copy of the directory.") from None
    check_place(path, directory)
    found = re.fullmatch(r"([0-9a-f]{32}) (.+)\n", path.read_bytes().decode(errors="replace"))
    if not found:
        raise UserError(f"{path} is damaged; remove it, and {directory.name} becomes a new run.")
    return found[1], visible(found[2])
