"""Makes a fingerprint of the steps of one rank, as they were scheduled: what communicated, by which kernel, on which
stream, launched after which computation, and what computed. It has no times."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis import LATENCY_NS, NEVER, TOGETHER_NS
from overlap_sweep.diagnosis.calls import Call
from overlap_sweep.diagnosis.facts import RankFacts, size_of
from overlap_sweep.trace.activity import BWD, FWD, RECOMPUTE
from overlap_sweep.trace.intervals import places_by_value
from overlap_sweep.trace.kernel_classes import short_name

PASSES = {FWD: "fwd", BWD: "bwd", RECOMPUTE: "bwd"}

COMPUTATION = "computation"
"""Stream of what communicates where matrix multiplications run, too."""

Counts = dict[str, int]
"""Number of kernels, or on a CPU operators, of one step by name."""


class Family(msgspec.Struct, frozen=True, order=True):
    """Key of the collectives that are compared with each other."""

    group: str
    """Description and size of the process group; names that torch gives differ between programs."""
    collective: str
    pass_: str
    """Pass of the launch, as `Call.pass_`."""


class Moved(msgspec.Struct, frozen=True):
    """One collective of a step."""

    family: int
    """Place in the fingerprint's families."""
    bytes: int | None
    """Size of the whole buffer; None if unknown."""
    dtype: str
    kernel: str
    blocks: int | None
    threads: int | None
    position: int | None
    """GEMMs that the step launched before it, in a step without any kernels; None if unknown, as in CUDA graphs."""
    stream: int
    """Number of its stream, which differs between recordings."""
    function: str
    """What launched it, as `Call.where`."""


class StepPrint(msgspec.Struct):
    moved: list[Moved]
    """Collectives in the order of their launches."""
    gemms: dict[str, Counts]
    """By pass."""
    computation: dict[str, Counts]
    grids: dict[str, dict[str, list[int]]]
    """Thread blocks of each kernel that computes, sorted, by pass and name; without those of one block."""
    copies: Counts


class Fingerprint(msgspec.Struct):
    """The steps of one rank, without those of start-up."""

    rank: int | None
    world_size: int | None
    on_device: bool
    families: list[Family]
    streams: list[str]
    """By family: COMPUTATION, or the number of the first family on its stream."""
    ready: int
    """Kernels that could have started before one that was launched before them on another stream."""
    overtook: int
    """Kernels of these that did."""
    steps: list[StepPrint]


def fingerprint_of(facts: RankFacts) -> Fingerprint:
    calls = [call for call in facts.calls if call.is_in_step]
    labels = _labels(facts, calls)
    family_of = [Family(labels[call.group], call.collective, call.pass_) for call in calls]
    families = sorted(set(family_of))
    moved: dict[int, list[tuple[Call, int]]] = defaultdict(list)
    for call, family in zip(calls, family_of, strict=True):
        moved[call.step].append((call, families.index(family)))
    # All kernels of a CUDA graph have one launch.
    launches_ns = facts.work.launch_ns[facts.work.launch_ns != NEVER]
    ordered = not facts.on_device or 2 * len(np.unique(launches_ns)) > len(launches_ns)
    ready, overtook = _overtaking(facts, calls) if facts.on_device and ordered else (np.zeros(0),) * 2
    return Fingerprint(
        rank=facts.rank,
        world_size=facts.world_size,
        on_device=facts.on_device,
        families=families,
        streams=_streams(facts, calls, family_of, families),
        ready=int(ready.sum()),
        overtook=int(overtook.sum()),
        steps=[_step(facts, number, moved[number], ordered=ordered) for number in facts.steady_steps],
    )


def _labels(facts: RankFacts, calls: Sequence[Call]) -> dict[str, str]:
    """Returns what to call each process group; those alike are numbered in the order of their first call."""
    labels: dict[str, str] = {}
    alike: Counter[str] = Counter()
    for call in calls:
        if call.group not in labels:
            about, size = facts.groups[call.group].about if call.group in facts.groups else "", size_of(facts, call)
            label = ", ".join(filter(None, (about, f"{size} ranks" if size else "")))
            alike[label] += 1
            labels[call.group] = f"{label} (group {alike[label]})" if alike[label] > 1 else label
    return labels


def _streams(
    facts: RankFacts, calls: Sequence[Call], family_of: Sequence[Family], families: Sequence[Family]
) -> list[str]:
    lanes: dict[Family, Counter[int]] = defaultdict(Counter)
    for call, family in zip(calls, family_of, strict=True):
        lanes[family][call.lane] += 1
    most = [max(lanes[family], key=lambda lane: lanes[family][lane]) for family in families]
    computing = set(np.unique(facts.work.lane[facts.work.is_gemm]).tolist())
    return [COMPUTATION if lane in computing else str(most.index(lane)) for lane in most]


def _overtaking(facts: RankFacts, calls: Sequence[Call]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Returns masks of the kernels that were ready, launched and first on their stream, while one that was launched
    before them had not started; and of those that started before that one."""
    work = facts.work
    start, end, launch, lane = (
        np.concatenate((getattr(work, name), [getattr(call, name) for call in calls])).astype(np.int64)
        for name in ("start_ns", "end_ns", "launch_ns", "lane")
    )
    order = np.lexsort((start, launch))
    order = order[launch[order] != NEVER]
    start, end, launch, lane = start[order], end[order], launch[order], lane[order]
    free = np.full(len(start), NEVER)
    for _, here in places_by_value(lane):
        free[here[1:]] = np.maximum.accumulate(end[here])[:-1]
    before = np.concatenate(([NEVER], np.maximum.accumulate(start)[:-1])) if len(start) else start
    ready = before > np.maximum(launch, free) + LATENCY_NS
    return ready, ready & (before > start + TOGETHER_NS)


def _step(facts: RankFacts, number: int, calls: Sequence[tuple[Call, int]], *, ordered: bool) -> StepPrint:
    work = facts.work
    own = np.flatnonzero(work.step == number)
    counted = own[work.is_gemm[own]] if work.is_gemm[own].any() else own
    launched = np.sort(work.launch_ns[counted])
    gemms: dict[str, Counter[str]] = defaultdict(Counter)
    computation: dict[str, Counter[str]] = defaultdict(Counter)
    grids: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index in own.tolist():
        kind = gemms if work.is_gemm[index] else computation
        pass_, name = PASSES.get(int(work.pass_[index]), "other"), facts.names[work.signature[index]]
        kind[pass_][name] += 1
        if (blocks := facts.grids[work.signature[index]]) > 1:
            grids[pass_][name].append(blocks)
    return StepPrint(
        moved=[
            Moved(
                family=family,
                bytes=call.buffer_bytes(size_of(facts, call)),
                dtype=call.dtype or "",
                kernel=brief_kernel(call.kernel),
                blocks=call.blocks,
                threads=call.threads,
                position=int(np.searchsorted(launched, call.launch_ns))
                if ordered and call.launch_ns != NEVER
                else None,
                stream=call.lane,
                function=call.where,
            )
            for call, family in sorted(calls, key=lambda one: (one[0].launch_ns, one[0].start_ns))
        ],
        gemms={pass_: dict(counts) for pass_, counts in gemms.items()},
        computation={pass_: dict(counts) for pass_, counts in computation.items()},
        grids={pass_: {name: sorted(own) for name, own in of_pass.items()} for pass_, of_pass in grids.items()},
        copies={name: count for step, name, count in facts.copied if step == number},
    )


def brief_kernel(name: str) -> str:
    """Returns the name of a kernel's function without namespaces, in which NCCL has algorithm and protocol; of a copy
    its direction."""
    if name.startswith(("Memcpy", "Memset")):
        return name.partition(" (")[0]
    return short_name(name).rpartition("::")[2].removeprefix("ncclDevKernel_") if "(" in name else name
