"""The content of optimize.json: what was expected of each trial, and what was left out, next to the points."""

from __future__ import annotations

import msgspec

from overlap_sweep.optimizer.candidates import Allowed, Candidate
from overlap_sweep.results.records import Record


class FailedTrial(msgspec.Struct):
    """A setting that was run and must not be used."""

    settings: dict[str, str]
    """Values of levers, by name."""
    reason: str


class OptimizeRecord(Record, kw_only=True):
    FILE = "optimize.json"
    MEND = "optimize again with --resume"

    command: str
    """The user's own, as it was typed."""
    allow: Allowed
    first_runs: list[str]
    """Names of the runs of the command as it is, from which the candidates follow."""
    candidates: list[Candidate] = msgspec.field(default_factory=list)
    """What could be tried, what is expected to gain most first; also what is not allowed."""
    left_out: dict[str, str] = msgspec.field(default_factory=dict)
    """Why each other lever is not tried, by its name."""
    hopeless: list[str] = msgspec.field(default_factory=list)
    """Candidates that were not tried, since they could gain nothing by what was known when their turn came."""
    failed: list[FailedTrial] = msgspec.field(default_factory=list)
    scale: float = 1.0
    """How many times what was predicted was gained, in the end."""
    elapsed_s: float = 0.0
    stopped: str = ""
    """Why it ended early; empty if it did not."""
