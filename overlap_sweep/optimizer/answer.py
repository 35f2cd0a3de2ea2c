"""Reads the answer of an optimization from its directory, and says it in a few lines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.levers import OPTION, levers
from overlap_sweep.levers.status import variables
from overlap_sweep.optimizer import tuned_file
from overlap_sweep.optimizer.candidates import Candidate, as_timed
from overlap_sweep.optimizer.record import OptimizeRecord
from overlap_sweep.report.causes import diagnosed
from overlap_sweep.report.numbers import as_duration, as_percent, counted, some_of
from overlap_sweep.results.gain import NO_GAIN, Gain
from overlap_sweep.results.measured import Scalar
from overlap_sweep.results.points import read_points
from overlap_sweep.results.provenance import highest_load
from overlap_sweep.results.records import Expected, KnobRecord, KnobSearch
from overlap_sweep.runtime.outcome import in_short
from overlap_sweep.search.knob_sweeper import STILL_RUNNING
from overlap_sweep.search.undecided import Verdict
from overlap_sweep.study import searched
from overlap_sweep.study.section import judged
from overlap_sweep.study.words import cautions
from overlap_sweep.workloads.job.result import JobRun
from overlap_sweep.workloads.job.rows import JobRow
from overlap_sweep.workloads.job.study import STUDY

if TYPE_CHECKING:
    from overlap_sweep.predict.predictions import Prediction

AS_IT_IS = "the command as it is"
MOST_CAUSES = 3
"""Causes of exposed communication that are named."""


class Trial(msgspec.Struct, kw_only=True):
    """A setting that was tried."""

    settings: dict[str, Scalar]
    """Values of levers, by name; none of the command as it is."""
    step_us: float | None
    """Time of the command as it is, less what was gained; None if it was not measured."""
    gain: float | None
    """Share of the time of the command as it is that it saves."""
    low: float | None
    """Ends of the gain's 95 % confidence interval."""
    high: float | None
    expected: Expected | None
    """What was expected before of the lever that was tried with it; None if nothing was."""
    added: float | None
    """Share of the time of the best setting until then that this lever saves, which was tried on top of it; None where
    several were."""
    effect: str
    """What it changed in what ran; empty without traces."""
    results: str
    """Whether it computes the same: equal, rounding or differs; - if that is unknown, empty if it was not measured."""
    note: str
    """Why it was not measured or must not be used, or that it is the best."""
    is_refused: bool


class Exposed(msgspec.Struct, kw_only=True):
    """A cause of exposed communication that is left."""

    cause: str
    where: str
    lost_us: float
    """At most that could be gained by mending it."""
    share: float
    advice: str
    change: str
    """The change that is predicted to mend it best, which may be one of the script's code; empty if none is."""
    gain_us: float | None
    low_us: float | None
    high_us: float | None


class Answer(msgspec.Struct, kw_only=True):
    """What optimizing a training has found."""

    schema: Literal[1] = 1
    """Version of these fields."""
    answer: str
    """In a few sentences."""
    verdict: Literal["proven", "keep", "undecided"]
    """`keep`: nothing that was tried gains what is worth having, and the runs would have shown it; `undecided`: they
    show neither."""
    settings: dict[str, Scalar]
    """Levers to set, by name; empty: keep the command as it is."""
    seemed: dict[str, Scalar]
    """Levers that are likeliest to gain, while that is undecided; empty if none was measured."""
    gain: float
    """Share of the step's time that `settings` save; while that is undecided, that `seemed` may save."""
    low: float
    """Ends of the gain's 95 % confidence interval."""
    high: float
    proven: bool
    """Whether it was faster beyond the noise in runs that alternated with the command as it is."""
    step_us: float
    """Of the command as it is."""
    best_us: float
    lines: list[str]
    """What to write: the command to run, and lines of code."""
    memory_gb: float | None
    """Peak on one GPU with these settings; None on a CPU."""
    memory_before_gb: float | None
    results: str
    trials: list[Trial]
    left_out: dict[str, str]
    """Why each other lever, or value of one, was not tried, by its name."""
    not_allowed: list[Candidate]
    """What --allow would add, what is expected to gain most first."""
    exposed: list[Exposed]
    runs: int
    minutes: float
    stopped: str
    """Why it ended early; empty if it did not."""
    cautions: list[str]
    """What to know before believing it, a sentence each."""


def read_answer(directory: Path) -> Answer:
    """Returns the answer so far. UserError if the directory has none."""
    path = directory / OptimizeRecord.FILE
    if not path.exists():
        raise UserError(f"{directory} has no {OptimizeRecord.FILE}: the command was not measured as it is.")
    record, knobs = OptimizeRecord.read(path), KnobRecord.read(directory / KnobRecord.FILE)
    points = read_points(directory).points
    results = [point.result for point in points if point.result]
    analyses = judged(STUDY, [point for point in points if point.status == "ok"], {directory: knobs})
    # The command as it is was measured, so there is one; a first run with another number of ranks failed.
    (analysis,) = analyses
    (found,) = knobs.searches
    rows = searched.rows_by_point(analysis, directory)
    best, reference = analysis.best, analysis.reference
    is_better = best is not reference and analysis.gain is not None and analysis.proven
    is_open = bool(found.verdict or found.stopped) and found.verdict != "keep"
    verdict: Verdict = "proven" if is_better else "undecided" if is_open else "keep"
    seemed = next((one.gain for one in found.tried if found.seemed and one.changed == found.seemed), None)
    gain = (analysis.gain if is_better else seemed) or NO_GAIN
    low, high = gain.interval
    winner = best if is_better else reference
    write = STUDY.to_write(analysis) if is_better else ""
    stopped = "interrupted" if found.stopped == STILL_RUNNING else found.stopped
    return Answer(
        answer=undecided(found, _runs_ms(reference), highest_load(reference.points), gain)
        if verdict == "undecided"
        else _sentence(winner, gain, is_better=is_better),
        verdict=verdict,
        seemed=_settings(found.seemed),
        settings=_settings(winner.options),
        gain=gain.share,
        low=low,
        high=high,
        proven=is_better,
        step_us=reference.time_us,
        best_us=winner.time_us,
        lines=[
            f"run: {STUDY.to_use(analysis)}",
            *set_by_command([directory / name for name in record.first_runs], _settings(winner.options)),
            *write.splitlines(),
        ]
        if is_better
        else [],
        memory_gb=winner.peak_memory_gb,
        memory_before_gb=reference.peak_memory_gb,
        results=winner.equality.verdict if winner.equality and is_better else "equal",
        trials=[_trial(one) for one in searched.trials(STUDY, analysis, found, rows)],
        left_out=searched.left_out(STUDY, found),
        not_allowed=record.not_allowed,
        exposed=list(_exposed(winner)),
        runs=len(points),
        # What was measured before it went on took time, too.
        minutes=max(knobs.elapsed_s, sum(one.wall_s or 0.0 for one in results) if knobs.reused else 0.0) / 60,
        stopped=stopped,
        cautions=cautions(STUDY, analysis),
    )


def _runs_ms(row: JobRow) -> list[float]:
    return [point.measured_as(JobRun).mean_us / 1000 for point in row.points]


def _sentence(winner: JobRow, gain: Gain, *, is_better: bool) -> str:
    if is_better:
        return f"Use {winner.setting}: {gain.in_words(AS_IT_IS)}, proven in runs that took turns."
    noise = as_percent(winner.step.noise_us / winner.time_us)
    return (
        f"Keep the command as it is: nothing that was tried is faster beyond the noise. Its time is known to ± {noise}."
    )


def undecided(found: KnobSearch, runs_ms: Sequence[float], load: str, gain: Gain) -> str:
    """Returns what is known so far, and how to go on. `runs_ms`: a step of the command as it is, in each run; `load`:
    the machine's, empty if it was low; `gain`: of what seems fastest."""
    wanted = sum(len(values) - 1 for values in found.knobs.values())
    left = len(found.untried)
    parts = ["Undecided"]
    if left or not wanted:
        parts = [f"Not finished, {wanted - left} of {wanted} values tried" if wanted else "Not finished, nothing tried"]
    took = f"{min(runs_ms):,.1f} to {max(runs_ms):,.1f} ms" if len(runs_ms) > 1 else f"{runs_ms[0]:,.1f} ms"
    busy = f", with a load of the machine up to {load}, which other programs may share" if load else ""
    parts.append(f": a step of {AS_IT_IS} took {took} in {counted(len(runs_ms), 'run')}{busy}.")
    if found.seemed:
        names = ", ".join(f"{key.removeprefix(OPTION)}={value}" for key, value in found.seemed.items())
        gains = gain.in_brief if gain.share > 0 else f"up to {as_percent(gain.interval[1])}"
        parts.append(f" {names} may gain {gains}, NOT PROVEN.")
    return "".join([*parts, f" Go on with --resume --minutes N{' when the machine is idle' if load else ''}."])


def set_by_command(first_runs: Sequence[Path], settings: Mapping[str, Scalar]) -> Iterator[str]:
    """Yields a line for each variable that the command sets itself: one in front of it would be replaced there."""
    seen = variables(first_runs)
    for name, value in settings.items():
        lever, now = levers().get(name), seen.get(name, "")
        if lever and now and value is not None and os.environ.get(lever.environment) != now.partition("=")[2]:
            yield f"where the command sets {now}: {lever.environment}={lever.assigned(value)}"


def _settings(options: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {name.removeprefix(OPTION): value for name, value in options.items() if name.startswith(OPTION)}


def _trial(one: searched.Trial) -> Trial:
    low, high = one.gain.interval if one.gain else (None, None)
    return Trial(
        settings=_settings(one.row.options if one.row else one.changed),
        step_us=one.trial_us,
        gain=one.gain.share if one.gain else None,
        low=low,
        high=high,
        expected=one.expected,
        added=one.added.share if one.added else None,
        effect=one.effect,
        results=one.results,
        note=one.note,
        is_refused=one.is_refused,
    )


def _exposed(row: JobRow) -> Iterator[Exposed]:
    """Yields the causes that are left with a setting, and the best change for each, from its traces."""
    causes = [one for one in row.causes if one.cause != "none"][:MOST_CAUSES]
    predictions = _mends(row)
    for one in causes:
        mend = predictions.get(one.cause)
        yield Exposed(
            cause=one.cause,
            where=one.where,
            lost_us=one.lost_us,
            share=one.share,
            advice=one.advice,
            change=mend.change if mend else "",
            gain_us=mend.gain_us if mend else None,
            low_us=mend.gain_low_us if mend else None,
            high_us=mend.gain_high_us if mend else None,
        )


def _mends(row: JobRow) -> dict[str, Prediction]:
    """Returns the best change for each cause that has one, from the setting's traces."""
    side = STUDY.side(row)
    if side is None:
        return {}
    (run,) = diagnosed([side])
    if not run or not run.found:
        return {}
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.predict.runs import mends_of

    measured = side.point.measured_as(JobRun)
    found: dict[str, Prediction] = {}
    for finding, mend in zip(run.found.diagnosis.findings, mends_of(run).of_findings, strict=True):
        if mend and ((timed := as_timed(mend, measured)).gain_us or 0.0) > 0:
            found.setdefault(finding.cause, timed)
    return found


def in_lines(answer: Answer, report: Path) -> list[str]:
    """Returns the answer in five lines, but for lines to write. `report`: the file that has all of it."""
    lines = [answer.answer, *(f"  {line}" for line in answer.lines)]
    if answer.settings:
        memory = ""
        if answer.memory_gb is not None and answer.memory_before_gb is not None:
            memory = f"; memory {answer.memory_gb:.1f} GB on a GPU instead of {answer.memory_before_gb:.1f}"
        lines.append(f"Results: {_RESULTS.get(answer.results, answer.results)}{memory}.")
    refused = [f" {_named(one.settings)}: " for one in answer.trials if one.is_refused]
    lines += [f"Caveat: {one}" for one in answer.cautions if not any(name in one for name in refused)]
    lines += [_still_exposed(answer.exposed), _tried(answer)]
    if reason := answer.left_out.get(tuned_file.OPTION):
        lines.append(f"{tuned_file.OPTION}: {reason}.")
    others = f", and why other levers or values were not tried ({len(answer.left_out)})" if answer.left_out else ""
    return [*lines, f"All that was measured{others}: {report}"]


_RESULTS = {
    "equal": "equal bit by bit, as far as was seen",
    "rounding": "equal but for rounding",
    "differs": "they differ; compare losses over a longer training",
    "unknown": "whether they are equal is unknown",
}


def _named(settings: Mapping[str, Scalar]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _still_exposed(exposed: Sequence[Exposed]) -> str:
    if not exposed:
        return "Communication is hardly exposed."
    return f"Still exposed, of a step: {'; '.join(map(_of_cause, exposed))}."


def _of_cause(one: Exposed) -> str:
    where = f" in {one.where.removeprefix('in ')}" if one.where else ""
    found = f"{one.cause} {as_percent(one.share)}{where}"
    # A gain that may be none is no advice.
    if one.gain_us is None or one.low_us is None or one.high_us is None or one.low_us <= 0:
        advice, _, _ = one.advice.partition(". ")
        return f"{found}{f' (try: {advice})' if advice else ''}"
    low, high = (f"{us / 1000:.1f}" for us in (one.low_us, one.high_us))
    return f"{found} ({one.change} is predicted to gain {one.gain_us / 1000:.1f} ms ({low} to {high}))"


def _tried(answer: Answer) -> str:
    settings = [one for one in answer.trials if one.settings]
    measured = len([one for one in settings if not one.is_refused])
    early = f"; ended early: {answer.stopped}" if answer.stopped else ""
    tried = (
        f"Measured {counted(measured, 'setting')} in {counted(answer.runs, 'run')}, "
        f"{as_duration(60 * answer.minutes)}{early}."
    )
    if refused := [f"{_named(one.settings)} ({in_short(one.note)})" for one in settings if one.is_refused]:
        tried += f" Failed or not to be used: {some_of(refused, separator='; ')}."
    if answer.not_allowed:
        best = answer.not_allowed[0]
        more = counted(len(answer.not_allowed), "value")
        tried += f" {more} more with --allow {best.needs}, the best {best.name}: {best.in_words}."
    return tried
