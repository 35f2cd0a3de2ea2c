"""What to know before believing the numbers of a case."""

from __future__ import annotations

import statistics

from overlap_sweep.report.numbers import as_us
from overlap_sweep.results.estimate import NOTABLE_DRIFT
from overlap_sweep.results.provenance import environments
from overlap_sweep.workloads.operator import async_tp
from overlap_sweep.workloads.operator.cases import CaseAnalysis
from overlap_sweep.workloads.operator.overlap_yaml import USERBUFFER_BACKENDS, transfer_warning


def cautions(case: CaseAnalysis) -> list[str]:
    """One sentence each, none where all is well."""
    lines = []
    if case.plans and case.case.backend not in USERBUFFER_BACKENDS:
        lines.append(transfer_warning(case.case.backend))
    if case.case.backend == async_tp.BACKEND:
        lines += async_tp.advice(case)
    for tp_size, plan in case.plans.items():
        for choice in plan.choices:
            if not choice.chosen.measured:
                lines.append(
                    f"TP={tp_size} {choice.label}: {choice.chosen.name} is predicted from its slots alone; "
                    "measure them together before you rely on it."
                )
            if choice.default and choice.default_wins:
                lines.append(f"TP={tp_size} {choice.label}: {_default_wins(choice.default.time_us, case)}.")
    if case.launch_bound:
        lines.append(f"Launch-bound, left out of the choice: {', '.join(case.launch_bound)}.")
    drifted = [drift for drift in case.drift if abs(drift.change) >= NOTABLE_DRIFT]
    worst = {drift.baseline: drift for drift in sorted(drifted, key=lambda drift: abs(drift.change))}
    if worst:
        by_how_much = ", ".join(
            f"{baseline} by up to {drift.change:+.0%} ({drift.operator} {drift.pass_name}, TP={drift.tp_size})"
            for baseline, drift in worst.items()
        )
        lines.append(f"Baselines drifted: {by_how_much}; settings are compared by what was measured beside them.")
    if case.repeats:
        widest, *_ = case.repeats
        typical = statistics.median(repeats.spread for repeats in case.repeats)
        lines.append(
            f"Repeated points: the medians of {len(case.repeats)} passes, each measured up to "
            f"{max(len(repeats.medians_us) for repeats in case.repeats)} times, spread by {typical:.1%} in the middle "
            f"and {widest.spread:.1%} at most ({widest.point} {widest.pass_name})."
        )
    for reason, names in case.conditions.slowed.items() if case.conditions else ():
        lines.append(f"GPUs were slowed down ({reason}) around {len(names)} points, first {names[0]}.")
    lines += dict.fromkeys(warning for point in case.points if point.result for warning in point.result.warnings)
    if len(environments(case.points)) > 1:
        lines.append("The points were measured in different environments; see tuning_report.json.")
    return lines


def _default_wins(default_us: float, case: CaseAnalysis) -> str:
    if case.case.backend == async_tp.BACKEND:
        # There are no more settings to sweep.
        return f"async TP as a whole, {as_us(default_us)} us, was faster than the same operators set one by one"
    return f"the default, {as_us(default_us)} us, is faster than anything tried; sweep more settings"
