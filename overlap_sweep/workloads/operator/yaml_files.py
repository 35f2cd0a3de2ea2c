"""The files of one TP size that libraries train with, all of one configuration.

Async TP is a switch and has no such file. What was measured of it is in one that only layers here overlap by.
"""

from __future__ import annotations

from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.overlap.overlap_cfg import no_switches
from overlap_sweep.report.numbers import comments
from overlap_sweep.workloads.operator import async_tp, exports, overlap_yaml
from overlap_sweep.workloads.operator.cases import CaseAnalysis
from overlap_sweep.workloads.operator.overlap_yaml import Provenance, origin
from overlap_sweep.workloads.operator.proven_head import proven_head


def training_files(case: CaseAnalysis, tp_size: int, provenance: Provenance) -> dict[str, str]:
    """By name the text of each; first the YAML for Megatron-LM, or what has its place."""
    config, proof = case.config(tp_size), case.proofs.get(tp_size)
    proven = ["", *proven_head(case, proof)] if proof else []
    unmeasured = overlap_yaml.unmeasured(case, tp_size)

    def head(what: str) -> list[str]:
        title = f"Communication overlap for TP={tp_size}: {what}."
        return [title, *origin(case, tp_size, provenance), *proven, *(["", *unmeasured] if unmeasured else [])]

    if case.case.backend == async_tp.BACKEND:
        unmeasured = []
        lines = no_switches([*head(async_tp.WHAT), ""])
        return {overlap_yaml.file_name(tp_size): comments(lines) + overlap_cfg.text(config)}
    for_megatron = (
        exports.megatron_yaml(config, head(overlap_yaml.WHAT))
        if case.decided(tp_size)
        else overlap_yaml.overlap_yaml(case, tp_size, provenance)
    )
    return {
        overlap_yaml.file_name(tp_size): for_megatron,
        exports.bridge_preset_file_name(tp_size): exports.megatron_bridge_preset(
            config, head("Megatron-Bridge's TransformerLayerTPOverlapCfg"), f"tp_comm_overlap_tp{tp_size}"
        ),
        exports.ub_cfgs_file_name(tp_size): exports.ub_cfgs_json(config),
    }
