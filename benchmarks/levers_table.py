"""Prints of each point of benchmarks/levers_results.sh whether its levers were applied, and what ran differently:

python -m benchmarks.levers_table OUT
"""

import json
import sys
from pathlib import Path

from overlap_sweep.effects.comparison import effect
from overlap_sweep.effects.runs import recordings
from overlap_sweep.levers import flat


def main(out: Path) -> None:
    for sweep in sorted(one for one in out.iterdir() if one.is_dir()):
        print(f"\n{sweep.name}")
        results = {one.parent: json.loads(one.read_text()) for one in sorted(sweep.glob("*/result.json"))}
        levers = {point: dict(flat(result["point"]["job"]["levers"])) for point, result in results.items()}
        prints = {point: one.prints for point in results for one in recordings(sorted(point.glob("trace_rank*")))}
        reference = next((point for point in prints if not levers[point]), None)
        for point, own in levers.items():
            named = ", ".join(f"{name}={value}" for name, value in own.items()) or "as it is"
            if point not in prints or not reference:
                print(f"{named:45} {results[point]['status']:8} {results[point]['error'] or ''}")
            elif own:
                options = {f"job.levers.{name}": ("", str(value)) for name, value in own.items()}
                found = effect(named, prints[point], "", prints[reference], options)
                verdicts = "; ".join(f"{one.verdict}: {one.evidence}" for one in found.settings)
                print(f"{named:45} applied  [{found.in_brief}] {verdicts}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
