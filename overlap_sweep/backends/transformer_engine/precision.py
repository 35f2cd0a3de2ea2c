"""Transformer Engine's precisions: recipes, and FP8 scales that stay what they are once they fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

CALIBRATION_STEPS = 3
"""The first step runs with scales of 1, the second with those of the first step's activations; the gradients' come
one step later."""


def autocast(precision: str, group: dist.ProcessGroup | None) -> AbstractContextManager[Any]:
    """`group` is the one over which delayed scaling agrees on its scales; None for a rank alone."""
    recipe: Recipe
    if precision == "fp8_delayed":
        # Without a group the library would take the default one, in which nobody else may be reducing.
        recipe = DelayedScaling(reduce_amax=group is not None)
    elif precision == "fp8_current":
        recipe = Float8CurrentScaling()
    else:
        return nullcontext()
    context: AbstractContextManager[Any] = te.autocast(enabled=True, recipe=recipe, amax_reduction_group=group)
    return context


def calibrate(precision: str, step: Callable[[], object]) -> None:
    """Run `step`, a forward and backward, until delayed scaling has its scales; then leave them alone.

    Afterwards no step updates them or reduces them over the ranks: Megatron-LM does that once for a whole model, so
    it is no part of one operator's time. Two layers calibrated on the same inputs compute with the same scales.
    """
    if precision == "fp8_delayed":
        for _ in range(CALIBRATION_STEPS):
            step()
        FP8GlobalStateManager.reset()
