"""Charts of tensor-parallel stacks: what a step's time goes to, and the losses, whose curves lie on each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, cycle

from overlap_sweep.report.charts import Axis, Bar, Bars, Column, Key, Line, LinePoint, Lines
from overlap_sweep.report.charts.palette import SERIES
from overlap_sweep.report.numbers import as_ms
from overlap_sweep.workloads.tp_training.answer import TpTrainingAnalysis, losses_in_words
from overlap_sweep.workloads.tp_training.config import IMPLEMENTATIONS
from overlap_sweep.workloads.tp_training.rows import TpTrainingRow

MOST_BARS = 30
"""As many as are looked at; the table has all."""
PARTS = [Key("forward", "gemm"), Key("backward", "series3"), Key("optimizer", "series4"), Key("other", "wait", 0.6)]

MOST_CURVES = 10
"""As many as can be told apart; who deviates is among them."""
MOST_POINTS = 400
"""Of a curve: more than a chart has pixels for."""
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
_WIDEST_PX = 8.0
_NARROWEST_PX = 1.6
_COLOURS: Mapping[str, str] = dict(zip(IMPLEMENTATIONS, SERIES, strict=False))
_MORE_COLOURS = SERIES[len(IMPLEMENTATIONS) :]


def stacks_bars(analysis: TpTrainingAnalysis) -> Bars:
    """Returns the settings by grid of ranks, from fast to slow in each."""
    rows = analysis.rows[:MOST_BARS]
    more = f"; the first {len(rows)} of {len(analysis.rows)}" if len(rows) < len(analysis.rows) else ""
    knows_mfu = any(row.mfu is not None for row in rows)
    return Bars(
        title=f"{analysis.case.brief} on {analysis.case.device}",
        subtitle="median of the steps, slowest rank, with its noise",
        axis=Axis(f"ms a step{more}"),
        parts=PARTS,
        columns=[Column("step ms"), Column("tokens/s/GPU"), *([Column("MFU")] if knows_mfu else [])],
        bars=[_bar(row, knows_mfu) for row in rows],
    )


def _bar(row: TpTrainingRow, knows_mfu: bool) -> Bar:
    # A single step has no noise that is known.
    noise_us = row.step.noise_us if row.step.repeats > 1 else 0.0
    found = row.communication
    communication = f"{as_ms(found.total_us)} ms, {as_ms(found.exposed_us)} exposed" if found else "no trace"
    mfu = [] if not knows_mfu else [""] if row.mfu is None else [f"{row.mfu:.1%}"]
    return Bar(
        name=row.name,
        ends=[end * row.time_us / 1e3 for end in accumulate(row.shares.values())],
        low=max(0.0, row.time_us - noise_us) / 1e3,
        high=(row.time_us + noise_us) / 1e3,
        cells=[as_ms(row.time_us), f"{row.tokens_per_s_per_gpu:,.0f}", *mfu],
        bold=row.chosen,
        details={
            "setting": row.name,
            "step": f"{as_ms(row.time_us)} ms, noise {as_ms(noise_us)}",
            **{name: f"{share:.0%}" for name, share in row.shares.items()},
            "tokens/s": f"{row.tokens_per_s:,.0f}",
            "TFLOP/s/GPU": f"{row.tflops_per_gpu:,.3g}",
            "communication": communication,
            "peak GB": "-" if row.memory_peak_gb is None else f"{row.memory_peak_gb:.1f}",
            "note": row.note or "-",
        },
    )


def loss_lines(analysis: TpTrainingAnalysis) -> Lines:
    """Returns the losses of all that trained one model, over the steps."""
    drawn = sorted(analysis.rows, key=lambda row: not row.deviates)[:MOST_CURVES]
    rows = [row for row in analysis.rows if row in drawn]
    left_out = f"; {len(rows)} of {len(analysis.rows)} are drawn" if len(rows) < len(analysis.rows) else ""
    said = losses_in_words(analysis)
    return Lines(
        title=f"Losses, {analysis.case.brief}",
        subtitle=f"{'; '.join(said) or 'mean over all tokens'}{left_out}",
        x=Axis("step"),
        y=Axis("loss", format=".4~g", logarithmic=False),
        lines=_curves(rows),
        legend=True,
    )


def _points(row: TpTrainingRow) -> list[LinePoint]:
    steps = [(step.step, step.loss) for step in row.run.steps if step.loss is not None]
    every = -(-len(steps) // MOST_POINTS)
    return [
        LinePoint(number, loss, details={"setting": row.name, "at": f"step {number}", "loss": f"{loss:.6g}"})
        for i, (number, loss) in enumerate(steps)
        if i % every == 0 or i == len(steps) - 1
    ]


def _curves(rows: Sequence[TpTrainingRow]) -> list[Line]:
    """Returns curves in the implementation's colour, another for more settings of it, and a dash for each of several
    data; those of the same data from wide to narrow, so that all are seen."""
    curves: list[Line] = []
    dp_sizes = sorted({row.grid.dp_size for row in rows})
    for dp_size, dash in zip(dp_sizes, cycle(_DASHES), strict=False):
        of_size = [row for row in rows if row.grid.dp_size == dp_size]
        more = cycle(_MORE_COLOURS)
        used: set[str] = set()
        for i, row in enumerate(of_size):
            own = _COLOURS[row.impl]
            shown = next(more) if own in used else own
            width_px = round(_NARROWEST_PX + (_WIDEST_PX - _NARROWEST_PX) * (1 - (i + 1) / len(of_size)), 2)
            curves.append(Line(row.name, _points(row), shown, shape="", dash=dash, width_px=width_px))
            used.add(own)
    return curves
