"""Finds gradients that are reduced more than once for one step of the optimizer.

A program that accumulates the gradients of several microbatches needs their sum over ranks only once, after the last.
Then each backward pass between two steps of the optimizer reduces the same: in the same process group, of the same
sizes and in the same order. Layers of equal sizes repeat within one backward pass, and don't count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from overlap_sweep.diagnosis.calls import NEVER, Call
from overlap_sweep.diagnosis.facts import RankFacts
from overlap_sweep.diagnosis.roles import Role
from overlap_sweep.trace.activity import NO_ITERATION

_Reduction = tuple[str, int | None, int | None]


def repeated_reductions(facts: RankFacts, roles: Sequence[Role]) -> dict[int, int]:
    """Returns the reductions that a later backward pass repeats before the optimizer's step, by index of the call, each
    with the number of passes that reduce the same.

    Where no step of one of torch's optimizers is in the trace, those of one profiler step.
    """
    found: dict[int, int] = {}
    for by_pass in _reductions(facts, roles).values():
        last = by_pass[max(by_pass)]
        same = [calls for calls in by_pass.values() if _sequence(facts, calls) == _sequence(facts, last)]
        found |= {call: len(same) for calls in same if calls is not last for call in calls}
    return found


def _reductions(facts: RankFacts, roles: Sequence[Role]) -> dict[tuple[str, int], dict[int, list[int]]]:
    """Returns calls that reduce gradients, in the order of their launches: by process group and step of the optimizer,
    and in that by backward pass."""
    found: dict[tuple[str, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i in sorted(range(len(facts.calls)), key=lambda i: facts.calls[i].launch_ns):
        call = facts.calls[i]
        if roles[i] != "gradient" or call.step == NO_ITERATION or call.launch_ns == NEVER:
            continue
        pass_ = int(np.searchsorted(facts.backward_passes[:, 0], call.launch_ns, side="right"))
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
    before, begun = np.searchsorted(steps[:, 1], call.launch_ns, "right"), np.searchsorted(steps[:, 0], call.launch_ns)
    return int(before) if before == begun else None


def _sequence(facts: RankFacts, calls: list[int]) -> list[_Reduction]:
    return [(call.collective, call.sent, call.received) for call in (facts.calls[i] for i in calls)]
