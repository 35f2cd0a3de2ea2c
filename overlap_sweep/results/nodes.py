"""The nodes of measured points, and whose traces were recorded on how many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from overlap_sweep.errors import UserError
from overlap_sweep.results.checks import check_place
from overlap_sweep.results.run_directory import RESULT_FILE, read_result
from overlap_sweep.workloads import nodes, ranks_per_node


def on_nodes(count: int) -> str:
    """Returns ` over 2 nodes`, for the end of a name; empty for a single node."""
    return f" over {count} nodes" if count > 1 else ""


def ranks_of_each(config: Mapping[str, Any]) -> int | None:
    """Returns the number of ranks on each node of a completed point; None if it has a single node, where all
    communication stays."""
    return ranks_per_node(config) if nodes(config) > 1 else None


def ranks_of_each_trace(traces: Iterable[Path]) -> tuple[dict[Path, int], list[str]]:
    """Returns the number of ranks on each node by trace, for traces of points on several nodes; and a sentence for each
    result.json next to traces that cannot be read."""
    found: dict[Path, int | None] = {}
    problems = []
    folders: dict[Path, int | None] = {}
    for trace in traces:
        folder = trace.parent
        if folder not in folders:
            folders[folder] = None
            try:
                folders[folder] = _of_folder(folder)
            except UserError as error:
                problems.append(f"{str(error).rstrip('.')}; whether these traces are of several nodes is unknown.")
        found[trace] = folders[folder]
    return {trace: ranks for trace, ranks in found.items() if ranks is not None}, problems


def _of_folder(folder: Path) -> int | None:
    path = folder / RESULT_FILE
    check_place(path, folder)
    return ranks_of_each(read_result(path).recorded) if path.exists() else None
