"""Tells what collectives carry, from where they are launched and what else their process group does.

- Activations are needed by the next kernels: a collective of activations blocks them by nature.
- Parameters of a sharded model are there since the optimizer's step: gathering them can begin at any time before.
- Gradients are not needed before the optimizer's step: reducing them can last until then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from overlap_sweep.diagnosis.facts import Call

Role = Literal["activation", "parameter", "gradient"]

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")

SMALL = 0.1
"""Share of the elements of a group's collectives below which others, such as those of a loss, don't decide."""


def roles_of(calls: Sequence[Call]) -> list[Role]:
    """Returns the role of each call.

    A group that only gathers in the forward pass and reduces in the backward pass gathers parameters, unless the
    function of autograd that gathers had computed what it gathers. Gathering after the optimizer's step is of
    parameters, too. A group that reduces in the forward pass reduces activations there, and so in the backward pass.
    What is reduced after the backward pass, or where autograd accumulates gradients, are gradients.
    """
    volume: dict[str, dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
    in_layers: dict[str, int] = defaultdict(int)
    for call in calls:
        kind = "reduce" if call.collective in REDUCTIONS else call.collective
        volume[call.group][kind, call.pass_] += _elements(call)
        if kind == "all_gather" and call.pass_ == "fwd":
            in_layers[call.group] += 1 if call.computed_before else -1
    gathers = {
        group: _gathers_parameters(of, in_layers[group] > 0)
        for group, of in volume.items()
        if group or len(volume) == 1
    }
    return [_role(call, volume[call.group], gathers.get(call.group, False)) for call in calls]


def _elements(call: Call) -> float:
    """Returns the elements of the whole buffer; 1 where sizes are unknown, so that calls are counted."""
    return float(max(call.sent or 0, call.received or 0) or 1)


def _gathers_parameters(volume: dict[tuple[str, str], float], computed: bool) -> bool:
    gathered = volume["all_gather", "fwd"] + volume["all_gather", "other"]
    reduced_forward = volume["reduce", "fwd"]
    reduced_after = volume["reduce", "bwd"] + volume["reduce", "other"]
    if not gathered or computed:
        return False
    return reduced_forward < SMALL * gathered and reduced_after >= SMALL * gathered


def _role(call: Call, volume: dict[tuple[str, str], float], gathers_parameters: bool) -> Role:
    if call.collective == "all_gather":
        return "parameter" if gathers_parameters or call.pass_ == "other" else "activation"
    if call.collective not in REDUCTIONS or call.pass_ == "fwd":
        return "activation"
    if gathers_parameters or call.pass_ == "other" or call.accumulates:
        return "gradient"
    return "activation"
