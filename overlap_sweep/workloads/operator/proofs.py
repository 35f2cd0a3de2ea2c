"""What the tuner proved on the whole layer, for people: the answer in a line, and the table that it comes from."""

from __future__ import annotations

from pathlib import PurePosixPath

from rich.console import Console

from overlap_sweep.overlap.overlap_cfg import DEFAULT, NONE, TUNED
from overlap_sweep.report.console import print_lines
from overlap_sweep.report.numbers import as_duration, as_sentence, as_us
from overlap_sweep.report.terminal import print_listing
from overlap_sweep.workloads.layer import section as layers
from overlap_sweep.workloads.layer.result import attention_backend
from overlap_sweep.workloads.operator import async_tp
from overlap_sweep.workloads.operator.analysis import OperatorAnalysis
from overlap_sweep.workloads.operator.cases import CaseAnalysis
from overlap_sweep.workloads.operator.choice import sum_under_us
from overlap_sweep.workloads.operator.overlap_yaml import file_name
from overlap_sweep.workloads.operator.proof import Outcome, Proof, Together, advised, spoken
from overlap_sweep.workloads.operator.trials import NO_OVERLAP, Trial


def headline(outcome: Outcome, folder: str = "") -> str:
    """What to train with at this TP size, and where it is written, but for async TP, which is a switch; or that nothing
    was proven.

    `folder` is that of the case's files.
    """
    at = f"TP={outcome.tp_size}:"
    if verdict := async_tp.verdict(outcome):
        return f"{at} {verdict}"
    if not isinstance(outcome, Proof):
        return f"{at} {outcome.verdict.rstrip('.')}"
    path = path_of_file(folder, outcome.tp_size)
    return f"{at} {_answer(outcome)}{f'; {path} says so' if outcome.recommended == NONE else f': {path}'}"


def path_of_file(folder: str, tp_size: int) -> str:
    """Of the YAML, as seen from where all reports are."""
    return (PurePosixPath(folder) / file_name(tp_size)).as_posix()


def _answer(proof: Proof) -> str:
    backend = proof.case.backend
    if proof.recommended == TUNED:
        labels = [label for label in (NONE, DEFAULT, proof.best_other) if label in proof.against]
        said = [
            proof.against[label].in_words(f" than {spoken(label, backend)}", with_interval=label == labels[0])
            for label in dict.fromkeys(labels)
        ]
        return f"tuned, {', '.join(said)}"
    best, use, decisive = spoken(proof.best_other, backend), advised(proof.best_other, backend), proof.decisive
    if proof.tuned_is_none and proof.best_other == NONE:
        return f"no overlap that was found pays: {use}"
    how = f"no faster than {best} beyond the noise"
    if decisive.differs:
        how = f"tuned is {decisive.in_words(f' than {best}')}"
    if NONE in proof.against and proof.best_other != NONE and proof.layer.reference == NONE:
        use += f", {proof.trial.rows[proof.best_other].to_reference.in_words(' than none')}"
    return f"{how}: {use}"


def print_outcomes(case: CaseAnalysis, console: Console) -> None:
    """By TP size what was measured on the whole layer, what was tried before, and what to believe of it."""
    for outcome in case.outcomes.values():
        trial = outcome.trial
        if trial and trial.layer:
            console.print(f"Proof at TP={outcome.tp_size}, {_what(trial)}:")
            best = trial.rows[outcome.recommended] if isinstance(outcome, Proof) else None
            print_listing(layers.compared(trial.layer, best), console, "layers.csv")
            print_lines([layers.legend(trial.layer)], console, indent=0)
            said = [*trial.left_out.values(), *trial.layer.cautions, *trial.warnings]
            print_lines([as_sentence(outcome.verdict), *said], console)
        for together in outcome.together:
            _print_together(together, console)
        if isinstance(outcome, Proof) and outcome.tp_size in case.plans:
            print_lines([*_differences(outcome, case), *_presets_one_by_one(outcome, case)], console)
        if trial or outcome.together:
            console.print()
    print_lines([_another(outcome) for outcome in case.superseded], console)


def _what(trial: Trial) -> str:
    assert trial.point
    layer, attention = trial.point.config["layer"], attention_backend(trial.point.result)
    parts = [
        layer["kind"],
        *([f"{layer['num_replicas']} replicas"] if layer["num_replicas"] > 1 else []),
        *(["with optimizer"] if layer["training"] else []),
        *([f"attention {attention}"] if attention else []),
    ]
    return ", ".join(parts)


def _print_together(together: Together, console: Console) -> None:
    trial = together.trial
    if not trial.layer:
        print_lines([f"No combinations were tried together: {trial.why_not_ok}."], console)
        return
    print_lines([f"Tried together before, ratio to {trial.layer.reference}:"], console)
    for row in together.combinations:
        marks = [*(["taken"] if row.name == together.taken else []), *(["launch-bound"] if row.launch_bound else [])]
        interval = f"[{row.interval.low:.3f}, {row.interval.high:.3f}]"
        print_lines([f"{row.ratio:.3f} {interval}  {', '.join([row.name, *marks])}"], console, indent=4)
    print_lines(list(trial.left_out.values()), console, indent=4)


def _differences(proof: Proof, case: CaseAnalysis) -> list[str]:
    """Where what was proven is not what the operators say one by one."""
    planned, config = case.plans[proof.tp_size].config, proof.config
    if config == planned:
        return []
    backend = proof.case.backend
    if config == NO_OVERLAP and backend == async_tp.BACKEND:
        return []
    if config == NO_OVERLAP:
        return ["The file says so, whatever is best for the operators one by one."]
    slots = [slot for slot in (*planned.slots, *config.slots) if planned.slots.get(slot) != config.slots.get(slot)]
    # Their names are Megatron's.
    switches = [n for n, on in config.switches.items() if on != planned.switches[n] and backend != async_tp.BACKEND]
    if not slots and not switches:
        return []
    what = "what was taken together" if proof.recommended == TUNED else spoken(proof.recommended, backend)
    # Of async TP no file is the answer.
    begin = f"{as_sentence(what)} is" if backend == async_tp.BACKEND else f"The file holds {what},"
    different = ", ".join(dict.fromkeys([*slots, *switches]))
    return [f"{begin} not the best of the operators one by one; the two differ in {different}."]


def _presets_one_by_one(proof: Proof, case: CaseAnalysis) -> list[str]:
    """What the operators take under the presets, where each was measured so."""
    plan = case.plans[proof.tp_size]
    final_us = sum(final.time_us for final in plan.finals)
    sums_us = {label: sum_under_us(plan.choices, config.slots) for label, config in proof.trial.configs.items()}
    return [
        f"The operators one by one under {label}: {as_us(time_us)} us, {time_us / final_us:.2f}x what they take tuned."
        for label, time_us in sums_us.items()
        if time_us is not None and label not in (NONE, DEFAULT, TUNED)
    ]


def _another(outcome: Outcome) -> str:
    return f"TP={outcome.tp_size} again, in {outcome.directory.name}: {outcome.verdict}"


def print_tuners(analysis: OperatorAnalysis, console: Console) -> None:
    """How long each sweep of the tuner took, and what it left out."""
    tuners = analysis.records.tuners
    if not tuners:
        return
    console.print("\nTuning", style="bold")
    for directory, record in tuners.items():
        where = f"{directory.relative_to(analysis.reading.root).as_posix()}, " if len(tuners) > 1 else ""
        spent = [f"{as_duration(record.search_s)} for {_count(record.points, 'operator point')}"]
        if trials := len(record.together) + len(record.proofs):
            layers_s = max(0.0, record.wall_s - record.search_s)
            spent.append(f"{as_duration(layers_s)} for {_count(trials, 'whole layer')}")
        print_lines([f"{where}{as_duration(record.wall_s)}: {', '.join(spent)}"], console)
        dropped = [f"Dropped: {what}: {why}" for what, why in record.dropped.items()]
        print_lines(dropped, console, indent=4 if where else 2)
    print_lines([f"{headline(stray)}." for stray in analysis.strays], console)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
