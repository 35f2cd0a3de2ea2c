"""`hydra/sweeper=optimize`: tries levers in the user's own training, and proves what is faster.

1. The command runs twice as it is, with traces: what its steps are made of, how noisy it is, and which levers its
   processes would take.
2. What each lever that applies is expected to gain follows from that recording: predictions, and bounds by the causes
   that it can mend (`candidates`).
3. The knob search tries them, what is expected to gain most first, each on top of what has helped, and proves the best
   in runs that alternate with the command as it is (`search.climb`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec

from overlap_sweep import workloads
from overlap_sweep.config import Search
from overlap_sweep.diagnosis.causes import CAUSES
from overlap_sweep.gpus import elsewhere
from overlap_sweep.levers import OPTION, named
from overlap_sweep.levers.status import inspected
from overlap_sweep.levers.training import Training
from overlap_sweep.optimizer import nccl_files, tuned_file
from overlap_sweep.optimizer.candidates import Allowed, Candidate, Collecting, Recorded, allowed, as_timed, candidates
from overlap_sweep.optimizer.checks import objection, point_of
from overlap_sweep.optimizer.first_runs import FIRST_RUNS, base, check_folder, first_runs
from overlap_sweep.optimizer.groups import purposes_of, shares_by_collective
from overlap_sweep.optimizer.knobs import knobs_of, prior_of
from overlap_sweep.optimizer.record import OptimizeRecord
from overlap_sweep.report.numbers import as_percent, as_us, some_of
from overlap_sweep.results.run_directory import Result
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.point import limits
from overlap_sweep.runtime.progress import announce, shown_waiting
from overlap_sweep.search import Setting, conduct
from overlap_sweep.search.knob_sweeper import Searching, record_of
from overlap_sweep.search.knob_trail import Answer, KnobTrail
from overlap_sweep.search.knobs import search
from overlap_sweep.search.measured import Budget, Measurements, SearchInputs
from overlap_sweep.workloads.job.config import Optimize, Resolved
from overlap_sweep.workloads.job.program_options import OVERLAP_LEVER
from overlap_sweep.workloads.job.result import JobRun

if TYPE_CHECKING:
    from overlap_sweep.predict.predictions import Prediction


def optimize(inputs: SearchInputs, levers: Sequence[str] = (), least: Allowed = "exact") -> None:
    """Tries levers until nothing more helps or the budget is over, and writes knobs.json and optimize.json after every
    trial. UserError, before anything runs, for a wrong option, and if the command as it is cannot be measured.
    `levers`: those that are tried where none are named; `least`: what is allowed in any case."""
    wanted = Optimize(**inputs.config.optimize)
    allow: Allowed = least if allowed(wanted.allow, least) else wanted.allow  # type: ignore[arg-type, assignment]
    chosen = named(wanted.levers or levers)
    with shown_waiting("composing what is run"):
        space = base(inputs)
    check_folder(Path(str(inputs.config.hydra.sweep.dir)), space.point())  # type: ignore[arg-type]
    measurements = Measurements.begin(inputs)
    announce([space.point()], outcomes)
    space, first = first_runs(inputs, space, measurements)
    directory = measurements.directory
    with shown_waiting("reading the traces"):
        recorded = _recorded(directory, first)
        found, left_out = candidates(recorded, chosen)
    record = OptimizeRecord(
        command=str(inputs.config.job.command),
        allow=allow,
        first_runs=[result.name for result in first],
    )
    # For the answer, should the tuner be interrupted. Where the second is, so is the first.
    record_of(measurements, [Searching(space, measurements, share=1.0)]).write(directory)
    record.write(directory)
    _add_files(found, left_out.not_here, recorded, first[0], measurements.budget, allow)
    tried = [one for one in found if allowed(one.needs, allow)]
    not_allowed = [one for one in found if one not in tried]
    for line in _worth_trying(first, recorded, tried, not_allowed, left_out.useless):
        print(f"optimize: {line}", flush=True)
    space.knobs = knobs_of(tried, OPTION.__add__)
    needs = {one.name: f"needs --allow {one.needs}; expected: {one.in_words}" for one in not_allowed}
    reasons = needs | left_out.not_here | left_out.useless
    space.left_out = {f"{OPTION}{name}": reason for name, reason in reasons.items()}
    prior = prior_of(space.knobs, tried, OPTION.__add__)
    reference = [point_of(directory, result.name) for result in first]
    searching = Searching(
        space,
        measurements,
        share=1.0,
        prior=prior,
        objection=partial(objection, directory=directory, reference=reference, allow=allow, memory=wanted.memory),
    )

    def measure(settings: Sequence[Setting]) -> list[Answer]:
        record_of(measurements, [searching]).write(directory)
        # Nothing is said again of what was measured before it went on.
        if measurements.budget.points > measurements.reused and (line := searching.progress):
            print(f"optimize: {line.replace(OPTION, '')}", flush=True)
        with limits.giving_up(_too_slow_us(searching.trail, inputs.config.search.reach)):
            return searching.measure(settings)

    record_of(measurements, [searching]).write(directory)
    record.not_allowed = not_allowed
    record.write(directory)
    effort = Search(**inputs.config.search)
    if not tried:
        # Nothing is compared with the command as it is.
        effort.repeats = min(effort.repeats, FIRST_RUNS)
    conduct(search(searching.trail, effort), measure)
    searching.ended = True
    record_of(measurements, [searching]).write(directory)
    if searching.found.proven:
        best = {key.removeprefix(OPTION): value.strip('"') for key, value in searching.found.best.items()}
        multicast = space.point().runtime.multicast
        for line in nccl_files.write(directory, best, recorded.purposes, recorded.nccl_version, multicast=multicast):
            print(f"optimize: {line}", flush=True)
    outcomes.answered = searching.found.time_us is not None


def _recorded(directory: Path, first: Sequence[Result]) -> Recorded:
    """Returns what the first runs say of the training."""
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.diagnosis.runs import diagnose, read_ranks
    from overlap_sweep.predict.runs import predictions_of

    point = first[0].point_as(Resolved)
    command = workloads.of(point).users_command
    assert command
    mine = command(point)
    recordings = [[directory / one.name / name for name in one.traces] for one in first]
    runs = [one.measured_as(JobRun) for one in first]
    on_gpu = point.runtime.device != "cpu"
    # Each rank has its own process groups.
    facts = [one.facts for one in read_ranks(recordings[0][: None if on_gpu else 1]).values() if one.facts]
    training = Training(
        libraries=facts[0].libraries if facts else None,
        words=mine.words,
        texts=mine.texts,
        elsewhere=mine.elsewhere,
        on_cpu=not on_gpu,
        override=point.job.levers_override,
    )
    shares: dict[str, float] = {}
    causes = [*chain.from_iterable(run.causes for run in runs)]
    for one in causes:
        shares[one.cause] = max(one.share, shares.get(one.cause, 0.0))
    environment = {**os.environ, **{name: str(value) for name, value in point.job.env.items() if value is not None}}

    def predict(changes: Sequence[str]) -> list[Prediction]:
        recorded = zip(recordings, runs, strict=True)
        return [as_timed(one, run) for traces, run in recorded for one in predictions_of(traces, changes)]

    groups = facts[0].groups.values() if facts else ()
    tp_size = max((group.size or 1 for group in groups if group.about == tuned_file.GROUP), default=1)
    findings = [[finding for one in diagnose(traces) for finding in one.findings] for traces in recordings]
    # Those of NCCL, whose process groups are alike in all runs.
    of_groups = findings[0] if on_gpu else []
    # Those of other machines are unknown here.
    cores = None if elsewhere() else max(1, len(os.sched_getaffinity(0)) // point.ranks_per_node)
    return Recorded(
        training,
        shares,
        [*chain.from_iterable(findings)],
        advice=" ".join(one.advice for one in causes),
        predict=predict,
        environment=environment,
        tp_size=tp_size,
        purposes=purposes_of(facts, of_groups),
        collectives=shares_by_collective(of_groups),
        nccl_version=facts[0].nccl_version if facts else "",
        nodes=point.nodes,
        cores=cores,
        collecting=_collecting(runs),
        inspected=inspected(directory / one.name for one in first),
    )


def _collecting(runs: Sequence[JobRun]) -> Collecting | None:
    shares = [one.collecting_share for one in runs if one.collecting_share is not None]
    if not shares:
        return None
    counts = (sum(len(one.long_collections) for one in runs), sum(len(one.step.samples_us) for one in runs))
    return Collecting(fmean(shares), *counts)


def _add_files(
    found: list[Candidate],
    left_out: dict[str, str],
    recorded: Recorded,
    first: Result,
    budget: Budget,
    allow: Allowed,
) -> None:
    """Adds the tuner's files for the training's layers, before the other values of their lever, and why none fits. If
    there is none, and one may be tried, it is tuned."""
    other = next((one for one in found if one.lever == OVERLAP_LEVER), None)
    may_try = allowed(other.needs if other else "rounding", allow)
    if other:
        began_s, minutes = budget.elapsed_s, (budget.ends_s - time.monotonic()) / 60
        files, reason = tuned_file.tuner_files(recorded.training, first.machine.gpu or "", minutes if may_try else 0.0)
        budget.other_s += budget.elapsed_s - began_s
        # Relative paths are of the folder where the command runs.
        is_here = first.point_as(Resolved).job.directory == "."
        values = [str(path if is_here else path.resolve()) for path in files]
        at = found.index(other)
        found[at:at] = [msgspec.structs.replace(other, value=value) for value in values]
    else:
        reason = tuned_file.of_a_loop(recorded.training, recorded.tp_size) if OVERLAP_LEVER in left_out else ""
    if reason and may_try:
        left_out[tuned_file.OPTION] = reason
        print(f"optimize: {tuned_file.OPTION}: {reason}", flush=True)


def _too_slow_us(trail: KnobTrail, reach: float) -> float:
    """Returns the median time of a step from which a trial is given up; infinite before the noise is known."""
    runs = [one for samples in (trail.found, trail.proof) for one in samples.of.get(trail.baseline, [])]
    if len(runs) < FIRST_RUNS:
        return math.inf
    return max(max(one.times_us) for one in runs) * (1 + reach)


def _worth_trying(
    first: Sequence[Result],
    recorded: Recorded,
    tried: Sequence[Candidate],
    not_allowed: Sequence[Candidate],
    useless: Mapping[str, str],
) -> list[str]:
    """Returns what the step is made of and what is tried, in lines."""
    runs = [result.measured_as(JobRun) for result in first]
    lines = [f"a step takes {some_of([as_us(run.mean_us) for run in runs])} us in {len(runs)} runs as it is"]
    run = runs[0]
    if run.exposed_comm_us is not None and run.profiled_us:
        causes = {cause: share for cause, share in recorded.shares.items() if cause != "none"}
        share = min(run.exposed_comm_us / run.profiled_us, 1.0)
        why = "; causes, and at most what each costs:" if causes else ""
        lines.append(f"communication is exposed for {as_percent(share)} of it{why}")
        lines += [f"  {cause} {as_percent(share)}: {CAUSES[cause].meaning}" for cause, share in causes.items()]
    lines += [f"caveat: {warning}" for warning in dict.fromkeys(chain.from_iterable(one.warnings for one in first))]
    values = "1 value of a lever applies" if len(tried) == 1 else f"{len(tried)} values of levers apply"
    lines.append(values + (", by the gain that is expected:" if tried else ""))
    width = max((len(one.name) for one in tried), default=0)
    lines += [f"  {one.name:{width}}  {one.in_words}" for one in tried]
    if not_allowed:
        best = not_allowed[0]
        lines.append(f"{len(not_allowed)} more need --allow {best.needs}, such as {best.name}: {best.in_words}")
    lines += [f"left out: {name}: {reason}" for name, reason in useless.items()]
    return lines
