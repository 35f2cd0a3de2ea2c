"""The advice for a case in sentences: the configuration to train with at each TP size, its gain and confidence; the TP
size to use; and caveats.

Measurements with backend=symm_mem are for training with PyTorch's async TP, which is one switch for the whole model and
reads no file: the advice is to switch it on or to leave it off.
"""

import math
from functools import partial

import yaml

from overlap_sweep.overlap.models import WHOLE
from overlap_sweep.overlap.overlap_cfg import (
    ASYNC_TP_BACKEND,
    DEFAULT,
    NONE,
    NONE_IN_WORDS,
    TUNED,
    USERBUFFER_BACKENDS,
    megatron_arguments,
    set_in_training,
    spoken,
)
from overlap_sweep.report.numbers import as_percent, as_sentence, as_us
from overlap_sweep.report.section import Card
from overlap_sweep.results.estimate import CONFIDENCE, NOTABLE_DRIFT, hidden_fraction
from overlap_sweep.results.gain import gain_of_sum, gain_over, nothing_beat
from overlap_sweep.results.provenance import cpu_only, different_environments, recorded_warnings, slowed_gpus
from overlap_sweep.workloads.operator.answer import CaseAnalysis, baseline_drift
from overlap_sweep.workloads.operator.choice import PassChoice, default_sum_us, gain_together, labels
from overlap_sweep.workloads.operator.proof import Proof, advised

HOW_TO_ASYNC_TP = (
    "To switch async TP on in torchtitan: --compile.enable --compile.enable_async_tensor_parallel (before August 2026 "
    "--parallelism.enable_async_tensor_parallel).",
    "In plain torch, before torch.compile: set torch._inductor.config._micro_pipeline_tp = True and call "
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group(<name of the TP group>). torch 2.13 deprecates the "
    "latter, but without it nothing is fused; fused_all_gather_matmul in a trace shows that it works.",
)


def is_async_tp(case: CaseAnalysis) -> bool:
    return case.case.backend == ASYNC_TP_BACKEND


def file_name(tp_size: int) -> str:
    """Returns the name of the YAML file to train with."""
    return f"optimal_tp_comm_overlap_cfg_tp{tp_size}.yaml"


def path_of_file(folder: str, tp_size: int) -> str:
    """Returns the path of the YAML file, relative to the reports."""
    return f"{folder}/{file_name(tp_size)}" if folder else file_name(tp_size)


def cards(case: CaseAnalysis) -> dict[int, Card]:
    """Returns one card per TP size from 2 on."""
    return {tp_size: _card(case, tp_size) for tp_size in sorted({*case.plans, *case.outcomes})}


def _card(case: CaseAnalysis, tp_size: int) -> Card:
    outcome, passes = case.outcomes.get(tp_size), case.passes(tp_size)
    has_file = tp_size in case.tp_sizes and not is_async_tp(case)
    slots = case.config(tp_size).slots if has_file else {}
    off = has_file and not case.config(tp_size).switches["tp_comm_overlap"]
    said = []
    # The headline says that nothing won.
    if outcome and not (isinstance(outcome, Proof) and outcome.nothing_won):
        said.append(as_sentence(outcome.verdict))
    if isinstance(outcome, Proof):
        done, rounds = "Proven" if outcome.proven else "Measured", f"{outcome.layer.rounds} interleaved rounds"
        said.append(f"{done} on {outcome.trial.part}: {rounds}, {as_percent(CONFIDENCE)} confidence intervals.")
        said += filter(None, [outcome.slots_in_words])
    # Without an outcome the headline has their gain.
    in_sum = [operators_in_sum(case, tp_size, with_gain=bool(outcome))] if passes else []
    leave_out = "Leave --tp-comm-overlap out of Megatron-LM's command line."
    noise_us = math.hypot(*(final.estimate.noise_us for _, final in passes))
    ties = "Settings that differ by less than the noise are ties, and the simplest wins."
    return Card(
        title=f"TP={tp_size}",
        headline=_headline(case, tp_size),
        sentences=[*(said if outcome else in_sum), *([leave_out] if off else set_in_training(case.case.process_wide))],
        basis=[
            *(in_sum if outcome else []),
            *(_differences(case, tp_size) if has_file else []),
            *([f"Noise: {as_us(noise_us)} us. {ties}"] if passes else []),
            # The card of the smallest TP size with advice on async TP explains how to switch it on.
            *(HOW_TO_ASYNC_TP if tp_size == next(filter(partial(async_tp_advice, case), case.tp_sizes), None) else ()),
        ],
        advised="this TP size" if case.scaling.optimal_tp_size == tp_size else "",
        file=path_of_file(case.folder, tp_size) if has_file else "",
        to_set=[f"{s.name}: {str(s.value).lower()}  ({s.reason})" for s in case.switches(tp_size)] if has_file else [],
        code=[yaml.safe_dump({slot: setting}, sort_keys=False) for slot, setting in slots.items()],
        use=_use(case, tp_size),
        limits=transfer_warning(case) if case.case.backend not in USERBUFFER_BACKENDS else "",
    )


def _use(case: CaseAnalysis, tp_size: int) -> list[str]:
    """Returns the command line arguments for training, Megatron-LM's or (async TP) torchtitan's; empty if overlap stays
    off."""
    if is_async_tp(case):
        is_on = async_tp_advice(case, tp_size).startswith(as_sentence(advised(DEFAULT, ASYNC_TP_BACKEND)))
        return ["--compile.enable --compile.enable_async_tensor_parallel"] if is_on else []
    if tp_size not in case.tp_sizes:
        return []
    return megatron_arguments(case.config(tp_size), tp_size, file_name(tp_size))


def _headline(case: CaseAnalysis, tp_size: int) -> str:
    outcome, passes = case.outcomes.get(tp_size), case.passes(tp_size)
    if advice := async_tp_advice(case, tp_size):
        return advice
    if isinstance(outcome, Proof):
        if outcome.recommended == TUNED and NONE in outcome.against:
            part = outcome.trial.part
            in_part = "" if part == WHOLE else f" in {part}"
            return as_sentence(outcome.against[NONE].in_words(f"{NONE_IN_WORDS}{in_part}"))
        advice = advised(outcome.recommended, case.case.backend)
        return nothing_beat(NONE_IN_WORDS, advice) if outcome.recommended == NONE else as_sentence(advice)
    if outcome and outcome.advice:
        return as_sentence(outcome.advice)
    if not any(final.settings for _, final in passes):
        if any(choice.default_wins for choice, _ in passes):
            return f"Only {default_in_words(case)} beat {NONE_IN_WORDS}; try more settings"
        off = advised(NONE, case.case.backend)
        return nothing_beat(NONE_IN_WORDS, off) if passes else "No overlap was tried"
    gain = as_sentence(gain_together(passes).in_words(NONE_IN_WORDS))
    return f"{gain}, not proven" if outcome else gain


def _differences(case: CaseAnalysis, tp_size: int) -> list[str]:
    """Returns why the file differs from the best setting of each operator measured alone."""
    plan = case.plans.get(tp_size)
    if plan is None or case.config(tp_size) == plan.config:
        return plan.overruled if plan else []
    outcome = case.outcomes[tp_size]
    measured = outcome.trial.part if outcome.trial else WHOLE
    return [f"The file has the fastest configuration of {measured}, not the best setting of each operator."]


def operators_in_sum(case: CaseAnalysis, tp_size: int, *, with_gain: bool = True) -> str:
    """Returns the summed times of all passes for which an overlap was tried, and the share of communication hidden."""
    passes, choices = case.passes(tp_size), case.tried(tp_size)
    none_us, floor_us = sum(choice.none.time_us for choice in choices), sum(choice.floor_us for choice in choices)
    time_us, default_us = sum(final.time_us for _, final in passes), default_sum_us(choices)
    default = f", {default_in_words(case)} {as_us(default_us)}" if default_us else ""
    hidden = hidden_fraction(time_us, none_us, floor_us)
    share = "" if math.isnan(hidden) else f" {as_percent(hidden)} of the communication is hidden."
    names = labels(choices)
    subject = f"Sum of {', '.join(names)}, each measured alone" if len(names) > 1 else f"{names[0]}, measured alone"
    overlaps = with_gain and any(final.settings for _, final in passes)
    gain = f", {gain_together(passes).in_words(NONE_IN_WORDS)}" if overlaps else ""
    others = f"no overlap {as_us(none_us)}{default}, floor {as_us(floor_us)}"
    return f"{subject}: {as_us(time_us)} us{gain}; {others}.{share}"


def default_in_words(case: CaseAnalysis) -> str:
    return "async TP" if is_async_tp(case) else "the default"


def is_effective(choice: PassChoice, overlap_threshold: float) -> bool:
    ratio = choice.chosen.overlap_ratio
    return bool(choice.chosen.settings) and ratio is not None and ratio >= overlap_threshold


def recommendation(choice: PassChoice, case: CaseAnalysis, overlap_threshold: float) -> str:
    """Returns the recommendation for one pass, in one line."""
    chosen, at, compared = choice.chosen, f"TP={choice.tp_size} {choice.label}", ""
    if choice.default:
        gain = gain_over(choice.default, chosen.estimate, max(len(choice.candidates) - 1, 1))
        compared = f", {gain.in_words(spoken(DEFAULT, case.case.backend))}"
    if not chosen.settings:
        return f"{at}: keep overlap off ({as_us(chosen.time_us)} us{compared}); {choice.reason}"
    if chosen.overlap_ratio is not None:
        effective = "effective" if is_effective(choice, overlap_threshold) else "not effective"
        compared += f", overlap ratio {chosen.overlap_ratio:.2f} ({effective})"
    return f"{at}: use {chosen.name} ({as_us(chosen.time_us)} us, {choice.gain.in_words(NONE_IN_WORDS)}{compared})"


def sentences(case: CaseAnalysis) -> list[str]:
    """Returns the TP size to use and why, if anything was measured, and which layers the files apply to."""
    scaling = case.scaling
    advice = f"Use TP={scaling.optimal_tp_size}. " if scaling.optimal_tp_size else "TP size undecided: "
    return [*([f"{advice}{scaling.reason}"] if scaling.results else []), *case.applies_to]


def cautions(case: CaseAnalysis) -> list[str]:
    """Returns the caveats of the numbers, a sentence or two each; empty if there are none."""
    proofs = case.proofs.items()
    lines = [f"At TP={size}, {line[0].lower()}{line[1:]}" for size, proof in proofs for line in proof.cautions]
    if case.plans and case.case.backend not in USERBUFFER_BACKENDS:
        lines.append(transfer_warning(case))
    choices = [choice for tp_size in case.plans for choice in case.tried(tp_size)]
    if beaten := [f"TP={choice.tp_size} {choice.label}" for choice in choices if choice.default_wins]:
        default = as_sentence(default_in_words(case))
        lines.append(f"{default} is faster than every setting tried for {', '.join(beaten)}; try more settings there.")
    if case.launch_bound:
        lines.append(f"Launch-bound points are left out of the choice: {', '.join(case.launch_bound)}.")
    baseline, change = max(baseline_drift(case.points).items(), key=lambda item: abs(item[1]), default=("", 0.0))
    if abs(change) >= NOTABLE_DRIFT:
        lines.append(
            f"The no-overlap time drifted by up to {change:+.0%} ({baseline}). Each setting is compared with the "
            "no-overlap time of its own point, so the drift cancels."
        )
    points = case.points
    return [*lines, *slowed_gpus(points), *recorded_warnings(points), *different_environments(points)]


def transfer_warning(case: CaseAnalysis) -> str:
    """Returns the caveat of measurements without userbuffers for training with Megatron-LM."""
    userbuffers = (
        f"Measured with backend={case.case.backend}, not with Transformer Engine's userbuffers: times in Megatron-LM "
        "will differ. For Megatron-LM, measure with backend=transformer_engine."
    )
    return " ".join(filter(None, [cpu_only(case.points), userbuffers]))


def async_tp_advice(case: CaseAnalysis, tp_size: int) -> str:
    """Returns whether to switch async TP on at this TP size: by the whole layer, else by the operators; empty if
    neither was measured, or for other backends."""
    if not is_async_tp(case):
        return ""
    outcome = case.outcomes.get(tp_size)
    trial = outcome.trial if outcome else None
    row = trial.rows.get(DEFAULT) if trial else None
    choices = [choice for choice in case.tried(tp_size) if choice.default]
    if trial and row and row.reference == NONE and not row.launch_bound:
        gain = row.gain
        advice = advised(DEFAULT if gain.faster else NONE, ASYNC_TP_BACKEND)
        why = f"{trial.part} is {gain.in_words(NONE_IN_WORDS)}"
    elif default_us := default_sum_us(choices):
        parts = ((gain_over(one.none.estimate, one.default), one.none.time_us) for one in choices if one.default)
        gain = gain_of_sum(parts)
        advice = "prove async TP on the whole layer" if gain.faster else advised(NONE, ASYNC_TP_BACKEND)
        why = f"it takes {as_us(default_us)} us for {', '.join(labels(choices))}, {gain.in_words(NONE_IN_WORDS)}"
    else:
        return ""
    return f"{as_sentence(advice)}: {why}. Async TP is one switch for the whole model."
