"""Charts and tables for the answers of operators: hidden communication, times over num_sm and TP sizes, timelines, and
the tuner's proofs on whole layers."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from overlap_sweep.diagnosis import NEGLIGIBLE
from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import DEFAULT, NONE, NONE_IN_WORDS, TUNED, named
from overlap_sweep.report import causes
from overlap_sweep.report.causes import Side
from overlap_sweep.report.charts import (
    DASHED,
    DOTTED,
    TICK,
    Axis,
    Dot,
    Form,
    Key,
    Line,
    LinePoint,
    Lines,
    Reference,
    Row,
    Rows,
    looks_of,
)
from overlap_sweep.report.iterations import Timeline, timeline
from overlap_sweep.report.numbers import PASS_WORDS, as_duration, as_percent, as_sentence, as_us
from overlap_sweep.report.section import Exhibit, Sources
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import without_operator
from overlap_sweep.results.traces import drawn_trace
from overlap_sweep.workloads.layer import section as layers
from overlap_sweep.workloads.layer.config import Asked as LayerPoint
from overlap_sweep.workloads.layer.result import attention_backend
from overlap_sweep.workloads.layer.traces import shown_by_traces
from overlap_sweep.workloads.operator.advice import default_in_words
from overlap_sweep.workloads.operator.answer import CaseAnalysis
from overlap_sweep.workloads.operator.choice import Candidate, PassChoice, frozen, slots_in_pass
from overlap_sweep.workloads.operator.config import Resolved
from overlap_sweep.workloads.operator.proof import Outcome, Proof, Trial, Unproven

NOT_CHOSEN = "diamond"
MARGIN = 0.05
"""Of the axis of hidden fractions, beyond the values."""
WORST, BEST = -1.0, 1.5
"""Hidden fractions that are drawn at their place. Those beyond are drawn at the end of the axis, dots as arrows; the
cells and tooltips have the numbers."""


def exhibits(case: CaseAnalysis) -> list[Exhibit]:
    """Returns all exhibits of a case, in page order."""
    return [
        Exhibit(
            name="hidden",
            heading="How much communication is hidden",
            brief="Hidden",
            drawn="Share of the communication time that the chosen setting hides behind GEMMs: 0% is no overlap, 100% "
            "the floor, and values above it are noise or drift. Below 0%, overlapping is slower. Orange mark: "
            f"{default_in_words(case)}; grey diamond: the fastest overlap, where none was chosen; arrow: less than "
            f"{WORST:.0%}; whiskers: noise. dgrad and wgrad can only be timed together.",
            parts=lambda: [_drawn(f"tp{tp_size}", bars) for tp_size, bars in hidden_bars(case).items()],
        ),
        *_proofs(case),
        Exhibit(
            name="num_sm",
            heading="Time over num_sm",
            brief="num_sm",
            drawn="Median times with their noise, scaled by the no-overlap time of the same point. Settings within the "
            "noise of the fastest are ties, and the simplest wins.",
            parts=lambda: [
                _drawn(f"tp{choice.tp_size}_{choice.operator}_{choice.pass_name}", lines, small=True)
                for tp_size in case.plans
                for choice in case.tried(tp_size)
                if (lines := _num_sm_lines(choice))
            ],
        ),
        *_scaling(case),
        Exhibit(
            name="timeline",
            heading="Timelines",
            brief="Timelines",
            drawn="A typical iteration of rank 0 under the profiler: it shows what runs at the same time. The profiler "
            "slows the iteration down, so take times from the tables.",
            parts=lambda: list(_timelines(case)),
        ),
        causes.exhibit(
            {
                f"TP={tp_size}, {operator}": _sides(case, choices)
                for tp_size in case.plans
                for operator, choices in _by_operator(case, tp_size).items()
            }
        ),
    ]


def _drawn(name: str, form: Form, *, small: bool = False) -> Exhibit:
    return Exhibit(chart=lambda: form, name=name, small=small)


def _by_operator(case: CaseAnalysis, tp_size: int) -> dict[str, list[PassChoice]]:
    found: dict[str, list[PassChoice]] = defaultdict(list)
    for choice in case.tried(tp_size):
        found[choice.operator].append(choice)
    return found


def _scaling(case: CaseAnalysis) -> list[Exhibit]:
    if not case.scaling.results:
        return []
    exhibit = Exhibit(
        heading="TP scaling",
        brief="TP scaling",
        explained="ideal time: time at TP=1 / TP, forward plus backward with the chosen settings; "
        f"efficient up to {1 + case.scaling.tolerance:.2f}x of it",
        notes=[f"{operator}: {result.reason}" for operator, result in case.scaling.results.items()],
    )
    return [exhibit]


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


def hidden_bars(case: CaseAnalysis) -> dict[int, Rows]:
    """Returns by TP size the hidden fraction of each pass under its chosen setting, without the passes for which no
    overlap was tried."""
    default_name, found = named(DEFAULT, case.case.backend), {}
    for tp_size in case.plans:
        rows = [_hidden_bar(choice, default_name) for choice in case.tried(tp_size)]
        shown = [at for row in rows for at in (*row.ends, *(dot.at for dot in row.dots), 0.0, 1.0)]
        keys = (Key(default_name, "comm", shape=TICK), Key("fastest overlap, not chosen", "wait", shape=NOT_CHOSEN))
        colours = {dot.colour for row in rows for dot in row.dots}
        if rows:
            found[tp_size] = Rows(
                title=f"TP={tp_size}",
                subtitle="",
                axis=Axis(
                    "hidden communication, %",
                    format=".0%",
                    domain=(max(WORST, min(shown)) - MARGIN, min(BEST, max(shown)) + MARGIN),
                ),
                parts=[Key("hidden", "accent")],
                columns=["hidden", "speedup", "setting"],
                rows=rows,
                references=[Reference("no overlap", 0.0), Reference("floor", 1.0, "muted")],
                legend=[key for key in keys if key.colour in colours],
            )
    return found


def _hidden_bar(choice: PassChoice, default_name: str) -> Row:
    chosen, noise_us, hidden = choice.chosen, choice.chosen.estimate.noise_us, choice.hidden_fraction
    phases = [slot.partition("_")[2] for slot in space.slots_of_pass(choice.operator, choice.pass_name)]
    low, high = (choice.hidden_at(chosen.time_us + sign * noise_us) if chosen.settings else None for sign in (1, -1))
    is_known = not math.isnan(hidden)
    fastest = None if chosen.settings else choice.fastest_overlap
    marked = [(choice.default, "comm", TICK), (fastest, "wait", NOT_CHOSEN)]
    dots = [
        Dot(at, colour=colour, shape=shape if at >= WORST else "triangle-left")
        for one, colour, shape in marked
        if one
        for at in [choice.hidden_at(one.time_us)]
    ]
    return Row(
        name=f"{choice.operator}_{' + '.join(phases)}",
        ends=[hidden] if is_known else [],
        cells=[as_percent(hidden), f"{choice.speedup:.2f}x", chosen.name],
        low=low if is_known else None,
        high=high if is_known else None,
        colour="bad" if hidden < 0 else "",
        dots=dots if is_known else [],
        details={
            "chosen": chosen.name,
            "time": f"{as_us(chosen.time_us)} us, noise {as_us(noise_us)}",
            "no overlap": f"{as_us(choice.none.time_us)} us",
            "floor": f"{as_us(choice.floor_us)} us",
            default_name: f"{as_us(choice.default.time_us)} us" if choice.default else "not measured",
            **({"fastest overlap": f"{fastest.name}, {as_us(fastest.time_us)} us"} if fastest else {}),
            "why": choice.reason,
        },
    )


def _traced(case: CaseAnalysis, choice: PassChoice) -> dict[str, Side | None]:
    """Returns the traces of a pass with no overlap, if there are some, and with the chosen setting, or if that is
    `none` with the fastest overlap; empty if the latter was not traced."""
    pass_name, place = choice.pass_name, (choice.tp_size, choice.operator)
    own = [one for one in case.points if (one.config.tp_size, one.config_as(Resolved).operator) == place]
    shown = choice.chosen if choice.chosen.settings else choice.fastest_overlap
    point = next((one for one in own if drawn_trace(one) and _has_run(one, shown, pass_name)), None) if shown else None
    if not shown or not point:
        return {}
    # `none` was recorded with another point or by one of its own.
    with_points = [Side(one, NONE, pass_name) for one in own]
    plain = [Side(one, "", pass_name) for one in own if one.result and not one.result.settings]
    name = f"{shown.name} ({'chosen' if shown is choice.chosen else 'not chosen'})"
    none = next((side for side in (*with_points, *plain) if side.traces), None)
    return {NONE_IN_WORDS: none, name: Side(point, pass_name=pass_name)}


def _has_run(point: Point, candidate: Candidate, pass_name: str) -> bool:
    settings = point.result.settings if point.result else {}
    return frozen(slots_in_pass(settings, pass_name)) == frozen(candidate.settings)


def _sides(case: CaseAnalysis, choices: Sequence[PassChoice]) -> dict[str, Side]:
    """Returns the traces of an operator, each once: with no overlap, and with the setting of one pass or of both."""
    found: dict[tuple[Path, str], dict[str, Side]] = defaultdict(dict)
    for choice in choices:
        for name, side in _traced(case, choice).items():
            is_none = name == NONE_IN_WORDS
            title = name if is_none else f"{PASS_WORDS[choice.pass_name]} {name}"
            if side:
                shown = replace(side, pass_name="" if is_none else side.pass_name, least_share=NEGLIGIBLE)
                found[side.point.directory, side.variant][title] = shown
    return {
        "; ".join(titles): side if len(titles) == 1 else replace(side, pass_name="")
        for titles in found.values()
        for side in list(titles.values())[:1]
    }


def _timelines(case: CaseAnalysis) -> Iterator[Exhibit]:
    """Yields the timelines of whole layers, then of each operator, and a note on operators without a trace."""
    for tp_size, proof in case.proofs.items():
        if shown := _layer_timeline(proof):
            yield _folded(f"TP={tp_size}, {proof.trial.part}", f"tp{tp_size}_layer", {"all": shown})
    without = []
    for tp_size in case.plans:
        for operator, choices in _by_operator(case, tp_size).items():
            if by_pass := {one.pass_name: shown for one in choices if (shown := _pass_timeline(case, one))}:
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


def _pass_timeline(case: CaseAnalysis, choice: PassChoice) -> Timeline | None:
    sides = {
        name: drawn_trace(side.point, side.variant) if side else None for name, side in _traced(case, choice).items()
    }
    title = f"{choice.operator} {PASS_WORDS[choice.pass_name]}, TP={choice.tp_size}"
    return timeline(title, sides, choice.pass_name) if sides else None


def _layer_timeline(proof: Proof) -> Timeline | None:
    names, backend = proof.trial.names, proof.case.backend
    best = TUNED if proof.recommended == NONE else proof.recommended
    if not proof.trial.point or NONE not in names or best not in names:
        return None
    title, none = f"{as_sentence(proof.trial.part)}, TP={proof.tp_size}", (NONE_IN_WORDS, names[NONE])
    return layers.layer_timeline(title, proof.trial.point, none, (named(best, backend), names[best]))


def _num_sm_lines(choice: PassChoice) -> Lines | None:
    """Returns times over num_sm, with one line per arm: settings that differ only in num_sm, which all slots share.
    None if no setting has one."""
    arms: dict[str, list[LinePoint]] = defaultdict(list)
    for candidate in choice.candidates:
        numbers = {space.num_sm_of(space.without_idle_knobs(setting)) for setting in candidate.settings.values()}
        if len(numbers) == 1 and (num_sm := numbers.pop()):
            plain = {slot: {k: v for k, v in s.items() if k != "num_sm"} for slot, s in candidate.settings.items()}
            arms[space.settings_name(plain)].append(_point(candidate, choice, num_sm))
    if not arms:
        return None
    looks = looks_of(list(arms))
    return Lines(
        title=f"{choice.operator} {PASS_WORDS[choice.pass_name]}, TP={choice.tp_size}",
        subtitle=f"chosen: {choice.chosen.name}",
        x=Axis("num_sm, SMs", logarithmic=True),
        y=Axis("time, us"),
        lines=[
            Line(name, sorted(points, key=lambda point: point.x), *looks[name]) for name, points in sorted(arms.items())
        ],
        references=[
            Reference("no overlap", choice.none.time_us, "ink", DASHED),
            Reference("floor", choice.floor_us, "muted", DOTTED),
            *([Reference("default", choice.default.time_us, "comm", DASHED)] if choice.default else []),
        ],
    )


def _point(candidate: Candidate, choice: PassChoice, num_sm: int) -> LinePoint:
    time_us, noise_us, is_chosen = candidate.time_us, candidate.estimate.noise_us, candidate is choice.chosen
    details = {
        "setting": candidate.name,
        "time": f"{as_us(time_us)} us, noise {as_us(noise_us)}",
        "speedup": f"{choice.none.time_us / time_us:.3f}x",
    }
    label = "chosen" if is_chosen else ""
    ends = max(0.0, time_us - noise_us), time_us + noise_us
    return LinePoint(num_sm, time_us, *ends, ringed=is_chosen, label=label, details=details)


def _proofs(case: CaseAnalysis) -> Iterator[Exhibit]:
    """Yields the measurements of the whole layer by TP size, and the combinations tried before."""
    for outcome in case.outcomes.values():
        if outcome.trial and outcome.trial.layer:
            yield _proof(outcome, outcome.trial)
        if isinstance(outcome, Proof):
            yield from shown_by_traces(outcome.trial.rows[outcome.recommended], f"the file at TP={outcome.tp_size}")
        yield from map(_together, outcome.together)


def _proof(outcome: Outcome, trial: Trial) -> Exhibit:
    assert trial.layer
    assert trial.point
    best = outcome.recommended if isinstance(outcome, Proof) else None
    attention = attention_backend(trial.point.result)
    layer = trial.point.config_as(LayerPoint).layer.kind + (f", attention {attention}" if attention else "")
    return Exhibit(
        name=f"layer_tp{trial.tp_size}",
        heading=f"Proof at TP={trial.tp_size}, {layer}",
        brief=f"Proof at TP={trial.tp_size}",
        chart=partial(layers.layer_bars, f"{as_sentence(trial.part)}, TP={trial.tp_size}", trial.layer, best),
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
