"""The content of optimize.json: what was asked for, and what was not tried for that reason. knobs.json has the rest."""

from __future__ import annotations

import msgspec

from overlap_sweep.optimizer.candidates import Allowed, Candidate
from overlap_sweep.results.records import Record


class OptimizeRecord(Record, kw_only=True):
    FILE = "optimize.json"
    MEND = "optimize again with --resume"

    command: str
    """The user's own, as it was typed."""
    allow: Allowed
    first_runs: list[str]
    """Names of the runs of the command as it is, from which the candidates follow."""
    not_allowed: list[Candidate] = msgspec.field(default_factory=list)
    """What could be tried if it were allowed, what is expected to gain most first."""
    left_out: dict[str, str] = msgspec.field(default_factory=dict)
    """Why each other lever is not tried, by its name, and single values of those that are, by NAME=VALUE."""
