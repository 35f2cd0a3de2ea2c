"""The YAML that Megatron-LM reads as tp_comm_overlap_cfg and hands to Transformer Engine as ub_cfgs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import DEFAULT, named, no_switches
from overlap_sweep.report.numbers import as_sentence, comments
from overlap_sweep.results.provenance import multicast
from overlap_sweep.workloads.operator import async_tp
from overlap_sweep.workloads.operator.cases import CaseAnalysis, SlotAnswer
from overlap_sweep.workloads.operator.choice import PassChoice, default_sum_us, labels

FILE_NAME = "optimal_tp_comm_overlap_cfg.yaml"
WHAT = "Megatron-LM's --tp-comm-overlap-cfg, Transformer Engine's ub_cfgs"
DONT_OVERLAP = "Don't overlap: leave --tp-comm-overlap out. Nothing else in this file has an effect then."
MULTICAST = {
    "off": [
        "NVLink multicast was off (runtime.multicast=false, UB_SKIPMC=1). Transformer Engine's own default is on:",
        "train with UB_SKIPMC=1 to have what was measured here.",
    ],
    "on": ["NVLink multicast was on (runtime.multicast=true), as is Transformer Engine's own default."],
    "on and off": ["NVLink multicast was on in some points and off in others: their times don't compare."],
}
"""What the head says of the userbuffers' transport."""
USERBUFFER_BACKENDS = ("transformer_engine", "megatron")


@dataclass(frozen=True)
class Provenance:
    """What the head of the file says about where its settings come from."""

    machine: str
    measured: str
    commands: Sequence[str]


def file_name(tp_size: int) -> str:
    return FILE_NAME.replace(".yaml", f"_tp{tp_size}.yaml")


def overlap_yaml(case: CaseAnalysis, tp_size: int, provenance: Provenance) -> str:
    """The file's text: only slots that are to be overlapped, under a head of comments with everything else.

    Loads with yaml.safe_load into `{slot: {method, num_sm, ...}}`.
    """
    slots = case.slots(tp_size)
    title = f"Communication overlap for TP={tp_size}: {WHAT}."
    origins = no_switches([*origin(case, tp_size, provenance), *beside_default(case, tp_size)])
    left_out = no_switches([*_left_out(case, tp_size), *unmeasured(case, tp_size)])
    head = [title, *origins, "", *_switches(case, tp_size), "", *left_out, ""]
    body = [_entry(answer, case.case.backend) for answer in slots if answer.final_setting]
    return comments(head) + ("".join(body) or "{}\n")


def origin(case: CaseAnalysis, tp_size: int, provenance: Provenance) -> list[str]:
    """Where the settings come from, and how far they hold."""
    lines = [
        f"{case.case}",
        f"Measured {provenance.measured} on {provenance.machine}",
        *(f"  {command}" for command in provenance.commands),
    ]
    if case.case.backend in USERBUFFER_BACKENDS:
        proof = case.proofs.get(tp_size)
        measured = [proof.trial.point] if proof and proof.trial.point else case.points
        lines += MULTICAST.get(multicast(measured) or "", [])
    else:
        lines.append(transfer_warning(case.case.backend))
    if case.case.backend == async_tp.BACKEND:
        lines += [*async_tp.advice_at(case, tp_size), *async_tp.HOW_TO]
    if tp_size in case.unproven:
        lines.append(as_sentence(case.unproven[tp_size].verdict))
    return lines


def beside_default(case: CaseAnalysis, tp_size: int) -> list[str]:
    """What the operators' best settings are worth in sum, where there is a default to compare them with."""
    of_pass = {answer.choice.label: answer for answer in case.slots(tp_size) if answer.tried}
    choices = [answer.choice for answer in of_pass.values()]
    default_us = default_sum_us(choices)
    if default_us is None:
        return []
    final_us = sum(answer.final.time_us for answer in of_pass.values())
    none_us = sum(choice.none.time_us for choice in choices)
    over, default = ", ".join(labels(choices)), named(DEFAULT, case.case.backend)
    return [f"Sum over {over}: {final_us:.1f} us, without overlap {none_us:.1f}, {default} {default_us:.1f}"]


def transfer_warning(backend: str) -> str:
    if backend == async_tp.BACKEND:
        return async_tp.NOT_FOR_MEGATRON
    return (
        f"Measured with backend={backend}, not with Transformer Engine's userbuffers: a hint where to look, "
        "not a measurement of what Megatron-LM will do."
    )


def _switches(case: CaseAnalysis, tp_size: int) -> list[str]:
    advised = case.plans[tp_size].switches
    if case.config(tp_size).switches["tp_comm_overlap"]:
        lines = ["Set in Megatron-Core's configuration (on Megatron-LM's command line):"]
        lines.append("  tp_comm_overlap: true  (--tp-comm-overlap)")
    else:
        lines = [DONT_OVERLAP]
    for advice in advised:
        flag = f"  ({advice.flag})" if advice.flag and advice.name != "tp_comm_overlap" else ""
        lines.append(f"  {advice.name}: {str(advice.value).lower()}{flag}  {advice.reason}")
    return lines + no_switches(case.plans[tp_size].overruled)


def _left_out(case: CaseAnalysis, tp_size: int) -> list[str]:
    """Of the measured slots those that are not in the file, and why."""
    lines = []
    if case.config(tp_size).switches["tp_comm_overlap"]:
        lines += [
            "A slot that is not in this file is not 'none': it gets Transformer Engine's default overlap,",
            "unless a switch above turns it off.",
        ]
    none = [answer for answer in case.slots(tp_size) if answer.tried and not answer.final_setting]
    return lines + [f"  {answer.slot}: {_why_none(answer, case.case.backend)}" for answer in none]


def unmeasured(case: CaseAnalysis, tp_size: int) -> list[str]:
    """The slots that no point of an operator overlapped, by what becomes of them; nothing where there are none."""
    by_fate: dict[str, list[str]] = {}
    runs = {"off": "off", "default": "at Transformer Engine's default", "as set": "as set below"}
    found = case.unmeasured(tp_size)
    for slot in found:
        why = "" if slot.runs == "off" or case.decided(tp_size) else f" ({slot.why})"
        by_fate.setdefault(f"  {runs[slot.runs]}{why}: ", []).append(slot.slot)
    if case.decided(tp_size):
        title = "Not measured by themselves, and as the whole layer was measured:"
    else:
        title = f"Not measured, and by unmeasured={case.plans[tp_size].unmeasured}:"
    return [title, *(fate + ", ".join(slots) for fate, slots in by_fate.items())] if found else []


def _why_none(answer: SlotAnswer, backend: str) -> str:
    if answer.setting:
        return f"{space.brief_name(answer.setting)} is best, but the switches don't allow it beside the others"
    default = default_beside(answer.choice, backend)
    compared = f"; {answer.choice.none.time_us:.1f} us{default}" if default else ""
    return f"none wins; {answer.choice.reason}{compared}"


def _entry(answer: SlotAnswer, backend: str) -> str:
    choice, final = answer.choice, answer.final
    compared = f"{final.time_us:.1f} us, without overlap {choice.none.time_us:.1f}{default_beside(choice, backend)}"
    together = " together" if len(final.settings) > 1 else ""
    predicted = "" if final.measured else ", predicted from its slots alone: measure them together"
    comment = f"# {choice.label}{together}: {compared}{predicted}\n"
    return comment + yaml.safe_dump({answer.slot: dict(answer.final_setting or {})}, sort_keys=False)


def default_beside(choice: PassChoice, backend: str) -> str:
    """To be appended to other times, in microseconds; empty where it was not measured."""
    return f", {named(DEFAULT, backend)} {choice.default.time_us:.1f}" if choice.default else ""
