"""GEMMs beside copies of one direction, by size: what of the shorter one is hidden behind the longer."""

from __future__ import annotations

from overlap_sweep.report.charts import Axis, Bar, Bars, Column, Key, cut
from overlap_sweep.report.numbers import as_us
from overlap_sweep.workloads.copy_engine.answer import CopyAnalysis, CopyRow

MOST_BARS = 40
"""As many as are looked at; the table has all."""

PARTS = [Key("the longer of GEMMs and copies", "gemm"), Key("added by the other", "comm"), Key("saved", "comm", 0.28)]


def copies_bars(analysis: CopyAnalysis) -> Bars:
    """Returns sizes in order; each as shares of its own time one after the other, since sizes differ by magnitudes."""
    rows = analysis.rows[:MOST_BARS]
    more = f"; the first {len(rows)} of {len(analysis.rows)} sizes" if len(rows) < len(analysis.rows) else ""
    return Bars(
        title=str(analysis.case),
        subtitle="both at once, with its noise",
        axis=Axis(f"% of the time one after the other{more}"),
        parts=PARTS,
        columns=[Column("at once us"), Column("saved us"), Column("of the ideal")],
        bars=[_bar(row) for row in rows],
    )


def _bar(row: CopyRow) -> Bar:
    scale = 100 / row.sequential.time_us
    longer_us = max(row.gemm.time_us, row.copy.time_us)
    time_us, noise_us = row.overlapped.time_us, row.overlapped.noise_us
    return Bar(
        name=row.size,
        ends=[end * scale for end in cut(longer_us, time_us, row.sequential.time_us)],
        low=max(0.0, time_us - noise_us) * scale,
        high=(time_us + noise_us) * scale,
        cells=[as_us(time_us), as_us(row.saving.time_us), f"{row.hidden_fraction:.0%}"],
        bold=row.saves,
        details={
            "size": row.size,
            "GEMMs alone": f"{as_us(row.gemm.time_us)} us",
            "copies alone": f"{as_us(row.copy.time_us)} us",
            "one after the other": f"{as_us(row.sequential.time_us)} us",
            "at once": f"{as_us(time_us)} us, noise {as_us(noise_us)}",
            "saved": f"{as_us(row.saving.time_us)} us, noise {as_us(row.saving.noise_us)}",
            "note": row.note,
        },
    )
