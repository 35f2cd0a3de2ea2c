"""The nodes of measured points, and whose traces were recorded on how many."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from overlap_sweep.config import ResolvedPoint
from overlap_sweep.errors import UserError
from overlap_sweep.results.checks import check_place
from overlap_sweep.results.run_directory import RESULT_FILE, read_result


def on_nodes(count: int) -> str:
    """Returns ` over 2 nodes`, for the end of a name; empty for a single node."""
    return f" over {count} nodes" if count > 1 else ""


def ranks_of_each(config: ResolvedPoint) -> int | None:
    """Returns the number of ranks on each node of a completed point; None if it has a single node, where all
    communication stays."""
    return config.ranks_per_node if config.nodes > 1 else None


def ranks_of_each_trace(traces: Iterable[Path]) -> tuple[dict[Path, int], list[str]]:
    """Returns the number of ranks on each node by trace, for traces of points on several nodes; and a sentence for each
    result.json next to traces that cannot be read."""
    paths = list(traces)
    found: dict[Path, int | None] = {}
    problems = []
    for folder in dict.fromkeys(path.parent for path in paths):
        result = folder / RESULT_FILE
        try:
            check_place(result, folder)
            found[folder] = ranks_of_each(read_result(result).point) if result.exists() else None
        except UserError as error:
            problems.append(f"{str(error).rstrip('.')}; whether these traces are of several nodes is unknown.")
    return {path: ranks for path in paths if (ranks := found.get(path.parent)) is not None}, problems
