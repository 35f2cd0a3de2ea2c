"""Jobs: the fastest setting among the points that may be compared, and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, isnan
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from overlap_sweep.report.numbers import as_percent, as_sentence, as_us, counted, shortened
from overlap_sweep.results import verdict
from overlap_sweep.results.estimate import LEAST_FREEDOM, LEAST_RUNS, gap_noise_us
from overlap_sweep.results.gain import Gain, gain_over, nothing_beat
from overlap_sweep.results.nodes import on_nodes
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import KnobRecord, KnobSearch
from overlap_sweep.workloads.job.result import JobRun
from overlap_sweep.workloads.job.rows import JobRow, Work, rows_of
from overlap_sweep.workloads.job.setting import command_line, differing, in_words, is_answer, script_digest, script_of

LONGEST_COMMAND = 100
"""Longest command in a title, in characters."""
ADVISED_RUNS = 3
"""Runs of each setting that are advised where there are too few."""


class JobCase(NamedTuple):
    """Properties that must be equal for jobs to be compared. The values in the command and its environment may
    differ."""

    script: str
    ranks: int
    device: str
    command: str
    """The command line as configured, with its placeholders."""
    directory: str
    content: str
    """Digest of the script."""
    optimizer_steps: int | None
    metric: str | None
    metric_is: str
    unit: str
    """The metric's name if times are those of a unit of it."""
    nodes: int

    @classmethod
    def of(cls, point: Point) -> JobCase:
        """Returns the case of an `ok` point."""
        job = point.config["job"]
        return cls(
            script=script_of(point.config),
            ranks=job["ranks"],
            device=point.case.device,
            command=job["command"],
            directory=job["directory"],
            content=script_digest(point.config),
            optimizer_steps=job["optimizer_steps"],
            metric=job["metric"],
            metric_is=job["metric_is"],
            unit=point.measured_as(JobRun).unit,
            nodes=point.case.nodes,
        )

    @property
    def brief(self) -> str:
        return f"{self.script}, {counted(self.ranks, 'rank')}{on_nodes(self.nodes)}"

    def __str__(self) -> str:
        return f"{self.brief} on {self.device}"


def titles(cases: Sequence[JobCase]) -> list[str]:
    """Returns the cases in words; those that would be called the same with what distinguishes them."""
    named = Counter(map(str, cases))
    found = []
    for case in cases:
        alike = [other for other in cases if str(other) == str(case)]
        fields = [name for name in JobCase._fields if len({getattr(other, name) for other in alike}) > 1]
        shown = (f"{name}={getattr(case, name)}" for name in fields if name != "command")
        command = [shortened(case.command, LONGEST_COMMAND)] * ("command" in fields)
        found.append(", ".join([str(case), *command, *shown]) if named[str(case)] > 1 else str(case))
    return found


@dataclass(frozen=True)
class JobAnalysis:
    """The analysis of one case."""

    case: JobCase
    title: str
    points: list[Point]
    rows: list[JobRow]
    """Rows from fast to slow."""
    reference: JobRow
    """The setting that was started first, which gains compare with."""
    best: JobRow
    """The best setting: a search's answer if there was one, else that of `verdict.choose`."""
    work: Work
    """Settings are compared by the time of this."""
    gain: Gain | None
    """Gain of the best over the reference; None if they are the same."""
    settled: bool
    """Whether a search measured the best setting again after choosing it."""
    reason: str
    """Why it is the best."""
    unjudged: list[JobRow]
    """Settings of too few runs to be better or worse than the reference."""
    shared: str
    """What is set in all rows alike, in words; empty if there is nothing."""

    @property
    def per(self) -> str:
        """Returns `per step`: by what times are compared."""
        return f"by {self.case.unit}" if self.case.unit else f"per {self.work}"

    @property
    def too_few_runs(self) -> bool:
        """Returns whether there are too few runs to tell any settings apart."""
        return bool(self.unjudged) and len(self.unjudged) == len(self.rows) - 1

    @property
    def command(self) -> str:
        """Returns the command line that runs the best setting."""
        return command_line(self.best.points[0].config)

    def speedup(self, row: JobRow) -> float:
        """Returns the reference's time over the row's, for the same work."""
        return self.reference.per(self.work).time_us / row.per(self.work).time_us


def analyse_jobs(points: Iterable[Point], searches: Mapping[Path, KnobRecord] | None = None) -> list[JobAnalysis]:
    """Returns an analysis of the `ok` points for each case. `searches`: records by directory."""
    cases: dict[JobCase, list[Point]] = defaultdict(list)
    for point in points:
        if point.workload == "job" and point.status == "ok":
            cases[JobCase.of(point)].append(point)
    ordered = sorted(cases, key=lambda case: (case.script, case.ranks, *map(str, case)))
    return [
        _analysis(case, title, cases[case], searches or {})
        for case, title in zip(ordered, titles(ordered), strict=True)
    ]


def _analysis(case: JobCase, title: str, points: list[Point], searches: Mapping[Path, KnobRecord]) -> JobAnalysis:
    rows = _as_proven(rows_of(points), searches)
    work, reference = compared_by(rows), rows[0]
    search = _search_of(rows, work, searches)
    unjudged = [] if search else [row for row in rows[1:] if isnan(gap_noise_us(row.per(work), reference.per(work)))]
    best, gain, reason = search or choose(rows, work)
    decided = len(unjudged) < len(rows) - 1
    settled = bool(search) and best is not reference and gain is not None and gain.faster

    def standing(row: JobRow) -> str:
        names = {"best, proven" if settled else "best": decided and row is best, "reference": row is reference}
        return "only" if len(rows) == 1 else ", ".join(name for name, holds in names.items() if holds)

    placed = {row.setting: replace(row, standing=standing(row)) for row in rows}
    alike = [name for name in reference.options if name not in differing([row.options for row in rows])]
    return JobAnalysis(
        case=case,
        title=title,
        points=points,
        rows=sorted(placed.values(), key=lambda row: row.per(work).time_us),
        reference=placed[reference.setting],
        best=placed[best.setting],
        work=work,
        gain=gain,
        settled=settled,
        reason=reason,
        unjudged=[placed[row.setting] for row in unjudged],
        shared=in_words(reference.options, alike) if alike and len(rows) > 1 else "",
    )


def compared_by(rows: Sequence[JobRow]) -> Work:
    """Returns what the rows' times are compared per: samples if they are known of all rows, else tokens, else steps."""
    if all(row.samples_per_step for row in rows):
        return "sample"
    return "token" if all(row.tokens_per_step for row in rows) else "step"


def choose(rows: Sequence[JobRow], work: Work) -> tuple[JobRow, Gain | None, str]:
    """Returns the best row, its gain over the reference, which comes first, and why. The reference is the best unless
    another is faster beyond the noise; then it is the one with the fewest changes within the noise of the fastest."""
    reference, *others = rows
    if not others:
        return reference, None, "the only setting measured"
    ordered = [reference, *sorted(others, key=lambda row: row.changes)]
    choice = verdict.choose(ordered, lambda row: row.per(work))
    if len(choice.unknown) == len(others):
        return reference, None, _why_unknown(rows)
    if not choice.won:
        gain = choice.gain_of_fastest.in_words(reference.setting)
        return reference, None, f"the fastest other, {choice.fastest.setting}, is {gain}"
    if choice.chosen is choice.fastest:
        return choice.chosen, choice.gain, f"fastest of {len(rows)}"
    reason = f"simplest within the noise of the fastest, {choice.fastest.setting} (noise {choice.tie_noise:.1%})"
    return choice.chosen, choice.gain, reason


def _why_unknown(rows: Sequence[JobRow]) -> str:
    """Returns how many runs of each setting are needed, and how many there are."""
    fewest, most = (pick(len(row.points) for row in rows) for pick in (min, max))
    runs = counted(most, "run") if fewest == most else f"{fewest} to {most} runs"
    return f"{_wanted(rows)} runs of each setting are needed to see what equal runs differ by; so far {runs} each"


def _wanted(rows: Sequence[JobRow]) -> int:
    """Returns how many runs of each setting are enough, and more than there are."""
    enough = max(LEAST_RUNS, 1 + ceil(LEAST_FREEDOM / len(rows)))
    return max(enough, 1 + min(len(row.points) for row in rows))


def _as_proven(rows: Sequence[JobRow], searches: Mapping[Path, KnobRecord]) -> list[JobRow]:
    """Returns the rows, in which a search's answer and its baseline have the times of the proof: those that the search
    states, measured in turns."""
    times_us: dict[str, float] = {}
    for directory, record in searches.items():
        for search in (search for search in record.searches if search.best and search.settles):
            best, base = (
                next((row for row in rows if _all_in(row, directory) and _is_answer(row, one, record)), None)
                for one in (search, structs.replace(search, best={}))
            )
            if best and base and search.time_us and search.baseline_us:
                # The search states times for the baseline's amount of work.
                times_us[best.setting] = search.time_us * best.runs[0].amount / base.runs[0].amount
                times_us[base.setting] = search.baseline_us
    return [replace(row, step=replace(row.step, time_us=times_us.get(row.setting, row.time_us))) for row in rows]


def _all_in(row: JobRow, directory: Path) -> bool:
    return all(point.directory.is_relative_to(directory) for point in row.points)


def _is_answer(row: JobRow, search: KnobSearch, record: KnobRecord) -> bool:
    overrides = Counter(override for search in record.searches for override in set(search.overrides))
    fixed = [override for override, count in overrides.items() if count < len(record.searches)]
    return any(is_answer(point.config, search, fixed) for point in row.points)


def _search_of(
    rows: Sequence[JobRow], work: Work, searches: Mapping[Path, KnobRecord]
) -> tuple[JobRow, Gain | None, str] | None:
    """Returns the row that a search settled on, its gain over the reference, and the proof: a search measures its
    answer again, in alternation with the baseline, so that it is not just the luckiest of many. None without one."""
    for directory, record in searches.items():
        for search in record.searches:
            # Without an answer of its own, a search that ran out of budget says nothing about what it tried.
            settles = search.settles and (search.best or not search.stopped)
            for row in rows if settles else ():
                own = [point for point in row.points if point.directory.is_relative_to(directory)]
                if _is_answer(replace(row, points=own), search, record):
                    return row, _proven_gain(row, rows[0], work, search), _proof_in_words(search)
    return None


def _proven_gain(row: JobRow, reference: JobRow, work: Work, search: KnobSearch) -> Gain | None:
    if row is reference:
        return None
    if search.best and search.gain:
        return search.gain
    return gain_over(reference.per(work), row.per(work))


def _proof_in_words(search: KnobSearch) -> str:
    if search.best and search.gain and search.gain.faster:
        return "proven by the search"
    return "the search found nothing faster"


def headline(analysis: JobAnalysis) -> str:
    """Returns the setting to use, in a few words."""
    best, reference = analysis.best, analysis.reference
    if len(analysis.rows) == 1:
        return f"{best.setting}: nothing to compare with"
    if analysis.too_few_runs:
        repetitions = ",".join(map(str, range(max(_wanted(analysis.rows), ADVISED_RUNS))))
        return f"Too few runs to tell which is fastest; add repetition={repetitions} resume=last"
    if best is reference:
        return nothing_beat(best.setting, "keep it")
    assert analysis.gain
    return f"Use {best.setting}: {analysis.gain.in_words(reference.setting, analysis.per)}"


def sentences(analysis: JobAnalysis) -> list[str]:
    """Returns sentences on the best setting, what to run, and how much communication is exposed."""
    best = analysis.best
    time = [f"{as_us(best.time_us)} us per step"] if not analysis.case.unit else []
    lines = [f"{headline(analysis)}.", f"{as_sentence(', '.join(filter(None, [*time, best.rate])))}."]
    if len(analysis.rows) > 1:
        lines[-1] += f" {as_sentence(analysis.reason)}."
    lines.append(f"Run: {analysis.command}")
    if analysis.shared:
        lines.append(f"All settings have {analysis.shared}.")
    return [*lines, *exposure_in_words(analysis)]


def exposure_in_words(analysis: JobAnalysis) -> list[str]:
    """Returns a sentence on the exposed communication of the best setting and of the reference; empty without
    traces."""
    rows = {row.setting: row.exposed_fraction for row in (analysis.best, analysis.reference)}
    known = [f"{as_percent(share)} with {setting}" for setting, share in rows.items() if share is not None]
    return [f"Exposed communication, of a profiled step: {'; '.join(known)}."] if known else []
