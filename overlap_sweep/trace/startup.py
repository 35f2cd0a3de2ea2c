"""Which iterations of a trace are start-up: the profiler's own, compilation, allocation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from overlap_sweep.trace.overlap import TraceRow

NOTABLE = 1.1
"""A first iteration that takes no longer than this times the longest of the others is one of them."""
NOTABLE_BESIDE_ONE = 1.5
"""The same where only one other is there: by how much iterations vary is then unknown."""


def startup_iterations(rows: Iterable[TraceRow]) -> list[int]:
    """The first iterations of one trace that take longer than the later ones vary by; never more than half of them.

    That is: longer than the longest of the later ones by more than what these lie apart. A later one that has fewer
    GEMMs, such as the last of a trace that breaks off, says nothing about an earlier one.
    """
    whole = sorted((row for row in rows if row.phase == "all"), key=lambda row: row.iteration)
    found: list[int] = []
    for number, row in enumerate(whole[: len(whole) // 2]):
        others = [other.span_us for other in whole[number + 1 :] if other.num_gemm_events >= row.num_gemm_events]
        if not others or not _stands_out(row.span_us, others):
            break
        found.append(row.iteration)
    return found


def _stands_out(span_us: float, others_us: Sequence[float]) -> bool:
    longest, shortest = max(others_us), min(others_us)
    if len(others_us) == 1:
        return span_us > NOTABLE_BESIDE_ONE * longest
    return span_us > max(NOTABLE * longest, longest + (longest - shortest))


def in_words(name: str, rows: Iterable[TraceRow], iterations: Sequence[int]) -> str:
    """A sentence about the start-up `iterations`, at least one, of the trace or point of that name."""
    spans = [(row.span_us, row.iteration in iterations) for row in rows if row.phase == "all"]
    longest, usual = (max(span_us for span_us, startup in spans if startup is which) for which in (True, False))
    which = f"iteration{'s' if len(iterations) > 1 else ''} {', '.join(map(str, iterations))}"
    return (
        f"{name}: {which} took up to {longest:,.1f} us, the later ones at most {usual:,.1f}: start-up, left out of "
        "medians and of what is chosen by them."
    )
