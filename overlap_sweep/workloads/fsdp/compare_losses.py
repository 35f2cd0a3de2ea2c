"""Whether tensor-parallel stacks compute in one dataset what they compute in another: the losses of what matches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isinf

from overlap_sweep.compare.datasets import Dataset
from overlap_sweep.compare.matching import Match
from overlap_sweep.compare.measured import Key
from overlap_sweep.workloads.tp_training.answer import TpTrainingCase, TpTrainingRow, measured
from overlap_sweep.workloads.tp_training.compare import rows_by_key
from overlap_sweep.workloads.tp_training.losses import compare, tolerance_of

_ROWS = Mapping[Key, tuple[TpTrainingCase, TpTrainingRow]]


def deviations(datasets: Iterable[Dataset], matches: Iterable[Match]) -> list[str]:
    """A sentence for each match that was given the same data and whose losses or gradients are not the same."""
    rows: dict[str, _ROWS] = {dataset.label: rows_by_key(dataset.points) for dataset in datasets}
    lines = []
    for match in matches:
        our_key, their_key = (key._replace(swept="") for key in (match.ours.key, match.theirs.key))
        ours, theirs = rows[match.dataset].get(our_key), rows[match.reference].get(their_key)
        if ours and theirs and _data(ours[0]) == _data(theirs[0]):
            lines += _deviation(match, ours[1], theirs[1])
    return lines


def _data(case: TpTrainingCase) -> TpTrainingCase:
    """Without what losses don't depend on, up to rounding."""
    return case._replace(model="", device="", dtype="", num_training_steps=0, warmup_steps=0)


def _deviation(match: Match, ours: TpTrainingRow, theirs: TpTrainingRow) -> list[str]:
    votes = {
        label: [measured(point.result).steps for point in row.points]
        for label, row in ((match.dataset, ours), (match.reference, theirs))
    }
    tolerance = max(tolerance_of(row.points[0].config["precision"]) for row in (ours, theirs))
    compared = compare(votes, tolerance)
    found = next(
        (one.deviates for (label, _), one in compared.items() if label == match.dataset and one.deviates), None
    )
    if found is None:
        return []
    by = "one of them is no number" if isinf(found.relative) else f"there by {found.relative:.1g}"
    name = ours.name if ours.name == theirs.name else f"{ours.name} against {theirs.name}"
    return [
        f"{match.dataset} does not compute what {match.reference} does: the {found.what} of {name} deviates from step "
        f"{found.step} on, {by}"
    ]
