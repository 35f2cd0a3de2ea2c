"""The files to train with at one TP size: the YAML that Megatron-LM reads as tp_comm_overlap_cfg and passes to
Transformer Engine as ub_cfgs, and the same configuration for other libraries.

Their heads say where the settings come from and how much they gain. Async TP is a switch and reads no file: its
settings are written for this package's own layers only.
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

MEGATRON = "Megatron-LM's --tp-comm-overlap-cfg and Transformer Engine's ub_cfgs"
BRIDGE = "Megatron-Bridge's TransformerLayerTPOverlapCfg"
LAYERS_HERE = f"workload=layer with backend={ASYNC_TP_BACKEND} (layer.tp_comm_overlap_cfg=<this file>)"


def training_files(case: CaseAnalysis, tp_size: int, command: str) -> dict[str, str]:
    """Returns the text of each file by name; first the YAML for Megatron-LM, or its substitute."""
    config, name = case.config(tp_size), f"tp_comm_overlap_tp{tp_size}"
    applies_to = ["", *case.applies_to] if case.applies_to else []
    lines = [*_origin(case, tp_size, command), *applies_to, *_gain(case, tp_size), *_unmeasured(case, tp_size)]

    def head(reader: str) -> list[str]:
        return [f"Communication overlap at TP={tp_size}, for {reader}.", *lines]

    if is_async_tp(case):
        return {file_name(tp_size): comments([*no_switches(head(LAYERS_HERE)), ""]) + overlap_cfg.text(config)}
    return {
        file_name(tp_size): exports.megatron_yaml(config, head(MEGATRON)),
        f"megatron_bridge_preset_tp{tp_size}.py": exports.megatron_bridge_preset(config, head(BRIDGE), name),
        f"ub_cfgs_tp{tp_size}.json": exports.ub_cfgs_json(config),
    }


def _origin(case: CaseAnalysis, tp_size: int, command: str) -> list[str]:
    """Returns the case, the machine and the commands of the measurements."""
    points = [*case.points, *(proof.trial.point for proof in case.proofs.values() if proof.trial.point)]
    lines = [
        f"{case.case}",
        f"Measured {measured_when(points)} on {describe_machine(environments(case.points)[0])}",
        *(f"  {line}" for line in dict.fromkeys([*launch_commands(points), command])),
    ]
    lines += overlap_cfg.set_in_training(case.case.process_wide)
    if case.case.backend not in USERBUFFER_BACKENDS:
        return [*lines, transfer_warning(case), *([async_tp_advice(case, tp_size)] if is_async_tp(case) else [])]
    proof = case.proofs.get(tp_size)
    if transport := multicast([proof.trial.point] if proof and proof.trial.point else case.points):
        lines.append(
            f"Measured with NVLink multicast {transport} (runtime.multicast=true turns it on, UB_SKIPMC=1 off); "
            "Transformer Engine's default is on."
        )
    return lines


def _gain(case: CaseAnalysis, tp_size: int) -> list[str]:
    """Returns the gain of the configuration: summed over operators if it has their best settings, and on whole layers
    that ran with it."""
    outcome, plan = case.outcomes.get(tp_size), case.plans.get(tp_size)
    as_planned = plan and plan.config == case.config(tp_size) and case.tried(tp_size)
    lines = ["", operators_in_sum(case, tp_size)] if as_planned else []
    lines += ["", as_sentence(outcome.verdict)] if outcome else []
    if not isinstance(outcome, Proof):
        return lines
    layer, backend = outcome.layer, case.case.backend
    recommended = named(outcome.recommended, backend)
    measured = as_sentence(outcome.trial.part.removeprefix("the "))
    lines.append(f"{measured} in {layer.rounds} interleaved rounds; this file is '{recommended}':")
    for label, row in outcome.trial.rows.items():
        ratio = f"{row.ratio:.3f} of {layer.reference} ({row.interval.low:.3f} to {row.interval.high:.3f})"
        lines.append(f"  {named(label, backend)}: {as_us(row.whole.time_us)} us, {ratio}")
    return [*lines, *layer.cautions, *outcome.trial.warnings]


def _unmeasured(case: CaseAnalysis, tp_size: int) -> list[str]:
    """Returns a line on the slots that no operator point overlapped, and how they run; empty if there are none."""
    slots = ", ".join(f"{one.slot} ({one.runs})" for one in case.unmeasured(tp_size))
    return ["", f"Slots not measured on their own: {slots}."] if slots else []
