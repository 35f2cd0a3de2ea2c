"""Implements `python launch.py` and `overlap-sweep launch`: measures one point, or a sweep of points with -m."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from overlap_sweep import workloads
from overlap_sweep.errors import UserError, end, in_words, is_of_users_system, was_interrupted
from overlap_sweep.hydra_adapter.composition import run_as_typed
from overlap_sweep.hydra_adapter.mistakes import checked, errors_in_one_line
from overlap_sweep.program import analyze_program, conf_folder, end_unread, print_version, stdout_is_closed
from overlap_sweep.results.run_directory import write_atomically
from overlap_sweep.runtime.meeting import place_by_hand
from overlap_sweep.runtime.nodes import gather
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.point import run_point
from overlap_sweep.runtime.progress import shown_waiting
from overlap_sweep.runtime.resolvers import register
from overlap_sweep.runtime.serve import serve
from overlap_sweep.runtime.start import remove_leftovers
from overlap_sweep.workloads import Workload

if TYPE_CHECKING:
    from overlap_sweep.report.section import Analysis, Section


@hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")
def measure(config: DictConfig) -> float:
    """Returns the point's objective: the median time in microseconds, which Hydra's sweepers minimise."""
    try:
        hydra_config = HydraConfig.get()
        swept = hydra_config.mode == RunMode.MULTIRUN
        return run_point(config, Path(hydra_config.runtime.output_dir), may_keep=swept)
    except UserError as error:
        # Hydra would wrap the exception in lines of its own.
        end(error)
    except OSError as error:
        # In a sweep the launcher gives up only this point.
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise
        sys.exit(f"error: {in_words(error)}")


def report_measured() -> bool:
    """Writes the files of points, and prints the results of those whose workload has a short report, unless this is a
    search, which has printed its own. Similar points are compared with each other. Returns whether any were printed."""

    def is_wanted(workload: Workload) -> bool:
        return workload.files_of_points or (workload.is_told_when_measured and not outcomes.searching)

    ok = [outcome for outcome in outcomes.all if outcome.result.status == "ok"]
    measured = [one.directory for one in ok if is_wanted(workloads.of(one.result.point))]
    if measured:
        from overlap_sweep.report.console import console_for, print_section
        from overlap_sweep.results.points import read_points
        from overlap_sweep.workloads import sections_of_points

        readings = [read_points(directory) for directory in measured]
        for problem in (problem for reading in readings for problem in reading.problems):
            print(f"warning: {problem}", file=sys.stderr)
        points = [point for reading in readings for point in reading.points]
        console = console_for(sys.stdout)
        for section in sections_of_points(points):
            _write_files(section)
            if outcomes.searching:
                continue
            for problem in (*section.problems, *section.warnings):
                print(f"warning: {problem}", file=sys.stderr)
            print_section(section, console)
    return bool(measured) and not outcomes.searching


def _write_files(section: Section) -> None:
    """Writes each point's file into its directory, and into that of all points. The first of a name stays there."""
    for file in reversed(section.files):
        content = file.content()
        for directory in (file.directory, outcomes.common):
            if not directory:
                continue
            try:
                write_atomically(directory / file.name, content)
            except OSError as error:
                print(f"warning: {in_words(error)}", file=sys.stderr)


def write_report(*, headlines: bool) -> Analysis | None:
    """Analyses the sweep, writes all files into its directory as analyze.py does, and prints the headlines. Returns the
    analysis; None if files could not be written."""
    from overlap_sweep.config import AnalysisConfig
    from overlap_sweep.report.charts.figures import left_out
    from overlap_sweep.report.console import console_for, print_headlines
    from overlap_sweep.report.files import write_reports
    from overlap_sweep.report.page import FILE_NAME
    from overlap_sweep.workloads import analyse

    root = outcomes.root
    assert root
    with shown_waiting("writing the report"):
        try:
            analysis = analyse(root, AnalysisConfig(), shlex.join([*analyze_program().split(), str(root)]))
            write_reports(analysis, root)
        except UserError as error:
            print(f"warning: {error}", file=sys.stderr)
            return None
    for warning in left_out():
        print(f"warning: {warning}", file=sys.stderr)
    if headlines:
        print_headlines(analysis, console_for(sys.stdout))
    outcomes.report = root / FILE_NAME
    return analysis


def conclude_tracking(analysis: Analysis | None) -> None:
    """Logs what was measured in the end, with what the sweep says of each point. `analysis`: that of the report, if
    one was written."""
    from overlap_sweep.config import AnalysisConfig

    root = outcomes.root
    if root and outcomes.tracking and outcomes.all:
        with shown_waiting("tracking"):
            outcomes.tracking.conclude(lambda: analysis or workloads.analyse(root, AnalysisConfig()), len(outcomes.all))


def _join_others() -> None:
    """Takes the place that torchrun gave this process among the machines of the launch. Returns on the first only."""
    try:
        place = place_by_hand(os.environ)
        if place and place.number:
            sys.exit(serve(place))
        if place:
            gather(place)
    except UserError as error:
        end(error)
    except KeyboardInterrupt:
        sys.exit(130)


def _measure() -> None:
    """Runs Hydra on the process's arguments. Exits with one line if a file or directory cannot be used."""
    try:
        measure()
    except (BrokenPipeError, HydraException):
        # Hydra's exception about a missing file is an OSError, too.
        raise
    except OSError as error:
        if is_of_users_system(error):
            # Hydra's files of the sweep's directory have no name in the error.
            error.filename = error.filename or outcomes.root
            sys.exit(f"error: {in_words(error)}")
        sys.exit(f"error: {error.filename} cannot be used ({error.strerror}); give another directory or file.")
    except Exception as error:
        if was_interrupted(error):
            raise KeyboardInterrupt from error
        raise


def main(*, headlines: bool = True) -> None:
    """Runs Hydra on the process's arguments and exits, with 0 if all valid points were measured. `headlines`: whether a
    sweep's answers are printed."""
    if "--version" in sys.argv[1:]:
        print_version()
        return
    if {"--help", "-h", "--cfg", "-c"} & {*sys.argv[1:]}:
        # Quitting a pager is not an error.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    _join_others()
    try:
        with errors_in_one_line():
            register()
            sys.argv[1:] = checked(sys.argv[1:])
            run_as_typed(sys.argv[1:])
            _measure()
        outcomes.hear_of_other_processes()
        answered, analysis = report_measured(), None
        if outcomes.wants_report and not outcomes.missing and not outcomes.report and outcomes.counts()["ok"]:
            analysis = write_report(headlines=headlines and not answered)
        conclude_tracking(analysis)
    except KeyboardInterrupt as interrupt:
        print(f"interrupted: {outcomes.counts_line()}; finished results are kept", file=sys.stderr)
        if outcomes.expected:
            print(f"resume with: {outcomes.resume_command()}", file=sys.stderr)
        if outcomes.tracking:
            outcomes.tracking.interrupt()
        sys.exit(getattr(interrupt, "exit_status", 130))
    except BrokenPipeError:
        if not stdout_is_closed():
            raise
        end_unread()
    except SystemExit:
        # An error in the middle of a sweep.
        if not outcomes.all:
            remove_leftovers()
        elif outcomes.may_resume:
            print(f"{outcomes.counts_line()}; resume with: {outcomes.resume_command()}", file=sys.stderr)
        if outcomes.tracking:
            outcomes.tracking.interrupt()
        raise
    sys.exit(outcomes.conclude())
