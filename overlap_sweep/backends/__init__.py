"""Who overlaps. Each backend is a folder here, imported only when a point asks for it.

A backend offers these functions. The first three are called where there is no torch and no GPU.

`refusal(point) -> str | None`
    Why it cannot run the point, decided from the resolved configuration alone, before any process starts.

`default_knobs(method) -> Mapping[str, Any]`
    What a knob that the user left null stands for, so that a setting says all that it is.

`has_default(point) -> bool`
    Whether there is a default overlap of the library's own to compare with.

`parameter_shapes(point, shape) -> Mapping[str, tuple[int, ...]]`
    The operator's parameters on this rank.

`prepare(point, purpose) -> None`
    Make ready what is built for `purpose` communicates with: before it is built, and before it is called again after
    another purpose or point was prepared. Collective.

`build(point, purpose, ranks, parameters) -> ParallelLinear`
    The operator as `purpose` says. Collective: every rank builds alike.

`close() -> None`
    Free what it holds, before the process group ends. Collective.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from overlap_sweep.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = {
    "torch": "overlap_sweep.backends.torch",
    "transformer_engine": "overlap_sweep.backends.transformer_engine",
    "megatron": "overlap_sweep.backends.megatron",
}

Purpose = Literal["point", "default", "none", "floor", "tp1"]
"""`point`: overlapped as the point's settings say, its other slots not at all; `default`: every slot as the library
overlaps it unasked; `none`: not overlapped; `floor`: the same GEMMs without communication; `tp1`: the whole operator
on one rank."""


@dataclass(frozen=True)
class ParallelLinear:
    """One rank's part of a linear operator."""

    forward: Callable[[Tensor], Tensor]
    """Differentiable in its input and in `parameters`."""
    parameters: Mapping[str, Tensor]
    """Leaves, by name: `weight`, and what else there is."""
    input_shape: tuple[int, int]
    output_shape: tuple[int, int]


def load(name: str) -> Any:
    """The backend's module. UserError for an unknown name."""
    if name not in BACKENDS:
        raise UserError(f"backend={name} is not known; choose one of auto, {', '.join(BACKENDS)}.")
    return import_module(BACKENDS[name])


def close_all() -> None:
    """Close every backend that this process has loaded. Collective."""
    for path in BACKENDS.values():
        if path in sys.modules:
            sys.modules[path].close()


def choose(device: str) -> str:
    """What `backend=auto` stands for: Megatron-LM's way to overlap where it can be measured."""
    module = load("transformer_engine")
    return "transformer_engine" if device == "cuda" and module.missing() is None else "torch"
