"""Tensor-parallel stacks side by side: what a step's time goes to, what one GPU does in it, and their losses."""

from __future__ import annotations

from itertools import accumulate

from overlap_sweep.report.numbers import as_ms
from overlap_sweep.report.page import time_bars
from overlap_sweep.report.page.figures import Figure, figure
from overlap_sweep.report.page.time_bars import BarsPanel, Part, TimeBar, lines_of
from overlap_sweep.workloads.tp_training import loss_curves
from overlap_sweep.workloads.tp_training.answer import TpTrainingAnalysis
from overlap_sweep.workloads.tp_training.rows import TpTrainingRow

MOST_BARS = 30
"""As many as are looked at; the table has all."""

PARTS = [
    Part("forward", "gemm", 1.0),
    Part("backward", "series3", 1.0),
    Part("optimizer", "series4", 1.0),
    Part("other", "wait", 0.6),
]


def stacks_figure(analysis: TpTrainingAnalysis, name: str) -> Figure:
    """Returns the chart of steps under that name."""
    panel = stacks_panel(analysis)
    return figure(name, time_bars.describe(panel), panel, time_bars.chart)


def losses_figure(analysis: TpTrainingAnalysis, name: str) -> Figure:
    """Returns the chart of losses under that name."""
    panel = loss_curves.curves_panel(analysis)
    return figure(name, loss_curves.describe(panel), panel, loss_curves.chart)


def stacks_panel(analysis: TpTrainingAnalysis) -> BarsPanel:
    """By grid of ranks, from fast to slow in each."""
    rows = analysis.rows[:MOST_BARS]
    names = lines_of([row.name for row in rows])
    more = f"; the first {len(rows)} of {len(analysis.rows)}" if len(rows) < len(analysis.rows) else ""
    knows_mfu = any(row.mfu is not None for row in rows)
    return BarsPanel(
        title=f"{analysis.case.brief} on {analysis.case.device}",
        subtitle="median of the steps, slowest rank, with its noise",
        axis=f"ms a step{more}",
        parts=PARTS,
        columns=["step ms", "tokens/s/GPU", *(["MFU"] if knows_mfu else [])],
        widths_px=[72, 100, *([58] if knows_mfu else [])],
        bars=[_bar(row, name, knows_mfu) for row, name in zip(rows, names, strict=True)],
    )


def _bar(row: TpTrainingRow, name: str, knows_mfu: bool) -> TimeBar:
    # A single step has no noise that is known.
    noise_us = row.step.noise_us if row.step.repeats > 1 else 0.0
    found = row.communication
    communication = f"{as_ms(found.total_us)} ms, {as_ms(found.exposed_us)} exposed" if found else "no trace"
    mfu = [] if not knows_mfu else [""] if row.mfu is None else [f"{row.mfu:.1%}"]
    return TimeBar(
        name=name,
        ends=[end * row.time_us / 1e3 for end in accumulate(row.shares)],
        at=row.time_us / 1e3,
        low=max(0.0, row.time_us - noise_us) / 1e3,
        high=(row.time_us + noise_us) / 1e3,
        cells=[as_ms(row.time_us), f"{row.tokens_per_s_per_gpu:,.0f}", *mfu],
        chosen=row.chosen,
        told={
            "setting": row.name,
            "step": f"{as_ms(row.time_us)} ms, noise {as_ms(noise_us)}",
            **{name: f"{share:.0%}" for name, share in row.shares._asdict().items()},
            "tokens/s": f"{row.tokens_per_s:,.0f}",
            "TFLOP/s/GPU": f"{row.tflops_per_gpu:,.3g}",
            "communication": communication,
            "peak GB": "-" if row.memory_peak_gb is None else f"{row.memory_peak_gb:.1f}",
            "note": row.note or "-",
        },
    )
