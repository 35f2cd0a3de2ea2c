"""The changes that are predicted, by name, and what each is good for."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from overlap_sweep.errors import UsageError, nearest
from overlap_sweep.predict.changes import blocks, computation, gathers, hosts, reductions, resources, scale
from overlap_sweep.predict.graph import CannotTell, Node, StepGraph
from overlap_sweep.scopes import parts_of, value_for

MOST_NUMBER = 10**6
"""Larger numbers are mistakes of whoever types them."""


@dataclass(frozen=True)
class Change:
    """A change by name."""

    apply: Callable[[StepGraph, str], None]
    values: Sequence[str]
    """Tried if none is named."""
    overlaps: bool = False
    """Whether it lets more computation run beside communication, so that the GPU waits less and its clock falls."""
    is_bound: bool = False
    is_open: bool = False
    """Whether of a bound nothing says how much longer it may take."""
    is_batch: bool = False
    """Whether its value is by what a step has more samples."""
    note: str = ""
    mends: Sequence[str] = ()
    """Causes of `diagnose` that it mends."""
    of_host: bool = False
    """Whether it changes what the host does, so that it can be told where the host is the limit."""


def number_of(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number <= MOST_NUMBER:
        raise CannotTell(f"{value} is not a number above 0" + (f" and up to {MOST_NUMBER:,}." if number > 0 else "."))
    return number


def _by_group(graph: StepGraph, value: str) -> Callable[[Node], float | None]:
    """Returns the function that gives the number that a value has for the process group of a collective; None if that
    has none."""
    numbers = {number: number_of(number) for _, number in parts_of(value)}

    def of(node: Node) -> float | None:
        assert node.call
        group = graph.groups[node.rank].get(node.call.group) if graph.groups else None
        number = value_for(value, group.described if group else "", group.ranks if group else ())
        return None if number is None else numbers[number]

    return of


@dataclass(frozen=True)
class _Flag:
    """A change that has one value."""

    change: Callable[[StepGraph], None]
    value: str

    def __call__(self, graph: StepGraph, value: str) -> None:
        self.check(value)
        self.change(graph)

    def check(self, value: str) -> None:
        if value.lower() != self.value:
            raise CannotTell(f"{value} is not predicted, only {self.value}.")


def _connections(graph: StepGraph, value: str) -> None:
    (resources.with_queue if number_of(value) == 1 else resources.without_queue)(graph)


_UNSYNCHRONISED = Change(_Flag(reductions.unsynchronised, "unsynchronised"), [])
CHANGES = {
    "ddp.bucket_cap_mb": Change(
        lambda graph, value: reductions.in_buckets(graph, number_of(value) * 2**20),
        ["25", "4", "100"],
        overlaps=True,
        mends=("issued_late",),
    ),
    "ddp.hooks": Change(_Flag(reductions.in_hooks, "true"), ["true"], overlaps=True, mends=("issued_late",)),
    "ddp.accumulate": _UNSYNCHRONISED,
    "ddp.no_sync": Change(_Flag(reductions.unsynchronised, "true"), ["true"], mends=("repeated_reduction",)),
    "fsdp2.prefetch": Change(
        lambda graph, value: gathers.prefetched(graph, round(number_of(value))),
        ["1", "2"],
        overlaps=True,
        mends=("issued_late",),
    ),
    "fsdp2.reshard_after_forward": Change(
        _Flag(gathers.kept_after_forward, "false"),
        ["false"],
        mends=("bandwidth",),
    ),
    "fsdp2.accumulate": _UNSYNCHRONISED,
    "fsdp2.no_sync": Change(_Flag(reductions.unsynchronised, "true"), ["true"], mends=("repeated_reduction",)),
    "env.CUDA_DEVICE_MAX_CONNECTIONS": Change(_connections, ["8"], overlaps=True, mends=("queue_order",)),
    "cuda.max_connections": Change(_connections, [], overlaps=True),
    "host.sync": Change(_Flag(hosts.without_sync, "none"), ["none"], overlaps=True, of_host=True, mends=("host_sync",)),
    "host.launch": Change(
        _Flag(hosts.faster_host, "graph"),
        ["graph"],
        note="Kernels are as fast as they were recorded.",
        of_host=True,
        mends=("host_bound",),
    ),
    "loader.ready": Change(_Flag(hosts.ready_batches, "true"), ["true"], of_host=True),
    "activations.recompute": Change(
        _Flag(computation.kept, "false"),
        ["false"],
        note="It takes the memory of what the forward pass then keeps.",
    ),
    "kernels.fused": Change(
        _Flag(computation.fused, "true"),
        ["true"],
        is_bound=True,
        note="A compiler fuses PyTorch's own kernels into fewer, which take some of that time.",
    ),
    "optimizer.step": Change(
        _Flag(hosts.without_optimizer, "none"),
        [],
        is_bound=True,
        of_host=True,
        note="One kernel for all parameters takes some of that time.",
    ),
    "ranks.equal": Change(
        _Flag(hosts.equal_ranks, "true"),
        ["true"],
        of_host=True,
        note="To the mean of the ranks, between any two collectives: also where they are late in turn.",
        mends=("straggler",),
    ),
    "ranks.surplus": Change(
        _Flag(hosts.without_surplus, "none"),
        ["none"],
        is_bound=True,
        note="Without the kernels that one rank alone runs, if they can be left out: shared, they gain less.",
    ),
    "nccl.cta_policy": Change(
        _Flag(resources.beside_nothing, "2"),
        ["2"],
        is_bound=True,
        note="Copies by copy engines take no multiprocessors, but may be slower themselves.",
        mends=("contention",),
    ),
    "link.times": Change(
        lambda graph, value: resources.faster_link(graph, number_of(value)),
        ["2"],
        is_bound=True,
        note="Shows what the link costs; nothing sets it.",
    ),
    "nccl.max_ctas": Change(
        lambda graph, value: blocks.with_blocks(graph, most=_by_group(graph, value)),
        ["8", "16"],
        mends=("contention",),
    ),
    "nccl.min_ctas": Change(
        lambda graph, value: blocks.with_blocks(graph, least=_by_group(graph, value)),
        ["32"],
        mends=("bandwidth",),
    ),
    "batch.times": Change(lambda graph, value: scale.larger_batch(graph, number_of(value)), [], is_batch=True),
    "ranks.times": Change(
        lambda graph, value: scale.more_ranks(graph, number_of(value)),
        [],
        is_bound=True,
        is_open=True,
        note="At least so long: links between nodes, which the recording does not have, are slower.",
    ),
}


def refusal(name: str, value: str) -> str:
    """Returns why a change's value can never be predicted, whatever was recorded; empty if it may be."""
    apply = CHANGES[name].apply
    try:
        if isinstance(apply, _Flag):
            apply.check(value)
        else:
            for _, number in parts_of(value):
                number_of(number)
    except CannotTell as error:
        return f"{name}={value}: {error}"
    return ""


def that_mend(causes: Collection[str]) -> dict[str, list[str]]:
    """Returns the changes that mend each of the causes."""
    return {
        cause: [f"{name}={value}" for name, one in CHANGES.items() if cause in one.mends for value in one.values]
        for cause in causes
    }


def singles(change: str) -> list[str]:
    """Returns the changes that are joined by `+`, which may also join the values of process groups."""
    return [each.strip() for each in re.split(r"\+(?=[^+=]*=)", change)]


def parsed(change: str, also: Collection[str] = ()) -> list[tuple[Change, str]]:
    """Returns the single changes of `NAME=VALUE+NAME=VALUE`. UsageError if one is unknown. `also`: other names that may
    have been meant."""
    found = []
    for each in singles(change):
        name, separator, value = each.partition("=")
        if name not in CHANGES:
            near = nearest(name, [*CHANGES, *also])
            mend = f"Did you mean {near}?" if near else f"Choose from {', '.join(CHANGES)}."
            raise UsageError(f"Unknown change {name}. {mend}" if name else f"A change is missing. {mend}")
        if not separator or not value:
            raise UsageError(f"{each} is not NAME=VALUE, such as {name}={(CHANGES[name].values or ['8'])[0]}.")
        found.append((CHANGES[name], value))
    return found


def mends(change: str, cause: str) -> bool:
    """Returns whether a change, such as `host.launch=graph`, alone mends a cause of `diagnose`."""
    known = CHANGES.get(change.partition("=")[0])
    return known is not None and cause in known.mends and len(singles(change)) == 1
