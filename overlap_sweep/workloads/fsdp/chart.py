"""The settings of training steps: their time, and how much of it is communication that computation does not hide."""

from __future__ import annotations

from overlap_sweep.report.numbers import as_ms
from overlap_sweep.report.page import time_bars
from overlap_sweep.report.page.figures import Figure, figure
from overlap_sweep.report.page.time_bars import BarsPanel, Part, TimeBar, cut, lines_of
from overlap_sweep.workloads.fsdp.answer import TrainingAnalysis, TrainingRow

MOST_BARS = 30
"""As many as are looked at; the table has all."""

PARTS = [
    Part("without communication (floor)", "gemm", 1.0),
    Part("exposed communication", "comm", 1.0),
    Part("hidden (to none)", "comm", 0.28),
]


def training_figure(analysis: TrainingAnalysis, name: str) -> Figure:
    """Draws the settings from fast to slow."""
    panel = training_panel(analysis)
    return figure(name, time_bars.describe(panel), panel, time_bars.chart)


def training_panel(analysis: TrainingAnalysis) -> BarsPanel:
    """From fast to slow; of a sample where steps have different numbers of them."""
    # What the others are told against is shown, however slow it is.
    told = (analysis.best, analysis.reference)
    rows = [row for i, row in enumerate(analysis.rows) if i < MOST_BARS or row in told]
    names = lines_of([row.setting for row in rows])
    left_out = len(analysis.rows) - len(rows)
    more = f"; {len(rows)} of {len(analysis.rows)} settings, the fastest" if left_out else ""
    return BarsPanel(
        title=f"{analysis.case.brief} on {analysis.case.device}",
        subtitle="median of the steps, slowest rank, with its noise",
        axis=("ms a step" if analysis.one_work else "us a sample") + more,
        parts=PARTS,
        columns=["step ms", "hidden", "vs none", "samples/s"],
        widths_px=[72, 62, 66, 84],
        bars=[_bar(row, name, analysis) for row, name in zip(rows, names, strict=True)],
    )


def _bar(row: TrainingRow, name: str, analysis: TrainingAnalysis) -> TimeBar:
    scale = 1e-3 if analysis.one_work else 1 / row.samples_per_step
    noise_us = row.step.noise_us
    step, floor, none = f"{as_ms(row.time_us)} ms", f"{as_ms(row.floor_us)} ms", f"{as_ms(row.none_us)} ms"
    return TimeBar(
        name=name,
        ends=[end * scale for end in cut(row.floor_us, row.time_us, row.none_us)],
        at=row.time_us * scale,
        low=max(0.0, row.time_us - noise_us) * scale,
        high=(row.time_us + noise_us) * scale,
        cells=[
            as_ms(row.time_us),
            row.hidden_in_words,
            f"{row.speedup:.2f}x",
            f"{row.samples_per_s:,.0f}",
        ],
        chosen=row is analysis.best,
        told={
            "setting": row.setting,
            "step": f"{step}, noise {as_ms(noise_us)}",
            "no overlap": none,
            "no communication": floor,
            "exposed": f"{as_ms(row.exposed_us)} ms",
            "hidden": row.hidden_in_words,
            "samples/s": f"{row.samples_per_s:,.0f}",
        },
    )
