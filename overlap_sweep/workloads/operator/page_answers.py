"""The answer first: for each TP size what to train with, how much faster it is, on what, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import NONE, TUNED, OverlapConfig
from overlap_sweep.report.numbers import as_ms, as_percent, as_sentence, as_us
from overlap_sweep.results.estimate import CONFIDENCE, hidden_fraction
from overlap_sweep.workloads.operator import async_tp
from overlap_sweep.workloads.operator.cases import CaseAnalysis
from overlap_sweep.workloads.operator.choice import PassChoice, default_sum_us, labels
from overlap_sweep.workloads.operator.proof import Outcome, Proof, spoken
from overlap_sweep.workloads.operator.proofs import path_of_file
from overlap_sweep.workloads.operator.switches import Plan


@dataclass(frozen=True)
class Answer:
    """For one TP size."""

    tp_size: int
    advised: bool
    """Whether this is the TP size that scaling comes to."""
    headline: str
    """In a few words."""
    said: list[str]
    """What it is about, a sentence each."""
    sure: list[str]
    """How sure it is, a sentence each."""
    file: str | None
    """The YAML, as seen from the page."""
    slots: list[str]
    """The YAML's content, slot by slot."""
    switches: list[str]


def answers(case: CaseAnalysis, folder: str) -> list[Answer]:
    """One for each TP size from 2 on; `folder` is that of the case's files."""
    return [_answer(case, tp_size, folder) for tp_size in sorted({*case.plans, *case.outcomes})]


def scaling_sentence(case: CaseAnalysis) -> str:
    """Which TP size to use; empty where nothing was measured."""
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


def _answer(case: CaseAnalysis, tp_size: int, folder: str) -> Answer:
    plan, outcome = case.plans.get(tp_size), case.outcomes.get(tp_size)
    tried = [choice for choice in plan.choices if choice.tried_slots] if plan else []
    is_switch = case.case.backend == async_tp.BACKEND
    # Of async TP a file would say nothing: the library reads none.
    has_file = tp_size in case.tp_sizes and not is_switch
    config = case.config(tp_size) if has_file else None
    said = _whole_layer(outcome) if outcome else []
    said += async_tp.how_to(outcome) if outcome else []
    said += [_operators(tried, bool(outcome), case.case.backend)] if tried else []
    return Answer(
        tp_size=tp_size,
        advised=case.scaling.optimal_tp_size == tp_size,
        headline=_headline(outcome, tried),
        said=said + (_differences(plan, config, outcome) if plan and config else []),
        sure=[*(_proven(outcome) if isinstance(outcome, Proof) else []), *(_measured(tried) if tried else [])],
        file=path_of_file(folder, tp_size) if has_file else None,
        slots=[yaml.safe_dump({slot: setting}, sort_keys=False) for slot, setting in config.slots.items()]
        if config
        else [],
        switches=[f"{s.name}: {str(s.value).lower()}  ({s.reason})" for s in case.switches(tp_size)]
        if has_file
        else [],
    )


def _headline(outcome: Outcome | None, tried: Sequence[PassChoice]) -> str:
    if verdict := async_tp.verdict(outcome, with_interval=False):
        return as_sentence(verdict)
    if isinstance(outcome, Proof):
        if outcome.recommended == NONE:
            return "Don't overlap"
        compared = outcome.against.get(NONE) if outcome.recommended == TUNED else None
        if compared:
            return compared.in_words(" than no overlap", with_interval=False)
        return f"Use {spoken(outcome.recommended, outcome.case.backend)}"
    if not tried:
        return "Nothing tried"
    if not any(choice.chosen.settings for choice in tried):
        return "Don't overlap"
    none_us, time_us, _ = _sums(tried)
    return f"{none_us / time_us:.2f}x no overlap"


def _whole_layer(outcome: Outcome) -> list[str]:
    said = [as_sentence(outcome.verdict)]
    if isinstance(outcome, Proof) and NONE in outcome.trial.rows and outcome.recommended != NONE:
        rows = outcome.trial.rows
        said.append(
            f"The whole layer: {as_ms(rows[outcome.recommended].all_us)} ms instead of {as_ms(rows[NONE].all_us)}."
        )
    return said


def _differences(plan: Plan, config: OverlapConfig, outcome: Outcome | None) -> list[str]:
    """Where the file is not what is best of each operator alone, and why."""
    best = {slot: setting for choice in plan.choices for slot, setting in choice.chosen.settings.items()}
    slots = [slot for slot in space.SLOTS if best.get(slot) != config.slots.get(slot)]
    if not slots:
        return []
    begin = f"The file is not the best of each operator measured alone: it differs in {', '.join(slots)}, since "
    if config == plan.config:
        return [
            f"{begin}Megatron-Core's switches turn overlap on or off for several slots at once, and do not allow all "
            "of it.",
            *plan.overruled,
        ]
    if not isinstance(outcome, Proof):
        return [f"{begin}in the whole layer that could not be used."]
    if outcome.recommended != TUNED:
        return [f"{begin}in the whole layer that is no faster than {_plainly(outcome.recommended, outcome)}."]
    if outcome.together:
        return [
            f"{begin}several combinations ran side by side in the whole layer, where operators affect one another, "
            "and this is the one that was taken there."
        ]
    return [f"{begin}this is what ran in the whole layer."]


def _plainly(label: str, proof: Proof) -> str:
    return "no overlap" if label == NONE else spoken(label, proof.case.backend)


def _operators(tried: Sequence[PassChoice], one_by_one: bool, backend: str) -> str:
    none_us, time_us, floor_us = _sums(tried)
    over, default_us = ", ".join(labels(tried)), default_sum_us(tried)
    begin = "Operators one by one: " if one_by_one else ""
    default = "async TP" if backend == async_tp.BACKEND else "the library's default"
    against_default = f", {default_us / time_us:.2f}x {default}" if default_us else ""
    if not any(choice.chosen.settings for choice in tried):
        return f"{begin}{over}: nothing that was tried beats {as_us(none_us)} us without overlap{against_default}."
    hidden = as_percent(hidden_fraction(time_us, none_us, floor_us))
    # Without a proof the headline says it.
    ratio = f", {none_us / time_us:.2f}x no overlap" if one_by_one else ""
    return (
        f"{begin}{over}: {as_us(time_us)} us instead of {as_us(none_us)}"
        f"{ratio}{against_default}; GEMMs alone take {as_us(floor_us)} us, so {hidden} of "
        "the communication is hidden."
    )


def _sums(choices: Sequence[PassChoice]) -> tuple[float, float, float]:
    """Without overlap, with what was chosen, GEMMs alone; in microseconds."""
    return (
        sum(choice.none.time_us for choice in choices),
        sum(choice.chosen.time_us for choice in choices),
        sum(choice.floor_us for choice in choices),
    )


def _proven(proof: Proof) -> list[str]:
    said = []
    for label in dict.fromkeys([NONE, proof.best_other]):
        compared = proof.against.get(label)
        if compared:
            interval = compared.interval
            only = ", the fastest of the others," if label == proof.best_other and len(proof.against) > 1 else ""
            said.append(
                f"the time tuned over that of {_plainly(label, proof)}{only} is {compared.ratio:.3f} "
                f"({interval.low:.3f} to {interval.high:.3f})"
            )
    return [
        f"Proven on the whole layer in {proof.layer.rounds} rounds side by side, with {as_percent(CONFIDENCE)} "
        f"intervals: {'; '.join(said)}."
    ]


def _measured(tried: Sequence[PassChoice]) -> list[str]:
    none_us, time_us, _ = _sums(tried)
    noise_us = math.hypot(*(choice.chosen.estimate.noise_us for choice in tried))
    none_noise_us = math.hypot(*(choice.none.estimate.noise_us for choice in tried))
    ratio = none_us / time_us
    ratio_noise = ratio * math.hypot(noise_us / time_us, none_noise_us / none_us)
    repeats = sorted(choice.chosen.estimate.repeats for choice in tried)
    counted = f"{repeats[0]}" if repeats[0] == repeats[-1] else f"{repeats[0]} to {repeats[-1]}"
    overlaps = any(choice.chosen.settings for choice in tried)
    compared = f", of the ratio {ratio_noise:.3f}" if overlaps else ""
    return [
        f"Noise of the sum {as_us(noise_us)} us ({noise_us / time_us:.1%}){compared}; medians of {counted} repeats, "
        "the slowest rank of each. What the noise cannot tell apart is a tie, and the simplest wins."
    ]
