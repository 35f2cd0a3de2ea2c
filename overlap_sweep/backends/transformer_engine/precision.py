"""Transformer Engine's precisions: recipes, and FP8 scales that stay what they are once they fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from transformer_engine.pytorch.quantization import FP8GlobalState, FP8GlobalStateManager

CALIBRATION_STEPS = {"fp8_delayed": 3, "fp8_current": 1}
"""Delayed scaling runs its first step with scales of 1, the second with those of the first step's weights and
activations; the gradients' come one step later. Every FP8 layer quantises its weights at least once."""


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
    """Run `step`, a forward and backward that quantises the weights, until they and the scales are what they should be.

    Two layers calibrated on the same inputs compute with the same scales.
    """
    # A layer that trained in an earlier point is not to be updated with this one.
    FP8GlobalStateManager.reset()
    for _ in range(CALIBRATION_STEPS.get(precision, 0)):
        step()


def freeze() -> None:
    """Leave all scales as they are.

    No step updates them any more or reduces them over the ranks: Megatron-LM does that once for a whole model, so it is
    no part of one operator's time. Layers enter themselves for updates in their first forward only, and the library
    forgets them here.
    """
    FP8GlobalStateManager.reset()


def kept_apart() -> Callable[[], None]:
    """-> what to call before each forward of one layer, so that only its own scales are updated with it.

    The library updates those of every layer in the process at once, as those of one model.
    """
    state = FP8GlobalState()

    def select() -> None:
        FP8GlobalStateManager.quantization_state = state

    return select
