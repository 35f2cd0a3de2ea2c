"""Collectives that are so small, and so many, that their time is latency: of fewer bytes than latency times bandwidth.
The latency is the time of the process group's fastest size, the bandwidth the best rate of any size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from overlap_sweep.diagnosis import Cause, Loss, Rule, as_rate, as_time, once

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.basis import Basis
    from overlap_sweep.diagnosis.losses import ExposedTime, RankView

MANY = 10
"""Fewest small calls of a kind in one step that are worth merging."""

MOST_LATENCY_NS = 200_000
"""Longest latency: gloo's on busy cores. What takes longer in a group without small calls moves bytes."""

SLOWEST_GBS = 1.0
"""Bandwidth that every link is taken to have, in bytes per nanosecond: a trace of small calls alone shows less."""

APART = 0.25
"""Computation between two calls of activations, as a share of the second, from which on it may need the first: then
they cannot be merged."""


_Link = tuple[str, str]
"""Process group, and the library that communicates."""


def latency_of_small(time: ExposedTime) -> Iterator[Loss]:
    """Yields what would be saved if one call did the work of all: their latency but once."""
    numbers = once(time.view, small_calls).get(time.index)
    if numbers:
        latency_ns = min(time.rest_ns, numbers["took_ns"] - numbers["transfer_ns"])
        yield Loss(latency_ns * (1 - 1 / numbers["num_calls"]), numbers=numbers)


def small_calls(view: RankView) -> dict[int, dict[str, float]]:
    """Returns the calls of a rank whose time is mostly latency, and that could be merged, by index: the time of each,
    that of its bytes at the best rate, and how many calls could be one."""
    sizes = {i: size for i, call in enumerate(view.facts.calls) if (size := call.buffer_bytes()) and not call.is_wait}
    alike: dict[tuple[_Link, tuple[object, ...]], list[int]] = defaultdict(list)
    latencies_ns: dict[_Link, float] = defaultdict(lambda: MOST_LATENCY_NS)
    rates: dict[_Link, float] = defaultdict(lambda: SLOWEST_GBS)
    for i in sizes.keys() & view.alike.keys():
        link = view.facts.calls[i].group, view.facts.calls[i].library
        alike_calls = view.alike[i]
        if alike_calls.transfer_us is not None and alike_calls.rate_gbs is not None:
            latencies_ns[link] = min(latencies_ns[link], max(alike_calls.transfer_us * 1000, 1000.0))
            rates[link] = max(rates[link], alike_calls.rate_gbs)
    for i, size in sizes.items():
        call = view.facts.calls[i]
        link = call.group, call.library
        small = size < latencies_ns[link] * rates[link]
        if small and not call.is_message and call.is_in_step:
            alike[link, (call.step, call.collective, call.pass_, view.roles[i])].append(i)
    found = {}
    for (link, _), same in alike.items():
        for run in _mergeable(view, same):
            for i in run if len(run) >= MANY else ():
                call, transfer_ns = view.facts.calls[i], sizes[i] / rates[link]
                numbers = {"took_ns": float(call.end_ns - call.start_ns), "transfer_ns": transfer_ns}
                found[i] = numbers | {"rate_gbs": rates[link], "num_calls": float(len(run))}
    return found


def _mergeable(view: RankView, same: list[int]) -> Iterator[list[int]]:
    """Yields the calls that don't need each other's results. Gradients and parameters never do; activations may, unless
    hardly anything is computed between them."""
    run: list[int] = []
    for i in same:
        call = view.facts.calls[i]
        if run and view.roles[i] == "activation":
            between_ns = view.exposure.compute.between(view.facts.calls[run[-1]].end_ns, call.start_ns)
            if between_ns > APART * (call.end_ns - call.start_ns):
                yield run
                run = []
        run.append(i)
    yield run


def evidence(basis: Basis) -> str:
    took, transfer = (as_time(median(basis.numbers_us(name))) for name in ("took_ns", "transfer_ns"))
    numbers = max((loss.numbers for loss in basis.losses), key=lambda numbers: numbers["num_calls"])
    rate = f"{as_rate(numbers['rate_gbs'])} GB/s"
    if numbers["rate_gbs"] == SLOWEST_GBS:
        rate += " (assumed: no call of the group is faster)"
    return (
        f"{basis.calls_in_words}, {took} each, of which their bytes would need {transfer} at {rate}. The "
        f"rest is latency, which one call instead of {numbers['num_calls']:.0f} would have once."
    )


CAUSE = Cause(
    order=50,
    meaning="many small collectives, whose time is not that of their bytes",
    evidence=evidence,
    exposed=Rule(30, latency_of_small),
    is_exposed=True,
)
