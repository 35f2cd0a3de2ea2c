"""The answer first: for each TP size what to train with, how much faster it is, on what, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from overlap_sweep.analysis.choice import PassChoice, default_sum_us, labels
from overlap_sweep.analysis.frame import hidden_fraction
from overlap_sweep.analysis.proof import Outcome, Proof, spoken
from overlap_sweep.analysis.sweep import CaseAnalysis
from overlap_sweep.analysis.trials import NONE, TUNED
from overlap_sweep.report.numbers import as_ms, as_percent, as_sentence, as_us
from overlap_sweep.report.proofs import path_of_file


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
    best = scaling.optimal_tp_size
    return f"{'TP size undecided' if best is None else f'Use TP={best}'}. {scaling.reason}"


def _answer(case: CaseAnalysis, tp_size: int, folder: str) -> Answer:
    plan, outcome = case.plans.get(tp_size), case.outcomes.get(tp_size)
    tried = [choice for choice in plan.choices if choice.tried_slots] if plan else []
    has_file = tp_size in case.tp_sizes
    config = case.config(tp_size) if has_file else None
    said = _whole_layer(outcome) if outcome else []
    said += [_operators(tried, bool(outcome))] if tried else []
    return Answer(
        tp_size=tp_size,
        advised=case.scaling.optimal_tp_size == tp_size,
        headline=_headline(outcome, tried),
        said=said + (list(plan.overruled) if plan else []),
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
    if isinstance(outcome, Proof):
        if outcome.recommended == NONE:
            return "Don't overlap"
        compared = outcome.against.get(NONE) if outcome.recommended == TUNED else None
        if compared:
            return compared.in_words(" than no overlap", with_interval=False)
        return f"Use {spoken(outcome.recommended)}"
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


def _operators(tried: Sequence[PassChoice], one_by_one: bool) -> str:
    none_us, time_us, floor_us = _sums(tried)
    over, default_us = ", ".join(labels(tried)), default_sum_us(tried)
    begin = "Operators one by one: " if one_by_one else ""
    against_default = f", {default_us / time_us:.2f}x the library's default" if default_us else ""
    if not any(choice.chosen.settings for choice in tried):
        return f"{begin}{over}: nothing that was tried beats {as_us(none_us)} us without overlap{against_default}."
    hidden = as_percent(hidden_fraction(time_us, none_us, floor_us))
    ratio = f"{none_us / time_us:.2f}x no overlap" if one_by_one else "faster"
    return (
        f"{begin}{over}: {as_us(time_us)} us instead of {as_us(none_us)}"
        f"{f', {ratio}' if one_by_one else ''}{against_default}; GEMMs alone take {as_us(floor_us)} us, so {hidden} of "
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
    decisive, rounds = proof.decisive, proof.layer.rounds
    return [
        f"Proven on the whole layer in {rounds} rounds side by side: the {as_percent(decisive.interval.coverage)} "
        f"interval of tuned over {spoken(proof.best_other)} is {decisive.interval.low:.3f} to "
        f"{decisive.interval.high:.3f}."
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
