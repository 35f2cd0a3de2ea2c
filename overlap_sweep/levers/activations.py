"""The lever of what the backward pass computes again, since the forward pass has not kept it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from overlap_sweep.levers.process import Later, NotApplicable, live

_MODULES = ("torch.utils.checkpoint", "torch.distributed._composable.checkpoint_activation")
"""Those that call what PyTorch's checkpoints are made of, under these names."""
_GENERATOR, _FUNCTION = "_checkpoint_without_reentrant_generator", "CheckpointFunction"


def keep(_: bool) -> Later:
    """Has the forward pass keep what torch.utils.checkpoint has the backward pass compute again, from the second step
    on, also in a checkpoint_wrapper that is compiled from then on. NotApplicable if that has no such calls; then
    nothing is changed."""
    return _watched(keeps=True)


def recomputed(_: bool) -> Later:
    """Finds out whether the second step computes something again, as `keep` does."""
    return _watched(keeps=False)


def _watched(*, keeps: bool) -> Later:
    calls = 0

    def generator_of(own: Any) -> Any:
        def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
            nonlocal calls
            calls += 1
            return _nothing() if keeps else own(*args, **kwargs)

        return generator

    def function_of(own: Any) -> Any:
        class Function:
            @staticmethod
            def apply(function: Any, preserves_random_state: bool, *args: Any) -> Any:
                nonlocal calls
                calls += 1
                return function(*args) if keeps else own.apply(function, preserves_random_state, *args)

        return Function

    replaced = []
    for module in filter(None, map(sys.modules.get, _MODULES)):
        for name, made in ((_GENERATOR, generator_of), (_FUNCTION, function_of)):
            if (own := getattr(module, name, None)) is not None:
                replaced.append((module, name, own))
                setattr(module, name, made(own))
    if keeps and (wrapper := _wrapper_to_compile()):
        # A compiler would make an operator of the call inside, in which none of the above is called.
        calls += 1
        replaced.append((wrapper, "forward", wrapper.forward))
        wrapper.forward = _call_inside
    # What was before this is not counted.
    yield False
    if not calls or not keeps:
        for module, name, own in replaced:
            setattr(module, name, own)
    if not calls:
        raise NotApplicable("a step of this training computes nothing again by torch.utils.checkpoint")
    while True:
        yield True


def _wrapper_to_compile() -> Any:
    """Returns the class of the modules that keep no activations, if there are some and nothing was compiled yet."""
    wrappers = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    dynamo = sys.modules.get("torch._dynamo.utils")
    if wrappers is None or (dynamo and dynamo.counters["frames"]):
        return None
    return wrappers.CheckpointWrapper if live(wrappers.CheckpointWrapper) else None


def _call_inside(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self._checkpoint_wrapped_module(*args, **kwargs)


def _nothing() -> Iterator[None]:
    """Goes around a forward pass like a checkpoint's generator, and leaves it as it is."""
    yield
