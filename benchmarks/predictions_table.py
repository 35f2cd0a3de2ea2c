"""Prints as Markdown what `predict` says of the recordings in tests/data/predictions.yaml, and what was measured.

    python benchmarks/predictions_table.py [OUT]

Pairs whose change was timed in turns with the recorded program, without the profiler, are compared with these times:
the predicted time is scaled by what recording costs. Below the table: how wide intervals must be at least, and the
error of replaying each recording as it is.
OUT: what record_pairs.py wrote, instead of tests/data/predictions.yaml.
"""

import json
import math
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from overlap_sweep.predict.graph import StepGraph
from overlap_sweep.predict.predictions import Prediction, half_width_us, predict
from overlap_sweep.predict.replay import recorded, replay_error, step_us
from overlap_sweep.predict.runs import graphs

DATA = Path(__file__).parent.parent / "tests" / "data"
SAME = 0.02
"""Steps that differ by less than this share are equal: which is faster is not asked of a prediction."""


class Judged(NamedTuple):
    """A prediction beside what was measured. Milliseconds."""

    pair: dict[str, Any]
    prediction: Prediction
    before_ms: float
    after_ms: float
    half_us: float
    """Least half-width of the interval."""
    deviation_us: float
    """Standard deviation of the recorded steps."""
    on_device: bool

    @property
    def scale(self) -> float:
        """Returns by what to multiply recorded microseconds: those of steps without the profiler are milliseconds."""
        return self.before_ms / self.prediction.step_us

    @property
    def error(self) -> float | None:
        predicted_us = self.prediction.predicted_us
        return None if predicted_us is None else predicted_us * self.scale / self.after_ms - 1

    @property
    def is_within(self) -> bool:
        low_us, high_us = self.prediction.low_us or 0.0, self.prediction.high_us or 0.0
        return low_us * self.scale <= self.after_ms <= high_us * self.scale

    @property
    def gained_ms(self) -> float:
        return self.before_ms - self.after_ms / self.prediction.work

    @property
    def is_sign_right(self) -> bool | None:
        """Returns None if the times differ by less than SAME, or than their noise."""
        if abs(self.gained_ms) < max(SAME, self.pair.get("noise", 0.0)) * self.before_ms:
            return None
        return (self.prediction.gain_us or 0.0) * self.gained_ms > 0

    @property
    def is_claim_right(self) -> bool | None:
        """Returns None if the interval has the step as it is, so that no gain and no loss is claimed."""
        found = self.prediction
        if (found.low_us or 0.0) <= found.step_us * found.work <= (found.high_us or 0.0):
            return None
        return (found.gain_us or 0.0) * self.gained_ms > 0

    @property
    def lacking_share(self) -> float:
        """Returns what the interval must have at least on each side for the measured time to lie within, as a share of
        the recorded step; 0 if what the recorded steps deviate by is enough."""
        found, measured_us = self.prediction, self.after_ms / self.scale
        outside_us = max((found.low_us or 0.0) - measured_us, measured_us - (found.high_us or 0.0))
        needed_us = self.half_us + outside_us
        return needed_us / found.step_us if needed_us > self.deviation_us else 0.0


def main() -> None:
    out = Path(sys.argv[1]) if sys.argv[1:] else None
    with tempfile.TemporaryDirectory() as folder:
        if out:
            judged = judged_pairs(Path(folder), out / "pairs.yaml")
            print(*pairs_table(judged), sep="\n")
            replayed = {path.name: graph_of(path) for path in sorted((out / "traces").iterdir()) if path.is_dir()}
            errors = {name: replay_error(graph) for name, graph in replayed.items() if graph and graph.steps}
        else:
            judged = judged_pairs(Path(folder))
            print(*pairs_table(judged), "", widths_line(judged), sep="\n")
            errors = replay_errors(Path(folder))
        sizes = sorted(map(abs, errors.values()))
        print()
        print(
            f"Replayed as recorded: {len(sizes)} recordings, off by {median(sizes):.4%} in the median, "
            f"{sizes[-1]:.2%} at most."
        )


def judged_pairs(folder: Path, listed: Path = DATA / "predictions.yaml") -> list[Judged]:
    """Returns the predictions for all listed pairs. Archives beside the list are unpacked into the folder."""
    found = []
    for pair in yaml.safe_load(listed.read_text()):
        directory = unpacked(folder, listed.parent / pair["recordings"])
        graph = graph_of(directory / pair["before"])
        assert graph is not None
        (prediction,) = predict(graph, [pair["change"]])
        widths_us = half_width_us(graph), half_width_us(graph, 0.0)
        found.append(Judged(pair, prediction, *measured_ms(directory, pair, graph), *widths_us, graph.on_device))
    return found


def pairs_table(judged: list[Judged]) -> list[str]:
    timed = any("noise" in one.pair for one in judged)
    lines = [
        "| recorded | change | step, ms | predicted, ms | interval | measured, ms | error | in interval |"
        + " sign | noise |" * timed,
        "|---|---|---|---|---|---|---|---|" + "---|---|" * timed,
    ]
    for one in judged:
        found = one.prediction
        start = f"| {one.pair['before']} | `{found.change}` | {one.before_ms:.2f} |"
        if found.predicted_us is None or one.error is None:
            end = f" | {one.pair['noise']:.1%} |" if timed else ""
            lines.append(f"{start} {found.status}: {found.reason.partition(', ')[0]} | | {one.after_ms:.2f} | | |{end}")
            continue
        predicted, low, high = ((time or 0.0) * one.scale for time in (found.predicted_us, found.low_us, found.high_us))
        inside = "yes" if one.is_within else "no"
        interval = f"{low:.2f} to {high:.2f}"
        sign = {True: "right", False: "wrong", None: "same"}[one.is_sign_right]
        end = f" {sign} | {one.pair['noise']:.1%} |" if timed else ""
        lines.append(f"{start} {predicted:.2f} | {interval} | {one.after_ms:.2f} | {one.error:+.1%} | {inside} |{end}")
    lines.append("")
    for device, on_device in (("GPU", True), ("gloo", False)):
        own = [one for one in judged if one.on_device is on_device and one.error is not None]
        if not own:
            continue
        errors = [abs(one.error or 0.0) for one in own]
        signs = [one.is_sign_right for one in own if one.is_sign_right is not None]
        claims = [one.is_claim_right for one in own if one.is_claim_right is not None]
        lines.append(
            f"{device}: {len(own)} pairs, error {median(errors):.1%} in the median, {max(errors):.1%} at most; "
            f"{sum(one.is_within for one in own)} in the interval; sign right in {sum(signs)} of {len(signs)} that "
            f"differ by {SAME:.0%} or more{', and by more than their noise' * timed}; of {len(claims)} whose interval "
            f"leaves no doubt of it in {sum(claims)}."
        )
    return lines


COVERED = 0.85
"""Share of recordings that are to lie within their intervals."""


def least_half(lacking: list[float]) -> float:
    """Returns the least half-width with which another pair, of the same kind as these, lies within its interval with a
    probability of COVERED: of n pairs that which COVERED * (n + 1) of them lie within."""
    return sorted(lacking)[min(math.ceil(COVERED * (len(lacking) + 1)), len(lacking)) - 1]


def widths_line(judged: list[Judged]) -> str:
    """Says which half-width the pairs on GPUs ask for, and how many lie within if it is chosen without them. Without
    changes whose intervals are as wide as what is assumed of them."""
    told = [one for one in judged if one.error is not None and "gloo" not in one.pair["recordings"]]
    own = [one for one in told if not one.prediction.change.startswith(("batch.", "nccl."))]

    def programs(one: Judged) -> set[str]:
        return {one.pair["before"], one.pair.get("after", one.pair.get("mend"))}

    # Both directions of two recordings are left out together.
    chosen = [least_half([other.lacking_share for other in own if programs(other) != programs(one)]) for one in own]
    within = sum(one.lacking_share <= share for one, share in zip(own, chosen, strict=True))
    return (
        f"Least half-width of an interval: {least_half([one.lacking_share for one in own]):.1%} of the step, of "
        f"{len(own)} pairs; chosen without each ({', '.join(sorted({f'{share:.1%}' for share in chosen}))}) "
        f"{within} of those left out lie within."
    )


def replay_errors(folder: Path, kind: str = "*") -> dict[str, float]:
    """Returns by what share the replay of each recording differs from it. `kind`: folder below tests/data."""
    found = {}
    for archive in sorted(DATA.glob(f"{kind}/*.tar.xz")):
        directory = unpacked(folder, archive.with_name(archive.name.removesuffix(".tar.xz")))
        for own in sorted(directory.iterdir()):
            graph = graph_of(own) if own.is_dir() else None
            if graph and graph.steps:
                found[f"{archive.parent.name}/{directory.name}/{own.name}"] = replay_error(graph)
    return found


@cache
def unpacked(folder: Path, recordings: Path) -> Path:
    """Returns where they are: here, or unpacked from the archive of that name."""
    if recordings.is_dir():
        return recordings
    directory = folder / recordings.parent.name / recordings.name
    with tarfile.open(f"{recordings}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory


@cache
def graph_of(directory: Path) -> StepGraph | None:
    traces = sorted(directory.glob("trace_rank*"))
    return graphs(traces)[0].graph if traces else None


def measured_ms(directory: Path, pair: dict[str, Any], graph: StepGraph) -> tuple[float, float]:
    """Returns the times before and after the change."""
    if "measured_ms" in pair:
        return tuple(pair["measured_ms"])
    if "after" in pair:
        after = graph_of(directory / pair["after"])
        assert after is not None
        return step_us(graph, recorded(graph)) / 1000, step_us(after, recorded(after)) / 1000
    described = {one["name"]: one for one in json.loads((directory / "scenarios.json").read_text())}
    times = described[pair["before"]]["in_turns_ms"]
    return median(times[pair["before"]]), median(times[pair["mend"]])


if __name__ == "__main__":
    sys.exit(main())
