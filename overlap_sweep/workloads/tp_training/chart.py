"""Tensor-parallel stacks side by side: what a step's time goes to, and what one GPU does in it."""

from __future__ import annotations

from itertools import accumulate

from overlap_sweep.report.numbers import as_ms
from overlap_sweep.report.page.time_bars import BarsPanel, Part, TimeBar, lines_of
from overlap_sweep.workloads.tp_training.answer import TpTrainingAnalysis, TpTrainingRow
from overlap_sweep.workloads.tp_training.section import cells, note

MOST_BARS = 30
"""As many as are looked at; the table has all."""

PARTS = [
    Part("forward", "gemm", 1.0),
    Part("backward", "series3", 1.0),
    Part("optimizer", "series4", 1.0),
    Part("other", "wait", 0.6),
]


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
        bars=[_bar(row, name, analysis, knows_mfu) for row, name in zip(rows, names, strict=True)],
    )


def _bar(row: TpTrainingRow, name: str, analysis: TpTrainingAnalysis, knows_mfu: bool) -> TimeBar:
    told = cells(row, analysis)
    # A single step has no noise that is known.
    noise_us = row.step.noise_us if row.step.repeats > 1 else 0.0
    communication = f"{told['comm ms']} ms, {told['exposed ms']} exposed" if row.communication else "no trace"
    return TimeBar(
        name=name,
        ends=[end * row.time_us / 1e3 for end in accumulate(row.shares)],
        at=row.time_us / 1e3,
        low=max(0.0, row.time_us - noise_us) / 1e3,
        high=(row.time_us + noise_us) / 1e3,
        cells=[told["step ms"], told["tokens/s/GPU"], *([told["MFU"]] if knows_mfu else [])],
        chosen=any(row is answer.best for answer in analysis.answers),
        told={
            "setting": row.name,
            "step": f"{told['step ms']} ms, noise {as_ms(noise_us)}",
            **{"forward": told["fwd"], "backward": told["bwd"], "optimizer": told["opt"], "other": told["other"]},
            "tokens/s": told["tokens/s"],
            "TFLOP/s/GPU": told["TFLOP/s"],
            "communication": communication,
            "peak GB": told["peak GB"] or "-",
            "note": note(row, analysis) or "-",
        },
    )
