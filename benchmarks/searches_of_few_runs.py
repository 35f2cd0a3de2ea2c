"""Prints what searches by expectation miss of the fastest setting, and how often they name changes that do nothing, on
made trainings, by the number of runs: python benchmarks/searches_of_few_runs.py [SEARCHES]."""

import sys

from tests.search import test_climb as made

TRAININGS = {
    "torchtitan": made.TORCHTITAN,
    "ddp": made.DDP,
    "fsdp2": made.FSDP2,
    "late": made.LATE,
    "noisy": made.NOISY,
    "nothing": made.NOTHING,
}


def main() -> None:
    searches = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    print("training    runs  missed  idle  proven  of searches")
    for name, training in TRAININGS.items():
        for runs in (8, 10, 12, 14, 18, 24, 40):
            trails = [training.searched(runs, seed) for seed in range(searches)]
            chosen = [trail.chosen or trail.baseline for trail in trails]
            missed = sum(training.factor(one) / training.best - 1 for one in chosen) / searches
            idle, proven = (
                sum(bool(training.idle(one)) for one in chosen),
                sum(one != trails[0].baseline for one in chosen),
            )
            print(f"{name:10}  {runs:4}  {missed:6.1%}  {idle:4}  {proven:6}  {searches:11}")


if __name__ == "__main__":
    main()
