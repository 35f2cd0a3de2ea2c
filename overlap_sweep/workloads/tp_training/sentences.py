"""The answers about tensor-parallel stacks in sentences, and what to know before believing them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from overlap_sweep.workloads.tp_training.answer import (
    GridAnswer,
    LossesAnswer,
    TpTrainingAnalysis,
    TpTrainingRow,
    ratio_interval,
    ratio_of,
)

FEW_STEPS = 5
LONG_WAIT = 0.05
"""Of a step: what is worth a sentence."""


def in_words(analysis: TpTrainingAnalysis) -> list[str]:
    """The answers, a sentence each: of each grid, of all, and whether losses agree."""
    lines = [_grid_in_words(answer) for answer in analysis.answers]
    if len(analysis.answers) > 1:
        lines.append(_best_in_words(analysis))
    return [*lines, *(line for answer in analysis.losses for line in losses_in_words(answer, analysis))]


def _grid_in_words(answer: GridAnswer) -> str:
    best, others, ties = answer.best, answer.comparable[1:], answer.ties
    deviating = [row.setting for row in answer.rows if row.deviates]
    if best is None:
        why = "computes what the others do" if deviating else "has a loss that is a number"
        return f"{answer.grid}: no answer, as none {why}"
    rate = f"{best.tokens_per_s:,.0f} tokens/s"
    left_out = f"; not compared, as it computes something else: {', '.join(deviating)}" if deviating else ""
    if not others:
        nothing = "" if left_out else ", nothing to compare it with"
        return f"{answer.grid}: {best.setting} takes {_ms(best.time_us)} ms a step, {rate}{nothing}{left_out}"
    ending = f"; not repeated{left_out}" if len(best.points) == 1 else left_out
    slowest = others[-1]
    if len(ties) > 1:
        names = " and ".join([", ".join(row.setting for row in ties[:-1]), ties[-1].setting])
        why = "differ by less than the noise"
        said = f"{names} {why} ({_over(ties[-1], best)} between them)"
        following = answer.slower
        if following:
            said += f"; {following[0].setting} takes {_over(following[0], best)} as long"
        return f"{answer.grid}: {said}; {best.setting} takes {_ms(best.time_us)} ms a step, {rate}{ending}"
    said = f"{best.setting} is fastest, {_over(others[0], best)} as fast as {others[0].setting}"
    if slowest is not others[0]:
        said += f", {_over(slowest, best)} as fast as {slowest.setting}, the slowest"
    return f"{answer.grid}: {said}; it takes {_ms(best.time_us)} ms a step, {rate}{ending}"


def _best_in_words(analysis: TpTrainingAnalysis) -> str:
    best = analysis.best
    if best is None:
        return "most tokens/s per GPU: no answer"
    of_mfu = f", {best.mfu:.1%} of its peak" if best.mfu is not None else ""
    return f"most tokens/s per GPU: {best.name}, {best.tokens_per_s_per_gpu:,.0f}{of_mfu}"


def losses_in_words(answer: LossesAnswer, analysis: TpTrainingAnalysis) -> Iterator[str]:
    """That they agree, or who is the first to deviate where."""
    where = f"DP={answer.dp_size}: " if len({row.grid.dp_size for row in analysis.rows}) > 1 else ""
    differences = [row.losses.largest for row in answer.rows if row.losses and row.losses.largest]
    if not answer.deviating:
        largest = max(differences, key=lambda one: one.relative, default=None)
        said = ""
        if largest:
            at = f"largest difference {largest.relative:.1g} at step {largest.step}"
            said = f" ({at})" if largest.relative else " (to the last digit)"
        yield f"{where}the losses agree{said}"
        return
    if len(answer.deviating) == len(answer.rows):
        names = ", ".join(row.name for row in answer.rows)
        first = min(row.losses.deviates.step for row in answer.rows if row.losses and row.losses.deviates)
        yield f"{where}losses or gradients differ from step {first} on, and it cannot be told who is right: {names}"
        return
    for row in answer.deviating:
        assert row.losses
        assert row.losses.deviates
        found = row.losses.deviates
        if math.isinf(found.relative):
            said = f"at step {found.step} either its {found.what} or that of the others is no number"
        else:
            said = f"its {found.what} deviates from step {found.step} on, there by {found.relative:.1g}"
        yield f"{where}{row.name} computes something else: {said}"


def _over(slower: TpTrainingRow, faster: TpTrainingRow) -> str:
    interval = ratio_interval(slower, faster)
    between = "" if math.isnan(interval.low) else f" [{interval.low:.2f}, {interval.high:.2f}]"
    return f"{ratio_of(slower, faster):.2f}x{between}"


def _ms(time_us: float) -> str:
    return f"{time_us / 1e3:,.3f}"


def _names(rows: Sequence[TpTrainingRow], analysis: TpTrainingAnalysis) -> str:
    return "all settings" if 1 < len(rows) == len(analysis.rows) else ", ".join(row.name for row in rows)


def _waits(row: TpTrainingRow) -> bool:
    found = row.communication
    return found is not None and found.waiting_us > max(found.total_us, LONG_WAIT * row.time_us)


def _waiting(row: TpTrainingRow) -> str:
    assert row.communication
    return f"{row.name} ({_ms(row.communication.waiting_us)} ms)"


def warnings(analysis: TpTrainingAnalysis) -> list[str]:
    """What to know before believing the answers, a sentence each."""
    lines = []
    if diverging := [row for row in analysis.rows if row.diverges]:
        lines.append(f"The last loss is no number, so it cannot be the fastest: {_names(diverging, analysis)}.")
    if limited := [row for row in analysis.rows if row.host_limits]:
        lines.append(
            "Launch-bound: the GPU waits for the host there, so the time is that of the host: "
            f"{_names(limited, analysis)}."
        )
    if few := [row for row in analysis.rows if row.step.repeats < FEW_STEPS]:
        lines.append(f"Fewer than {FEW_STEPS} timed steps, so the noise is hardly known: {_names(few, analysis)}.")
    if waiting := [row for row in analysis.rows if _waits(row)]:
        lines.append(
            "In the profiled steps one rank waits for another, longer than it takes to communicate; comm and exposed "
            f"are without that: {', '.join(map(_waiting, waiting))}."
        )
    told: dict[str, list[str]] = defaultdict(list)
    for row in analysis.rows:
        for warning in dict.fromkeys(w for point in row.points if point.result for w in point.result.warnings):
            told[warning].append(row.name)
    return [*lines, *(f"{', '.join(names)}: {warning}" for warning, names in told.items())]
