"""Says what a setting changed in what ran: the steps of two recordings of the same work, as they were scheduled."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

ASPECTS = {
    "calls": "number and sizes of a process group's collectives",
    "type": "data type of what they move",
    "kernel": "kernel that moves it: library, algorithm, protocol, reduction",
    "blocks": "thread blocks of that kernel",
    "threads": "threads of each of its blocks",
    "stream": "streams that collectives share with computation, or with each other",
    "position": "computation that was launched before a collective",
    "sequence": "order of collectives to each other",
    "overtaking": "whether kernels start before communication that was launched before them on another stream",
    "gemms": "matrix multiplications",
    "computation": "other kernels, or on a CPU operators",
    "grid": "thread blocks of kernels that compute, where their number is the same",
    "copies": "copies and sets within a rank",
}
"""Aspects of a step that are compared, in the order in which differences are listed."""


class Slots(NamedTuple):
    """Slots of a tp_comm_overlap_cfg, and the operators of the layer that it is for."""

    settings: Mapping[str, Mapping[str, object]] = {}
    """Method and knobs by slot, as in the file."""
    operators: Sequence[str] = ("qkv", "proj", "fc1", "fc2")
    """Operators of the layer."""


NO_SLOTS = Slots()

Verdict = Literal["in force", "not in force", "fell back", "cannot be seen"]


class Setting(msgspec.Struct, kw_only=True, frozen=True):
    """A setting that differs between two recordings, and whether it was in force in the second."""

    name: str
    before: str
    after: str
    verdict: Verdict
    evidence: str


UNSEEN = "a trace does not show it"
"""Evidence on a setting that changes nothing in what is recorded."""


class Rest(msgspec.Struct, frozen=True):
    """How much longer an operator takes in a layer than without communication, and why, in microseconds."""

    pass_: str = msgspec.field(name="pass")
    operator: str
    """Empty for what is in none: attention, residual connections and what is between functions."""
    rest_us: float
    """Sum of the next four."""
    gemm_us: float
    """GEMMs take longer: in pieces, beside communication, or at a lower clock."""
    other_us: float
    """Other kernels and copies within the GPU: into userbuffers, and sums of what ranks sent."""
    exposed_us: float
    """Communication while nothing computes, with what waits for other ranks inside it."""
    gap_us: float
    """Nothing runs, or only waits."""
    beside_us: float
    """Not part of the sum: communication while a GEMM runs."""


class Difference(msgspec.Struct, kw_only=True, frozen=True):
    """Something that differs between two recordings in every step."""

    aspect: str
    """One of ASPECTS."""
    group: str = ""
    """Process group, such as `2 ranks` or `dp, 8 ranks`; empty if the difference is not about one, or it is unknown."""
    collective: str = ""
    pass_: str = msgspec.field(name="pass", default="")
    before: str
    after: str
    sentence: str
    ranks: list[int | None] = []
    """Ranks that differ so; all of those compared if empty."""
