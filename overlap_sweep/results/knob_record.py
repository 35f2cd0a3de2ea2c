"""knobs.json, which a search over knobs leaves beside its points."""

from __future__ import annotations

from pathlib import Path

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import Record, read_record

KNOBS_FILE = "knobs.json"


class Gain(msgspec.Struct):
    """By which share of the slower time something is faster, and how far that may be off; negative: it is slower."""

    share: float
    noise: float

    @property
    def sure(self) -> bool:
        return abs(self.share) > self.noise


class Contribution(msgspec.Struct, kw_only=True):
    """One knob that the best setting has otherwise than the baseline."""

    key: str
    baseline: str
    value: str
    alone: Gain | None
    """Of the value in the baseline; null where that cannot be measured."""
    taken_away: Gain | None
    """What the best setting gains over itself with the baseline's value; null where that cannot be measured."""


class TriedKnobs(msgspec.Struct, kw_only=True):
    """One setting that was measured. Times in microseconds, the machine's drift taken out."""

    changed: dict[str, str]
    """By key what is not as in the baseline."""
    time_us: float
    noise_us: float
    measurements: int
    """Of the search; those of the proof are not among them."""


class KnobSearch(msgspec.Struct, kw_only=True):
    """One search: the knobs of one model, number of ranks and whatever else was not searched."""

    label: str
    overrides: list[str]
    """Of the baseline, as typed."""
    knobs: dict[str, list[str]]
    """By key the values, the baseline's first."""
    best: dict[str, str] = {}
    """By key what is not as in the baseline; empty: nothing is faster."""
    time_us: float | None = None
    """Of the best setting: a step, or whatever the workload's time is."""
    baseline_us: float | None = None
    gain: Gain | None = None
    """Over the baseline."""
    over_none: Gain | None = None
    """Of the best setting over the same without overlap."""
    proven: bool = False
    """The gain is of measurements that were taken after the choice, in alternation."""
    by_time: bool = False
    """The proof compares times as they are; else relative to what was measured beside them, which does not depend on
    the knobs."""
    contributions: list[Contribution] = []
    points: int = 0
    settings: int = 0
    """How many of the grid were measured."""
    grid: int = 0
    host_bound: int = 0
    """Points whose time is that of the host, which enqueues no faster."""
    stopped: str = ""
    """Why the search ended before its end; empty otherwise."""
    dropped: str = ""
    """Why there is no answer at all."""
    notes: list[str] = []
    refused: dict[str, int] = {}
    """By reason, how many settings that were thought of make no sense."""
    left_out: dict[str, str] = {}
    """By key, why it was not searched."""
    tried: list[TriedKnobs] = []
    """Fastest first."""

    @property
    def answered(self) -> bool:
        """Whether it came to anything, be it that nothing is faster than the baseline."""
        return self.time_us is not None and self.baseline_us is not None

    @property
    def settles(self) -> bool:
        """Whether the answer stands against what the points say one by one."""
        return self.answered and (self.proven or not self.best)

    @property
    def never_tried(self) -> dict[str, list[str]]:
        """By key the values that no setting had."""
        found = {}
        for key, values in self.knobs.items():
            had = {tried.changed.get(key, values[0]) for tried in self.tried} if values else set()
            if missing := [value for value in values if value not in had]:
                found[key] = missing
        return found


class KnobRecord(Record, kw_only=True):
    """The content of knobs.json."""

    points: int = 0
    reused: int = 0
    """How many of them an earlier run had measured."""
    elapsed_s: float = 0.0
    searches: list[KnobSearch] = msgspec.field(default_factory=list)


def read_knobs(path: Path) -> KnobRecord:
    """UserError when it is none of this or an earlier schema."""
    return read_record(path, KnobRecord, "remove it, or search again")


def check_knobs(record: KnobRecord, path: Path) -> None:
    """UserError where what is told of it is not there."""
    if any(search.answered and search.best and not search.gain for search in record.searches):
        raise UserError(f"{path} has a best setting without its gain; remove it, or search again.")
