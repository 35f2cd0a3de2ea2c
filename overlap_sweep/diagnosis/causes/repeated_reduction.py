"""Gradients that are reduced more than once for one step of the optimizer: each backward pass before it reduces the
same sizes in the same process group and order. Layers of equal sizes within one pass don't count."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from overlap_sweep.diagnosis import MENTIONED, NEVER, Cause, Loss, Rule, as_time, once

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.basis import Basis
    from overlap_sweep.diagnosis.calls import Call
    from overlap_sweep.diagnosis.facts import RankFacts
    from overlap_sweep.diagnosis.losses import ExposedTime, RankView

_Reduction = tuple[str, int | None, int | None]


def all_but_last(time: ExposedTime) -> Iterator[Loss]:
    passes = once(time.view, repeated_reductions).get(time.index)
    if passes:
        yield Loss(time.rest_ns, numbers={"passes": float(passes)})


def slower_gemms(view: RankView) -> Iterator[Loss]:
    """Yields what GEMMs lost next to reductions that are repeated."""
    for i, passes in once(view, repeated_reductions).items():
        if i in view.slowed:
            extra_ns = view.slowed[i].extra_ns
            yield Loss(extra_ns, call=i, numbers={"slowed_ns": extra_ns, "passes": float(passes)})


def repeated_reductions(view: RankView) -> dict[int, int]:
    """Returns the reductions that a later backward pass repeats before the optimizer's step (or within the profiler's,
    if it is not in the trace), by index of the call, each with the number of passes that reduce the same."""
    facts = view.facts
    found: dict[int, int] = {}
    for by_pass in _reductions(view).values():
        last = by_pass[max(by_pass)]
        same = [calls for calls in by_pass.values() if _sequence(facts, calls) == _sequence(facts, last)]
        found |= {call: len(same) for calls in same if calls is not last for call in calls}
    return found


def _reductions(view: RankView) -> dict[tuple[str, int], dict[int, list[int]]]:
    """Returns calls that reduce gradients, in the order of their launches: by process group and step of the optimizer,
    and in that by backward pass."""
    facts, roles = view.facts, view.roles
    found: dict[tuple[str, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i in sorted(range(len(facts.calls)), key=lambda i: facts.calls[i].launch_ns):
        call = facts.calls[i]
        if roles[i] != "gradient" or not call.is_in_step or call.launch_ns == NEVER:
            continue
        pass_ = int(facts.backward_passes[:, 0].searchsorted(call.launch_ns, side="right"))
        step = _optimizer_step(facts, call)
        if pass_ and step is not None:
            found[call.group, step][pass_].append(i)
    return found


def _optimizer_step(facts: RankFacts, call: Call) -> int | None:
    """Returns the number of the optimizer's step that comes after the call; None if the call is inside of one, which
    then evaluates the model itself."""
    steps = facts.optimizer_steps
    if not len(steps):
        return call.step
    before, begun = steps[:, 1].searchsorted(call.launch_ns, "right"), steps[:, 0].searchsorted(call.launch_ns)
    return int(before) if before == begun else None


def _sequence(facts: RankFacts, calls: list[int]) -> list[_Reduction]:
    return [(call.collective, call.sent, call.received) for call in (facts.calls[i] for i in calls)]


def evidence(basis: Basis) -> str:
    passes = max(loss.numbers["passes"] for loss in basis.losses)
    slowed = basis.sum_us("slowed_ns")
    exposed = basis.sum_lost_us - slowed
    slower = f", and GEMMs next to them take {as_time(slowed)} longer" if slowed > MENTIONED * exposed else ""
    return (
        f"The same gradients are reduced in {passes:.0f} backward passes for one step of the optimizer, which needs "
        f"only their sum after the last. All but the last: {basis.calls_in_words}, exposed for {as_time(exposed)}"
        f"{slower}."
    )


CAUSE = Cause(
    order=60,
    meaning="the same gradients are reduced several times for one optimizer's step",
    evidence=evidence,
    exposed=Rule(20, all_but_last),
    others=slower_gemms,
)
