"""What lies beside the points of a sweep that searched: tuner.json, search.json and knobs.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.results.checks import check_place
from overlap_sweep.results.measured import Count, FileName, Slot, WholeSetting
from overlap_sweep.results.run_directory import one_line, write_json

SCHEMA = 1


class Record(msgspec.Struct, kw_only=True):
    """The content of a file beside the points of a sweep."""

    FILE: ClassVar[str]
    MEND: ClassVar[str]
    """What to do where it cannot be read."""

    schema: int = SCHEMA

    def write(self, directory: Path) -> Path:
        return write_json(directory / self.FILE, self)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the record. UserError for any other content, or a later schema."""
        try:
            record = msgspec.json.decode(path.read_bytes(), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
            raise UserError(f"{path} cannot be read ({one_line(error)}); {cls.MEND}.") from None
        if record.schema > SCHEMA:
            said = f"has schema {record.schema}, this version reads up to {SCHEMA}"
            raise UserError(f"{path} {said}; update overlap_sweep.")
        return record

    @classmethod
    def read_all(cls, root: Path, problems: list[str]) -> dict[Path, Self]:
        """Returns the records at or below `root` by directory; each that cannot be read becomes a problem."""
        found = {}
        for path in sorted(root.rglob(cls.FILE)):
            try:
                check_place(path, root)
                found[path.parent] = cls.read(path)
            except UserError as error:
                problems.append(str(error))
        return found


class LayerTrial(msgspec.Struct, kw_only=True):
    """A layer point of the tuner: configurations side by side at one TP size."""

    tp_size: Count
    point: FileName
    """The name of its run directory, beside tuner.json."""
    variants: dict[str, str]
    """What they are called in reports, and the name of each in the point's `variants`. Of a proof: `none`, `default`,
    `tuned`, and `preset <file name>`. Of a trial before it: `best of each slot` and what was changed in the others."""


class TunerRecord(Record, kw_only=True):
    """The content of tuner.json: what belongs to what in a sweep of the tuner."""

    FILE = "tuner.json"
    MEND = "remove it, or run the tuner again"

    command: str
    started: str
    """UTC, ISO 8601."""
    wall_s: float
    """So far; from the command to the last layer point."""
    search_s: float = 0.0
    """The part of it that measured operators, with the start of the processes."""
    points: int = 0
    """Operator points that the search measured."""
    dropped: dict[str, str] = msgspec.field(default_factory=dict)
    """By TP size or operator, in words, why it was not searched (to the end)."""
    together: list[LayerTrial] = msgspec.field(default_factory=list)
    proofs: list[LayerTrial] = msgspec.field(default_factory=list)


class TriedSetting(msgspec.Struct, kw_only=True):
    """One setting of a pass that a search measured."""

    setting: str
    """In a word, such as `dgrad bulk_sm4 + wgrad bulk_sm2`."""
    time_us: float | None = None
    noise_us: float | None = None
    measurements: int = 0


class PassSearch(msgspec.Struct, kw_only=True):
    """One search: a pass of an operator at one TP size. Times in microseconds."""

    model: str
    tp_size: Count
    operator: str
    pass_name: str = msgspec.field(name="pass")
    chosen: dict[str, dict[str, Any]] = {}
    """By slot the fastest that was found; empty for no overlap."""
    time_us: float | None = None
    none_us: float | None = None
    floor_us: float | None = None
    evaluations: int = 0
    """Measurements of settings."""
    exhaustive: int = 0
    """Settings that there are."""
    stopped: str = ""
    """Why it ended."""
    notes: list[str] = []
    """What was dropped on the way, and why."""
    refused: dict[str, int] = {}
    """By reason, how many settings make no sense."""
    tried: list[TriedSetting] = []

    def __post_init__(self) -> None:
        msgspec.convert(self.chosen, dict[Slot, WholeSetting])


class SearchRecord(Record, kw_only=True):
    """The content of search.json, which a search leaves beside its points."""

    FILE = "search.json"
    MEND = "remove it, or search again"

    points: int = 0
    """Baselines included."""
    reused: int = 0
    """How many of them an earlier run had measured."""
    elapsed_s: float = 0.0
    rounds: int = 0
    dropped: dict[str, str] = msgspec.field(default_factory=dict)
    """By what was searched for, why it was not, or not to the end."""
    searches: list[PassSearch] = msgspec.field(default_factory=list)


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

    def __post_init__(self) -> None:
        if self.answered and self.best and not self.gain:
            raise ValueError("a best setting without its gain")

    @property
    def answered(self) -> bool:
        """Returns whether the search has an answer, be it that nothing is faster than the baseline."""
        return self.time_us is not None and self.baseline_us is not None

    @property
    def settles(self) -> bool:
        """Returns whether the answer holds against what the points say one by one."""
        return self.answered and (self.proven or not self.best)

    @property
    def never_tried(self) -> dict[str, list[str]]:
        """Returns by key the values that no setting had."""
        found = {}
        for key, values in self.knobs.items():
            had = {tried.changed.get(key, values[0]) for tried in self.tried} if values else set()
            if missing := [value for value in values if value not in had]:
                found[key] = missing
        return found


class KnobRecord(Record, kw_only=True):
    """The content of knobs.json."""

    FILE = "knobs.json"
    MEND = "remove it, or search again"

    points: int = 0
    reused: int = 0
    """How many of them an earlier run had measured."""
    elapsed_s: float = 0.0
    searches: list[KnobSearch] = msgspec.field(default_factory=list)


@dataclass(frozen=True)
class Records:
    """The records by the sweep's directory, in the order of their names."""

    tuners: dict[Path, TunerRecord]
    searches: dict[Path, SearchRecord]
    knobs: dict[Path, KnobRecord]
    problems: list[str]
    """One sentence for each that cannot be read: its points are analysed all the same."""

    @property
    def layer_trials(self) -> dict[Path, LayerTrial]:
        """Returns the whole layers that tuners measured, by run directory."""
        tuners = self.tuners.items()
        return {folder / trial.point: trial for folder, one in tuners for trial in (*one.together, *one.proofs)}


def read_records(root: Path) -> Records:
    """Returns the records at or below `root`."""
    problems: list[str] = []
    tuners, searches = TunerRecord.read_all(root, problems), SearchRecord.read_all(root, problems)
    return Records(tuners, searches, KnobRecord.read_all(root, problems), problems)
