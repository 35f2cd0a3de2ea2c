"""The advice on a case in sentences: for each TP size what to train with, how much faster it is, on what, and how sure
that is; which TP size to use; and what to know before believing it.

Measurements with backend=symm_mem speak to those who train with PyTorch's async TP, which is a switch for the whole
model and reads no file: switch it on, or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import yaml

from overlap_sweep.overlap.overlap_cfg import ASYNC_TP_BACKEND, DEFAULT, NONE, TUNED, megatron_arguments
from overlap_sweep.report.numbers import as_percent, as_sentence, as_us
from overlap_sweep.report.section import Card
from overlap_sweep.results.estimate import CONFIDENCE, NOTABLE_DRIFT, hidden_fraction
from overlap_sweep.results.provenance import environments, slowed_gpus
from overlap_sweep.workloads.operator.answer import CaseAnalysis, baseline_drift
from overlap_sweep.workloads.operator.choice import Candidate, PassChoice, default_sum_us, labels
from overlap_sweep.workloads.operator.proof import Proof, advised, spoken

USERBUFFER_BACKENDS = ("transformer_engine", "megatron")

HOW_TO_ASYNC_TP = (
    "To switch async TP on in torchtitan: --compile.enable --compile.enable_async_tensor_parallel (before August 2026 "
    "--parallelism.enable_async_tensor_parallel).",
    "In plain torch, before torch.compile: torch._inductor.config._micro_pipeline_tp = True and "
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group(name of the TP group), which torch 2.13 calls "
    "deprecated and unnecessary, but without which the compile pass fuses nothing and says nothing; a trace shows "
    "fused_all_gather_matmul where it does.",
)
"""A sentence each."""


LEAVE_OUT = "Leave --tp-comm-overlap out of Megatron-LM's command line."
ASYNC_TP_ARGUMENTS = "--compile.enable --compile.enable_async_tensor_parallel"
"""What torchtitan takes."""
_SWITCH_ON = as_sentence(advised(DEFAULT, ASYNC_TP_BACKEND))


def is_async_tp(case: CaseAnalysis) -> bool:
    return case.case.backend == ASYNC_TP_BACKEND


def file_name(tp_size: int) -> str:
    """Returns the name of the YAML to train with."""
    return f"optimal_tp_comm_overlap_cfg_tp{tp_size}.yaml"


def path_of_file(folder: str, tp_size: int) -> str:
    """Returns the path of the YAML, relative to the reports."""
    return f"{folder}/{file_name(tp_size)}" if folder else file_name(tp_size)


def cards(case: CaseAnalysis) -> dict[int, Card]:
    """Returns a card for each TP size from 2 on."""
    return {tp_size: _card(case, tp_size) for tp_size in sorted({*case.plans, *case.outcomes})}


def _card(case: CaseAnalysis, tp_size: int) -> Card:
    outcome, passes = case.outcomes.get(tp_size), case.passes(tp_size)
    has_file = tp_size in case.tp_sizes and not is_async_tp(case)
    file = path_of_file(case.folder, tp_size) if has_file else ""
    slots = case.config(tp_size).slots if has_file else {}
    off = has_file and not case.config(tp_size).switches["tp_comm_overlap"]
    proven = [_proven(outcome)] if isinstance(outcome, Proof) else []
    in_sum = [operators_in_sum(case, tp_size)] if passes else []
    return Card(
        title=f"TP={tp_size}",
        headline=_headline(case, tp_size),
        sentences=[*([as_sentence(outcome.verdict), *proven] if outcome else in_sum), *([LEAVE_OUT] if off else [])],
        basis=[
            *(in_sum if outcome else []),
            *(_differences(case, tp_size) if has_file else []),
            *([_noise(passes)] if passes else []),
            *(HOW_TO_ASYNC_TP if tp_size == _first_with_async_tp(case) else ()),
        ],
        advised="this TP size" if case.scaling.optimal_tp_size == tp_size else "",
        file=file,
        to_set=[f"{s.name}: {str(s.value).lower()}  ({s.reason})" for s in case.switches(tp_size)] if has_file else [],
        code=[yaml.safe_dump({slot: setting}, sort_keys=False) for slot, setting in slots.items()],
        use=_use(case, tp_size),
    )


def _use(case: CaseAnalysis, tp_size: int) -> list[str]:
    """Returns what the command line of training takes, Megatron-LM's, or of async TP torchtitan's; empty where nothing
    is to be switched on."""
    if is_async_tp(case):
        return [ASYNC_TP_ARGUMENTS] if async_tp_advice(case, tp_size).startswith(_SWITCH_ON) else []
    if tp_size not in case.tp_sizes:
        return []
    return megatron_arguments(case.config(tp_size), tp_size, file_name(tp_size))


def _first_with_async_tp(case: CaseAnalysis) -> int | None:
    """Returns the first TP size that async TP is advised on, where it is said how to switch it on."""
    return next((size for size in case.tp_sizes if is_async_tp(case) and async_tp_advice(case, size)), None)


def _headline(case: CaseAnalysis, tp_size: int) -> str:
    outcome, passes = case.outcomes.get(tp_size), case.passes(tp_size)
    if is_async_tp(case) and (advice := async_tp_advice(case, tp_size)):
        return advice
    if isinstance(outcome, Proof):
        if outcome.recommended == TUNED and NONE in outcome.against:
            return outcome.against[NONE].in_words(" than no overlap")
        return as_sentence(advised(outcome.recommended, case.case.backend))
    if outcome and outcome.advice:
        return as_sentence(outcome.advice)
    if not any(final.settings for _, final in passes):
        return "Don't overlap" if passes else "Nothing tried"
    none_us, time_us = (sum(one.time_us for one in ones) for ones in ([c.none for c, _ in passes], finals(passes)))
    speedup, noise = none_us / time_us, none_us / time_us**2 * noise_us(passes)
    interval = f" ({max(0.0, speedup - noise):.3f} to {speedup + noise:.3f})"
    return f"{speedup:.3f}x no overlap{interval}{', not proven' if outcome else ''}"


def _differences(case: CaseAnalysis, tp_size: int) -> list[str]:
    """Returns why the file differs from the best of each operator measured alone."""
    plan = case.plans.get(tp_size)
    if plan is None or case.config(tp_size) == plan.config:
        return plan.overruled if plan else []
    return ["The file is what the whole layer decided for, not the best of each operator measured alone."]


def finals(passes: Sequence[tuple[PassChoice, Candidate]]) -> list[Candidate]:
    """Returns the candidate that the switches leave of each choice."""
    return [final for _, final in passes]


def operators_in_sum(case: CaseAnalysis, tp_size: int) -> str:
    """Returns the gain of the settings over all passes for which an overlap was tried."""
    passes = case.passes(tp_size)
    choices = [choice for choice, _ in passes]
    none_us, floor_us = sum(choice.none.time_us for choice in choices), sum(choice.floor_us for choice in choices)
    time_us, default_us = sum(final.time_us for final in finals(passes)), default_sum_us(choices)
    default = f", under {default_in_words(case)} {as_us(default_us)}" if default_us else ""
    return (
        f"Operators one by one, {', '.join(labels(choices))}: {as_us(time_us)} us, without overlap {as_us(none_us)}"
        f"{default}, GEMMs alone {as_us(floor_us)}: {as_percent(hidden_fraction(time_us, none_us, floor_us))} of the "
        "communication is hidden."
    )


def default_in_words(case: CaseAnalysis) -> str:
    return "async TP" if is_async_tp(case) else "the library's default"


def _proven(proof: Proof) -> str:
    rounds = f"{proof.layer.rounds} rounds side by side"
    return f"Proven on the whole layer in {rounds}, with {as_percent(CONFIDENCE)} intervals."


def noise_us(passes: Sequence[tuple[PassChoice, Candidate]]) -> float:
    """Returns the noise of the sum of the times of what the switches leave of each choice."""
    return math.hypot(*(final.estimate.noise_us for final in finals(passes)))


def _noise(passes: Sequence[tuple[PassChoice, Candidate]]) -> str:
    return (
        f"Noise of the operators' sum {as_us(noise_us(passes))} us. What the noise cannot tell apart is a tie, and the "
        "simplest wins."
    )


def is_effective(choice: PassChoice, overlap_threshold: float) -> bool:
    ratio = choice.chosen.overlap_ratio
    return bool(choice.chosen.settings) and ratio is not None and ratio >= overlap_threshold


def recommendation(choice: PassChoice, case: CaseAnalysis, overlap_threshold: float) -> str:
    """Returns what to do about one pass, in a sentence."""
    chosen, at, compared = choice.chosen, f"TP={choice.tp_size} {choice.label}", ""
    if choice.default:
        compared = f", {choice.default.time_us / chosen.time_us:.2f}x {spoken(DEFAULT, case.case.backend)}"
    if not chosen.settings:
        return f"{at}: don't overlap{compared}; {choice.reason}"
    if chosen.overlap_ratio is not None:
        effective = "effective" if is_effective(choice, overlap_threshold) else "not effective"
        compared += f", overlap ratio {chosen.overlap_ratio:.2f} ({effective})"
    return f"{at}: {chosen.name}, {choice.speedup:.2f}x no overlap{compared}"


def scaling_sentence(case: CaseAnalysis) -> str:
    """Returns which TP size to use; empty if nothing was measured."""
    scaling = case.scaling
    advice = f"Use TP={scaling.optimal_tp_size}" if scaling.optimal_tp_size else "TP size undecided"
    return f"{advice}. {scaling.reason}" if scaling.results else ""


def cautions(case: CaseAnalysis) -> list[str]:
    """Returns what to know before believing the numbers, a sentence each; empty if all is well."""
    lines = []
    if case.plans and case.case.backend not in USERBUFFER_BACKENDS:
        lines.append(transfer_warning(case))
    choices = [choice for tp_size in case.plans for choice in case.tried(tp_size)]
    if beaten := [f"TP={choice.tp_size} {choice.label}" for choice in choices if choice.default_wins]:
        lines.append(f"Faster than anything tried is {default_in_words(case)} of {', '.join(beaten)}.")
    if case.launch_bound:
        lines.append(f"Launch-bound, left out of the choice: {', '.join(case.launch_bound)}.")
    what, change = max(baseline_drift(case.points).items(), key=lambda item: abs(item[1]), default=("", 0.0))
    if abs(change) >= NOTABLE_DRIFT:
        lines.append(
            f"Baselines drifted: times without overlap by up to {change:+.0%} ({what}); settings are compared by what "
            "was measured beside them."
        )
    lines += slowed_gpus(case.points)
    lines += dict.fromkeys(warning for point in case.points if point.result for warning in point.result.warnings)
    if len(environments(case.points)) > 1:
        lines.append("The points were measured in different environments; see tuning_report.json.")
    return lines


def transfer_warning(case: CaseAnalysis) -> str:
    """Returns how far measurements without userbuffers apply to those who train with Megatron-LM."""
    return (
        f"Measured with backend={case.case.backend}, not with Transformer Engine's userbuffers: a hint where to look, "
        "not a measurement of what Megatron-LM will do."
    )


def async_tp_advice(case: CaseAnalysis, tp_size: int) -> str:
    """Returns whether to switch async TP on at this TP size, by the whole layer, or if none was measured by the
    operators; empty if neither was."""
    outcome = case.outcomes.get(tp_size)
    trial = outcome.trial if outcome else None
    row = trial.rows.get(DEFAULT) if trial else None
    choices = [choice for choice in case.tried(tp_size) if choice.default]
    if row and row.reference == NONE and not row.launch_bound:
        advice = advised(DEFAULT if row.to_reference.faster else NONE, ASYNC_TP_BACKEND)
        why = f"the whole layer is {row.to_reference.in_words(' than none')}"
    elif default_us := default_sum_us(choices):
        none_us = sum(choice.none.time_us for choice in choices)
        advice = "prove async TP on the whole layer" if default_us < none_us else advised(NONE, ASYNC_TP_BACKEND)
        why = f"{', '.join(labels(choices))} take {as_us(default_us)} us, without overlap {as_us(none_us)}"
    else:
        return ""
    return f"{as_sentence(advice)}: {why}. Async TP is one switch for the whole model."
