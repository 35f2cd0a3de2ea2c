"""A made-up sweep of training on two nodes of two ranks each, with traces."""

from pathlib import Path
from typing import Any

from tests.make_point import ENVIRONMENT, make_point, resolved
from tests.timeline import AUTOGRAD, Timeline

RANKS, NODES = 4, 2
ALL, NODE, ACROSS = "0", "1", "2"
"""Process groups of a rank: of all ranks, of those of its node, and of those in its place on each node."""
STEP_US = 10_000


def training_trace(rank: int, *, hybrid: bool, steps: int = 2) -> Timeline:
    """Steps of FSDP2, on whose end the host does not wait. Nothing hides the gathers and reductions: between nodes 1200
    us each, within a node 300 us; with hybrid sharding the gradients are also all-reduced between nodes, for 600 us.

    Gathers and reductions have 2^24 elements of bf16: 33.6 MB.
    """
    made, node = Timeline(rank, RANKS), rank // 2
    ranks = {ALL: (0, 1, 2, 3), NODE: (2 * node, 2 * node + 1), ACROSS: (rank % 2, rank % 2 + 2)}
    group, took = (NODE, 300) if hybrid else (ALL, 1200)

    def communicate(kind: str, at: int, took: int, launch: int, group: str, **given: int) -> None:
        made.collective(kind, at, at + took, launch, group=group, ranks=ranks[group], **given)

    for number in range(steps):
        start = 1000 + number * STEP_US
        made.step(number, start - 600, start + STEP_US - 700)
        made.operator("FSDP::pre_forward", start - 590, start - 500)
        communicate("all_gather", start, took, start - 500, group, elements=1 << 24)
        made.kernel(start + took, start + 3000)
        made.backward(start + 2300, start + 6000)
        made.kernel(start + 3000, start + 6000, launch=start + 2400, thread=AUTOGRAD)
        communicate("reduce_scatter", start + 6000, took, start + 5500, group, elements=1 << 24, thread=AUTOGRAD)
        end = start + 6000 + took
        if hybrid:
            communicate("all_reduce", end, 600, start + 5600, ACROSS, elements=1 << 23, thread=AUTOGRAD)
            end += 600
        made.kernel(end, end + 400, "multi_tensor_apply_kernel", launch=start + 5800)
    return made


def write_two_nodes(directory: Path) -> None:
    """Hybrid sharding is faster on two nodes; the same ranks on one node are another case, and not profiled."""
    usual = {"none_us": 9000.0, "floor_us": 6400.0}
    for name, replicas, step_us in (("sharded", 1, 8800.0), ("hybrid", 2, 7600.0)):
        point = resolved("fsdp", **{"fsdp.replicas": replicas, "runtime.nodes": NODES, "profile": "all"})
        traces = [f"trace_rank{rank}.json.gz" for rank in range(RANKS)]
        environment: dict[str, Any] = {**ENVIRONMENT, "gpu_count": 2, "hosts": ["node7", "node8"]}
        known = {"name": name, "traces": traces, "environment": environment, "step_us": step_us}
        written = make_point("fsdp", directory, point, **known, **usual)
        for rank, trace in enumerate(traces):
            training_trace(rank, hybrid=replicas > 1).write(written / trace)
    one_node = resolved("fsdp", **{"runtime.nodes": 1})
    make_point("fsdp", directory, one_node, name="one_node", step_us=6900.0, **usual)
