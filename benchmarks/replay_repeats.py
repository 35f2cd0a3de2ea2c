"""Runs the search on recorded response surfaces with every repeat drawn anew: what ending repeats early saves.

python -m benchmarks.replay_repeats FILE... [--times 20] [--deviation 0.003]
python -m benchmarks.replay_repeats DIRECTORY

A DIRECTORY is that of a tuner run whose points have all their repeats: it prints after how many of them each would have
ended.

A recording has each setting's median and spread. A measurement draws its repeats from a normal distribution with these
two, next to those of no overlap, as a point measures them, and ends by the product's own rule. The truth is the
recorded median. Seconds are those of the GPU: all turns of both, a third as many of the floor, one warm-up turn of
each, and HOST_S for every turn, which is what a spin kernel and the synchronisation of the ranks take.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.replay_search import REPEATS as RECORDED_REPEATS
from benchmarks.replay_search import RecordedCell, read
from overlap_sweep.config import Search, Tuner
from overlap_sweep.measure.timing import EVERY, LEAST_REPEATS
from overlap_sweep.overlap import space
from overlap_sweep.results.estimate import Estimate, estimate, normalised
from overlap_sweep.results.measured import summarise
from overlap_sweep.results.points import read_points
from overlap_sweep.results.verdict import enough_of_pass, enough_of_rounds
from overlap_sweep.search import conduct
from overlap_sweep.search.bisect import bisect
from overlap_sweep.search.cell import NONE, Candidate, Trail
from overlap_sweep.workloads.layer.result import LayerTimes
from overlap_sweep.workloads.operator.result import OperatorTimes

MOST_REPEATS = 21
HOST_S = 2.5e-3
FLOOR_OF_NONE = 0.8
"""Time of the floor over that of no overlap, about."""
IQR_OF_SD = 1.349


@dataclass
class Machine:
    """Answers a search on one cell, and counts what that takes."""

    recorded: RecordedCell
    noise_goal: float | None
    drawn: random.Random
    floor_every: int
    deviation: float
    """Standard deviation of one repeat as a fraction of its time."""
    best: float = 1.0
    seconds: float = 0.0

    def measure(self, candidate: Candidate, none: Estimate) -> Estimate:
        point_us: list[float] = []
        none_us: list[float] = []
        goal = self.noise_goal
        while len(point_us) < MOST_REPEATS:
            point_us.append(self.draw(candidate))
            none_us.append(self.draw(NONE))
            done = len(point_us)
            looks = goal is not None and LEAST_REPEATS <= done < MOST_REPEATS and done % EVERY == 0
            if looks and goal is not None and enough_of_pass(point_us, none_us, goal, self.best):
                break
        self.best = min(self.best, statistics.median(point_us) / statistics.median(none_us))
        floors = 1 + (len(point_us) if self.floor_every == 1 else EVERY - 1 + len(point_us) // self.floor_every)
        turns = 1 + len(point_us)
        point_s, none_s = 1e-6 * self.recorded.time_us(candidate), 1e-6 * self.recorded.time_us(NONE)
        # A point measures a forward and a backward setting, so half of what its turns cost besides is this cell's.
        self.seconds += turns * (point_s + none_s) + floors * FLOOR_OF_NONE * none_s + HOST_S * (2 * turns + floors) / 2
        return normalised([(summarise(point_us), summarise(none_us))], none)

    def draw(self, candidate: Candidate) -> float:
        """Returns the time of one repeat in microseconds."""
        return self.recorded.time_us(candidate) * max(0.1, self.drawn.gauss(1.0, self.deviation))


def recorded_deviation(recorded: RecordedCell) -> float:
    """Returns the standard deviation of one repeat as a fraction of its time: the median over the cell's settings,
    since the spread of twelve repeats is itself uncertain."""
    samples = [one for of_candidate in recorded.samples.values() for one in of_candidate]
    spread = statistics.median(one.noise_us / one.time_us for one in samples) / 1.57 * math.sqrt(RECORDED_REPEATS)
    return spread / IQR_OF_SD


def search(
    recorded: RecordedCell, noise_goal: float | None, floor_every: int, seed: int, deviation: float | None
) -> tuple[Trail, Machine]:
    """Returns one search to its end and the machine that it was run on."""
    known = recorded_deviation(recorded) if deviation is None else deviation
    machine = Machine(recorded, noise_goal, random.Random(f"{seed} {recorded}"), floor_every, known)
    none_us = [machine.draw(NONE) for _ in range(2 * MOST_REPEATS)]
    trail = Trail(recorded.cell, estimate(none_us), floor_us=math.nan)

    def measure(wanted: Sequence[Candidate]) -> Mapping[Candidate, Estimate]:
        return {candidate: machine.measure(candidate, trail.none) for candidate in wanted}

    trail.stopped = conduct(bisect(trail, Search()), measure)
    return trail, machine


def of_run(directory: Path, noise_goal: float, noise_goal_of_layers: float) -> None:
    """Prints after how many of their recorded repeats the points of a tuner run would have ended, and what that
    saves."""
    points = [point for point in read_points(directory).points if point.status == "ok" and point.result]
    points.sort(key=lambda point: str(point.result.started))  # type: ignore[union-attr]
    best: dict[tuple[str, str], float] = {}
    before_s, after_s, ended = 0.0, 0.0, []
    for point in (one for one in points if one.workload == "operator"):
        times, operator, names = (
            point.measured_as(OperatorTimes).times,
            point.recorded["operator"],
            space.passes(point.recorded),
        )
        samples = {name: (times[name].point.samples_us, times[name].none.samples_us) for name in names}
        most = len(samples[names[0]][0])
        # A baseline is measured to the end.
        looks = range(LEAST_REPEATS, most, EVERY) if point.result and point.result.settings else ()
        done = next(
            (
                n
                for n in looks
                if all(_enough(samples[name], n, noise_goal, best.get((operator, name), 1.0)) for name in names)
            ),
            most,
        )
        for name, (point_us, none_us) in samples.items():
            ratio = statistics.median(point_us[:done]) / statistics.median(none_us[:done])
            best[operator, name] = min(best.get((operator, name), 1.0), ratio)
        both = [times[name] for name in space.PASSES]
        turn_s = (
            1e-6 * sum(one.point.median_us + one.none.median_us for one in both),
            1e-6 * sum(one.floor.median_us for one in both),
        )
        before_s += _turns_s(most, most, *turn_s)
        after_s += _turns_s(done, EVERY - 1 + done // EVERY, *turn_s)
        ended.append(done)
    print(f"{len(ended)} points of operators: repeats {Counter(ended)}; GPU {before_s:.1f} s -> {after_s:.1f} s")
    for point in (one for one in points if one.workload == "layer"):
        variants = {name: one.times["all"].samples_us for name, one in point.measured_as(LayerTimes).variants.items()}
        reference = variants.pop("none")
        others = [us for name, us in variants.items() if name != "floor"]
        looks = range(LEAST_REPEATS, len(reference), EVERY)
        rounds = next(
            (n for n in looks if enough_of_rounds([us[:n] for us in others], reference[:n], noise_goal_of_layers)),
            len(reference),
        )
        print(f"{point.name}: {rounds} of {len(reference)} rounds")


def _enough(samples: tuple[Sequence[float], Sequence[float]], repeats: int, noise_goal: float, best: float) -> bool:
    point_us, none_us = samples
    return enough_of_pass(point_us[:repeats], none_us[:repeats], noise_goal, best)


def _turns_s(repeats: int, floors: int, point_and_none_s: float, floor_s: float) -> float:
    """Returns the seconds of a point's turns, one warm-up of each included."""
    turns, floors = repeats + 1, floors + 1
    return turns * point_and_none_s + floors * floor_s + HOST_S * (2 * turns + floors)


def main(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Recorded surfaces, or the directory of a tuner run.")
    ],
    times: Annotated[int, typer.Option(help="How often each search is run, with other draws.")] = 20,
    deviation: Annotated[
        float | None, typer.Option(help="Standard deviation of one repeat as a fraction; default: as recorded.")
    ] = None,
) -> None:
    """Print, for several noise goals, the evaluations, the GPU's seconds and the regret of all searches."""
    if files[0].is_dir():
        of_run(files[0], Search().noise_goal or 0.0, Tuner().noise_goal or 0.0)
        return
    cells = [cell for path in files for cell in read(path)]
    print("rule                       evaluations    GPU s   regret: mean  worst of a mean  worst")
    rules = {"21 repeats, floor always": (None, 1), "21 repeats": (None, EVERY)}
    rules |= {f"noise goal {goal:g}": (goal, EVERY) for goal in (0.005, 0.01, 0.02, 0.03)}
    for name, (goal, floor_every) in rules.items():
        evaluations, seconds, regrets = 0, 0.0, []
        for seed in range(times):
            found = [search(cell, goal, floor_every, seed, deviation) for cell in cells]
            evaluations += sum(trail.evaluations for trail, _ in found)
            seconds += sum(machine.seconds for _, machine in found)
            chosen = [(machine.recorded, trail.best) for trail, machine in found]
            regrets.append([cell.time_us(best) / cell.time_us(cell.best) - 1 for cell, best in chosen])
        means = [statistics.fmean(of_seed) for of_seed in regrets]
        worst = max(map(max, regrets))
        print(
            f"{name:26} {evaluations / times:11.1f} {seconds / times:8.2f} {statistics.fmean(means):14.2%} "
            f"{max(means):16.2%} {worst:6.2%}"
        )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(context_settings={"help_option_names": ["-h", "--help"]})(main)
    app(prog_name="python -m benchmarks.replay_repeats")
