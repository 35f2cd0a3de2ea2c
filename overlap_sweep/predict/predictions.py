"""Predicts the time of a step with something changed, from a recording: what can be changed by name, the interval, and
what becomes critical."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from statistics import stdev
from types import MappingProxyType
from typing import Literal

import msgspec

from overlap_sweep.diagnosis import NEVER, as_share, as_time, once
from overlap_sweep.errors import UserError, nearest
from overlap_sweep.predict.changes import blocks, gathers, hosts, reductions, resources, scale
from overlap_sweep.predict.graph import CannotTell, StepGraph
from overlap_sweep.predict.replay import (
    POWER,
    Replayed,
    kind_of,
    parts_us,
    recorded,
    replay,
    replay_at_power,
    step_us,
)

NOISE, NOISE_ON_CPU = 0.025, 0.1
"""Least half of an interval, as a share of the step: recordings of equal settings differ by so much."""

HOST_BOUND = 0.35
"""Share of the critical path that are launches from which on a recording does not hold what the GPU could gain."""

MOST_POWER = 0.7
"""Exponent of `replay.POWER` with which the highest time is predicted; the lowest with 0."""

LEAST = 0.001
"""Least change of a step, as a share of it, that is listed if no change is named."""

CRITICAL_FROM = 0.03
"""Least share of the critical path that is named."""

Status = Literal["predicted", "bound", "cannot tell"]


class Prediction(msgspec.Struct, kw_only=True):
    """What a step would take with a change. Microseconds."""

    change: str
    step_us: float
    """Of the recording: mean of its steps, of the slowest rank."""
    predicted_us: float | None
    """None if it cannot be told; of a bound the least time."""
    low_us: float | None
    high_us: float | None
    gain_us: float | None
    """For the work of a recorded step: of a step with more samples, the time for as many as the recorded one has."""
    critical: str
    """What then takes the step's time, as shares of the longest chain of what waits for each other."""
    reason: str
    """Why it cannot be told, or what else to know."""
    status: Status
    work: float = 1.0
    """Samples of the changed step over those of the recorded one."""
    parts_us: dict[str, float] = {}
    """What each kind takes of the changed step, as `replay.parts_us`."""


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


def _number(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise CannotTell(f"{value} is not a number above 0.")
    return number


def _flag(apply: Callable[[StepGraph], None], wanted: str, graph: StepGraph, value: str) -> None:
    if value.lower() != wanted:
        raise CannotTell(f"{value} is not predicted, only {wanted}.")
    apply(graph)


def _connections(graph: StepGraph, value: str) -> None:
    (resources.with_queue if _number(value) == 1 else resources.without_queue)(graph)


_UNSYNCHRONISED = Change(partial(_flag, reductions.unsynchronised, "unsynchronised"), [])
CHANGES = {
    "ddp.bucket_cap_mb": Change(
        lambda graph, value: reductions.in_buckets(graph, _number(value) * 2**20),
        ["25", "4", "100"],
        overlaps=True,
        mends=("issued_late",),
    ),
    "ddp.hooks": Change(partial(_flag, reductions.in_hooks, "true"), ["true"], overlaps=True, mends=("issued_late",)),
    "ddp.accumulate": _UNSYNCHRONISED,
    "ddp.no_sync": Change(partial(_flag, reductions.unsynchronised, "true"), ["true"], mends=("repeated_reduction",)),
    "fsdp2.prefetch": Change(
        lambda graph, value: gathers.prefetched(graph, round(_number(value))),
        ["1", "2"],
        overlaps=True,
        mends=("issued_late",),
    ),
    "fsdp2.reshard_after_forward": Change(
        partial(_flag, gathers.kept_after_forward, "false"),
        ["false"],
        mends=("bandwidth",),
    ),
    "fsdp2.accumulate": _UNSYNCHRONISED,
    "fsdp2.no_sync": Change(partial(_flag, reductions.unsynchronised, "true"), ["true"], mends=("repeated_reduction",)),
    "env.CUDA_DEVICE_MAX_CONNECTIONS": Change(_connections, ["8"], overlaps=True, mends=("queue_order",)),
    "cuda.max_connections": Change(_connections, [], overlaps=True),
    "host.sync": Change(
        partial(_flag, hosts.without_sync, "none"), ["none"], overlaps=True, of_host=True, mends=("host_sync",)
    ),
    "host.launch": Change(
        partial(_flag, hosts.faster_host, "graph"),
        ["graph"],
        note="Kernels are as fast as they were recorded.",
        of_host=True,
        mends=("host_bound",),
    ),
    "loader.ready": Change(partial(_flag, hosts.ready_batches, "true"), ["true"], of_host=True),
    "ranks.equal": Change(partial(_flag, hosts.equal_ranks, "true"), ["true"], of_host=True, mends=("straggler",)),
    "nccl.cta_policy": Change(
        partial(_flag, resources.beside_nothing, "2"),
        ["2"],
        is_bound=True,
        note="A bound: copies by copy engines take no multiprocessors, but may be slower themselves.",
        mends=("contention",),
    ),
    "link.times": Change(
        lambda graph, value: resources.faster_link(graph, _number(value)), ["2"], is_bound=True, note="A bound."
    ),
    "nccl.max_ctas": Change(
        lambda graph, value: blocks.with_blocks(graph, most=_number(value)), ["8", "16"], mends=("contention",)
    ),
    "nccl.min_ctas": Change(
        lambda graph, value: blocks.with_blocks(graph, least=_number(value)), ["32"], mends=("bandwidth",)
    ),
    "batch.times": Change(lambda graph, value: scale.larger_batch(graph, _number(value)), [], is_batch=True),
    "ranks.times": Change(
        lambda graph, value: scale.more_ranks(graph, _number(value)),
        [],
        is_bound=True,
        is_open=True,
        note="At least so long: links between nodes, which the recording does not have, are slower.",
    ),
}


def predict(graph: StepGraph, wanted: Sequence[str] = ()) -> list[Prediction]:
    """Returns a prediction for each change, in their order; without any for all that apply, best first. UserError for
    an unknown one. A change is `NAME=VALUE`, or several joined by `+`."""
    if not graph.steps or not graph.nodes:
        raise UserError("No step that all ranks have was recorded without the profiler's start; record more steps.")
    if wanted:
        return [_predicted(graph, each) for each in wanted]
    found = [_predicted(graph, f"{name}={value}") for name, one in CHANGES.items() for value in one.values]
    told = [one for one in found if one.gain_us is not None and abs(one.gain_us) >= LEAST * one.step_us]
    return sorted(told, key=lambda one: -(one.gain_us or 0.0))


def that_mend(causes: Collection[str]) -> dict[str, list[str]]:
    """Returns the changes that mend each of the causes."""
    return {
        cause: [f"{name}={value}" for name, one in CHANGES.items() if cause in one.mends for value in one.values]
        for cause in causes
    }


def parsed(change: str) -> list[tuple[Change, str]]:
    """Returns the single changes of `NAME=VALUE+NAME=VALUE`. UserError if one is unknown."""
    found = []
    for each in change.split("+"):
        name, separator, value = each.strip().partition("=")
        if name not in CHANGES:
            near = nearest(name, [*CHANGES])
            mend = f"Did you mean {near}?" if near else f"Choose from {', '.join(CHANGES)}."
            raise UserError(f"Unknown change {name}. {mend}")
        if not separator or not value:
            raise UserError(f"{each} is not NAME=VALUE, such as {name}={(CHANGES[name].values or ['8'])[0]}.")
        found.append((CHANGES[name], value))
    return found


def _predicted(graph: StepGraph, change: str) -> Prediction:
    singles = parsed(change)
    original_us = step_us(graph, recorded(graph))

    def answer(
        status: Status,
        reason: str,
        times: Sequence[float | None] = (None, None, None),
        critical: str = "",
        parts: Mapping[str, float] = MappingProxyType({}),
        work: float = 1.0,
    ) -> Prediction:
        usual, low, high = times
        return Prediction(
            change=change,
            step_us=original_us,
            predicted_us=usual,
            low_us=low,
            high_us=high,
            gain_us=None if usual is None else original_us - usual / work,
            critical=critical,
            reason=reason,
            status=status,
            work=work,
            parts_us=dict(parts),
        )

    overlaps = any(one.overlaps for one, _ in singles)
    notes = [one.note for one, _ in singles if one.note]
    if (graph.world_size or 0) > graph.ranks:
        notes.append(
            f"Traces of {graph.ranks} of {graph.world_size} ranks: what they wait for in others is taken to stay."
        )
    if overlaps and graph.on_device and not any(graph.shows_contention):
        notes.append("No GEMM ran beside communication: what that costs is taken from two H200s.")

    def replayed(contention: float, end: Literal[0, 1] | None, power: float) -> tuple[StepGraph, Replayed]:
        changed = _changed(graph, singles, contention, end)
        return changed, replay_at_power(changed, graph, power if overlaps else 0.0)

    try:
        for each in change.split("+"):
            _check_family(graph, each.strip().partition(".")[0])
        if graph.on_device and not any(one.of_host for one, _ in singles):
            _refuse_host_bound(graph)
        usual, times = replayed(1.0, None, POWER)
        spread_us = [step_us(*replayed(0.5, 0, 0.0)), step_us(*replayed(1.5, 1, MOST_POWER))]
    except CannotTell as error:
        return answer("cannot tell", str(error))
    predicted_us = step_us(usual, times)
    half_us = max(_noise_us(graph), (NOISE if graph.on_device else NOISE_ON_CPU) * original_us)
    low_us, high_us = min(*spread_us, predicted_us) - half_us, max(*spread_us, predicted_us) + half_us
    bounds = [one for one, _ in singles if one.is_bound]
    status: Status = "bound" if bounds else "predicted"
    work = prod(_number(value) for one, value in singles if one.is_batch)
    if work != 1:
        per_sample = predicted_us / work / original_us - 1
        notes.append(
            f"A step of {work:g} times the samples: {as_time(predicted_us / work)} for as many as now, "
            f"{as_share(abs(per_sample))} {'more' if per_sample > 0 else 'less'}."
        )
    open_us = None if any(one.is_open for one in bounds) else max(high_us, original_us if bounds else 0.0)
    notes = list(dict.fromkeys([*notes, *usual.notes]))
    found = (predicted_us, max(low_us, 0.0), open_us)
    return answer(status, " ".join(notes), found, critical_path(usual, times), parts_us(usual, times), work)


DIFFERS = 0.005
"""Least difference, as a share of the step, that is named of a prediction that was checked."""


def where_wrong(prediction: Prediction, graph: StepGraph) -> str:
    """Returns which parts of the changed step take longer or shorter than predicted, the largest difference first.
    `graph`: that of a recording with the change."""
    measured_us = parts_us(graph, recorded(graph))
    more_us = {
        name: measured_us.get(name, 0.0) - prediction.parts_us.get(name, 0.0)
        for name in {*measured_us, *prediction.parts_us}
    }
    named = sorted(
        (one for one in more_us.items() if abs(one[1]) >= DIFFERS * prediction.step_us), key=lambda one: -abs(one[1])
    )
    return "; ".join(f"{name} {as_time(abs(us))} {'more' if us > 0 else 'less'} than predicted" for name, us in named)


def _changed(
    graph: StepGraph, singles: Sequence[tuple[Change, str]], contention: float, end: Literal[0, 1] | None
) -> StepGraph:
    """Returns the graph with the changes. `contention`: factor of what computation and communication cost each other;
    `end`: whether what was not recorded takes the least or the most time that it may, or as long as it usually does."""
    copy = graph.copy()
    for single, value in singles:
        single.apply(copy, value)
    for node in copy.nodes:
        node.slowdown *= contention
        if end is not None:
            node.duration_ns *= node.leeway[end]
    return copy


def _noise_us(graph: StepGraph) -> float:
    """Returns the standard deviation of the recorded steps."""
    ends = [
        max((node.recorded_ns[1] for node in graph.nodes if node.step == step and node.kind == "compute"), default=0.0)
        for step in graph.steps
    ]
    took = [(after - before) / 1000 for before, after in pairwise(ends)]
    return stdev(took) if len(took) > 1 else 0.0


def _check_family(graph: StepGraph, family: str) -> None:
    calls = [(node.role, node.call.collective) for node in graph.nodes if node.call]
    if family == "ddp" and ("gradient", "all_reduce") not in calls:
        raise CannotTell("No all-reduce of gradients was recorded.")
    if family == "fsdp2" and ("parameter", "all_gather") not in calls:
        raise CannotTell("No all-gather of parameters was recorded.")


def _refuse_host_bound(graph: StepGraph) -> None:
    share = once(graph, _launches_share)
    if share >= HOST_BOUND:
        raise CannotTell(
            f"{as_share(share)} of the recorded step is the host's launches, which recording slows down; "
            "only changes of the host can be told."
        )


def _launches_share(graph: StepGraph) -> float:
    return _critical_shares(graph, replay(graph)).get("launches", 0.0)


def critical_path(graph: StepGraph, times: Replayed) -> str:
    """Returns what makes up the longest chain, such as `GEMMs 71%, all_reduce bwd 12%, launches 8%`."""
    listed = [(name, share) for name, share in _critical_shares(graph, times).items() if share >= CRITICAL_FROM]
    return ", ".join(f"{name} {as_share(share)}" for name, share in listed)


def _critical_shares(graph: StepGraph, times: Replayed) -> dict[str, float]:
    """Returns the shares, the largest first, of the chain in which each node waited for the one before, from the first
    kernel of the last one's rank on."""
    spent: dict[str, float] = defaultdict(float)
    running = [i for i, node in enumerate(graph.nodes) if node.kind in ("compute", "comm")]
    place = max(running, key=lambda i: times.ends_ns[i])
    first_ns = min(times.starts_ns[i] for i in running if graph.nodes[i].rank == graph.nodes[place].rank)
    until_ns = times.ends_ns[place]
    while place != NEVER and until_ns > first_ns:
        node, before = graph.nodes[place], times.waited_for[place]
        since_ns = max(times.moved_ns[place], first_ns)
        spent[kind_of(node)] += max(until_ns - since_ns, 0.0)
        if before != NEVER:
            is_late_rank = node.meeting != NEVER and graph.nodes[before].meeting == node.meeting
            ended_ns = since_ns if is_late_rank else max(times.ends_ns[before], first_ns)
            of_host = graph.nodes[before].kind in ("launch", "sync")
            spent["launches" if of_host else "pauses"] += max(since_ns - ended_ns, 0.0)
            until_ns = ended_ns
        place = before
    total = sum(spent.values())
    return {name: spent[name] / total for name in sorted(spent, key=lambda name: -spent[name])} if total else {}
