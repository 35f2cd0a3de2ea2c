"""The tidy table of answers: one row per case, TP size and slot that an overlap was tried for."""

from __future__ import annotations

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import DEFAULT, NONE, OverlapConfig, methods_allowed
from overlap_sweep.report.frame import Row, column_types
from overlap_sweep.results.estimate import hidden_fraction
from overlap_sweep.workloads.operator.analysis import OperatorAnalysis
from overlap_sweep.workloads.operator.cases import CaseAnalysis, SlotAnswer
from overlap_sweep.workloads.operator.proof import Proof

COLUMNS = {
    **column_types(
        *("model", "backend", "device", "precision", "tokens", "tp_size", "slot", "operator", "phase", "pass"),
        *("setting", "method", *space.KNOBS, "time_us", "noise_us", "none_us", "default_us", "floor_us"),
        *("hidden_fraction", "speedup", "overlap_ratio", "measured", "reason", "final_setting"),
        *("proven", "recommended", "layer_ratio", "layer_ratio_low", "layer_ratio_high"),
    ),
    **dict.fromkeys(("setting", "reason", "final_setting", "recommended"), "string"),
    **dict.fromkeys(("measured", "proven"), "boolean"),
}
"""Every column in its order, and its pandas type. Times are in microseconds.

The times are those of the slot's pass: dgrad and wgrad can only be timed together. `setting`, with its method and
knobs, is the slot's best, `final_setting` what to train with; `measured` is false where the time is predicted. Where a
whole layer proved it, `recommended` is what came out best there, and layer_ratio its time over that of no overlap.
"""


def answer_rows(analysis: OperatorAnalysis) -> list[Row]:
    """One dictionary per case, TP size and tried slot, with exactly the keys of COLUMNS; what is unknown is None."""
    rows = [
        {
            **case.case._asdict(),
            "tp_size": tp_size,
            **_slot_cells(answer, case.config(tp_size)),
            **_proof_cells(case, tp_size),
        }
        for case in analysis.cases
        for tp_size in case.plans
        for answer in case.slots(tp_size)
        if answer.tried
    ]
    return [{column: row.get(column) for column in COLUMNS} for row in rows]


def _slot_cells(answer: SlotAnswer, config: OverlapConfig) -> Row:
    choice, chosen = answer.choice, answer.choice.chosen
    time_us, none_us = chosen.time_us, choice.none.time_us
    return {
        "slot": answer.slot,
        "operator": choice.operator,
        "phase": answer.phase,
        "pass": choice.pass_name,
        "setting": space.brief_name(answer.setting),
        "method": "none",
        **(answer.setting or {}),
        "time_us": time_us,
        "noise_us": chosen.estimate.noise_us,
        "none_us": none_us,
        "default_us": choice.default.time_us if choice.default else None,
        "floor_us": choice.floor_us,
        "hidden_fraction": hidden_fraction(time_us, none_us, choice.floor_us),
        "speedup": none_us / time_us,
        "overlap_ratio": chosen.overlap_ratio,
        "measured": chosen.measured,
        "reason": choice.reason,
        "final_setting": _final_setting(answer.slot, config),
    }


def _final_setting(slot: str, config: OverlapConfig) -> str:
    if not methods_allowed(config.switches)[slot]:
        return NONE
    setting = config.slots.get(slot)
    return space.brief_name(setting) if setting else DEFAULT


def _proof_cells(case: CaseAnalysis, tp_size: int) -> Row:
    proof = case.outcomes.get(tp_size)
    if not isinstance(proof, Proof):
        return {"proven": False}
    cells: Row = {"proven": True, "recommended": proof.recommended}
    row = proof.trial.rows[proof.recommended]
    if proof.layer.reference == NONE:
        cells |= {"layer_ratio": row.ratio, "layer_ratio_low": row.interval.low, "layer_ratio_high": row.interval.high}
    return cells
