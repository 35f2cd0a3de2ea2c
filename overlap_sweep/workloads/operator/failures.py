"""What failed, and what is not to be trusted therefore.

A race shows at one num_sm and not at another, today and not tomorrow: what differs from a setting that computes wrong
numbers in nothing but num_sm and the cluster size is as wrong. A setting that once crashed or hung may do it again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from overlap_sweep.overlap import space
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import Result

OUTPUT = "output"
"""The tensor that the forward pass alone decides; the others are gradients."""

_SIZES = ("num_sm", "cga_size")

Frozen = frozenset[Any]
"""The slots of a pass with their settings."""

PassKey = tuple[Any, ...]
"""Everything that says which pass of which operator it is, and on what."""


@dataclass
class Failures:
    """Of one pass."""

    wrong: set[Frozen] = field(default_factory=set)
    """Arms, without their sizes, of which some setting computed wrong numbers."""
    broken: set[Frozen] = field(default_factory=set)
    """Settings that crashed or timed out."""
    attempted: set[str] = field(default_factory=set)
    """The slots that were to be overlapped in some point that ran, whatever became of it."""

    def distrusts(self, settings: Mapping[str, Mapping[str, Any]]) -> bool:
        return arm(settings) in self.wrong or frozen(settings) in self.broken


def wrong_passes(result: Result) -> set[str]:
    """The passes with wrong tensors, of a point that failed for its numbers; else none."""
    if result.status != "failed" or not result.relative_error:
        return set()
    allowed = space.tolerance(result.point)
    wrong = {name for name, error in result.relative_error.items() if error is None or error > allowed}
    return {"fwd" if name == OUTPUT else "bwd" for name in wrong}


def frozen(settings: Mapping[str, Mapping[str, Any]], *without: str) -> Frozen:
    return frozenset(
        (slot, frozenset((k, v) for k, v in s.items() if k not in without)) for slot, s in settings.items()
    )


def arm(settings: Mapping[str, Mapping[str, Any]]) -> Frozen:
    return frozen(settings, *_SIZES)


def pass_key(point: Point, pass_name: str) -> PassKey:
    case, config = point.case, point.config
    # Failed points know nothing of the GPU's name.
    return case.model, case.backend, case.precision, case.tokens, config["tp_size"], config["operator"], pass_name


def of_pass(settings: Mapping[str, space.Setting], pass_name: str) -> dict[str, space.Setting]:
    """The slots of one pass."""
    return {slot: s for slot, s in settings.items() if space.PASS_OF_PHASE[slot.partition("_")[2]] == pass_name}


def failures(points: Iterable[Point]) -> Mapping[PassKey, Failures]:
    """By pass. Of a point that overlaps both passes and failed, only wrong tensors of a single pass tell whose fault it
    was: a search measures the others again alone."""
    found: dict[PassKey, Failures] = defaultdict(Failures)
    for point in points:
        if point.workload != "operator" or not point.result or point.status == "skipped":
            continue
        by_pass = {name: of_pass(point.result.settings, name) for name in space.PASSES}
        overlapped = {name: settings for name, settings in by_pass.items() if settings}
        wrong = wrong_passes(point.result)
        for name, settings in overlapped.items():
            own = found[pass_key(point, name)]
            own.attempted |= set(settings)
            if wrong == {name}:
                own.wrong.add(arm(settings))
            elif point.status != "ok" and not wrong and len(overlapped) == 1:
                own.broken.add(frozen(settings))
    return found
