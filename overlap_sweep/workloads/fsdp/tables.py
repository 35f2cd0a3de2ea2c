"""Tables of training steps: points, settings, and the best of each case; and the bytes that a rank sends in a step,
within its node and to others, computed from how the model is sharded.

A collective of n ranks on S bytes makes each rank send (n - 1) / n S, an all-reduce twice that: the factors of
nccl-tests (doc/PERFORMANCE.md), which hold for NCCL's and gloo's rings. A ring visits the ranks in order, so that it
leaves each node once: of a group with m ranks on each of several nodes, 1 / m of what is sent crosses between nodes.
NCCL's trees, for small all-reduces, send about as much. FSDP2 communicates as ZeRO's stage 3 does (Rajbhandari et al.,
arXiv:1910.02054, section 7).
"""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from overlap_sweep.report import table
from overlap_sweep.report.diagnosis import NODES
from overlap_sweep.report.numbers import as_loss
from overlap_sweep.report.table import Column, Kind, PointRow, Table, asked, attribute, points_table, through
from overlap_sweep.results.measured import Scalar
from overlap_sweep.study import section
from overlap_sweep.study.settings import Options, value_in_words
from overlap_sweep.workloads.fsdp.config import Asked, Resolved
from overlap_sweep.workloads.fsdp.rows import NAMING, Analysis, FsdpRow, knobs_of, overrides

A = Column[Analysis]
C = Column[FsdpRow]
K = Column[Options]


def _knob(name: str, kind: Kind, path: str, read: Callable[[Scalar], Scalar] = lambda value: value) -> K:
    return K(name, lambda options: read(options[path]), f"Value of the option {path}.", kind)


STRATEGY = _knob("strategy", "text", "distributed.strategy")
KNOBS = (
    K(
        "turned",
        lambda options: len(NAMING.changed(options)),
        "Number of options that are not at their defaults.",
        "count",
    ),
    replace(_knob("batch_size", "count", "training.batch_size"), header="batch", show=str, dropped=1),
    _knob("gradient_accumulation", "count", "training.gradient_accumulation"),
    _knob("forward_prefetch", "count", "fsdp.forward_prefetch", lambda value: None if value is None else int(value)),
    _knob("backward_prefetch", "text", "fsdp.backward_prefetch", value_in_words),
    _knob("limit_all_gathers", "flag", "fsdp.limit_all_gathers"),
    _knob("reshard_after_forward", "text", "fsdp.reshard_after_forward", value_in_words),
    _knob("replicas", "count", "fsdp.replicas"),
    _knob("reduce_dtype", "text", "fsdp.reduce_dtype"),
    _knob("layers_per_unit", "count", "fsdp.layers_per_unit"),
    _knob("separate_reduce_scatter_group", "flag", "fsdp.separate_reduce_scatter_group"),
    _knob("symmetric_memory", "text", "fsdp.symmetric_memory"),
    _knob("enable_overlap", "flag", "distributed.enable_overlap"),
    _knob("bucket_cap_mb", "number", "distributed.bucket_cap_mb"),
    _knob("compile", "flag", "compile.enabled"),
)
"""Options with their own columns; the others are in `setting`."""


_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class NodeTraffic(NamedTuple):
    """Bytes that a rank sends in a step, mean over the ranks: to ranks of its own node, and of others."""

    within_node: float
    between_nodes: float


def node_traffic(
    *,
    parameter_bytes: float,
    gradient_bytes: float,
    ranks: int,
    nodes: int,
    replicas: int = 1,
    reshard_after_forward: bool | int = True,
    micro_batches: int = 1,
) -> NodeTraffic:
    """Returns what a rank sends in a step of sharded data parallelism. `replicas=ranks` is plain data parallelism.

    parameter_bytes, gradient_bytes: the whole model's, as they are gathered and reduced, without FSDP2's padding.
    reshard_after_forward: as in FSDP2; with a number of ranks the backward pass gathers among that many.
    """
    shards, per_node = ranks // replicas, ranks // nodes
    shard_groups = [range(first, first + shards) for first in range(0, ranks, shards)]
    replica_groups = [range(first, ranks, shards) for first in range(shards)]
    collectives = [(micro_batches * parameter_bytes, shard_groups), (gradient_bytes, shard_groups)]
    if reshard_after_forward:
        group = shards if reshard_after_forward is True else int(reshard_after_forward)
        again = [range(first, first + group) for first in range(0, ranks, group)]
        collectives.append((micro_batches * parameter_bytes, again))
    # Each rank has one part of the reduced gradients.
    collectives.append((2 * gradient_bytes / shards, replica_groups))
    within = between = 0.0
    for size, groups in collectives:
        count = len(groups[0])
        links = [(rank, group[(place + 1) % count]) for group in groups for place, rank in enumerate(group)]
        crossing = sum(rank // per_node != following // per_node for rank, following in links) / ranks
        sent = size * (count - 1) / count
        within, between = within + sent * (1 - crossing), between + sent * crossing
    return NodeTraffic(within, between)


def traffic_of(point: Resolved, parameters: int) -> NodeTraffic | None:
    """Returns the traffic of a resolved training point with so many parameters; None on a single node. Without the
    all-reduce of the gradients' norm, which is one number."""
    nodes, ranks = point.runtime.nodes or 1, point.distributed.dp_size
    if nodes == 1:
        return None
    fsdp, distributed = point.fsdp, point.distributed
    if distributed.strategy == "ddp":
        # Parameters and gradients are in float32, whatever autocast computes in.
        size = parameters * _BYTES["fp32"]
        reduced = node_traffic(parameter_bytes=0, gradient_bytes=size, ranks=ranks, nodes=nodes, replicas=ranks)
        if not distributed.overlap_reduce_scatter:
            return reduced
        load = node_traffic(parameter_bytes=0, gradient_bytes=size, ranks=ranks, nodes=nodes)
        return NodeTraffic(*(sum(both) for both in zip(reduced, load, strict=True)))
    return node_traffic(
        parameter_bytes=parameters * _BYTES[point.precision],
        gradient_bytes=parameters * _BYTES[fsdp.reduce_dtype or point.precision],
        ranks=ranks,
        nodes=nodes,
        replicas=fsdp.replicas,
        reshard_after_forward=fsdp.reshard_after_forward,
        micro_batches=point.training.gradient_accumulation,
    )


def _sent(name: str, sent: str, header: str, dropped: int) -> Column[NodeTraffic]:
    computed = "computed from the sharding, mean over the ranks; empty for points on one node."
    about, value = f"Data that a rank sends {sent} in a step, 10^9 bytes: {computed}", attrgetter(name)
    return Column(f"{name}_gb", lambda t: value(t) / 1e9, about, header=header, show="{:.3g}".format, dropped=dropped)


TRAFFIC = (
    _sent("within_node", "within its node", "GB in node", 2),
    _sent("between_nodes", "to other nodes", "GB between nodes", 6),
)

TIMES = (
    attribute("time_us", "Time of one training step: median of the steps, of the slowest rank.", header="time us"),
    attribute("noise_us", read="step.noise_us", header="noise us", dropped=5, queried=True),
)
OF_POINTS = (
    C("q1_us", lambda row: row.run.step["point"].q1_us),
    C("q3_us", lambda row: row.run.step["point"].q3_us),
    C("repeats", lambda row: len(row.run.step["point"].samples_us), kind="count"),
)
MEASURED = (
    attribute(
        "none_us", "Time of the same step with no overlap: each collective runs alone on the GPU.", header="none us"
    ),
    attribute("floor_us", "Time of the same step without communication.", header="floor us"),
    attribute("host_us", header="host us", dropped=3),
    attribute("speedup", header="speedup", show="{:.2f}x".format, high_first=True),
    C(
        "hidden_fraction",
        lambda row: row.hidden.fraction if row.hidden.known else None,
        "(none_us - time_us) / (none_us - floor_us), from pairs of the same round; empty if its noise is 0.5 or more.",
        header="hidden",
        words=lambda row: row.hidden.in_words,
        high_first=True,
    ),
    C("hidden_noise", lambda row: row.hidden.noise if row.hidden.known else None),
    C(
        "exposed_comm_us",
        lambda row: row.time_us - row.floor_us,
        "Time that communication adds to the step: time_us - floor_us.",
        header="exposed us",
        dropped=6,
    ),
    C("us_per_sample", lambda row: row.per("sample").time_us),
    attribute("samples_per_step", kind="count", read="run.samples_per_step"),
    attribute("samples_per_s", header="samples/s", show="{:,.0f}".format, high_first=True),
    C(
        "tokens_per_s",
        lambda row: row.config.workload.tokens / row.time_us * 1e6,
        header="tokens/s",
        show="{:,.0f}".format,
        dropped=2,
        high_first=True,
    ),
    attribute("peak_memory_gb", header="peak GB", show="{:.1f}".format, dropped=4, queried=True),
    *(through(column, lambda row: traffic_of(row.config, row.run.parameters)) for column in TRAFFIC),
    attribute("parameters", kind="count", read="run.parameters"),
    attribute(
        "loss",
        "Loss after the last step of the recorded run; empty if it is NaN or infinite.",
        header="loss",
        show=as_loss,
        dropped=1,
        queried=True,
    ),
    attribute("compiled", "Compiler of the layers, or the reason why they were not compiled.", "text", "run.compiled"),
    attribute("launch_bound", "The CPU takes as long to enqueue the step as the GPU to run it.", "flag"),
    attribute(
        "baseline_launch_bound",
        "none_us or floor_us is launch-bound, so hidden_fraction is unreliable.",
        "flag",
    ),
)


def _options(row: PointRow[FsdpRow]) -> Options:
    return knobs_of(row.point.config_as(Asked))


TABLE = points_table(
    "training",
    "one row per point",
    (
        replace(table.MODEL, dropped=1),
        asked("ranks", "distributed", "dp_size", kind="count", header="ranks"),
        NODES,
        table.DEVICE,
        through(STRATEGY, _options),
        replace(table.PRECISION, dropped=1),
        section.setting_of_point(lambda point: NAMING.in_words(knobs_of(point.config_as(Asked)))),
        *(through(column, _options) for column in KNOBS),
    ),
    (*TIMES, *OF_POINTS, *MEASURED, section.EFFECT, section.CHOSEN, section.NOTE),
)
OF_RUNS = (replace(section.RUNS, usual=1), *TIMES, *MEASURED)
COMPARED: Table[FsdpRow] = Table(
    "training",
    "one row per setting",
    (
        section.setting(),
        attribute("precision", kind="text", read="config.precision"),
        *(through(column, attrgetter("options"), header="") for column in (STRATEGY, *KNOBS)),
        *OF_RUNS,
        section.EFFECT,
        section.NOTE,
    ),
)
GAIN = "samples_per_s over that of the reference, minus 1."
REFERENCE, *_, PROVEN, REASON = section.decision_columns("the setting with the fewest changed options")
ANSWERS: Table[Analysis] = Table(
    "training",
    "one row per model, ranks, nodes and device: the best setting",
    (
        *section.case_columns(("model", "device"), ("ranks", "nodes")),
        through(STRATEGY, attrgetter("best.options")),
        attribute("precision", kind="text", read="best.config.precision"),
        attribute("setting", kind="text", read="best.setting"),
        A(
            "overrides",
            lambda analysis: overrides(analysis.best.options, analysis.differing),
            "Command-line overrides that select this setting.",
            "text",
        ),
        *(through(column, attrgetter("best.options")) for column in KNOBS),
        *(through(column, attrgetter("best")) for column in OF_RUNS),
        REFERENCE,
        A("gain", lambda analysis: analysis.best.over_reference - 1, GAIN),
        PROVEN,
        REASON,
    ),
)
