"""Charts and tables for the answers of operators: hidden communication, times over num_sm and TP sizes, timelines, and
the tuner's proofs on whole layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from overlap_sweep.diagnosis import NEGLIGIBLE
from overlap_sweep.overlap.overlap_cfg import NONE, TUNED, named
from overlap_sweep.report import causes
from overlap_sweep.report.charts import Form
from overlap_sweep.report.iterations import Timeline
from overlap_sweep.report.numbers import PASS_WORDS, as_duration, as_sentence
from overlap_sweep.report.section import Exhibit, Sources
from overlap_sweep.results.records import without_operator
from overlap_sweep.workloads.layer import section as layers
from overlap_sweep.workloads.layer.result import attention_backend
from overlap_sweep.workloads.layer.section import layer_bars, layer_timeline
from overlap_sweep.workloads.operator import chart
from overlap_sweep.workloads.operator.advice import default_in_words
from overlap_sweep.workloads.operator.answer import CaseAnalysis
from overlap_sweep.workloads.operator.choice import PassChoice
from overlap_sweep.workloads.operator.proof import Outcome, Proof, Trial, Unproven


def exhibits(case: CaseAnalysis) -> list[Exhibit]:
    """Returns all exhibits of a case, in page order."""
    return [_hidden(case), *_proofs(case), _num_sm(case), *_scaling(case), _all_timelines(case), _causes(case)]


def _hidden(case: CaseAnalysis) -> Exhibit:
    return Exhibit(
        name="hidden",
        heading="How much communication is hidden",
        brief="Hidden",
        drawn="Share of the communication time that the chosen setting hides behind GEMMs: 0% is no overlap, 100% the "
        f"floor, and values above it are noise or drift. Below 0%, overlapping is slower. Orange mark: "
        f"{default_in_words(case)}; grey diamond: the fastest overlap, where none was chosen; arrow: less than "
        f"{chart.WORST:.0%}; whiskers: noise. dgrad and wgrad can only be timed together.",
        parts=lambda: [_drawn(f"tp{tp_size}", bars) for tp_size, bars in chart.hidden_bars(case).items()],
    )


def _num_sm(case: CaseAnalysis) -> Exhibit:
    return Exhibit(
        name="num_sm",
        heading="Time over num_sm",
        brief="num_sm",
        drawn="Median times with their noise, scaled by the no-overlap time of the same point. Settings within the "
        "noise of the fastest are ties, and the simplest wins.",
        parts=lambda: [
            _drawn(f"tp{tp_size}_{choice.operator}_{choice.pass_name}", lines, small=True)
            for tp_size in case.plans
            for choice, lines in chart.num_sm_lines(case, tp_size)
        ],
    )


def _scaling(case: CaseAnalysis) -> list[Exhibit]:
    results = case.scaling.results
    if not results:
        return []
    exhibit = Exhibit(
        heading="TP scaling",
        brief="TP scaling",
        explained="ideal time: time at TP=1 / TP, forward plus backward with the chosen settings; "
        f"efficient up to {1 + case.scaling.tolerance:.2f}x of it",
        notes=[f"{operator}: {result.reason}" for operator, result in results.items()],
    )
    return [exhibit]


def _all_timelines(case: CaseAnalysis) -> Exhibit:
    return Exhibit(
        name="timeline",
        heading="Timelines",
        brief="Timelines",
        drawn="A typical iteration of rank 0 under the profiler: it shows what runs at the same time. The profiler "
        "slows the iteration down, so take times from the tables.",
        parts=lambda: list(_timelines(case)),
    )


def _causes(case: CaseAnalysis) -> Exhibit:
    """Returns why communication is exposed in each operator, with no overlap and with the chosen setting."""
    return causes.exhibit_of_several(
        {
            f"TP={tp_size}, {operator}": _sides(case, [one for one in case.tried(tp_size) if one.operator == operator])
            for tp_size in case.plans
            for operator in dict.fromkeys(choice.operator for choice in case.tried(tp_size))
        }
    )


def _sides(case: CaseAnalysis, choices: Sequence[PassChoice]) -> dict[str, causes.Side]:
    """Returns the traces of an operator, each once: with no overlap, and with the setting of one pass or of both."""
    found: dict[tuple[Path, str], dict[str, causes.Side]] = defaultdict(dict)
    for choice in choices:
        for name, side in chart.traced(case, choice).items():
            of_both = name == chart.NO_OVERLAP
            title = name if of_both else f"{PASS_WORDS[choice.pass_name]} {name}"
            if side:
                shown = replace(side, pass_name="" if of_both else side.pass_name, least_share=NEGLIGIBLE)
                found[side.point.directory, side.variant][title] = shown
    return {
        "; ".join(titles): side if len(titles) == 1 else replace(side, pass_name="")
        for titles in found.values()
        for side in list(titles.values())[:1]
    }


def _drawn(name: str, form: Form, *, small: bool = False) -> Exhibit:
    return Exhibit(chart=lambda: form, name=name, small=small)


def _timelines(case: CaseAnalysis) -> Iterator[Exhibit]:
    """Yields the timelines of whole layers, then of each operator, and a note on operators without a trace."""
    for tp_size, proof in case.proofs.items():
        if shown := _layer_timeline(proof):
            yield _folded(f"TP={tp_size}, {proof.trial.part}", f"tp{tp_size}_layer", {"all": shown})
    without = []
    for tp_size in case.plans:
        found = chart.pass_timelines(case, tp_size)
        for operator in dict.fromkeys(choice.operator for choice in case.tried(tp_size)):
            by_pass = {choice.pass_name: shown for choice, shown in found if choice.operator == operator}
            if by_pass:
                yield _folded(f"TP={tp_size}, {operator}", f"tp{tp_size}_{operator}", by_pass)
            else:
                without.append(f"{operator} at TP={tp_size}")
    if without:
        how = "profile=all records one for every point, profile=best for the fastest"
        yield Exhibit(notes=[f"No trace of {', '.join(without)}; {how}."])


def _folded(title: str, name: str, timelines: dict[str, Timeline]) -> Exhibit:
    return Exhibit(
        name=name,
        folded=title,
        notes=list(dict.fromkeys(note for shown in timelines.values() for note in shown.notes)),
        parts=lambda: [_drawn(pass_name, shown.chart) for pass_name, shown in timelines.items()],
    )


def _layer_timeline(proof: Proof) -> Timeline | None:
    names, backend = proof.trial.names, proof.case.backend
    best = TUNED if proof.recommended == NONE else proof.recommended
    if not proof.trial.point or NONE not in names or best not in names:
        return None
    title = f"{as_sentence(proof.trial.part)}, TP={proof.tp_size}"
    return layer_timeline(title, proof.trial.point, ("no overlap", names[NONE]), (named(best, backend), names[best]))


def _proofs(case: CaseAnalysis) -> list[Exhibit]:
    """Returns the measurements of the whole layer by TP size, and the combinations tried before."""
    found = []
    for outcome in case.outcomes.values():
        if outcome.trial and outcome.trial.layer:
            found.append(_proof(outcome, outcome.trial))
        found += map(_together, outcome.together)
    return found


def _proof(outcome: Outcome, trial: Trial) -> Exhibit:
    assert trial.layer
    assert trial.point
    best = outcome.recommended if isinstance(outcome, Proof) else None
    attention = attention_backend(trial.point.result)
    layer = trial.point.recorded["layer"]["kind"] + (f", attention {attention}" if attention else "")
    return Exhibit(
        name=f"layer_tp{trial.tp_size}",
        heading=f"Proof at TP={trial.tp_size}, {layer}",
        brief=f"Proof at TP={trial.tp_size}",
        chart=partial(layer_bars, f"{as_sentence(trial.part)}, TP={trial.tp_size}", trial.layer, best),
        listing=layers.compared(trial.layer, trial.rows[best] if best else None),
        explained=layers.legend(trial.layer),
        notes=[*trial.layer.cautions, *trial.warnings],
    )


def _together(trial: Trial) -> Exhibit:
    heading = f"Combinations tried before the proof at TP={trial.tp_size}"
    if not trial.layer:
        return Exhibit(heading=heading, notes=[f"No combinations were measured: {trial.why_not_ok}."])
    listing = layers.compared(trial.layer, trial.layer.winner)
    return Exhibit(heading=heading, listing=listing, explained=layers.legend(trial.layer), notes=trial.warnings)


def tuning(sources: Sources, strays: Sequence[Unproven]) -> list[Exhibit]:
    """Returns how long each sweep of a tuner took, and what it dropped; empty if none ran."""
    tuners, notes = sources.records.tuners, []
    for directory, record in tuners.items():
        where = f"{directory.relative_to(sources.reading.root).as_posix()}, " if len(tuners) > 1 else ""
        notes.append(
            f"{where}{as_duration(record.wall_s)} in total, {as_duration(record.search_s)} of it for the search "
            f"({record.points} operator points)"
        )
        notes += [f"{where}dropped: {label}: {without_operator(label, why)}" for label, why in record.dropped.items()]
    notes += [f"TP={stray.tp_size}: {stray.verdict}" for stray in strays]
    return [Exhibit(heading="Tuning", notes=notes)] if notes else []
