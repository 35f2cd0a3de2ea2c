"""Levers of the host's work between kernels: loaders of data, copies to the GPU, optimizers, garbage collection,
compilation."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from overlap_sweep.levers.process import Later, NotApplicable, NotHere, live

if TYPE_CHECKING:
    from torch import Tensor, nn

FUSED_ON = ("cuda", "cpu", "mps", "xpu")
"""Devices with kernels for a whole step of an optimizer."""


def workers(number: int, arguments: Mapping[str, Any]) -> int:
    from torch.utils.data import IterableDataset

    if isinstance(arguments["dataset"], IterableDataset):
        raise NotHere("the dataset is an IterableDataset, which each worker would read from its start")
    return number


def of_workers(value: int | bool, arguments: Mapping[str, Any]) -> int | bool:
    if not arguments["num_workers"]:
        raise NotHere("no DataLoader has workers; give job.levers.loader.num_workers, too")
    return value


def pin_memory(value: bool, _: Mapping[str, Any]) -> bool:
    import torch

    if not torch.cuda.is_available():
        raise NotApplicable("pinned memory needs GPUs")
    return value


def fused(value: bool, arguments: Mapping[str, Any]) -> bool:
    from torch.distributed.tensor import DTensor

    if not value:
        return False
    for other in ("foreach", "differentiable"):
        if arguments[other]:
            raise NotApplicable(f"the script gives the optimizer {other}=True, which excludes fused=True")
    # torch finds out in the first step, which ends the training.
    parameters = _parameters(arguments["params"])
    for one in parameters:
        if not one.is_floating_point() or one.device.type not in FUSED_ON:
            raise NotApplicable(f"fused=True takes no parameters of {one.dtype} on {one.device.type}")
    if len({isinstance(one, DTensor) for one in parameters}) > 1:
        raise NotApplicable("fused=True takes no DTensors (FSDP2) beside other parameters in an optimizer")
    return True


def _parameters(params: Any) -> list[Tensor]:
    """Returns the parameters of an optimizer, which is given them, groups of them, or pairs of names and them."""
    found: list[Tensor] = []
    for one in params:
        if isinstance(one, dict):
            # As the optimizer does; they may come from a generator.
            one["params"] = list(one["params"])
            found += _parameters(one["params"])
        else:
            found.append(one[1] if isinstance(one, tuple) else one)
    return found


def collect_every(steps: int) -> Later:
    """Collects garbage between steps only, every so many of them."""
    check_collecting()
    gc.collect()
    gc.disable()
    gc.freeze()
    for step in itertools.count(1):
        yield True
        if step % steps == 0:
            gc.collect()


def check_collecting(_: object = None) -> None:
    if not gc.isenabled():
        raise NotApplicable("the script has disabled garbage collection itself")


def non_blocking(_: bool) -> Later:
    """Copies pinned tensors to the GPU without waiting, where the script does not say whether to."""
    import torch

    if not torch.cuda.is_available():
        raise NotApplicable("copies to a GPU need one")
    seen = {"pinned": 0, "other": 0}

    def wrapped(method: Any) -> Any:
        @functools.wraps(method)
        def copied(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            is_plain = "non_blocking" not in kwargs and not any(isinstance(one, bool) for one in args)
            if is_plain and tensor.device.type == "cpu" and not torch.compiler.is_compiling():
                is_pinned = tensor.is_pinned()
                seen["pinned" if is_pinned else "other"] += 1
                if is_pinned:
                    kwargs["non_blocking"] = True
            copy: Tensor = method(tensor, *args, **kwargs)
            return copy

        return copied

    methods = {name: getattr(torch.Tensor, name) for name in ("to", "cuda")}
    for name, method in methods.items():
        setattr(torch.Tensor, name, wrapped(method))
    yield False
    if not seen["pinned"]:
        for name, method in methods.items():
            setattr(torch.Tensor, name, method)
        which = "only memory that is not pinned; give job.levers.loader.pin_memory=true, too"
        raise NotApplicable(f"a step copies {which if seen['other'] else 'nothing, or says how itself'}")
    while True:
        yield True


def compile_blocks(_: bool) -> None:
    for block in blocks_to_compile():
        block.compile()


def blocks_to_compile(_: object = None) -> list[nn.Module]:
    from torch import nn
    from torch._dynamo import OptimizedModule

    blocks = repeated_blocks(live(nn.Module))
    if not blocks:
        raise NotApplicable(
            "this training has no modules of one class repeated in a ModuleList, ModuleDict or Sequential"
        )
    if live(OptimizedModule) or any(
        getattr(one, "_compiled_call_impl", None) for one in (*blocks, *map(_inner, blocks))
    ):
        raise NotApplicable("the script compiles its model itself")
    if own := next(
        (one for one in map(_written_class, blocks) if one.forward.__module__.startswith("torch.nn.")), None
    ):
        # Seen with 2.13: it captures no graph of a module whose forward is torch's own code.
        raise NotApplicable(
            f"the repeated blocks are {own.__name__}, whose forward is torch's own, with which compile() does nothing"
        )
    return blocks


def repeated_blocks(modules: list[nn.Module]) -> list[nn.Module]:
    """Returns the children of the outermost ModuleLists, ModuleDicts and Sequentials whose children are trained, of one
    class, and not single operators."""
    from torch import nn

    containers = []
    for one in modules:
        blocks = [*one.children()] if isinstance(one, nn.ModuleList | nn.ModuleDict | nn.Sequential) else []
        if len(blocks) > 1 and len({*map(_written_class, blocks)}) == 1 and all(map(_is_trained_block, blocks)):
            containers.append(one)
    inner = {module for one in containers for module in one.modules() if module is not one}
    found = {block: None for one in containers if one not in inner for block in one.children()}
    return [*found]


def _inner(block: nn.Module) -> nn.Module:
    """Returns the module of which a checkpoint_wrapper keeps no activations; any other itself."""
    inner: nn.Module = getattr(block, "_checkpoint_wrapped_module", block)
    return inner


def _written_class(block: nn.Module) -> type[nn.Module]:
    """Returns the class that the script has made a block of: FSDP2 gives its modules classes of their own, and of equal
    blocks perhaps only each second one is wrapped."""
    from torch.distributed.fsdp import FSDPModule

    own = type(_inner(block))
    return next(one for one in own.__bases__ if one is not FSDPModule) if issubclass(own, FSDPModule) else own


def _is_trained_block(block: nn.Module) -> bool:
    return any(True for _ in block.children()) and any(one.requires_grad for one in block.parameters())
