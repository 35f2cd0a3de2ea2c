"""Who overlaps. Each backend is a folder here, imported only when a point asks for it.

A backend offers two functions:

`refusal(point) -> str | None`
    Why it cannot run the point, decided from the resolved configuration alone: called before any process
    starts, so it must not import torch.

`build(operator, shape, settings, ranks) -> Callable[[Tensor, Tensor, Tensor], Tensor]`
    A differentiable function of this rank's input, weight and bias (shapes: `models.LinearShape`) that
    communicates as `settings` says (`space.settings`: slot -> method and knobs; a slot that is not in it does
    not overlap). A shape of `tp_size=1` has nothing to communicate. Collective: every rank builds alike.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from overlap_sweep.errors import UserError

BACKENDS = {"torch": "overlap_sweep.backends.torch"}


def load(name: str) -> Any:
    """The backend's module. UserError for an unknown name."""
    if name not in BACKENDS:
        raise UserError(f"backend={name} is not known; choose one of {', '.join(BACKENDS)}.")
    return import_module(BACKENDS[name])
