"""Columns and words about the nodes of points, the same for all workloads: how many, and what their communication
costs."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from overlap_sweep.report.numbers import as_rate, as_us
from overlap_sweep.report.table import Column, PointRow, Table, through

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.groups import NodeTimes

NODES: Column[PointRow] = Column("nodes", lambda row: row.point.case.nodes, kind="count", header="nodes", usual=1)
"""Column of tables of points."""


def _times(name: str, read: str) -> Column[NodeTimes | None]:
    known = attrgetter(read)
    # Of unknown process groups a part may be on either side.
    column: Column[NodeTimes] = Column(name, lambda times: None if times.unknown_us else known(times))
    return through(column, lambda times: times)


NODE_TIMES: Table[NodeTimes | None] = Table(
    "nodes",
    "communication within and between nodes, from the traces of each row's point",
    (
        _times("within_node_us", "within_us"),
        _times("between_nodes_us", "between_us"),
        _times("within_node_gb_s", "within_gb_s"),
        _times("between_nodes_gb_s", "between_gb_s"),
    ),
)
"""Columns that a query can add to any table of points."""


def between_nodes_in_a_sentence(times: NodeTimes | None) -> str:
    """Returns how much communication is between nodes, and at which bandwidth; empty for a single node."""
    if times is None or not times.comm_us:
        return ""
    if not times.between_us and times.unknown_us:
        return "How much of the communication is between nodes is unknown: the traces do not name its process groups."
    least = "at least " if times.at_least else ""
    rate = f", at {least}{as_rate(times.between_gb_s)} GB/s" if times.between_gb_s else ""
    exposed = f" ({as_us(times.exposed_between_us)} us exposed)" if times.between_us else ""
    unknown = f"; of {as_us(times.unknown_us)} us it is unknown" if times.unknown_us else ""
    return (
        f"{as_us(times.between_us)} of {as_us(times.comm_us)} us of communication is between nodes{rate}"
        f"{exposed}{unknown}."
    )
