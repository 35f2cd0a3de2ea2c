"""Steps in which a run hid much less of its communication than usual, or was much slower, and what the device says."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from overlap_sweep.workloads.fsdp.telemetry_runs import Device, Run, Step
from overlap_sweep.workloads.fsdp.telemetry_steps import LESS_HIDDEN_BY, SLOWER_BY, spread

FEWEST_STEPS = 5
"""Among fewer nothing is usual."""

THROTTLE_REASONS = {
    0x1: "GPU idle",
    0x4: "SW power cap",
    0x8: "HW slowdown",
    0x20: "SW thermal slowdown",
    0x40: "HW thermal slowdown",
    0x80: "HW power brake",
}
"""NVML's bits of why a clock is not higher."""

CLOCK_LOWER_BY = 0.03
"""Clocks move by a few steps of 15 MHz all the time."""
CLOCK_EXPLAINS = 0.25
"""Of a slowdown so much must be the clock's."""
RANK_CLOCK_LOWER_BY = 0.05


@dataclass(frozen=True)
class DeviceFinding:
    """A rank's sample in a step beside what is usual on that rank."""

    rank: int
    sample: Device
    usual: Device
    """Medians over the run; of the throttle reasons those that are there in more than half of the steps."""
    reasons: list[str]
    """Why the clock is not higher: where it is lower than usual all that are told, else those that are not usual."""
    slower_clock: bool
    """Lower than it usually wobbles."""
    explains: bool
    """The clock fell by a sizeable part of the slowdown; reasons without that are none."""
    hottest: bool = False
    """Hotter than in all other steps that count."""


@dataclass(frozen=True)
class Dip:
    """A step, told of one rank."""

    step: int
    rank: int
    """The one whose device explains it, else the one that is furthest from its usual."""
    other_ranks: list[int]
    """On which the step stands out, too."""
    hidden_share: float | None
    usual_hidden_share: float | None
    """Median over the rank's steps."""
    less_hidden: bool
    step_ms: float
    usual_step_ms: float
    slower: bool
    device: DeviceFinding | None
    """Of the rank; or of another one, where only that one's explains the step. None where no sample was taken."""

    @property
    def slowdown(self) -> float:
        """0.18 is 18 % slower."""
        return self.step_ms / self.usual_step_ms - 1


@dataclass(frozen=True)
class _OnRank:
    """How a step of one rank stands out; `distance` in tolerances."""

    step: Step
    usual_hidden_share: float | None
    less_hidden: bool
    usual_step_ms: float
    slower: bool
    distance: float


def find_dips(run: Run, numbers: Sequence[int]) -> list[Dip]:
    """Among these steps, those that stand out on any rank, in order.

    Each rank is judged by its own steps, since ranks may differ throughout: a step stands out when it takes longer than
    the rank's median by more than 4 MADs (see Spread) and at least 5 %, or when the hidden part of its communication is
    below the rank's median by more than 4 MADs and at least 10 points. As all ranks wait for the slowest, a step mostly
    stands out on all of them: it is told once, of the rank whose device explains it.
    """
    if len(numbers) < FEWEST_STEPS:
        return []
    by_step: dict[int, list[_OnRank]] = {}
    for of_rank in run.steps.values():
        for found in _outstanding([of_rank[number] for number in numbers]):
            by_step.setdefault(found.step.step, []).append(found)
    counted = {rank: [of_rank[number] for number in numbers] for rank, of_rank in run.steps.items()}
    usual = {rank: usual_device(steps) for rank, steps in counted.items()}
    hottest = {rank: _hottest(steps) for rank, steps in counted.items()}
    return [_dip(run, number, by_step[number], usual, hottest) for number in sorted(by_step)]


def slow_devices(run: Run, numbers: Sequence[int]) -> list[str]:
    """A sentence for each rank whose clock is below the others' throughout: then it holds up all of them."""
    clocks = {
        rank: usual.sm_clock_mhz
        for rank, of_rank in run.steps.items()
        if (usual := usual_device(of_rank[number] for number in numbers)).sm_clock_mhz
    }
    if len(clocks) < 2:
        return []
    median = statistics.median(clocks.values())
    return [
        f"{run.name}: rank {rank} runs at {clock:,.0f} MHz, the ranks' median is {median:,.0f} MHz."
        for rank, clock in sorted(clocks.items())
        if clock < median * (1 - RANK_CLOCK_LOWER_BY)
    ]


def usual_device(steps: Iterable[Step]) -> Device:
    """Over the steps of one rank."""
    samples = [step.device for step in steps]
    told = [int(sample.throttle_reasons) for sample in samples if sample.throttle_reasons is not None]
    bits = [bit for bit in THROTTLE_REASONS if sum(bool(reasons & bit) for reasons in told) > len(told) / 2]
    return Device(
        sm_clock_mhz=_median(sample.sm_clock_mhz for sample in samples),
        power_w=_median(sample.power_w for sample in samples),
        temperature_c=_median(sample.temperature_c for sample in samples),
        throttle_reasons=sum(bits) if told else None,
    )


def device_finding(
    rank: int, sample: Device, usual: Device, slowdown: float, hottest: bool = False
) -> DeviceFinding | None:
    """Of a step that takes longer by the factor 1 + `slowdown`. None where the device told nothing."""
    if sample == Device():
        return None
    clock, usual_clock = sample.sm_clock_mhz, usual.sm_clock_mhz
    slower = explains = False
    if clock is not None and usual_clock is not None:
        slower = clock < usual_clock * (1 - CLOCK_LOWER_BY)
        explains = slower and usual_clock - clock >= CLOCK_EXPLAINS * slowdown * clock
    bits = int(sample.throttle_reasons or 0)
    if not slower:
        bits &= ~int(usual.throttle_reasons or 0)
    reasons = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    return DeviceFinding(rank, sample, usual, reasons, slower, explains, hottest)


def _outstanding(steps: Sequence[Step]) -> list[_OnRank]:
    """Of one rank."""
    times = spread([step.step_ms for step in steps], relative=SLOWER_BY)
    fractions = [step.hidden_share for step in steps if step.hidden_share is not None]
    hidden = spread(fractions, absolute=LESS_HIDDEN_BY) if fractions else None
    found = []
    for step in steps:
        slower_by = (step.step_ms - times.median) / times.tolerance
        less_by = 0.0
        if hidden and step.hidden_share is not None:
            less_by = (hidden.median - step.hidden_share) / hidden.tolerance
        if max(slower_by, less_by) > 1:
            found.append(
                _OnRank(
                    step=step,
                    usual_hidden_share=hidden.median if hidden else None,
                    less_hidden=less_by > 1,
                    usual_step_ms=times.median,
                    slower=slower_by > 1,
                    distance=max(slower_by, less_by),
                )
            )
    return found


def _dip(
    run: Run, number: int, on_ranks: Sequence[_OnRank], usual: dict[int, Device], hottest: dict[int, int | None]
) -> Dip:
    slowdown = max(one.step.step_ms / one.usual_step_ms - 1 for one in on_ranks)
    findings = {
        rank: device_finding(rank, of_rank[number].device, usual[rank], slowdown, hottest[rank] == number)
        for rank, of_rank in run.steps.items()
    }
    explained = {rank for rank, finding in findings.items() if finding and finding.explains}
    told = max(on_ranks, key=lambda one: (one.step.rank in explained, one.distance))
    rank = told.step.rank
    elsewhere = min(explained, default=rank)
    return Dip(
        step=number,
        rank=rank,
        other_ranks=sorted(one.step.rank for one in on_ranks if one is not told),
        hidden_share=told.step.hidden_share,
        usual_hidden_share=told.usual_hidden_share,
        less_hidden=told.less_hidden,
        step_ms=told.step.step_ms,
        usual_step_ms=told.usual_step_ms,
        slower=told.slower,
        device=findings[rank if rank in explained else elsewhere],
    )


def _hottest(steps: Iterable[Step]) -> int | None:
    """The number of the step that is hotter than all others of the rank, if one is."""
    known = sorted((step.device.temperature_c, step.step) for step in steps if step.device.temperature_c is not None)
    return known[-1][1] if len(known) > 1 and known[-1][0] > known[-2][0] else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
