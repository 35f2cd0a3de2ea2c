"""Exposed communication costs next to nothing, as the mean of the ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from overlap_sweep.diagnosis import NEGLIGIBLE, Finding, StepLoss, as_share
from overlap_sweep.diagnosis.cause import Cause, advice_for


def nothing_lost(steps: Sequence[StepLoss]) -> Finding | None:
    """Returns the finding; None if exposed communication costs something."""
    by_rank: dict[int | None, list[StepLoss]] = defaultdict(list)
    for step in steps:
        if not step.startup:
            by_rank[step.rank].append(step)
    costs_us = {rank: median(step.exposed_comm_us for step in own) for rank, own in by_rank.items()}
    total_us = sum(median(step.step_us for step in own) for own in by_rank.values())
    if not total_us or sum(costs_us.values()) / total_us >= NEGLIGIBLE:
        return None
    cost_us, share = sum(costs_us.values()) / len(costs_us), sum(costs_us.values()) / total_us
    return Finding(
        cause="none",
        lost_us=round(cost_us, 3),
        share=share,
        rank=max(costs_us, key=lambda rank: costs_us[rank]),
        process_group="",
        collective="",
        where="",
        evidence=f"Exposed communication costs {cost_us:,.1f} us per step, {as_share(share)} of it.",
        try_=advice_for("none", {}),
    )


CAUSE = Cause(order=0, meaning="communication costs less than 2 % of the step", of_run=nothing_lost)
