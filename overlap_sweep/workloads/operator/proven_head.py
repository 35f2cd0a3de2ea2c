"""What the head of a file says whose configuration was proven: by what, against what, and what it leaves open."""

from __future__ import annotations

from collections.abc import Mapping

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import FLOOR, methods_allowed, named
from overlap_sweep.report.numbers import as_ms, as_percent, as_sentence
from overlap_sweep.results.provenance import measured_when
from overlap_sweep.workloads.layer.result import attention_backend
from overlap_sweep.workloads.operator import async_tp
from overlap_sweep.workloads.operator.cases import CaseAnalysis
from overlap_sweep.workloads.operator.choice import PassChoice
from overlap_sweep.workloads.operator.overlap_yaml import USERBUFFER_BACKENDS, beside_default, default_beside
from overlap_sweep.workloads.operator.proof import Proof


def proven_head(case: CaseAnalysis, proof: Proof) -> list[str]:
    """Lines for comments: the layer's numbers, what is not overlapped, and the operators' numbers."""
    parts = [part for part in (_proof(proof), _open_slots(proof), _operators(case, proof)) if part]
    return [line for part in parts for line in ("", *part)][1:]


def _proof(proof: Proof) -> list[str]:
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
        times = f"fwd {as_ms(row.fwd_us)}, bwd {as_ms(row.bwd_us)}, all {as_ms(row.all_us)} ms"
        interval = f"{row.ratio:.3f} [{row.interval.low:.3f}, {row.interval.high:.3f}] of {layer.reference}"
        compared = [] if label == layer.reference else [interval]
        hidden = [f"hidden {as_percent(row.hidden_fraction)}"] if label not in (layer.reference, FLOOR) else []
        bound = ["launch-bound"] if row.launch_bound else []
        lines.append(f"  {names[label]:<{width}}  {', '.join([times, *compared, *hidden, *bound])}")
    return [*lines, *trial.left_out.values(), *layer.cautions, *trial.warnings]


def _open_slots(proof: Proof) -> list[str]:
    """The slots that the file has no settings for."""
    config = proof.config
    if not config.switches["tp_comm_overlap"]:
        return []
    allowed = methods_allowed(config.switches)
    off = [slot for slot in allowed if space.SLOTS[slot] and not allowed[slot]]
    left = [slot for slot in allowed if allowed[slot] and slot not in config.slots]
    ran = "without overlap where this was measured"
    if proof.case.backend in USERBUFFER_BACKENDS:
        ran = "at Transformer Engine's default"
    elif proof.case.backend == async_tp.BACKEND:
        ran = "as under async TP"
    lines = [f"Not overlapped, by the switches: {', '.join(off)}."] if off else []
    return [*lines, *([f"Not in this file, {ran}: {', '.join(left)}."] if left else [])]


def _operators(case: CaseAnalysis, proof: Proof) -> list[str]:
    """What the configuration is worth in each operator by itself, where that was measured."""
    plan = case.plans.get(proof.tp_size)
    lines = (
        [f"  {choice.label}: {_operator(choice, proof)}" for choice in plan.choices if choice.tried_slots]
        if plan
        else []
    )
    if not plan or not lines:
        return []
    in_sum = beside_default(case, proof.tp_size) if proof.config == plan.config else []
    return ["The operators one by one, us:", *lines, *in_sum]


def _operator(choice: PassChoice, proof: Proof) -> str:
    compared = f"without overlap {choice.none.time_us:.1f}{default_beside(choice, proof.case.backend)}"
    slots = _slots_on(choice, proof)
    settings = {slot: proof.config.slots[slot] for slot in slots if "method" in proof.config.slots.get(slot, {})}
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


def _slots_on(choice: PassChoice, proof: Proof) -> list[str]:
    """The slots of the pass that overlapped where this was measured."""
    allowed = methods_allowed(proof.config.switches)
    of_pass = [space.slot(choice.operator, p) for p in space.PHASES if space.PASS_OF_PHASE[p] == choice.pass_name]
    has_default = proof.case.backend in (*USERBUFFER_BACKENDS, async_tp.BACKEND)
    return [slot for slot in of_pass if allowed.get(slot) and (has_default or slot in proof.config.slots)]


def _same(one: Mapping[str, space.Setting], other: Mapping[str, space.Setting]) -> bool:
    return one.keys() == other.keys() and all(
        space.without_idle_knobs(one[slot]) == space.without_idle_knobs(other[slot]) for slot in one
    )
