"""Simulates how often equal settings of a job have a winner, and how often a faster one is found.

    python -m benchmarks.false_winners [TRIALS]

Runs take turns, as `repetition=` makes them. Each has a level of its own, from its neighbours on the machine and from
drift, and its steps are correlated. They go through the functions that answer a sweep, or through a whole search with
its proof. Rates are of whole answers: that anything but the reference is best, of 2 or of 5 settings.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from overlap_sweep.config import Search
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import Result
from overlap_sweep.search import Setting, conduct
from overlap_sweep.search.knob_trail import Answer, Knob, KnobTrail
from overlap_sweep.search.knobs import search
from overlap_sweep.study.analysis import analyse
from overlap_sweep.workloads import Sample
from overlap_sweep.workloads.job.result import JobRun
from overlap_sweep.workloads.job.study import STUDY
from tests.make_point import job_config, timing_of

STEP_US = 100_000.0
SETTINGS, REPETITIONS, STEPS, GAINS = (2, 5), (2, 3, 5), (4, 8, 20), (0.02, 0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Machine:
    """What makes equal runs differ. Shares of the time."""

    name: str
    between: float = 0.01
    """Standard deviation of runs."""
    within: float = 0.02
    """Standard deviation of the steps of a run."""
    correlation: float = 0.5
    """Of successive steps."""
    drift: float = 0.0
    """Slowdown from the first run to the last."""
    wander: float = 0.0
    """Standard deviation of a slow change, of which a run has 0.7 of the one before."""
    loaded: float = 0.0
    """Probability that others use the machine throughout a run, which then takes 30 % longer."""
    rare: float = 0.0
    """Probability that a step takes five times as long."""
    uneven: float = 0.0
    """Standard deviation of the last setting's runs, beyond that of the others."""
    start: float = 0.0
    """Slowdown of the sweep's first run and of each run's first step."""


MACHINES = (
    Machine("quiet"),
    Machine("noisy", between=0.1, within=0.1, correlation=0.8),
    Machine("drift of 30 %", drift=0.3),
    Machine("slow changes", wander=0.1),
    Machine("load in 1/4 of runs", loaded=0.25),
    Machine("load in 1/2 of runs", loaded=0.5),
    Machine("rare slow steps", rare=0.05, within=0.05),
    Machine("one setting uneven", uneven=0.1),
    Machine("slow start", start=0.3),
    Machine("all of these", between=0.03, within=0.05, drift=0.1, wander=0.05, loaded=0.25, rare=0.02, start=0.3),
)


class Sweep:
    """A sweep on the machine, whose runs follow each other."""

    def __init__(self, machine: Machine, random: Random, runs: int, steps: int) -> None:
        """`runs`: their number, over which the machine drifts."""
        self._machine, self._random, self._runs, self._steps = machine, random, runs, steps
        self._done, self._wandered = 0, random.gauss(0, machine.wander)

    def run(self, step_us: float, *, uneven: bool) -> list[float]:
        """Returns the times of the steps of the next run."""
        machine, gauss = self._machine, self._random.gauss
        level = 1 + machine.drift * self._done / max(self._runs - 1, 1) + self._wandered + gauss(0, machine.between)
        level += machine.start * (self._done == 0) + (gauss(0, machine.uneven) if uneven else 0.0)
        level *= 1.3 if self._random.random() < machine.loaded else 1.0
        self._wandered = 0.7 * self._wandered + (1 - 0.7**2) ** 0.5 * gauss(0, machine.wander)
        self._done += 1
        error, times_us = gauss(0, 1), []
        for number in range(self._steps):
            slow = 5.0 if self._random.random() < machine.rare else 1.0 + machine.start * (number == 0)
            times_us.append(max(step_us * (level + machine.within * error) * slow, 1.0))
            error = machine.correlation * error + (1 - machine.correlation**2) ** 0.5 * gauss(0, 1)
        return times_us


@cache
def _config(bucket: int, repetition: int) -> dict[str, Any]:
    return job_config({"bucket": bucket}, repetition=repetition)


def best_of(machine: Machine, random: Random, gains: Sequence[float], repetitions: int, steps: int) -> int:
    """Returns the number of the setting that a sweep calls best, of which 0 is the reference. `gains`: how much less
    time each takes, as a share."""
    sweep, points = Sweep(machine, random, len(gains) * repetitions, steps), []
    for repetition in range(repetitions):
        for number, gain in enumerate(gains):
            times_us = sweep.run(STEP_US * (1 - gain), uneven=number == len(gains) - 1)
            run = JobRun(step=timing_of(times_us), timed_by="host", calls_per_step=1)
            name, config = f"{number}_{repetition}", dict(_config(number, repetition))
            minute = f"2026-11-20T{len(points) // 60:02}:{len(points) % 60:02}:00+00:00"
            result = Result(name=name, recorded=config, status="ok", measured=run, started=minute)
            points.append(Point(Path(name), "ok", result.point, result))
    (analysis,) = analyse(STUDY, points)
    return int(analysis.best.points[0].name.partition("_")[0])


def proven_of(machine: Machine, random: Random, gains: Sequence[float], repeats: int, steps: int) -> int:
    """Returns the number of the setting that a search over one knob with these values proves."""
    knob = Knob("bucket", tuple(map(str, range(len(gains)))))
    sweep = Sweep(machine, random, 3 * len(gains), steps)

    def measure(wanted: Sequence[Setting]) -> list[Answer]:
        numbers = [int(setting[0]) for setting in wanted]
        runs = [sweep.run(STEP_US * (1 - gains[one]), uneven=one == len(gains) - 1) for one in numbers]
        return [Sample(tuple(times_us), by_mean=True) for times_us in runs]

    trail = KnobTrail((knob,), lambda setting: None, lambda: float("inf"))
    conduct(search(trail, Search(repeats=repeats)), measure)
    return int(trail.chosen[0]) if trail.chosen else 0


def rate(decide: Any, machine: Machine, gains: Sequence[float], repetitions: int, steps: int, trials: int) -> float:
    """Returns the share of trials in which anything but the reference is best."""
    random = Random(f"{decide.__name__} {machine.name} {gains} {repetitions} {steps}")
    return sum(decide(machine, random, gains, repetitions, steps) > 0 for _ in range(trials)) / trials


def main(trials: int) -> None:
    for decide, what in ((best_of, "sweep"), (proven_of, "search")):
        for count in SETTINGS:
            columns = [(repetitions, steps) for repetitions in REPETITIONS for steps in STEPS]
            heads = [f"{repetitions}x{steps}" for repetitions, steps in columns]
            print(f"\nWinners among {count} equal settings, {what}, runs x steps, of {trials}")
            print(f"{'':20} " + " ".join(f"{head:>6}" for head in heads))
            for machine in MACHINES:
                rates = [rate(decide, machine, [0.0] * count, *column, trials) for column in columns]
                print(f"{machine.name:20} " + " ".join(f"{one:6.1%}" for one in rates), flush=True)
            print(f"\nFaster settings found, one of {count}, {what}, 8 steps, of {trials // 4}")
            heads = [f"{repetitions}: {gain:.0%}" for repetitions in REPETITIONS for gain in GAINS]
            print(f"{'':20} " + " ".join(f"{head:>6}" for head in heads))
            for machine in MACHINES:
                found = [
                    rate(decide, machine, [0.0, gain, *[0.0] * (count - 2)], repetitions, 8, trials // 4)
                    for repetitions in REPETITIONS
                    for gain in GAINS
                ]
                print(f"{machine.name:20} " + " ".join(f"{one:6.0%}" for one in found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
