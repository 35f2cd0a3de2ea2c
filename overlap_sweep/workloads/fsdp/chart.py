"""Charts of training steps: the settings by what their time goes to, and what each knob contributed."""

from __future__ import annotations

from overlap_sweep.report.charts import Axis, Bar, Bars, Column, Dot, Key, Reference, cut
from overlap_sweep.report.numbers import as_ms
from overlap_sweep.workloads.fsdp.answer import TrainingAnalysis, TrainingRow
from overlap_sweep.workloads.fsdp.knob_effects import KnobContribution, contributed

MOST_BARS = 30
"""As many as are looked at; the table has all."""
MOST_KNOBS = 40

PARTS = [
    Key("without communication (floor)", "gemm"),
    Key("exposed communication", "comm"),
    Key("hidden (to none)", "comm", 0.28),
]


def settings_bars(analysis: TrainingAnalysis) -> Bars:
    """Returns the settings from fast to slow; of a sample where steps have different numbers of them."""
    # What the others are told against is shown, however slow it is.
    told = (analysis.best, analysis.reference)
    rows = [row for i, row in enumerate(analysis.rows) if i < MOST_BARS or row in told]
    left_out = len(analysis.rows) - len(rows)
    more = f"; {len(rows)} of {len(analysis.rows)} settings, the fastest" if left_out else ""
    return Bars(
        title=f"{analysis.case.brief} on {analysis.case.device}",
        subtitle="median of the steps, slowest rank, with its noise",
        axis=Axis(("ms a step" if analysis.one_work else "us a sample") + more),
        parts=PARTS,
        columns=[Column("step ms"), Column("hidden"), Column("vs none"), Column("samples/s")],
        bars=[_setting_bar(row, analysis) for row in rows],
    )


def _setting_bar(row: TrainingRow, analysis: TrainingAnalysis) -> Bar:
    scale = 1e-3 if analysis.one_work else 1 / row.samples_per_step
    noise_us = row.step.noise_us
    return Bar(
        name=row.setting,
        ends=[end * scale for end in cut(row.floor_us, row.time_us, row.none_us)],
        low=max(0.0, row.time_us - noise_us) * scale,
        high=(row.time_us + noise_us) * scale,
        cells=[as_ms(row.time_us), row.hidden.in_words, f"{row.speedup:.2f}x", f"{row.samples_per_s:,.0f}"],
        bold=row is analysis.best,
        details={
            "setting": row.setting,
            "step": f"{as_ms(row.time_us)} ms, noise {as_ms(noise_us)}",
            "no overlap": f"{as_ms(row.none_us)} ms",
            "no communication": f"{as_ms(row.floor_us)} ms",
            "exposed": f"{as_ms(row.exposed_us)} ms",
            "hidden": row.hidden.in_words,
            "samples/s": f"{row.samples_per_s:,.0f}",
        },
    )


def knob_bars(analysis: TrainingAnalysis) -> Bars:
    """Returns every change of one knob with all others alike."""
    contributions = contributed(analysis).contributions[:MOST_KNOBS]
    return Bars(
        title=f"What each knob contributed: {analysis.case.brief}",
        subtitle="change of the time that a sample takes; whiskers are all pairs and their noise, dots the best's",
        axis=Axis(format="+.1~%"),
        parts=[Key("change", "good")],
        columns=[Column("time"), Column("beside the best")],
        bars=[_knob_bar(contribution) for contribution in contributions],
        references=[Reference(0.0, below="faster", above="slower")],
    )


def _knob_bar(contribution: KnobContribution) -> Bar:
    (low, high), beside = contribution.range, contribution.beside_best
    name = f"{contribution.name} {contribution.what}"
    return Bar(
        name=name,
        ends=[contribution.change],
        low=low - contribution.noise,
        high=high + contribution.noise,
        cells=[contribution.change_text, contribution.beside_text or "-"],
        colour="wait" if not contribution.sure else "bad" if contribution.change > 0 else "good",
        bold=contribution.taken and beside is not None,
        marker=Dot(beside.change, colour="ink") if beside else None,
        details={
            "knob": name,
            "time of a sample": contribution.change_text,
            "over the pairs": contribution.range_text or "one pair",
            "pairs": str(len(contribution.effects)),
            "beside the best": contribution.beside_text or "-",
        },
    )
