"""Levers of DistributedDataParallel beyond its plain arguments, and accumulation of gradients without synchronisation,
which FSDP2 has, too."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from overlap_sweep.errors import first_line
from overlap_sweep.levers.process import Later, NotApplicable, live

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

M = TypeVar("M", bound="nn.Module")
DEFAULT_BUCKETS_MB = [1, 25]
"""The first, and all others, where none is given; a size that is given is that of all."""


def buckets(first_mb: float, arguments: Mapping[str, Any]) -> list[float] | None:
    """Returns the sizes of DDP's buckets: the first, and that of all others; what the call has, if it has these."""
    given, size_mb = arguments["bucket_cap_mb_list"], arguments["bucket_cap_mb"]
    now = DEFAULT_BUCKETS_MB if size_mb is None else [size_mb, size_mb]
    found = [first_mb, now[1]]
    return given if not given and found == now else found


def check_all_used(_: bool) -> None:
    """Raises NotApplicable if a parameter got no gradient in the first step, which DDP would wait for."""
    for model in models():
        for name, parameter in model.module.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise NotApplicable(f"the parameter {name} got no gradient in the first step")


def compress_bf16(_: bool) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    for model in models():
        try:
            model.register_comm_hook(None, bf16_compress_hook)
        except (RuntimeError, TypeError) as error:
            raise NotApplicable(f"DDP takes no bf16_compress_hook here ({first_line(error)})") from error


def no_sync(_: bool) -> Later:
    def synchronise(model: DistributedDataParallel, is_last: bool) -> None:
        # What no_sync() sets, and DDP reads in the forward pass.
        model.require_backward_grad_sync = is_last

    return synchronise_last(_dynamic(), synchronise)


def several_microbatches(_: bool) -> Later:
    return counted(_dynamic())


def _dynamic() -> list[DistributedDataParallel]:
    found = models()
    if any(model.static_graph for model in found):
        raise NotApplicable("DDP with static_graph=True synchronises in every microbatch")
    return found


def counted(models: Sequence[nn.Module]) -> Later:
    """Counts the microbatches of the second step. NotApplicable if there is one. With torch.compile it stays undecided:
    a hook would have the model compiled again."""
    from torch._dynamo import OptimizedModule

    if live(OptimizedModule) or any(model._compiled_call_impl for model in models):
        return itertools.repeat(False)
    return synchronise_last(models, None)


def synchronise_last(models: Sequence[M], synchronise: Callable[[M, bool], None] | None) -> Later:
    """Counts the microbatches of a step: forward passes of a model that record gradients. From then on it has gradients
    synchronised in the last one alone. NotApplicable if there is one, or if their number changes: then all synchronise
    again.

    `synchronise`: sets whether the forward pass that begins, and its backward pass, synchronise; None: to count alone.
    """
    import torch

    counts: Counter[M] = Counter()
    per_step: Counter[M] = Counter()

    def before_forward(model: M, *_: object) -> None:
        if torch.is_grad_enabled():
            counts[model] += 1
            if per_step and synchronise:
                synchronise(model, counts[model] >= per_step[model])

    hooks = [model.register_forward_pre_hook(before_forward) for model in models]
    try:
        # What was before this is not counted.
        yield False
        if max(counts.values(), default=0) < 2:
            raise NotApplicable("a step of this training has one microbatch")
        if not synchronise:
            for hook in hooks:
                hook.remove()
            return
        per_step.update(counts)
        while counts == per_step:
            counts.clear()
            yield True
        raise NotApplicable(
            f"the number of microbatches changes: a step had {max(per_step.values())}, another {max(counts.values())}"
        )
    except NotApplicable:
        for model, hook in zip(models, hooks, strict=True):
            hook.remove()
            if synchronise:
                synchronise(model, True)
        raise


def models(_: object = None) -> list[DistributedDataParallel]:
    from torch.nn.parallel import DistributedDataParallel

    found = live(DistributedDataParallel)
    if not found:
        raise NotApplicable("this training has made no DistributedDataParallel")
    return found
