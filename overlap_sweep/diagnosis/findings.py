"""Makes findings of what every rank lost in every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from overlap_sweep.diagnosis import (
    END_OF_STEP,
    EXPOSED,
    IN_TURN,
    LISTED,
    LISTED_PYTHON,
    LISTED_SLOWED,
    LISTED_UNEXPLAINED,
    NEGLIGIBLE,
    PAUSES,
    RECORDING_SLOWS,
    Cause,
    Diagnosis,
    Finding,
    Pass,
    StepLoss,
    as_share,
)
from overlap_sweep.diagnosis.advice import advice_for
from overlap_sweep.diagnosis.arrivals import Arrivals, arrivals
from overlap_sweep.diagnosis.basis import Basis, steady_steps
from overlap_sweep.diagnosis.calls import NEVER
from overlap_sweep.diagnosis.causes import Loss, losses_of
from overlap_sweep.diagnosis.contention import hidden_ns, slowed_by_call, slowed_gemms
from overlap_sweep.diagnosis.evidence import evidence_of, try_of
from overlap_sweep.diagnosis.exposure import Exposure, Measure, exposure_of
from overlap_sweep.diagnosis.facts import RankFacts
from overlap_sweep.diagnosis.lateness import POINT_TO_POINT, Often, Share, often_of
from overlap_sweep.diagnosis.rank import RankView, views_of
from overlap_sweep.diagnosis.transfers import Alike
from overlap_sweep.trace.intervals import intersect, merge, subtract


@dataclass(frozen=True)
class Key:
    """What losses have in common that make one finding."""

    cause: Cause
    group: str
    collective: str
    pass_: Pass
    about: str = ""
    """Of waits the call of the runtime; PAUSES of those of the host."""


@dataclass
class _Lost:
    """The losses of one finding on one rank."""

    by_step: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    by_place: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    losses: list[Loss] = field(default_factory=list)


def diagnosis_of(name: str, facts: Sequence[RankFacts], met: Arrivals | None = None) -> Diagnosis:
    """Returns the diagnosis of one run, given the facts of its ranks; `met`: when they met, if known."""
    met = met or arrivals(facts)
    steps: list[StepLoss] = []
    candidates: dict[Key, list[Finding]] = defaultdict(list)
    exposures = [exposure_of(own) for own in facts]
    views = views_of(facts, exposures, met)
    losses = [losses_of(view) for view in views]
    run = _Run(
        facts=facts,
        exposures=exposures,
        often=often_of(facts, met),
        turns=_turns(facts, losses),
        separated=[_separated(view) for view in views],
        alike=[view.alike for view in views],
    )
    for rank, (own, exposure) in enumerate(zip(facts, exposures, strict=True)):
        lost = _lost_by_key(own, losses[rank])
        slowed = _slowed(views[rank], exposure, lost)
        own_steps = list(_steps(own, exposure, slowed))
        steps += own_steps
        steady = [step for step in own_steps if not step.startup]
        numbers = {step.step for step in steady}
        for key, found in lost.items():
            found.losses = [loss for loss in found.losses if loss.step in numbers]
            if not found.losses:
                continue
            candidates[key].append(_finding(run, rank, key, found, steady))
    worst = [max(of_ranks, key=lambda finding: finding.lost_us) for of_ranks in candidates.values()]
    findings = _listed(worst, nothing_of(steps), facts[0].on_device)
    world_size = max((own.world_size or 0 for own in facts), default=0) or None
    return Diagnosis(
        run=name,
        ranks=[own.rank for own in facts],
        world_size=world_size,
        findings=findings,
        steps=steps,
        notes=_notes(facts, findings),
    )


MOST_OF_SMALL = 3


def _listed(found: Sequence[Finding], nothing: Finding | None, on_device: bool) -> list[Finding]:
    """Returns the findings to list, the most worthwhile first.

    If exposed communication costs nothing worth mending, its causes are not listed. If each costs little but all
    together something, the largest are.
    """
    ordered = sorted(found, key=lambda finding: -finding.lost_us)
    slowed = sum(finding.share for finding in ordered if finding.cause == "contention")
    late = sum(finding.share for finding in ordered if finding.cause == "host_bound")
    from_share: dict[Cause, float] = {
        "host_bound": LISTED if on_device or late >= LISTED_PYTHON else 1.0,
        "unexplained": LISTED_UNEXPLAINED,
    }
    if slowed < LISTED_SLOWED:
        from_share["contention"] = 1.0
    if nothing:
        from_share |= dict.fromkeys(EXPOSED, 1.0)
    listed = [finding for finding in ordered if finding.share >= from_share.get(finding.cause, LISTED)]
    if nothing:
        listed.append(nothing)
    elif not any(finding.cause in EXPOSED for finding in listed):
        listed += [finding for finding in ordered if finding.cause in EXPOSED][:MOST_OF_SMALL]
    # One change mends all findings of a cause, so their sum is what it can gain.
    gain_us: dict[Cause, float] = defaultdict(float)
    for finding in listed:
        gain_us[finding.cause] += finding.lost_us
    return sorted(listed, key=lambda finding: (-gain_us[finding.cause], finding.cause, -finding.lost_us))


def _lost_by_key(facts: RankFacts, losses: Sequence[Loss]) -> dict[Key, _Lost]:
    found: dict[Key, _Lost] = defaultdict(_Lost)
    for loss in losses:
        key, place = _key(facts, loss)
        found[key].by_step[loss.step] += loss.lost_ns
        found[key].by_place[place] += loss.lost_ns
        found[key].losses.append(loss)
    return found


def _key(facts: RankFacts, loss: Loss) -> tuple[Key, str]:
    """Returns what the loss belongs to, and where it happened."""
    if loss.call is not None:
        call = facts.calls[loss.call]
        if loss.cause == "straggler":
            return Key(loss.cause, "", "", "", IN_TURN if loss.in_turn else str(loss.late_rank)), call.where
        return Key(loss.cause, call.group, call.collective, call.pass_), call.where
    if loss.cause == "host_sync" and loss.wait is not None:
        wait = facts.waits[loss.wait]
        if wait.ends_step:
            return Key(loss.cause, "", "", "", END_OF_STEP), END_OF_STEP
        return Key(loss.cause, "", "", "", wait.operator or wait.name), wait.where or wait.operator or wait.name
    if loss.pause is not None:
        return Key(loss.cause, "", "", "", PAUSES), facts.pauses[loss.pause].place
    stall = None if loss.stall is None else facts.stalls[loss.stall]
    return Key(loss.cause, "", "", ""), f"{stall.after} ({stall.stream})" if stall else ""


def _slowed(view: RankView, exposure: Exposure, lost: dict[Key, _Lost]) -> dict[int, float]:
    """Adds what GEMMs lost to communication next to them; returns it by step in nanoseconds."""
    facts = view.facts
    slowed = slowed_gemms(facts)
    extra, alone = slowed_by_call(facts, slowed)
    moving = [(call.end_ns - round(view.moving_ns(i)), call.end_ns) for i, call in enumerate(facts.calls)]
    hidden = hidden_ns(moving, exposure.gaps)
    by_step: dict[int, float] = defaultdict(float)
    for i in np.flatnonzero(extra).tolist():
        call = facts.calls[i]
        by_step[call.step] += float(extra[i])
        cause: Cause = "repeated_reduction" if i in view.repeated else "contention"
        found = lost[Key(cause, call.group, call.collective, call.pass_)]
        found.by_step[call.step] += float(extra[i])
        found.by_place[call.where] += float(extra[i])
        numbers = {"alone_ns": float(alone[i]), "hidden_ns": float(hidden[i])}
        if i in view.repeated:
            numbers = {"slowed_ns": float(extra[i]), "passes": float(view.repeated[i])}
        found.losses.append(Loss(cause, call.step, float(extra[i]), i, numbers=numbers))
    return by_step


def _steps(facts: RankFacts, exposure: Exposure, slowed: dict[int, float]) -> list[StepLoss]:
    exposed = Measure(intersect(exposure.gaps, exposure.comm.union))
    idle = Measure(subtract(exposure.gaps, merge(np.concatenate((exposure.comm.union, facts.copies)))))
    return [
        StepLoss(
            rank=facts.rank,
            step=step.number,
            step_us=(step.end_ns - step.start_ns) / 1000,
            comm_us=exposure.comm.between(step.start_ns, step.end_ns) / 1000,
            exposed_comm_us=exposed.between(step.start_ns, step.end_ns) / 1000,
            idle_us=idle.between(step.start_ns, step.end_ns) / 1000,
            slowed_us=slowed.get(step.number, 0.0) / 1000,
            startup=step.startup,
        )
        for step in facts.steps
    ]


_Calls = tuple[str, str, Pass]
"""Process group, collective and pass."""


@dataclass(frozen=True)
class _Separated:
    """Exposed time of calls, by step, in microseconds."""

    waiting_us: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    transfer_us: dict[int, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True)
class _Run:
    """What findings of all ranks share; lists by rank."""

    facts: Sequence[RankFacts]
    exposures: Sequence[Exposure]
    often: list[Often]
    turns: dict[int, Share]
    separated: list[dict[_Calls, _Separated]]
    alike: list[Mapping[int, Alike]]


def _turns(facts: Sequence[RankFacts], losses: Sequence[list[Loss]]) -> dict[int, Share]:
    """Returns the waiting of all ranks for ranks that are late in turn, by the rank that caused it."""
    found: dict[int, Share] = {}
    for own, lost in zip(facts, losses, strict=True):
        steady = set(steady_steps(own).tolist())
        for loss in lost:
            if loss.in_turn and loss.step in steady:
                before = found.get(loss.late_rank, Share(loss.late_rank, 0.0))
                found[loss.late_rank] = Share(
                    loss.late_rank, before.waited_ns + loss.lost_ns, before.why.plus(loss.why)
                )
    return found


def _separated(view: RankView) -> dict[_Calls, _Separated]:
    """Returns the waiting and the transfer of a rank's calls. Where nobody knows when the last rank started, all counts
    as transfer, which takes at most that."""
    found: dict[_Calls, _Separated] = defaultdict(_Separated)
    for i, exposed in view.exposure.exposed.items():
        call, waiting = view.facts.calls[i], view.waitings.get(i)
        if call.collective not in POINT_TO_POINT:
            own = found[call.group, call.collective, call.pass_]
            if view.last_ns[i] != NEVER:
                own.waiting_us[call.step] += waiting.waited_ns / 1000 if waiting else 0.0
            pieces = waiting.rest if waiting else exposed.pieces
            own.transfer_us[call.step] += sum(end - start for start, end in pieces) / 1000
    return found


def _of_calls(run: _Run, rank: int, key: Key, steady: Sequence[StepLoss]) -> tuple[float | None, float | None]:
    """Returns the waiting and the transfer per step of the calls that a finding is about: the waiting of the rank that
    waits most, and the transfer of its own rank."""
    calls, steps = (key.group, key.collective, key.pass_), [step.step for step in steady]
    own = run.separated[rank].get(calls)
    if key.cause not in EXPOSED or not own or not steps:
        return None, None
    known = [of_rank[calls].waiting_us for of_rank in run.separated if calls in of_rank]
    waiting_us = [median(one.get(step, 0.0) for step in steps) for one in known if one]
    return max(waiting_us, default=None), median(own.transfer_us.get(step, 0.0) for step in steps)


def _finding(run: _Run, rank: int, key: Key, lost: _Lost, steady: Sequence[StepLoss]) -> Finding:
    own = run.facts[rank]
    step_us = median([step.step_us for step in steady]) if steady else 0.0
    lost_us = median([lost.by_step.get(step.step, 0.0) / 1000 for step in steady]) if steady else 0.0
    group = own.groups.get(key.group)
    places = {place: ns for place, ns in lost.by_place.items() if place}
    waiting_us, transfer_us = _of_calls(run, rank, key, steady)
    if key.cause == "straggler":
        waiting_us, transfer_us = lost_us, _transfer_us(run.exposures[rank], lost, steady)
    basis = Basis(
        facts=run.facts,
        exposures=run.exposures,
        rank=rank,
        cause=key.cause,
        about=key.about,
        losses=lost.losses,
        lost_us=lost_us,
        step_us=step_us,
        num_steps=len(steady),
        alike=run.alike[rank],
        often=run.often,
        turns=run.turns,
        waiting_us=waiting_us,
        transfer_us=transfer_us,
    )
    return Finding(
        cause=key.cause,
        lost_us=round(lost_us, 3),
        share=lost_us / step_us if step_us else 0.0,
        rank=basis.late_rank if key.cause == "straggler" else own.rank,
        process_group=group.title if group else key.group,
        collective=key.collective,
        pass_=key.pass_,
        where=max(places, key=lambda place: places[place]) if places else "",
        evidence=evidence_of(basis),
        try_=try_of(basis),
        waiting_us=None if waiting_us is None else round(waiting_us, 3),
        transfer_us=None if transfer_us is None else round(transfer_us, 3),
    )


def _transfer_us(exposure: Exposure, lost: _Lost, steady: Sequence[StepLoss]) -> float:
    """Returns the exposed time per step of calls that waited, without that waiting."""
    exposed_us: dict[int, float] = defaultdict(float)
    for step, call in {(loss.step, loss.call) for loss in lost.losses}:
        if call is not None:
            exposed_us[step] += sum(end - start for start, end in exposure.exposed[call].pieces) / 1000
    return median(exposed_us[step.step] - lost.by_step.get(step.step, 0.0) / 1000 for step in steady)


def nothing_of(steps: Sequence[StepLoss]) -> Finding | None:
    """Returns the finding that exposed communication costs next to nothing, as the mean of the ranks; None if it costs
    something."""
    by_rank: dict[int | None, list[StepLoss]] = defaultdict(list)
    for step in steps:
        if not step.startup:
            by_rank[step.rank].append(step)
    costs_us = [median([step.exposed_comm_us for step in own]) for own in by_rank.values()]
    steps_us = [median([step.step_us for step in own]) for own in by_rank.values()]
    if not costs_us or not sum(steps_us) or sum(costs_us) / sum(steps_us) >= NEGLIGIBLE:
        return None
    cost_us, share = sum(costs_us) / len(costs_us), sum(costs_us) / sum(steps_us)
    return Finding(
        cause="none",
        lost_us=round(cost_us, 3),
        share=share,
        rank=max(by_rank, key=lambda rank: median([step.exposed_comm_us for step in by_rank[rank]])),
        process_group="",
        collective="",
        where="",
        evidence=f"Exposed communication costs {cost_us:,.1f} us per step, {as_share(share)} of it.",
        try_=advice_for("none", {}),
    )


def _notes(facts: Sequence[RankFacts], findings: Sequence[Finding]) -> list[str]:
    """Returns what is unknown, and what to know before believing the findings."""
    notes = []
    world_size = max((own.world_size or 0 for own in facts), default=0)
    if len(facts) == 1 and world_size > 1:
        notes.append(
            f"Only rank {facts[0].rank} of {world_size}: when the other ranks started is unknown, so waiting for them "
            "counts as communication unless a call takes much longer than its size needs."
        )
    if facts[0].on_device and any(finding.cause == "host_bound" for finding in findings):
        notes.append(RECORDING_SLOWS)
    if facts[0].on_device and all(np.all(own.work.launch_ns == NEVER) for own in facts):
        notes.append("The trace has no launches: whether the host was too late is unknown, and counts as dependency.")
    return notes
