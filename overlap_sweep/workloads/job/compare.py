"""Jobs in comparisons and histories: their step times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from overlap_sweep.report.comparison import Comparing
from overlap_sweep.report.numbers import counted
from overlap_sweep.results.comparable import Comparable, Key, KeyedTime, Sample
from overlap_sweep.results.nodes import on_nodes
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import Records
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads import nodes
from overlap_sweep.workloads.job.answer import JobAnalysis, analyse_jobs
from overlap_sweep.workloads.job.result import JobRun
from overlap_sweep.workloads.job.rows import JobRow
from overlap_sweep.workloads.job.setting import CONNECTIONS, MULTICAST, in_words, options_of

STEP = "step"
"""Name of the pass: a whole training step."""


def measured(points: Sequence[Point], records: Records) -> Comparable:
    """Returns the step times of all settings. Only commands of one script that are in the same dataset are told apart,
    so that a sweep can be compared with one of a changed command."""
    analyses = analyse_jobs(points)
    cases = Counter(analysis.case[:3] for analysis in analyses)
    return Comparable(
        [_time(analysis, row, several=cases[analysis.case[:3]] > 1) for analysis in analyses for row in analysis.rows]
    )


def samples(result: Result) -> dict[str, Sample]:
    """Returns the sample of the step, even if it is launch-bound."""
    run, ranks = result.measured_as(JobRun), counted(result.point["job"]["ranks"], "rank")
    ranks += on_nodes(nodes(result.point))
    tokens = int(run.tokens_per_step) if run.tokens_per_step else None
    sample = Sample((run.step,), None, run.unit or STEP, tokens)
    return {f"{ranks}, {in_words(options_of(result.point))}": sample}


COMPARED = Comparing(
    measured,
    samples,
    matched=("job.ranks", "job.values", "job.env", CONNECTIONS, MULTICAST),
    # How many steps are looked at, how they are marked, and what happens after them.
    changes_nothing=("job.skip_steps", "job.steps", "job.profile_steps", "job.attach", "job.finish"),
)


def _time(analysis: JobAnalysis, row: JobRow, *, several: bool) -> KeyedTime:
    case = analysis.case
    ranks = counted(case.ranks, "rank")
    key = Key(
        model=case.script,
        tokens=None,
        precision=None,
        backend="job",
        device=case.device,
        tp_size=1,
        operator=f"{ranks}: {analysis.title.removeprefix(f'{case}, ')}" if several else ranks,
        pass_name=case.unit or STEP,
        setting=row.whole_setting,
        nodes=case.nodes,
    )
    return KeyedTime(key, row.step, None, None, tuple(point.name for point in row.points))
