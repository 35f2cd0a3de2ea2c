"""Names, groups and sizes of collectives, from what NCCL's kernels, c10d's operators and gloo's spans record."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from overlap_sweep.trace.kineto import Detail
from overlap_sweep.trace.stream import ProcessGroup

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.facts import Group

_KINDS = (
    ("all_gather", re.compile(r"all_?gather", re.IGNORECASE)),
    ("reduce_scatter", re.compile(r"reduce_?scatter", re.IGNORECASE)),
    ("all_reduce", re.compile(r"all_?reduce", re.IGNORECASE)),
    ("all_to_all", re.compile(r"all_?to_?all|a2a", re.IGNORECASE)),
    ("broadcast", re.compile(r"broadcast", re.IGNORECASE)),
    ("barrier", re.compile(r"barrier", re.IGNORECASE)),
    ("send_recv", re.compile(r"send_?recv|coalesced", re.IGNORECASE)),
    ("send", re.compile(r"(^|\W|_)send", re.IGNORECASE)),
    ("recv", re.compile(r"(^|\W|_)recv|receive", re.IGNORECASE)),
    ("reduce", re.compile(r"reduce", re.IGNORECASE)),
    ("gather", re.compile(r"gather", re.IGNORECASE)),
    ("scatter", re.compile(r"scatter", re.IGNORECASE)),
)


def collective_of(detail: Detail, name: str, library: str) -> str:
    """Returns the collective's common name, such as all_gather; the library of a kernel that is no collective.

    `detail`: what the trace says about it; else the name of the kernel, operator or span tells.
    """
    for said in (detail.collective or "", name if library != "peer_copy" else ""):
        for kind, pattern in _KINDS:
            if pattern.search(said):
                return kind
    return library


def group_of(name: str, detail: Detail | None, configured: ProcessGroup | None) -> Group:
    """Returns a process group from the trace's list of groups and from a collective's own fields."""
    from overlap_sweep.diagnosis.facts import Group

    about = (configured.about if configured else None) or (detail.group_about if detail else None) or ""
    ranks = configured.ranks if configured else ()
    return Group(
        name=name,
        about="" if about in ("undefined", "default_pg") else about,
        ranks=tuple(ranks) or _ranks(detail.group_ranks if detail else None),
        size=(configured.size if configured else None) or (detail.group_size if detail else None),
        backend=configured.backend if configured else "",
    )


def _ranks(written: str | None) -> tuple[int, ...]:
    """Returns the ranks of `[0, 1]`; none if the list is cut, as in large groups."""
    try:
        ranks = ast.literal_eval(written or "()")
    except (ValueError, SyntaxError):
        return ()
    return tuple(rank for rank in ranks if isinstance(rank, int)) if isinstance(ranks, list | tuple) else ()


def sizes_of_host(name: str, detail: Detail) -> Detail:
    """Returns what the dimensions of an operator's arguments tell about a collective on the CPU; only traces with
    shapes have them."""
    return detail
