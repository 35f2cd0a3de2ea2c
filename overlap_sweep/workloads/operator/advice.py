"""What is said of a case in sentences: for each TP size what to train with, how much faster it is, on what, and how
sure that is; which TP size to use; and what to know before believing it.

Measurements with backend=symm_mem speak to those who train with PyTorch's async TP, which is a switch for the whole
model and reads no file: switch it on, or not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import yaml

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import ASYNC_TP_BACKEND, DEFAULT, NONE, TUNED, OverlapConfig
from overlap_sweep.report.numbers import as_ms, as_percent, as_sentence, as_us
from overlap_sweep.report.section import Card
from overlap_sweep.results.estimate import CONFIDENCE, NOTABLE_DRIFT, hidden_fraction
from overlap_sweep.results.provenance import environments, slowed_gpus
from overlap_sweep.workloads.operator.answer import CaseAnalysis
from overlap_sweep.workloads.operator.choice import PassChoice, default_sum_us, labels
from overlap_sweep.workloads.operator.proof import Outcome, Proof, advised, spoken

USERBUFFER_BACKENDS = ("transformer_engine", "megatron")

ALL_OR_NOTHING = (
    "Async TP is one switch for the whole model: what decides is all of it against none, not the best of each slot"
)
HOW_TO_ASYNC_TP = (
    "To switch async TP on in torchtitan: --compile.enable --compile.enable_async_tensor_parallel (before August 2026 "
    "--parallelism.enable_async_tensor_parallel).",
    "In plain torch, before torch.compile: torch._inductor.config._micro_pipeline_tp = True and "
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group(name of the TP group), which torch 2.13 calls "
    "deprecated and unnecessary, but without which the compile pass fuses nothing and says nothing; a trace shows "
    "fused_all_gather_matmul where it does.",
)
"""A sentence each."""


def is_async_tp(case: CaseAnalysis) -> bool:
    return case.case.backend == ASYNC_TP_BACKEND


def file_name(tp_size: int) -> str:
    """Returns the name of the YAML to train with."""
    return f"optimal_tp_comm_overlap_cfg_tp{tp_size}.yaml"


def path_of_file(folder: str, tp_size: int) -> str:
    """Returns where the YAML is, as seen from where all reports are."""
    return f"{folder}/{file_name(tp_size)}" if folder else file_name(tp_size)


def cards(case: CaseAnalysis) -> list[Card]:
    """Returns one for each TP size from 2 on."""
    return [_card(case, tp_size) for tp_size in sorted({*case.plans, *case.outcomes})]


def _card(case: CaseAnalysis, tp_size: int) -> Card:
    outcome, tried = case.outcomes.get(tp_size), case.tried(tp_size)
    has_file = tp_size in case.tp_sizes and not is_async_tp(case)
    config = case.config(tp_size) if has_file else None
    sentences = _whole_layer(outcome) if outcome else []
    sentences += [_operators(tried, case, one_by_one=bool(outcome))] if tried else []
    return Card(
        title=f"TP={tp_size}",
        headline=_headline(outcome, tried),
        sentences=sentences + (_differences(case, tp_size, config) if config else []),
        confidence=[
            *([_proven(outcome)] if isinstance(outcome, Proof) else []),
            *([_measured(tried)] if tried else []),
        ],
        advised="this TP size" if case.scaling.optimal_tp_size == tp_size else "",
        file=path_of_file(case.folder, tp_size) if has_file else "",
        to_set=[f"{s.name}: {str(s.value).lower()}  ({s.reason})" for s in case.switches(tp_size)] if has_file else [],
        code=[yaml.safe_dump({slot: s}, sort_keys=False) for slot, s in config.slots.items()] if config else [],
    )


def _headline(outcome: Outcome | None, tried: Sequence[PassChoice]) -> str:
    if outcome and (verdict := async_tp_verdict(outcome, with_interval=False)):
        return as_sentence(verdict)
    if isinstance(outcome, Proof):
        if outcome.recommended == NONE:
            return "Don't overlap"
        compared = outcome.against.get(NONE) if outcome.recommended == TUNED else None
        if compared:
            return compared.in_words(" than no overlap", with_interval=False)
        return f"Use {spoken(outcome.recommended, outcome.case.backend)}"
    if outcome and outcome.advice:
        return as_sentence(outcome.advice)
    if not tried:
        return "Nothing tried"
    if not any(choice.chosen.settings for choice in tried):
        return "Don't overlap"
    none_us, time_us, _ = _sums(tried)
    return f"{none_us / time_us:.2f}x no overlap{', not proven' if outcome else ''}"


def _whole_layer(outcome: Outcome) -> list[str]:
    sentences = [as_sentence(outcome.verdict)]
    if isinstance(outcome, Proof) and NONE in outcome.trial.rows and outcome.recommended != NONE:
        best, none = (outcome.trial.rows[label] for label in (outcome.recommended, NONE))
        best_us, none_us = (row.measured.times["all"].median_us for row in (best, none))
        sentences.append(f"The whole layer: {as_ms(best_us)} ms instead of {as_ms(none_us)}.")
    return sentences


def _operators(tried: Sequence[PassChoice], case: CaseAnalysis, *, one_by_one: bool) -> str:
    none_us, time_us, floor_us = _sums(tried)
    over, default_us = ", ".join(labels(tried)), default_sum_us(tried)
    begin = "Operators one by one: " if one_by_one else ""
    against_default = f", {default_us / time_us:.2f}x {default_in_words(case)}" if default_us else ""
    if not any(choice.chosen.settings for choice in tried):
        return f"{begin}{over}: nothing that was tried beats {as_us(none_us)} us without overlap{against_default}."
    hidden = as_percent(hidden_fraction(time_us, none_us, floor_us))
    # Without a proof the headline says it.
    ratio = f", {none_us / time_us:.2f}x no overlap" if one_by_one else ""
    return (
        f"{begin}{over}: {as_us(time_us)} us instead of {as_us(none_us)}{ratio}{against_default}; GEMMs alone take "
        f"{as_us(floor_us)} us, so {hidden} of the communication is hidden."
    )


def default_in_words(case: CaseAnalysis) -> str:
    return "async TP" if is_async_tp(case) else "the library's default"


def _sums(choices: Sequence[PassChoice]) -> tuple[float, float, float]:
    """Returns microseconds without overlap, with what was chosen, and of the GEMMs alone."""
    return (
        sum(choice.none.time_us for choice in choices),
        sum(choice.chosen.time_us for choice in choices),
        sum(choice.floor_us for choice in choices),
    )


def _differences(case: CaseAnalysis, tp_size: int, config: OverlapConfig) -> list[str]:
    """Returns where the file is not what is best of each operator alone, and why."""
    plan, outcome = case.plans.get(tp_size), case.outcomes.get(tp_size)
    if plan is None:
        return []
    best = {slot: setting for choice in plan.choices for slot, setting in choice.chosen.settings.items()}
    different = [slot for slot in space.SLOTS if best.get(slot) != config.slots.get(slot)]
    if config.switches["tp_comm_overlap"]:
        different += [name for name, on in config.switches.items() if on != plan.config.switches[name]]
    if not different:
        return []
    begin = f"The file is not the best of each operator measured alone: it differs in {', '.join(different)}, since "
    if config == plan.config:
        final_us, (none_us, _, _) = sum(final.time_us for final in plan.finals), _sums(plan.choices)
        return [
            f"{begin}Megatron-Core's switches turn overlap on or off for several slots at once, and do not allow all "
            f"of it: {none_us / final_us:.2f}x no overlap is left.",
            *plan.overruled,
        ]
    if not isinstance(outcome, Proof):
        return [f"{begin}in the whole layer that could not be used."]
    if outcome.recommended != TUNED:
        return [f"{begin}in the whole layer that is no faster than {spoken(outcome.recommended, case.case.backend)}."]
    return [f"{begin}that is what ran in the whole layer, where operators affect one another."]


def _proven(proof: Proof) -> str:
    rounds = f"{proof.layer.rounds} rounds side by side"
    return f"Proven on the whole layer in {rounds}, with {as_percent(CONFIDENCE)} intervals."


def _measured(tried: Sequence[PassChoice]) -> str:
    none_us, time_us, _ = _sums(tried)
    noise_us = math.hypot(*(choice.chosen.estimate.noise_us for choice in tried))
    none_noise_us = math.hypot(*(choice.none.estimate.noise_us for choice in tried))
    ratio_noise = none_us / time_us * math.hypot(noise_us / time_us, none_noise_us / none_us)
    repeats = sorted(choice.chosen.estimate.repeats for choice in tried)
    counted = f"{repeats[0]}" if repeats[0] == repeats[-1] else f"{repeats[0]} to {repeats[-1]}"
    overlaps = any(choice.chosen.settings for choice in tried)
    compared = f", of the ratio {ratio_noise:.3f}" if overlaps else ""
    return (
        f"Noise of the sum {as_us(noise_us)} us ({noise_us / time_us:.1%}){compared}; medians of {counted} repeats, "
        "the slowest rank of each. What the noise cannot tell apart is a tie, and the simplest wins."
    )


def is_effective(choice: PassChoice, overlap_threshold: float) -> bool:
    ratio = choice.chosen.overlap_ratio
    return bool(choice.chosen.settings) and ratio is not None and ratio >= overlap_threshold


def recommendation(choice: PassChoice, case: CaseAnalysis, overlap_threshold: float) -> str:
    """Returns what to do about one pass, in a sentence."""
    chosen, at = choice.chosen, f"TP={choice.tp_size} {choice.label}"
    default = ""
    if choice.default:
        default = f", {choice.default.time_us / chosen.time_us:.2f}x {spoken(DEFAULT, case.case.backend)}"
    if not chosen.settings:
        sentence = f"{at}: don't overlap{default}; {choice.reason}"
    else:
        sentence = f"{at}: {chosen.name}, {choice.speedup:.2f}x no overlap{default}"
        if chosen.overlap_ratio is not None:
            effective = "effective" if is_effective(choice, overlap_threshold) else "not effective"
            sentence += f", overlap ratio {chosen.overlap_ratio:.2f} ({effective})"
        if not chosen.measured:
            sentence += "; predicted from its slots alone, measure them together before you rely on it"
    if is_async_tp(case) and choice.default:
        gain = default_speedup(choice)
        sentence += f"; async TP, for the whole model or not at all, is {gain:.2f}x no overlap here"
    return sentence


def scaling_sentence(case: CaseAnalysis) -> str:
    """Returns which TP size to use; empty where nothing was measured."""
    scaling = case.scaling
    if not scaling.results:
        return ""
    tp_sizes = {tp_size for operator in scaling.results.values() for tp_size in operator.e2e_times}
    complete = {name: one.e2e_times for name, one in scaling.results.items() if set(one.e2e_times) == tp_sizes}
    if not complete:
        return "TP size undecided: no operator was measured at every TP size."
    best = scaling.optimal_tp_size
    if best is None:
        return "TP size undecided: TP=1 was not measured, so there is nothing to scale from."
    one_us, best_us = (sum(times[tp_size] for times in complete.values()) for tp_size in (1, best))
    over = f"sum over {', '.join(complete)}; TP=1 takes {as_us(one_us)} us"
    if best == 1:
        return f"Use TP=1: no larger TP size that was measured scales efficiently ({over})."
    return (
        f"Use TP={best}: of the TP sizes that were measured it is the largest that scales efficiently ({over}, "
        f"TP={best} takes {as_us(best_us)}, which is {best_us * best / one_us:.2f} times the ideal)."
    )


def cautions(case: CaseAnalysis) -> list[str]:
    """Returns what to know before believing the numbers, a sentence each; none where all is well."""
    lines = []
    if case.plans and case.case.backend not in USERBUFFER_BACKENDS:
        lines.append(transfer_warning(case))
    if is_async_tp(case):
        of_sizes = [sentence for tp_size in case.tp_sizes for sentence in async_tp_advice(case, tp_size)]
        lines += [*of_sizes, *HOW_TO_ASYNC_TP] if of_sizes else []
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
    lines += slowed_gpus(case.points)
    lines += dict.fromkeys(warning for point in case.points if point.result for warning in point.result.warnings)
    if len(environments(case.points)) > 1:
        lines.append("The points were measured in different environments; see tuning_report.json.")
    return lines


def transfer_warning(case: CaseAnalysis) -> str:
    """Returns what measurements without userbuffers say to those who train with Megatron-LM."""
    backend = case.case.backend
    if is_async_tp(case):
        return (
            f"Measured with backend={backend}, the operators of PyTorch's async TP: nothing that Megatron-LM could be "
            "set to."
        )
    return (
        f"Measured with backend={backend}, not with Transformer Engine's userbuffers: a hint where to look, "
        "not a measurement of what Megatron-LM will do."
    )


def _default_wins(default_us: float, case: CaseAnalysis) -> str:
    if is_async_tp(case):
        # There are no more settings to sweep.
        return f"async TP as a whole, {as_us(default_us)} us, was faster than the same operators set one by one"
    return f"the default, {as_us(default_us)} us, is faster than anything tried; sweep more settings"


def async_tp_verdict(outcome: Outcome, *, with_interval: bool = True) -> str:
    """Returns `switch async TP on, 9.4% faster than none`, where a tuner ran both on the whole layer; else nothing."""
    trial = outcome.trial
    row = trial.rows.get(DEFAULT) if trial else None
    if not trial or not trial.point or trial.point.config["backend"] != ASYNC_TP_BACKEND:
        return ""
    if row is None or row.launch_bound or row.reference != NONE:
        return ""
    label = DEFAULT if row.to_reference.faster else NONE
    compared = row.to_reference.in_words(" than none", with_interval=with_interval)
    return f"{advised(label, ASYNC_TP_BACKEND)}, {'' if label == DEFAULT else 'it is '}{compared}"


def async_tp_advice(case: CaseAnalysis, tp_size: int) -> list[str]:
    """Returns whether to switch async TP on at this TP size, and what each operator has of it; nothing where it was not
    measured."""
    choices = [choice for choice in case.plans[tp_size].choices if choice.default] if tp_size in case.plans else []
    outcome, lines = case.outcomes.get(tp_size), []
    if outcome and (verdict := async_tp_verdict(outcome)):
        lines.append(f"TP={tp_size}: {ALL_OR_NOTHING}. The whole layer says: {verdict}.")
    elif choices:
        lines.append(f"TP={tp_size}: {ALL_OR_NOTHING}. {_judged_by_operators(choices)}")
    if choices:
        speedups = ", ".join(f"{choice.label} {default_speedup(choice):.2f}x" for choice in choices)
        lines.append(f"TP={tp_size}: async TP against no overlap, operator by operator: {speedups}.")
    return lines


def _judged_by_operators(choices: list[PassChoice]) -> str:
    default_us, none_us = default_sum_us(choices), sum(choice.none.time_us for choice in choices)
    assert default_us is not None
    sums = f"Over {', '.join(labels(choices))} it takes {as_us(default_us)} us, without overlap {as_us(none_us)}"
    if default_us < none_us:
        return f"{sums}: prove it on the whole layer, which the tuner does, before you switch it on."
    return f"{sums}: leave it off."


def default_speedup(choice: PassChoice) -> float:
    """Returns the library's default over no overlap, where it was measured."""
    assert choice.default
    return choice.none.time_us / choice.default.time_us
