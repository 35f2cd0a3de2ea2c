"""torch.compile of a model's layers, tried on one of them first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from overlap_sweep.measure.ranks import Ranks

NO = "no"
LONGEST_REASON = 200
"""Characters: inductor lists all of its options in a line."""


def compile_layers(
    layers: Sequence[nn.Module], config: Mapping[str, Any], example: Callable[[nn.Module], None], ranks: Ranks
) -> str:
    """Compile every layer in place, as `config` (`training_config.Compile`) asks; collective.

    `example(layer)` runs one forward and backward. It is tried on the first layer, whose code all others share: where
    that raises on any rank, all ranks keep their layers as they were. Called before anything is sharded, since a layer
    that fails inside of FSDP2's hooks leaves its parameters gathered.

    `nn.Module.compile` replaces how the module is called, not the module: a wrapper of `torch.compile(layer)` would put
    `_orig_mod.` into the name of every parameter, and with it into the state dict.

    Returns `no`, the backend's name, or `no: ` and the reason, which is printed, too.
    """
    if not config["enabled"]:
        return NO
    # What other points of the process have compiled would decide what is compiled now, and whether at all.
    torch._dynamo.reset()
    options = _options(config)
    try:
        layers[0].compile(**options)
        example(layers[0])
        failure = None
    except Exception as error:
        failure = _told(error)
    reason = _shared(failure, ranks)
    if reason is not None:
        # What `compile` set; there is no function that takes it back.
        layers[0]._compiled_call_impl = None
        print(f"torch.compile is left out: {reason}", flush=True)
        return f"{NO}: {reason}"
    for layer in layers[1:]:
        layer.compile(**options)
    return str(options["backend"])


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of torch.compile."""
    options = {name: config[name] for name in ("backend", "fullgraph", "dynamic")}
    if torch.version.hip and config["backend"] == "inductor":
        print("torch.compile: on ROCm aot_eager instead of inductor, without its mode and options", flush=True)
        return {**options, "backend": "aot_eager"}
    return {**options, "mode": config["mode"], "options": dict(config["options"]) or None}


def _told(error: Exception) -> str:
    """`<type>: <first line>`, of what a backend raised rather than of what dynamo made of it."""
    cause = getattr(error, "inner_exception", error)
    line = next(iter(str(cause).splitlines()), "")
    return f"{type(cause).__name__}: {line[:LONGEST_REASON]}{'...' if len(line) > LONGEST_REASON else ''}"


def _shared(failure: str | None, ranks: Ranks) -> str | None:
    """The failure of the first rank that had one, on all of them."""
    (last,) = ranks.slowest([0.0 if failure is None else float(ranks.world_size - ranks.rank)])
    if not last:
        return None
    told = [failure]
    if ranks.world_size > 1:
        dist.broadcast_object_list(told, ranks.world_size - int(last))
    return told[0]
