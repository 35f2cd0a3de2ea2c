"""GEMMs beside copies of one direction, by size: what of the shorter one is hidden behind the longer."""

from __future__ import annotations

from overlap_sweep.report.numbers import as_us
from overlap_sweep.report.page import time_bars
from overlap_sweep.report.page.figures import Figure, figure
from overlap_sweep.report.page.time_bars import BarsPanel, Part, TimeBar, cut, lines_of
from overlap_sweep.workloads.copy_engine.answer import CopyAnalysis, CopyRow

MOST_BARS = 40
"""As many as are looked at; the table has all."""

PARTS = [
    Part("the longer of GEMMs and copies", "gemm", 1.0),
    Part("added by the other", "comm", 1.0),
    Part("saved", "comm", 0.28),
]


def copies_figure(analysis: CopyAnalysis, name: str) -> Figure:
    """Returns the chart under that name."""
    panel = copies_panel(analysis)
    return figure(name, time_bars.describe(panel), panel, time_bars.chart)


def copies_panel(analysis: CopyAnalysis) -> BarsPanel:
    """By size; each as shares of its own time one after the other, since sizes differ by magnitudes."""
    rows = analysis.rows[:MOST_BARS]
    more = f"; the first {len(rows)} of {len(analysis.rows)} sizes" if len(rows) < len(analysis.rows) else ""
    names = lines_of([row.size for row in rows])
    return BarsPanel(
        title=str(analysis.case),
        subtitle="both at once, with its noise",
        axis=f"% of the time one after the other{more}",
        parts=PARTS,
        columns=["at once us", "saved us", "of the ideal"],
        widths_px=[96, 84, 88],
        bars=[_bar(row, name) for row, name in zip(rows, names, strict=True)],
    )


def _bar(row: CopyRow, name: str) -> TimeBar:
    scale = 100 / row.sequential.time_us
    longer_us = max(row.gemm.time_us, row.copy.time_us)
    time_us, noise_us = row.overlapped.time_us, row.overlapped.noise_us
    return TimeBar(
        name=name,
        ends=[end * scale for end in cut(longer_us, time_us, row.sequential.time_us)],
        at=time_us * scale,
        low=max(0.0, time_us - noise_us) * scale,
        high=(time_us + noise_us) * scale,
        cells=[as_us(time_us), as_us(row.saving.time_us), f"{row.hidden_fraction:.0%}"],
        chosen=row.saves,
        told={
            "size": row.size,
            "GEMMs alone": f"{as_us(row.gemm.time_us)} us",
            "copies alone": f"{as_us(row.copy.time_us)} us",
            "one after the other": f"{as_us(row.sequential.time_us)} us",
            "at once": f"{as_us(time_us)} us, noise {as_us(noise_us)}",
            "saved": f"{as_us(row.saving.time_us)} us, noise {as_us(row.saving.noise_us)}",
            "note": row.note,
        },
    )
