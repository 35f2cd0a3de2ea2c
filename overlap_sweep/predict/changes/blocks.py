"""Changes of the thread blocks of NCCL's kernels: fewer leave multiprocessors to GEMMs, and move data slower."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from overlap_sweep.predict.calibration import Calibration, calibrations, chosen, fitted
from overlap_sweep.predict.costs import OTHER_SIZE, Family, bus_share, family_of, latencies_ns
from overlap_sweep.predict.graph import CannotTell, Node, StepGraph

LEEWAY, LEEWAY_ELSEWHERE = 1.12, 1.3
"""Factor by which times of collectives may differ from those predicted: on GPUs and numbers of ranks that were
calibrated, of whose rates each is predicted to 10% from the others; and on others, of which nothing is known."""


@dataclass(frozen=True)
class Kernel:
    """A collective of NCCL's."""

    node: Node
    blocks: int
    family: Family
    latency_ns: float
    gb_per_s: float | None
    """Bus bandwidth without the latency; None if its size is unknown."""


def _any(node: Node) -> None:
    return None


def with_blocks(
    graph: StepGraph,
    most: Callable[[Node], float | None] = _any,
    least: Callable[[Node], float | None] = _any,
    known: Sequence[Calibration] = (),
) -> None:
    """NCCL's kernels have at most, or at least, so many thread blocks: by collective, None if it stays as it is. Those
    of small buffers have few in any case, and don't get more. `known`: calibrations instead of the user's and this
    package's."""
    kernels = kernels_of(graph)
    if not kernels:
        raise CannotTell("No kernel of NCCL whose thread blocks are known was recorded.")
    largest: dict[str, int] = defaultdict(int)
    for one in kernels:
        largest[one.family.group] = max(largest[one.family.group], one.blocks)

    def wanted(one: Kernel) -> int:
        at_least, at_most = least(one.node), most(one.node)
        is_large = one.blocks == largest[one.family.group]
        raised = max(one.blocks, at_least) if at_least is not None and is_large else one.blocks
        return round(raised if at_most is None else min(raised, at_most))

    if all(least(one.node) is None and most(one.node) is None for one in kernels):
        raise CannotTell("No collective of such a process group was recorded.")
    changed = [(one, wanted(one)) for one in kernels if wanted(one) != one.blocks]
    if not changed:
        graph.notes.append(f"NCCL's kernels have at most {max(largest.values())} thread blocks as it is.")
        return
    known = known or calibrations()
    calibration = chosen(known, graph.device_name, graph.world_size)
    used = [calibration]
    slowed = _slowed(graph.ranks, [(one, wanted(one)) for one in kernels], calibration)
    for node in graph.nodes:
        if node.kind == "compute":
            node.slowdown *= slowed[node.rank]
    seen = _rates_seen(kernels)
    is_elsewhere, is_fitted = graph.device_name != calibration.device, True
    for one, blocks in changed:
        node = one.node
        near = _near(seen[one.family], node.bytes)
        if len(near) > 1:
            rates, leeway = fitted(near), LEEWAY
        else:
            own = _calibrated(known, one.family.collective, graph.device_name, node.group_size)
            as_there = graph.device_name == own.device and node.group_size == own.ranks
            rates = fitted((seen.blocks, seen.gb_per_s) for seen in own.rates[one.family.collective])
            leeway = LEEWAY if as_there else LEEWAY_ELSEWHERE
            used.append(own)
            is_elsewhere, is_fitted = is_elsewhere or not as_there, False
        longer = rates.longer(one.blocks, blocks, one.gb_per_s)
        node.duration_ns = one.latency_ns + (node.duration_ns - one.latency_ns) * longer
        node.leeway = (node.leeway[0] / leeway, node.leeway[1] * leeway)
        assert node.call is not None
        node.call = replace(node.call, blocks=blocks)
    graph.notes.append(
        f"What thread blocks do to {'GEMMs' if is_fitted else 'collectives and GEMMs'} was measured on "
        + " and ".join(dict.fromkeys(f"{one.gpus}, NCCL {one.nccl}" for one in used))
        + (", not on such GPUs or so many ranks as here: the interval is wider." if is_elsewhere else ".")
        + (" What they do to collectives is in this recording." if is_fitted else "")
    )


def kernels_of(graph: StepGraph) -> list[Kernel]:
    """Returns the collectives of NCCL's kernels, without those of symmetric memory, which have a grid of their own."""
    found = []
    for node, latency_ns in zip(graph.nodes, latencies_ns(graph.nodes), strict=True):
        call = node.call
        if node.kind == "comm" and call and call.library == "nccl" and call.blocks and "Sym" not in call.kernel:
            share = bus_share(call.collective, node.group_size)
            rate = None
            if share and node.bytes and node.duration_ns > 0:
                rate = node.bytes * share / (node.duration_ns - latency_ns)
            found.append(Kernel(node, call.blocks, family_of(node), latency_ns, rate))
    return found


def _slowed(ranks: int, wanted: Sequence[tuple[Kernel, int]], calibration: Calibration) -> list[float]:
    """Returns by rank the factor of what GEMMs beside collectives lose: the mean over the time of these."""
    before_ns, after_ns = [0.0] * ranks, [0.0] * ranks
    for one, blocks in wanted:
        before_ns[one.node.rank] += one.node.duration_ns
        after_ns[one.node.rank] += one.node.duration_ns * (blocks / one.blocks) ** calibration.exponent
    return [after / before if before else 1.0 for before, after in zip(before_ns, after_ns, strict=True)]


def _rates_seen(kernels: Sequence[Kernel]) -> Mapping[Family, Mapping[tuple[int, int], float]]:
    """Returns the rates that were recorded, by size in bytes and thread blocks."""
    found: dict[Family, dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in kernels:
        if one.gb_per_s is not None and one.node.bytes:
            found[one.family][one.node.bytes, one.blocks].append(one.gb_per_s)
    return defaultdict(
        dict, {family: {key: median(own) for key, own in rates.items()} for family, rates in found.items()}
    )


def _near(seen: Mapping[tuple[int, int], float], size_bytes: int | None) -> dict[int, float]:
    """Returns the recorded rates of about the same size, by thread blocks."""
    if not size_bytes:
        return {}
    return {blocks: rate for (size, blocks), rate in seen.items() if 1 / OTHER_SIZE < size / size_bytes < OTHER_SIZE}


def _calibrated(known: Sequence[Calibration], collective: str, device: str, ranks: int | None) -> Calibration:
    """Returns the calibration that has the collective. CannotTell if there is none."""
    having = [one for one in known if collective in one.rates]
    if not having:
        raise CannotTell(
            f"No recording shows how long {collective} takes with other thread blocks; "
            "+experiment=nccl_calibration measures it."
        )
    return chosen(having, device, ranks)
