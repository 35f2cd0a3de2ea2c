"""Prints as Markdown what `predict` says of the recordings in tests/data/predictions.yaml, and what was measured.

    python benchmarks/predictions_table.py

Pairs whose change was timed in turns with the recorded program, without the profiler, are compared with these times:
the predicted time is scaled by what recording costs. The last table is the error of replaying each recording as it is.
"""

import json
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from overlap_sweep.predict.graph import StepGraph
from overlap_sweep.predict.predictions import predict
from overlap_sweep.predict.replay import recorded, replay, step_us
from overlap_sweep.predict.runs import graphs

DATA = Path(__file__).parent.parent / "tests" / "data"
SAME = 0.02
"""Steps that differ by less than this share are equal: which is faster is not asked of a prediction."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(*pairs_table(Path(folder)), sep="\n")
        print()
        print(*replays_table(Path(folder)), sep="\n")


def pairs_table(folder: Path) -> list[str]:
    lines = [
        "| recorded | change | step, ms | predicted, ms | interval | measured, ms | error | in interval |",
        "|---|---|---|---|---|---|---|---|",
    ]
    by_device: dict[str, list[tuple[float, bool, bool | None]]] = {"GPU": [], "gloo": []}
    for pair in yaml.safe_load((DATA / "predictions.yaml").read_text()):
        directory = unpacked(folder, pair["recordings"])
        graph = graph_of(directory / pair["before"])
        (found,) = predict(graph, [pair["change"]])
        before_ms, after_ms = measured_ms(directory, pair, graph)
        scale = before_ms / (found.step_us / 1000)
        start = f"| {pair['before']} | `{found.change}` | {before_ms:.2f} |"
        if found.predicted_us is None:
            lines.append(f"{start} | {found.status}: {found.reason} | {after_ms:.2f} | | |")
            continue
        times = [time_us / 1000 * scale for time_us in (found.predicted_us, found.low_us or 0.0, found.high_us or 0.0)]
        error, inside = times[0] / after_ms - 1, times[1] <= after_ms <= times[2]
        gained = before_ms - after_ms
        sign = None if abs(gained) < SAME * before_ms else (before_ms - times[0]) * gained > 0
        by_device["gloo" if "gloo" in pair["recordings"] else "GPU"].append((abs(error), inside, sign))
        lines.append(
            f"{start} {times[0]:.2f} | {times[1]:.2f} to {times[2]:.2f} | {after_ms:.2f} | {error:+.1%} | "
            f"{'yes' if inside else 'no'} |"
        )
    lines.append("")
    for device, own in by_device.items():
        errors, signs = [one[0] for one in own], [one[2] for one in own if one[2] is not None]
        lines.append(
            f"{device}: {len(own)} pairs, error {median(errors):.1%} in the median, {max(errors):.1%} at most; "
            f"{sum(one[1] for one in own)} in the interval; sign right in {sum(signs)} of {len(signs)} that differ by "
            f"{SAME:.0%} or more."
        )
    return lines


def replays_table(folder: Path) -> list[str]:
    errors = {}
    for archive in sorted(DATA.glob("*/*.tar.xz")):
        directory = unpacked(folder, f"{archive.parent.name}/{archive.name.removesuffix('.tar.xz')}")
        for own in sorted(directory.iterdir()):
            graph = graph_of(own) if own.is_dir() else None
            if graph and graph.steps:
                errors[f"{directory.name}/{own.name}"] = (
                    step_us(graph, replay(graph)) / step_us(graph, recorded(graph)) - 1
                )
    sizes = sorted(map(abs, errors.values()))
    worst = sorted(errors.items(), key=lambda one: -abs(one[1]))[:5]
    return [
        f"Replayed as recorded: {len(sizes)} recordings, {median(sizes):.4%} in the median, {sizes[-1]:.4%} at most.",
        *(f"- {name}: {error:+.4%}" for name, error in worst),
    ]


@cache
def unpacked(folder: Path, recordings: str) -> Path:
    directory = folder / recordings
    with tarfile.open(DATA / f"{recordings}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory


@cache
def graph_of(directory: Path) -> StepGraph | None:
    traces = sorted(directory.glob("trace_rank*"))
    return graphs(traces)[0].graph if traces else None


def measured_ms(directory: Path, pair: dict[str, Any], graph: StepGraph) -> tuple[float, float]:
    """Returns the times before and after the change."""
    if "after" in pair:
        after = graph_of(directory / pair["after"])
        assert after is not None
        return step_us(graph, recorded(graph)) / 1000, step_us(after, recorded(after)) / 1000
    described = {one["name"]: one for one in json.loads((directory / "scenarios.json").read_text())}
    times = described[pair["before"]]["in_turns_ms"]
    return median(times[pair["before"]]), median(times[pair["mend"]])


if __name__ == "__main__":
    sys.exit(main())
