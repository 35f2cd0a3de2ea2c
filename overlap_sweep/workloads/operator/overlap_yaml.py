"""The files of one TP size that libraries train with, all of one configuration: the YAML that Megatron-LM reads as
tp_comm_overlap_cfg and hands to Transformer Engine as ub_cfgs, and its forms for other libraries.

Their heads say where the settings come from, and how far they hold. Async TP is a switch and has no such file: what was
measured of it is in one that only layers here overlap by.
"""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.overlap.overlap_cfg import (
    ASYNC_TP_BACKEND,
    DEFAULT,
    FLOOR,
    OverlapConfig,
    methods_allowed,
    named,
    no_switches,
)
from overlap_sweep.report.numbers import as_ms, as_percent, as_sentence, comments
from overlap_sweep.results.provenance import (
    describe_machine,
    environments,
    launch_commands,
    measured_when,
    multicast,
)
from overlap_sweep.workloads.layer.result import PASSES, attention_backend
from overlap_sweep.workloads.operator import exports
from overlap_sweep.workloads.operator.advice import (
    HOW_TO_ASYNC_TP,
    USERBUFFER_BACKENDS,
    async_tp_advice,
    file_name,
    is_async_tp,
    transfer_warning,
)
from overlap_sweep.workloads.operator.answer import CaseAnalysis, SlotAnswer
from overlap_sweep.workloads.operator.choice import PassChoice, default_sum_us, labels
from overlap_sweep.workloads.operator.proof import Proof, Unproven

MEGATRON = "Megatron-LM's --tp-comm-overlap-cfg, Transformer Engine's ub_cfgs"
BRIDGE = "Megatron-Bridge's TransformerLayerTPOverlapCfg"
LAYERS_HERE = f"what was measured, for layers with backend={ASYNC_TP_BACKEND} (layer.tp_comm_overlap_cfg)"
MULTICAST = {
    "off": [
        "NVLink multicast was off (runtime.multicast=false, UB_SKIPMC=1). Transformer Engine's own default is on:",
        "train with UB_SKIPMC=1 to have what was measured here.",
    ],
    "on": ["NVLink multicast was on (runtime.multicast=true), as is Transformer Engine's own default."],
    "on and off": ["NVLink multicast was on in some points and off in others: their times don't compare."],
}
"""What the head says of the userbuffers' transport."""


def training_files(case: CaseAnalysis, tp_size: int, command: str) -> dict[str, str]:
    """Returns by name the text of each; first the YAML for Megatron-LM, or what has its place."""
    config, proof = case.config(tp_size), case.proofs.get(tp_size)
    origin = _origin(case, tp_size, command)
    proven = ["", *_proven(case, proof)] if proof else []
    unmeasured = _unmeasured(case, tp_size)

    def head(what: str) -> list[str]:
        return [_title(tp_size, what), *origin, *proven, *(["", *unmeasured] if unmeasured else [])]

    if is_async_tp(case):
        lines = no_switches([_title(tp_size, LAYERS_HERE), *origin, *proven, ""])
        return {file_name(tp_size): comments(lines) + overlap_cfg.text(config)}
    for_megatron = (
        exports.megatron_yaml(config, head(MEGATRON))
        if case.decided(tp_size)
        else _best_of_each_slot(case, tp_size, [*origin, *_sums_beside_default(case, tp_size)], unmeasured)
    )
    return {
        file_name(tp_size): for_megatron,
        f"megatron_bridge_preset_tp{tp_size}.py": exports.megatron_bridge_preset(
            config, head(BRIDGE), f"tp_comm_overlap_tp{tp_size}"
        ),
        f"ub_cfgs_tp{tp_size}.json": exports.ub_cfgs_json(config),
    }


def _title(tp_size: int, what: str) -> str:
    return f"Communication overlap for TP={tp_size}: {what}."


def _origin(case: CaseAnalysis, tp_size: int, command: str) -> list[str]:
    """Returns where the settings come from, and how far they hold."""
    points = [*case.points, *(proof.trial.point for proof in case.proofs.values() if proof.trial.point)]
    lines = [
        f"{case.case}",
        f"Measured {measured_when(points)} on {describe_machine(environments(case.points)[0])}",
        *(f"  {line}" for line in dict.fromkeys([*launch_commands(points), command])),
    ]
    if case.case.backend in USERBUFFER_BACKENDS:
        proof = case.proofs.get(tp_size)
        measured = [proof.trial.point] if proof and proof.trial.point else case.points
        lines += MULTICAST.get(multicast(measured) or "", [])
    else:
        lines.append(transfer_warning(case))
    if is_async_tp(case):
        lines += [*async_tp_advice(case, tp_size), *HOW_TO_ASYNC_TP]
    outcome = case.outcomes.get(tp_size)
    return [*lines, *([as_sentence(outcome.verdict)] if isinstance(outcome, Unproven) else [])]


def _best_of_each_slot(case: CaseAnalysis, tp_size: int, origin: list[str], unmeasured: list[str]) -> str:
    """Returns the YAML where no whole layer decided: only slots that are to be overlapped, each under its times, below
    a head with everything else."""
    plan, slots = case.plans[tp_size], case.slots(tp_size)
    overlaps = plan.config.switches["tp_comm_overlap"]
    switches = [exports.DONT_OVERLAP]
    if overlaps:
        switches = [exports.SET_IN_MEGATRON, "  tp_comm_overlap: true  (--tp-comm-overlap)"]
    for advice in plan.switches:
        flag = f"  ({advice.flag})" if advice.flag and advice.name != "tp_comm_overlap" else ""
        switches.append(f"  {advice.name}: {str(advice.value).lower()}{flag}  {advice.reason}")
    left_out = [
        "A slot that is not in this file is not 'none': it gets Transformer Engine's default overlap,",
        "unless a switch above turns it off.",
    ]
    none = [f"  {one.slot}: {_why_none(one)}" for one in slots if not one.final_setting]
    head = [
        *no_switches([_title(tp_size, MEGATRON), *origin]),
        *["", *switches, *no_switches(plan.overruled)],
        *["", *no_switches([*(left_out if overlaps else []), *none, *unmeasured]), ""],
    ]
    return comments(head) + ("".join(_entry(answer) for answer in slots if answer.final_setting) or "{}\n")


def _why_none(answer: SlotAnswer) -> str:
    if answer.setting:
        return f"{space.brief_name(answer.setting)} is best, but the switches don't allow it beside the others"
    default = _beside_default(answer.choice, answer.case)
    compared = f"; {answer.choice.none.time_us:.1f} us{default}" if default else ""
    return f"none wins; {answer.choice.reason}{compared}"


def _entry(answer: SlotAnswer) -> str:
    choice, final = answer.choice, answer.final
    none = f"without overlap {choice.none.time_us:.1f}{_beside_default(choice, answer.case)}"
    together = " together" if len(final.settings) > 1 else ""
    predicted = "" if final.measured else ", predicted from its slots alone: measure them together"
    comment = f"# {choice.label}{together}: {final.time_us:.1f} us, {none}{predicted}\n"
    return comment + yaml.safe_dump({answer.slot: dict(answer.final_setting or {})}, sort_keys=False)


def _beside_default(choice: PassChoice, case: CaseAnalysis) -> str:
    """Returns the default's time, to be appended to other times; empty where it was not measured."""
    return f", {named(DEFAULT, case.case.backend)} {choice.default.time_us:.1f}" if choice.default else ""


def _sums_beside_default(case: CaseAnalysis, tp_size: int) -> list[str]:
    """Returns what the operators' best settings are worth in sum, where there is a default to compare them with."""
    answers = {answer.choice.label: answer for answer in case.slots(tp_size)}
    choices = [answer.choice for answer in answers.values()]
    default_us = default_sum_us(choices)
    if default_us is None:
        return []
    final_us, none_us = sum(one.final.time_us for one in answers.values()), sum(one.none.time_us for one in choices)
    over, default = ", ".join(labels(choices)), named(DEFAULT, case.case.backend)
    return [f"Sum over {over}: {final_us:.1f} us, without overlap {none_us:.1f}, {default} {default_us:.1f}"]


def _unmeasured(case: CaseAnalysis, tp_size: int) -> list[str]:
    """Returns the slots that no point of an operator overlapped, by what becomes of them; nothing where there are
    none."""
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


def _proven(case: CaseAnalysis, proof: Proof) -> list[str]:
    """Returns of a proven configuration the layer's numbers, what is not overlapped, and the operators' numbers."""
    parts = [part for part in (_layer(proof), _open_slots(proof), _operators(case, proof)) if part]
    return [line for part in parts for line in ("", *part)][1:]


def _layer(proof: Proof) -> list[str]:
    trial, layer = proof.trial, proof.layer
    assert trial.point
    attention = attention_backend(trial.point.result)
    where = ", ".join([trial.point.config["layer"]["kind"], *([f"attention {attention}"] if attention else [])])
    names = {label: named(label, proof.case.backend) for label in trial.rows}
    width = max(map(len, names.values()))
    lines = [
        f"Proven on the whole layer ({where}), {measured_when([trial.point])}, {layer.rounds} rounds side by side.",
        f"This is the configuration '{names[proof.recommended]}'. {as_sentence(proof.verdict)}",
    ]
    for label, row in trial.rows.items():
        times = ", ".join(f"{name} {as_ms(row.measured.times[name].median_us)}" for name in PASSES) + " ms"
        interval = f"{row.ratio:.3f} [{row.interval.low:.3f}, {row.interval.high:.3f}] of {layer.reference}"
        compared = [] if label == layer.reference else [interval]
        hidden = [f"hidden {as_percent(row.hidden_fraction)}"] if label not in (layer.reference, FLOOR) else []
        bound = ["launch-bound"] if row.launch_bound else []
        lines.append(f"  {names[label]:<{width}}  {', '.join([times, *compared, *hidden, *bound])}")
    return [*lines, *trial.left_out.values(), *layer.cautions, *trial.warnings]


def _open_slots(proof: Proof) -> list[str]:
    """Returns the slots that the file has no settings for."""
    config = proof.config
    if not config.switches["tp_comm_overlap"]:
        return []
    allowed = methods_allowed(config.switches)
    off = [slot for slot in allowed if space.SLOTS[slot] and not allowed[slot]]
    left = [slot for slot in allowed if allowed[slot] and slot not in config.slots]
    ran = "without overlap where this was measured"
    if proof.case.backend in USERBUFFER_BACKENDS:
        ran = "at Transformer Engine's default"
    elif proof.case.backend == ASYNC_TP_BACKEND:
        ran = "as under async TP"
    lines = [f"Not overlapped, by the switches: {', '.join(off)}."] if off else []
    return [*lines, *([f"Not in this file, {ran}: {', '.join(left)}."] if left else [])]


def _operators(case: CaseAnalysis, proof: Proof) -> list[str]:
    """Returns what the configuration is worth in each operator by itself, where that was measured."""
    lines = [f"  {choice.label}: {_operator(choice, case, proof.config)}" for choice in case.tried(proof.tp_size)]
    if not lines:
        return []
    as_planned = proof.config == case.plans[proof.tp_size].config
    in_sum = _sums_beside_default(case, proof.tp_size) if as_planned else []
    return ["The operators one by one, us:", *lines, *in_sum]


def _operator(choice: PassChoice, case: CaseAnalysis, config: OverlapConfig) -> str:
    compared = f"without overlap {choice.none.time_us:.1f}{_beside_default(choice, case)}"
    slots = _slots_on(choice, case, config)
    settings = {slot: config.slots[slot] for slot in slots if "method" in config.slots.get(slot, {})}
    if len(settings) < len(slots):
        others = f"{space.settings_name(settings)}, the others " if settings else ""
        return f"{others}as the library has it; {compared}"
    if not settings:
        return f"not overlapped; {compared}{'' if choice.chosen.settings else f'; {choice.reason}'}"
    known = next((candidate for candidate in choice.candidates if _same(candidate.settings, settings)), None)
    if known is None:
        return f"{space.settings_name(settings)}, not measured; {compared}"
    predicted = "" if known.measured else " (predicted from its slots alone)"
    return f"{space.settings_name(settings)} {known.time_us:.1f}{predicted}; {compared}"


def _slots_on(choice: PassChoice, case: CaseAnalysis, config: OverlapConfig) -> list[str]:
    """Returns the slots of the pass that overlapped where this was measured."""
    allowed = methods_allowed(config.switches)
    of_pass = [space.slot(choice.operator, p) for p in space.PHASES if space.PASS_OF_PHASE[p] == choice.pass_name]
    has_default = case.case.backend in (*USERBUFFER_BACKENDS, ASYNC_TP_BACKEND)
    return [slot for slot in of_pass if allowed.get(slot) and (has_default or slot in config.slots)]


def _same(one: Mapping[str, space.Setting], other: Mapping[str, space.Setting]) -> bool:
    return one.keys() == other.keys() and all(
        space.without_idle_knobs(one[slot]) == space.without_idle_knobs(other[slot]) for slot in one
    )
