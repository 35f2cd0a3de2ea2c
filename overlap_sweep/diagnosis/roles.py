"""Tells what collectives carry, from where they are launched and what else their process group does.

- Activations are needed by the next kernels: a collective of activations blocks them by nature.
- Parameters of a sharded model are there since the optimizer's step: gathering them can begin at any time before.
- Gradients are not needed before the optimizer's step: reducing them can last until then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from overlap_sweep.diagnosis import Role
from overlap_sweep.diagnosis.calls import Call
from overlap_sweep.diagnosis.collectives import REDUCTIONS

SMALL = 0.1
"""Share of the elements of a group's collectives below which others, such as those of a loss, don't decide."""


def roles_of(calls: Sequence[Call]) -> list[Role]:
    """Returns the role of each call.

    A group that only gathers in the forward pass and reduces in the backward pass gathers parameters, unless the
    function of autograd that gathers had computed what it gathers. So does a hook or plain code that gathers in the
    forward pass of a group that reduces later, whatever else the group does: activations are gathered by functions,
    which autograd can run backward. Gathering after the optimizer's step is of parameters, too. A group that reduces in
    the forward pass reduces activations there, and so in the backward pass. What is reduced after the backward pass, or
    where autograd accumulates gradients, are gradients; but a few numbers after it are their norm, which is needed at
    once. A few numbers that are gathered are counts or losses, never parameters. What was reduced and scattered as
    gradients stays that if a group that does nothing else all-reduces it, as hybrid sharding does.
    """
    of_group: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        of_group[call.group].append(call)
    gathers = {group: _gathers_parameters(own) for group, own in of_group.items()}
    roles = [_role(call, gathers[call.group]) for call in calls]
    shards = {
        call.received
        for call, role in zip(calls, roles, strict=True)
        if role == "gradient" and call.collective == "reduce_scatter" and call.received is not None
    }
    return [
        "gradient" if call.sent in shards and _reduces_alone(of_group[call.group]) else role
        for call, role in zip(calls, roles, strict=True)
    ]


def _reduces_alone(calls: Iterable[Call]) -> bool:
    """Returns whether a group all-reduces after the forward pass, and nothing else."""
    return all(call.collective == "all_reduce" and call.pass_ != "fwd" for call in calls if not call.is_of_scalars)


def _volume(calls: Iterable[Call]) -> float:
    """Returns the elements of the whole buffers; where sizes are unknown, calls are counted."""
    return sum(float(max(call.sent or 0, call.received or 0) or 1) for call in calls)


class _Gathers(NamedTuple):
    """Which all-gathers of a group are of parameters."""

    in_functions: bool
    elsewhere: bool


def _gathers_parameters(calls: Sequence[Call]) -> _Gathers:
    forward = [
        call for call in calls if call.collective == "all_gather" and call.pass_ == "fwd" and not call.is_of_scalars
    ]
    gathered = _volume(forward)
    reduced_forward = _volume(call for call in calls if call.collective in REDUCTIONS and call.pass_ == "fwd")
    reduced_after = _volume(call for call in calls if call.collective in REDUCTIONS and call.pass_ != "fwd")
    if not gathered or reduced_after < SMALL * gathered:
        return _Gathers(False, False)
    elsewhere = _volume(call for call in forward if not call.in_function) >= SMALL * gathered
    computed = sum(1 if call.computed_before else -1 for call in forward if call.in_function) > 0
    return _Gathers(reduced_forward < SMALL * gathered and not computed, elsewhere)


def _role(call: Call, gathers: _Gathers) -> Role:
    if call.collective == "all_gather":
        if call.is_of_scalars:
            return "activation"
        if call.pass_ == "other":
            return "parameter"
        # Functions of the backward pass are not told from hooks there.
        elsewhere = gathers.elsewhere and not call.in_function
        return "parameter" if gathers.in_functions or elsewhere else "activation"
    if call.collective not in REDUCTIONS or call.pass_ == "fwd":
        return "activation"
    if call.pass_ == "other" and call.is_of_scalars:
        # The norm of all gradients, which the optimizer's step needs at once.
        return "activation"
    if gathers.in_functions or call.pass_ == "other" or call.accumulates:
        return "gradient"
    return "activation"
