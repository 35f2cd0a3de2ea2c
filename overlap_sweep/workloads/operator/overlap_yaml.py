"""The files of one TP size that libraries train with, all of one configuration: the YAML that Megatron-LM reads as
tp_comm_overlap_cfg and hands to Transformer Engine as ub_cfgs, and its forms for other libraries.

Their heads say where the settings come from, and how far they hold. Async TP is a switch and has no such file: what was
measured of it is in one that only layers here overlap by.
"""

from __future__ import annotations

from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.overlap.overlap_cfg import ASYNC_TP_BACKEND, named, no_switches
from overlap_sweep.report.numbers import as_sentence, as_us, comments
from overlap_sweep.results.provenance import (
    describe_machine,
    environments,
    launch_commands,
    measured_when,
    multicast,
)
from overlap_sweep.workloads.operator import exports
from overlap_sweep.workloads.operator.advice import (
    USERBUFFER_BACKENDS,
    async_tp_advice,
    file_name,
    is_async_tp,
    operators_in_sum,
    transfer_warning,
)
from overlap_sweep.workloads.operator.answer import CaseAnalysis
from overlap_sweep.workloads.operator.proof import Proof

MEGATRON = "Megatron-LM's --tp-comm-overlap-cfg, Transformer Engine's ub_cfgs"
BRIDGE = "Megatron-Bridge's TransformerLayerTPOverlapCfg"
LAYERS_HERE = f"what was measured, for layers with backend={ASYNC_TP_BACKEND} (layer.tp_comm_overlap_cfg)"


def training_files(case: CaseAnalysis, tp_size: int, command: str) -> dict[str, str]:
    """Returns the text of each file by name; first the YAML for Megatron-LM, or its substitute."""
    config, name = case.config(tp_size), f"tp_comm_overlap_tp{tp_size}"
    lines = [*_origin(case, tp_size, command), *_gain(case, tp_size), *_unmeasured(case, tp_size)]

    def head(what: str) -> list[str]:
        return [f"Communication overlap for TP={tp_size}: {what}.", *lines]

    if is_async_tp(case):
        return {file_name(tp_size): comments([*no_switches(head(LAYERS_HERE)), ""]) + overlap_cfg.text(config)}
    return {
        file_name(tp_size): exports.megatron_yaml(config, head(MEGATRON)),
        f"megatron_bridge_preset_tp{tp_size}.py": exports.megatron_bridge_preset(config, head(BRIDGE), name),
        f"ub_cfgs_tp{tp_size}.json": exports.ub_cfgs_json(config),
    }


def _origin(case: CaseAnalysis, tp_size: int, command: str) -> list[str]:
    """Returns what was measured, on what, and by which commands."""
    points = [*case.points, *(proof.trial.point for proof in case.proofs.values() if proof.trial.point)]
    lines = [
        f"{case.case}",
        f"Measured {measured_when(points)} on {describe_machine(environments(case.points)[0])}",
        *(f"  {line}" for line in dict.fromkeys([*launch_commands(points), command])),
    ]
    if case.case.backend not in USERBUFFER_BACKENDS:
        return [*lines, transfer_warning(case), *([async_tp_advice(case, tp_size)] if is_async_tp(case) else [])]
    proof = case.proofs.get(tp_size)
    if transport := multicast([proof.trial.point] if proof and proof.trial.point else case.points):
        lines.append(
            f"NVLink multicast was {transport} (runtime.multicast=true is on, UB_SKIPMC=1 off); Transformer Engine's "
            "own default is on."
        )
    return lines


def _gain(case: CaseAnalysis, tp_size: int) -> list[str]:
    """Returns how much faster the configuration is: of operators one by one if it is their best, and of whole layers
    that ran with it."""
    outcome, plan = case.outcomes.get(tp_size), case.plans.get(tp_size)
    as_planned = plan and plan.config == case.config(tp_size) and case.tried(tp_size)
    lines = ["", operators_in_sum(case, tp_size)] if as_planned else []
    lines += ["", as_sentence(outcome.verdict)] if outcome else []
    if not isinstance(outcome, Proof):
        return lines
    layer, backend = outcome.layer, case.case.backend
    lines.append(f"Whole layers, {layer.rounds} rounds side by side; this is '{named(outcome.recommended, backend)}':")
    for label, row in outcome.trial.rows.items():
        ratio = f"{row.ratio:.3f} [{row.interval.low:.3f}, {row.interval.high:.3f}] of {layer.reference}"
        lines.append(f"  {named(label, backend)}: {as_us(row.whole.time_us)} us, {ratio}")
    return [*lines, *layer.cautions, *outcome.trial.warnings]


def _unmeasured(case: CaseAnalysis, tp_size: int) -> list[str]:
    """Returns the slots that no point of an operator overlapped, with what becomes of them; empty if there are none."""
    slots = ", ".join(f"{one.slot} ({one.runs})" for one in case.unmeasured(tp_size))
    return ["", f"Slots that were not measured by themselves: {slots}."] if slots else []
