"""Makes findings of what every rank lost in every step."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from overlap_sweep.diagnosis import (
    NEGLIGIBLE,
    NEVER,
    RECORDING_SLOWS,
    UNKNOWN_RANK,
    Diagnosis,
    Finding,
    Loss,
    Pass,
    StepLoss,
    advice_for,
    as_share,
    some_of,
)
from overlap_sweep.diagnosis.basis import Basis, conditions_of
from overlap_sweep.diagnosis.causes import CAUSES
from overlap_sweep.diagnosis.causes.straggler import IN_TURN
from overlap_sweep.diagnosis.facts import RankFacts
from overlap_sweep.diagnosis.groups import GroupRow, GroupTotal, NodeTimes, group_rows, group_totals, node_times_of
from overlap_sweep.diagnosis.lateness import Often, Share, by_root, often_of
from overlap_sweep.diagnosis.losses import RankView, Seen, losses_of, seen_of
from overlap_sweep.trace.activity import BWD, FWD
from overlap_sweep.trace.files import TraceFile, rank_of
from overlap_sweep.trace.intervals import Measure, intersect, merge, subtract

RANKS_NAMED = 16

_Calls = tuple[str, str, Pass]
"""Process group, collective and pass."""


class _Kind(NamedTuple):
    """What losses have in common that make one finding."""

    cause: str
    calls: _Calls = ("", "", "")
    about: str = ""
    """As `Loss.about`."""


@dataclass(frozen=True)
class _Exposed:
    """Exposed time of calls, by step, in microseconds."""

    waiting_us: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Empty if nobody knows when the last rank started: then all counts as transfer, which takes at most that."""
    transfer_us: dict[int, float] = field(default_factory=lambda: defaultdict(float))


class Found(msgspec.Struct):
    """What was found in the traces of one run, which the cache keeps."""

    diagnosis: Diagnosis
    groups: list[GroupRow]
    """Communication by process group, collective and size."""
    totals: list[GroupTotal]
    """The same by process group."""
    node_times: NodeTimes | None
    """Communication within and between nodes; None unless the run is known to have several."""


@dataclass(frozen=True)
class _Run:
    """What findings of all ranks share; lists by rank."""

    views: Sequence[RankView]
    often: list[Often]
    turns: dict[int, Share]
    """The waiting of all ranks for ranks that are late in turn, by the rank that caused it."""
    exposed: list[dict[_Calls, _Exposed]]
    steady: list[list[StepLoss]]


def found_of(
    name: str, files: Sequence[TraceFile], facts: Sequence[RankFacts], seen: Seen, missing: Sequence[int]
) -> Found:
    """Returns what was found in the traces of one run. `missing`: ranks without a trace."""
    diagnosis, rows = diagnosis_of(name, facts, seen), group_rows(facts, seen.met)
    diagnosis.notes += _startup_notes(files)
    if missing and len(facts) > 1:
        # What a single rank cannot know, its diagnosis says.
        ranks = some_of(missing, RANKS_NAMED)
        diagnosis.notes.append(f"No trace of rank {ranks}: whether the other ranks wait for it is unknown.")
    return Found(diagnosis, rows, group_totals(facts, seen.met), node_times_of(facts, rows))


def _startup_notes(files: Sequence[TraceFile]) -> list[str]:
    ranks: dict[str, list[str]] = {}
    for file in files:
        if file.startup:
            rank = rank_of(file)
            ranks.setdefault(some_of(file.startup, RANKS_NAMED), []).append("" if rank is None else str(rank))
    where = {steps: f" on rank {some_of(own, RANKS_NAMED)}" if any(own) else "" for steps, own in ranks.items()}
    return [f"Step {steps} left out: it contains the profiler's start{on_rank}." for steps, on_rank in where.items()]


def diagnosis_of(name: str, facts: Sequence[RankFacts], seen: Seen | None = None) -> Diagnosis:
    """Returns the diagnosis of one run, given the facts of its ranks; `seen`: what `seen_of` made of them, if known."""
    met, views = seen or seen_of(facts)
    losses = [losses_of(view) for view in views]
    steps = [_steps(view) for view in views]
    every_step = [step for own in steps for step in own]
    turns = by_root(
        Share(loss.late_rank, loss.lost_ns, loss.why)
        for own, lost in zip(facts, losses, strict=True)
        for loss in lost
        if loss.about == IN_TURN and loss.step in own.steady_steps
    )
    steady = [[step for step in own if not step.startup] for own in steps]
    run = _Run(views, often_of(facts, met), turns, [_exposed_by_calls(view) for view in views], steady)
    nothing = nothing_lost(every_step)
    listed = _listed(_findings(run, losses), nothing, on_device=facts[0].on_device)
    if stragglers := {finding.rank for finding in listed if finding.cause == "straggler"} - {None}:
        counted = [
            [loss for loss in own if not (loss.makes_late and rank.rank in stragglers)]
            for rank, own in zip(facts, losses, strict=True)
        ]
        listed = _listed(_findings(run, counted), nothing, on_device=facts[0].on_device)
    return Diagnosis(
        run=name,
        ranks=[own.rank for own in facts],
        world_size=max((own.world_size or 0 for own in facts), default=0) or None,
        device=(facts[0].device_name or "GPU") if facts[0].on_device else "CPU",
        findings=listed,
        steps=every_step,
        notes=_notes(facts, listed),
    )


def _findings(run: _Run, losses: list[list[Loss]]) -> list[Finding]:
    """Returns each finding, of the rank that loses most. `losses`: by rank."""
    found: dict[_Kind, list[Finding]] = defaultdict(list)
    for rank, view in enumerate(run.views):
        by_kind: dict[_Kind, list[Loss]] = defaultdict(list)
        for loss in losses[rank]:
            call = None if loss.call is None or loss.about else view.facts.calls[loss.call]
            calls: _Calls = (call.group, call.collective, call.pass_) if call else ("", "", "")
            by_kind[_Kind(loss.cause, calls, loss.about)].append(loss)
        for kind, own in by_kind.items():
            if any(loss.step in view.facts.steady_steps for loss in own):
                found[kind].append(_finding(run, rank, kind, own))
    return [max(same, key=lambda finding: finding.lost_us) for same in found.values()]


def _listed(found: Sequence[Finding], nothing: Finding | None, *, on_device: bool) -> list[Finding]:
    """Returns the findings to list, the most worthwhile first. `nothing`: that exposed communication costs next to
    nothing; then its causes are not listed."""
    ordered = sorted(found, key=lambda finding: -finding.lost_us)
    total: dict[str, float] = defaultdict(float)
    for finding in ordered:
        total[finding.cause] += finding.share
    listed = []
    for finding in ordered:
        cause = CAUSES[finding.cause]
        is_enough = total[cause.name] >= (cause.least_total if on_device else cause.least_total_on_cpu)
        if finding.share >= cause.least_share and is_enough and not (nothing and cause.is_exposed):
            listed.append(finding)
    if nothing:
        listed.append(nothing)
    elif not any(CAUSES[finding.cause].is_exposed for finding in listed):
        # Each costs little, but all together something.
        listed += [finding for finding in ordered if CAUSES[finding.cause].is_exposed][:3]
    # One change may fix all findings of a cause, so their sum is what it can gain.
    gain_us: dict[str, float] = defaultdict(float)
    for finding in listed:
        gain_us[finding.cause] += finding.lost_us
    return sorted(listed, key=lambda finding: (-gain_us[finding.cause], finding.cause, -finding.lost_us))


def _steps(view: RankView) -> list[StepLoss]:
    facts, exposure = view.facts, view.exposure
    exposed = Measure(intersect(exposure.gaps, exposure.comm.union))
    idle = Measure(subtract(exposure.gaps, merge(np.concatenate((exposure.comm.union, facts.copies)))))
    slowed_ns: dict[int, float] = defaultdict(float)
    for call, slowed in view.slowed.items():
        slowed_ns[facts.calls[call].step] += slowed.extra_ns
    return [
        StepLoss(
            rank=facts.rank,
            step=step.number,
            step_us=(step.end_ns - step.start_ns) / 1000,
            comm_us=exposure.comm.between(step.start_ns, step.end_ns) / 1000,
            exposed_comm_us=exposed.between(step.start_ns, step.end_ns) / 1000,
            idle_us=idle.between(step.start_ns, step.end_ns) / 1000,
            slowed_us=slowed_ns[step.number] / 1000,
            startup=step.startup,
        )
        for step in facts.steps
    ]


def _exposed_by_calls(view: RankView) -> dict[_Calls, _Exposed]:
    found: dict[_Calls, _Exposed] = defaultdict(_Exposed)
    for i, exposed in view.exposure.exposed.items():
        call, waiting = view.facts.calls[i], view.waitings.get(i)
        if not call.is_message:
            own = found[call.group, call.collective, call.pass_]
            if view.last_ns[i] != NEVER:
                own.waiting_us[call.step] += waiting.waited_ns / 1000 if waiting else 0.0
            own.transfer_us[call.step] += (waiting.rest_ns if waiting else exposed.total_ns) / 1000
    return found


def _waiting_and_transfer(
    run: _Run, rank: int, kind: _Kind, losses: list[Loss], lost_us: dict[int, float]
) -> tuple[float | None, float | None]:
    """Returns the waiting and the transfer per step of the calls that a finding is about: the waiting of the rank that
    waits most, and the transfer of its own rank. `lost_us`: by steady step."""
    if not CAUSES[kind.cause].is_exposed:
        return None, None
    if kind.about:
        # Of a straggler: the exposed time of calls that waited, without that waiting.
        exposed_us: dict[int, float] = defaultdict(float)
        for step, call in {(loss.step, loss.call) for loss in losses}:
            if call is not None:
                exposed_us[step] += run.views[rank].exposure.exposed[call].total_ns / 1000
        return median(lost_us.values()), median(exposed_us[step] - lost for step, lost in lost_us.items())
    own = run.exposed[rank].get(kind.calls)
    if not own:
        return None, None
    known = [by_calls[kind.calls].waiting_us for by_calls in run.exposed if kind.calls in by_calls]
    waiting_us = (median(waiting.get(step, 0.0) for step in lost_us) for waiting in known if waiting)
    return max(waiting_us, default=None), median(own.transfer_us.get(step, 0.0) for step in lost_us)


def _finding(run: _Run, rank: int, kind: _Kind, losses: list[Loss]) -> Finding:
    own = run.views[rank].facts
    lost_ns = {step.step: 0.0 for step in run.steady[rank]}
    places: dict[str, float] = defaultdict(float)
    for loss in losses:
        if loss.step in lost_ns:
            lost_ns[loss.step] += loss.lost_ns
        where = loss.where or ("" if loss.call is None else own.calls[loss.call].where)
        if where:
            places[where] += loss.lost_ns
    steady = [loss for loss in losses if loss.step in lost_ns]
    step_us = median([step.step_us for step in run.steady[rank]])
    by_step_us = {step: ns / 1000 for step, ns in lost_ns.items()}
    lost_us = median(by_step_us.values())
    waiting_us, transfer_us = _waiting_and_transfer(run, rank, kind, steady, by_step_us)
    basis = Basis(
        views=run.views,
        rank=rank,
        cause=kind.cause,
        about=kind.about,
        losses=steady,
        lost_us=lost_us,
        num_steps=len(lost_ns),
        often=run.often,
        turns=run.turns,
        waiting_us=waiting_us,
        transfer_us=transfer_us,
    )
    late = UNKNOWN_RANK if kind.about == IN_TURN else steady[0].late_rank
    group, collective, pass_ = kind.calls
    advice = advice_for(kind.cause, conditions_of(basis))
    return Finding(
        cause=kind.cause,
        lost_us=round(lost_us, 3),
        share=lost_us / step_us if step_us else 0.0,
        rank=own.rank if kind.cause != "straggler" else run.views[late].facts.rank if late != UNKNOWN_RANK else None,
        process_group=own.groups[group].title if group in own.groups else group,
        collective=collective,
        pass_=pass_,
        where=max(places, key=lambda place: places[place], default=""),
        evidence=f"{CAUSES[kind.cause].evidence(basis)}{basis.waiting_and_transfer}",
        try_=advice.sentence,
        changes=advice.changes,
        roles=sorted(basis.roles),
        cannot_tell=advice.cannot_tell,
        waiting_us=None if waiting_us is None else round(waiting_us, 3),
        transfer_us=None if transfer_us is None else round(transfer_us, 3),
    )


def exposed_by_rank(steps: Sequence[StepLoss]) -> tuple[dict[int | None, float], float | None]:
    """Returns exposed communication per steady step by rank, in microseconds, and its share of the step as the mean of
    the ranks, None without steps."""
    by_rank: dict[int | None, list[StepLoss]] = defaultdict(list)
    for step in steps:
        if not step.startup:
            by_rank[step.rank].append(step)
    costs_us = {rank: median(step.exposed_comm_us for step in own) for rank, own in by_rank.items()}
    total_us = sum(median(step.step_us for step in own) for own in by_rank.values())
    return costs_us, sum(costs_us.values()) / total_us if total_us else None


def nothing_lost(steps: Sequence[StepLoss]) -> Finding | None:
    """Returns the finding that exposed communication costs next to nothing, as the mean of the ranks; None if it does
    not."""
    costs_us, share = exposed_by_rank(steps)
    if share is None or share >= NEGLIGIBLE:
        return None
    cost_us = sum(costs_us.values()) / len(costs_us)
    return Finding(
        cause="none",
        lost_us=round(cost_us, 3),
        share=share,
        rank=max(costs_us, key=lambda rank: costs_us[rank]),
        process_group="",
        collective="",
        where="",
        evidence=f"Exposed communication costs {cost_us:,.1f} us per step, {as_share(share)} of it.",
        try_=advice_for("none", {}).sentence,
    )


def _notes(facts: Sequence[RankFacts], findings: Sequence[Finding]) -> list[str]:
    notes = []
    world_size = max((own.world_size or 0 for own in facts), default=0)
    if len(facts) == 1 and world_size > 1:
        notes.append(
            f"Only rank {facts[0].rank} of {world_size}: when the other ranks started is unknown, so waiting for them "
            "counts as communication unless a call takes much longer than its size needs. Record all ranks."
        )
    if facts[0].on_device and any(finding.cause == "host_bound" for finding in findings):
        notes.append(RECORDING_SLOWS)
    if facts[0].on_device and all(np.all(own.work.launch_ns == NEVER) for own in facts):
        notes.append("The trace has no launches: whether the host was too late is unknown, and counts as dependency.")
    passes = {pass_ for own in facts for pass_ in np.unique(own.work.pass_).tolist()}
    if FWD in passes and BWD not in passes:
        notes.append("The recording shows no backward pass: nothing trains in it, or it is of a part of the step.")
    return notes
