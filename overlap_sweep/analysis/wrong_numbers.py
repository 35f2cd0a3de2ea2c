"""Which settings compute something else than without overlap, and which are not to be trusted therefore.

A race shows at one num_sm and not at another, today and not tomorrow: what differs from a wrong setting in nothing but
num_sm and the cluster size is as wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from overlap_sweep import space
from overlap_sweep.analysis.points import Point
from overlap_sweep.run_directory import Result

OUTPUT = "output"
"""The tensor that the forward pass alone decides; the others are gradients."""

_SIZES = ("num_sm", "cga_size")

Arm = frozenset[Any]
"""The slots of a pass with all of their settings but the sizes."""

PassKey = tuple[Any, ...]
"""Everything that says which pass of which operator it is, and on what."""


def wrong_passes(result: Result) -> set[str]:
    """The passes with wrong tensors, of a point that failed for its numbers; else none."""
    if result.status != "failed" or not result.relative_error:
        return set()
    allowed = space.tolerance(result.point)
    wrong = {name for name, error in result.relative_error.items() if error is None or error > allowed}
    return {"fwd" if name == OUTPUT else "bwd" for name in wrong}


def arm(settings: Mapping[str, Mapping[str, Any]]) -> Arm:
    return frozenset((slot, frozenset((k, v) for k, v in s.items() if k not in _SIZES)) for slot, s in settings.items())


def pass_key(point: Point, pass_name: str) -> PassKey:
    case, config = point.case, point.config
    # Failed points know nothing of the GPU's name.
    return case.model, case.backend, case.precision, case.tokens, config["tp_size"], config["operator"], pass_name


def of_pass(settings: Mapping[str, space.Setting], pass_name: str) -> dict[str, space.Setting]:
    """The slots of one pass."""
    return {slot: s for slot, s in settings.items() if space.PASS_OF_PHASE[slot.partition("_")[2]] == pass_name}


def wrong_arms(points: Iterable[Point]) -> dict[PassKey, set[Arm]]:
    """By pass, the arms of which some setting computed wrong numbers."""
    found: dict[PassKey, set[Arm]] = defaultdict(set)
    for point in points:
        if point.result and not point.is_layer:
            for pass_name in wrong_passes(point.result):
                if wrong := arm(of_pass(point.result.settings, pass_name)):
                    found[pass_key(point, pass_name)].add(wrong)
    return dict(found)
