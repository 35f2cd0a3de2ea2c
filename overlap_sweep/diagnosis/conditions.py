"""What `advice.yaml` may ask of any finding, by name; causes have conditions of their own besides."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from statistics import median

from overlap_sweep.diagnosis.basis import Basis
from overlap_sweep.diagnosis.causes import CAUSES
from overlap_sweep.diagnosis.collectives import BYTES_OF, type_of
from overlap_sweep.diagnosis.slowdown import lost_of_hidden

TRAINING = {"optimizer", "loader", "ddp", "fsdp1", "fsdp2", "deepspeed"}
"""Libraries of which a training run has at least one. Benchmarks of operators and layers have none."""

DEFAULT_BUCKET = 25
"""PyTorch's bucket_cap_mb."""

LEAST_BUCKET = 1
"""Buckets of fewer MiB are mostly latency."""

LEAST_BLOCKS = 4
"""Fewest SMs of NCCL that can be halved twice."""

BUSY = 0.5
"""Share of the time hidden on a CPU from which on what GEMMs lose next to communication makes overlap not worth it."""

_MEGATRON = re.compile(r"_PARALLEL_GROUP")
"""In the descriptions of Megatron-Core's process groups."""


def conditions_of(basis: Basis) -> dict[str, str]:
    """Returns the conditions that hold, each with its value for the sentence, if it has one."""
    calls = basis.calls
    names = {
        *(basis.own.libraries | basis.roles),
        *(name for call in calls for name in (call.collective, call.library, call.pass_)),
        *CAUSES[basis.cause].conditions(basis),
    }
    found = {name: condition(basis) for name, condition in CONDITIONS.items()}
    return dict.fromkeys(names, "") | {
        name: value if isinstance(value, str) else "" for name, value in found.items() if value
    }


def _few_numbers(basis: Basis) -> bool:
    """Returns whether the calls move a norm, losses or counts of tokens."""
    calls = basis.calls
    return (
        basis.roles == {"activation"}
        and bool(calls)
        and all(call.pass_ == "other" or call.is_of_scalars for call in calls)
        and not _point_to_point(basis)
    )


def _point_to_point(basis: Basis) -> bool:
    return any(call.is_message for call in basis.calls)


def _after_step(basis: Basis) -> bool:
    return basis.roles == {"parameter"} and all(call.pass_ == "other" for call in basis.calls)


def _one_unit(basis: Basis) -> bool:
    """Returns whether the parameters of a sharded model are gathered all at once: by one call in each pass."""
    groups = {call.group for call in basis.calls}
    gathers = [
        call
        for call in basis.own.calls
        if call.group in groups and call.collective == "all_gather" and call.pass_ in ("fwd", "bwd")
    ]
    begun = sorted(basis.own.backward_passes.reshape(-1).tolist())
    # Even numbers are forward passes, odd ones backward passes.
    by_pass = Counter(bisect_right(begun, call.launch_ns) for call in gathers)
    alike = {(call.sent, call.received, call.where) for call in gathers if not call.is_of_scalars}
    return basis.roles == {"parameter"} and len(alike) == 1 and max(by_pass.values()) == 1


def _gathered_twice(basis: Basis) -> bool:
    groups = {call.group for call in basis.calls}
    return any(
        call.collective == "all_gather" and call.pass_ == "bwd" and call.group in groups for call in basis.own.calls
    )


def _low_precision(basis: Basis) -> bool:
    calls = basis.calls
    return bool(calls) and all(BYTES_OF.get(type_of(call.dtype), 4) < 4 for call in calls)


def _bucket_mib(basis: Basis) -> list[float]:
    return [size / 2**20 for call in basis.calls if (size := call.buffer_bytes())]


def _smaller_bucket(basis: Basis) -> str:
    # A parameter larger than the limit has a bucket of its own, so that the largest does not show the limit.
    usual = median(_bucket_mib(basis) or [0.0])
    if usual < LEAST_BUCKET:
        return ""
    return f"{DEFAULT_BUCKET if usual > 1.2 * DEFAULT_BUCKET else usual / 2:.2g}"


def _larger_bucket(basis: Basis) -> str:
    # Buckets of a model that is small are below any limit.
    larger = 4 * max(_bucket_mib(basis), default=0.0)
    return f"{larger:.0f}" if larger > DEFAULT_BUCKET else ""


def _fewer_blocks(basis: Basis) -> str:
    most = max((call.blocks for call in basis.calls if call.blocks and call.library == "nccl"), default=0)
    return f"{most // 2} or {most // 4}" if most >= LEAST_BLOCKS else ""


def _busy_cores(basis: Basis) -> str:
    if basis.own.on_device or basis.cause not in ("dependency", "issued_late"):
        return ""
    slower = lost_of_hidden(basis.own, basis.view.exposure.gaps)
    return f"{slower:.0%}" if slower >= BUSY else ""


CONDITIONS: dict[str, Callable[[Basis], bool | str]] = {
    "cpu": lambda basis: not basis.own.on_device,
    "megatron": lambda basis: any(_MEGATRON.search(group.about) for group in basis.own.groups.values()),
    "no_training": lambda basis: not any(view.facts.libraries & TRAINING for view in basis.views),
    "point_to_point": _point_to_point,
    "few_numbers": _few_numbers,
    "after_step": _after_step,
    "one_unit": _one_unit,
    "gathered_twice": _gathered_twice,
    "low_precision": _low_precision,
    "blocks_backward": lambda basis: basis.blocks_backward,
    "between_nodes": lambda basis: basis.between_nodes,
    "parameters_between_nodes": lambda basis: (
        basis.between_nodes and basis.roles == {"parameter"} and not _after_step(basis)
    ),
    "activations_between_nodes": lambda basis: (
        basis.between_nodes and basis.roles == {"activation"} and not (_few_numbers(basis) or _point_to_point(basis))
    ),
    # Values to try instead of those that the trace shows to be in use: buckets in MiB, SMs of NCCL.
    "smaller": _smaller_bucket,
    "larger": _larger_bucket,
    "fewer": _fewer_blocks,
    "busy_cores": _busy_cores,
}
"""By name; a condition holds if it returns True, or a value for the sentence."""
