"""The records that a search leaves next to its points: tuner.json, search.json and knobs.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

import msgspec

from overlap_sweep.declared import Count, FileName
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import space
from overlap_sweep.results.checks import check_place
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.results.gain import Gain
from overlap_sweep.results.measured import Slot, WholeSetting
from overlap_sweep.results.run_directory import one_line, write_json

SCHEMA = 1


class Record(msgspec.Struct, kw_only=True):
    """The content of a file next to the points of a sweep."""

    FILE: ClassVar[str]
    MEND: ClassVar[str]
    """What to do if it cannot be read."""

    schema: int = SCHEMA

    def write(self, directory: Path) -> Path:
        return write_json(directory / self.FILE, self)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Returns the record. UserError if it is invalid or of a later schema."""
        try:
            record = msgspec.json.decode(path.read_bytes(), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
            raise UserError(f"{path} cannot be read ({one_line(error)}); {cls.MEND}.") from None
        if record.schema > SCHEMA:
            raise UserError(
                f"{path} has schema {record.schema}, this version reads up to {SCHEMA}; update overlap_sweep."
            )
        return record

    @classmethod
    def read_all(cls, root: Path, problems: list[str]) -> dict[Path, Self]:
        """Returns the records at or below `root` by directory; unreadable ones are added to `problems`."""
        found = {}
        for path in sorted(root.rglob(cls.FILE)):
            try:
                check_place(path, root)
                found[path.parent] = cls.read(path)
            except UserError as error:
                problems.append(str(error))
        return found


class LayerTrial(msgspec.Struct, kw_only=True):
    """A layer point of the tuner: several configurations in turns at one TP size."""

    tp_size: Count
    point: FileName
    """Name of its run directory, next to tuner.json."""
    variants: dict[str, str]
    """Names of the variants in the point, by their label in reports. Labels of a proof: `none`, `default`, `tuned` and
    `preset <file name>`; of combinations before it: `best of each slot`, and what the others change."""


class TunerRecord(Record, kw_only=True):
    """The content of tuner.json: command, durations and layer points of a sweep of the tuner."""

    FILE = "tuner.json"
    MEND = "run the tuner again with resume="

    command: str
    started: str
    """Start time, UTC, ISO 8601."""
    wall_s: float
    """Seconds from the start of the command to the last layer point so far."""
    search_s: float = 0.0
    """Seconds of it for measuring operators, including the start of the processes."""
    points: int = 0
    """Number of operator points that the search measured."""
    dropped: dict[str, str] = msgspec.field(default_factory=dict)
    """Why a TP size or operator was not searched, or not completely, by its label."""
    together: list[LayerTrial] = msgspec.field(default_factory=list)
    proofs: list[LayerTrial] = msgspec.field(default_factory=list)


def without_operator(label: str, reason: str) -> str:
    """Returns a reason of `dropped` for a line that begins with its label: without the operator that both name."""
    return reason.removeprefix(f"{label.rpartition(' ')[2]}: ")


class TriedSetting(msgspec.Struct, kw_only=True):
    """One setting of a pass that a search measured."""

    setting: str
    """Name of the setting, such as `dgrad bulk_sm4 + wgrad bulk_sm2`."""
    time_us: float | None = None
    noise_us: float | None = None
    measurements: int = 0


class PassSearch(msgspec.Struct, kw_only=True):
    """One search: a pass of an operator at one TP size. Times in microseconds."""

    model: str
    tp_size: Count
    operator: str
    pass_name: str = msgspec.field(name="pass")
    chosen: dict[str, space.Setting] = {}
    """The fastest setting found, by slot; empty for no overlap."""
    time_us: float | None = None
    none_us: float | None = None
    floor_us: float | None = None
    evaluations: int = 0
    """Number of settings measured."""
    exhaustive: int = 0
    """Number of settings in the search space."""
    stopped: str = ""
    """Why the search ended."""
    notes: list[str] = []
    """What was dropped during the search, and why."""
    refused: dict[str, int] = {}
    """Number of invalid settings by reason."""
    tried: list[TriedSetting] = []

    def __post_init__(self) -> None:
        msgspec.convert(self.chosen, dict[Slot, WholeSetting])


class SearchRecord(Record, kw_only=True):
    """The content of search.json, which a search writes next to its points."""

    FILE = "search.json"
    MEND = "search again with resume="

    points: int = 0
    """Number of points, baselines included."""
    reused: int = 0
    """Number of them that an earlier run measured."""
    elapsed_s: float = 0.0
    rounds: int = 0
    dropped: dict[str, str] = msgspec.field(default_factory=dict)
    """Why a task was not searched, or not completely, by its label."""
    searches: list[PassSearch] = msgspec.field(default_factory=list)


EQUIVALENT = "are equivalent here"
"""End of the reason why a knob is not searched: its values make no difference."""


class Contribution(msgspec.Struct, kw_only=True):
    """One knob whose value in the best setting differs from the baseline."""

    key: str
    baseline: str
    value: str
    alone: Gain | None
    """Gain of changing only this knob in the baseline; null if it was not measured."""
    taken_away: Gain | None
    """Gain of the best setting over itself with this knob at the baseline's value; null if it was not measured."""
    added: Gain | None = None
    """Gain over the best setting until then, where changes are tried one on top of the other; else null."""


class Expected(msgspec.Struct, frozen=True):
    """What a single change is expected to gain, as shares of the baseline's time; losses are negative."""

    gain: float
    low: float
    high: float
    is_predicted: bool = False
    """Whether measurements of others say how far it can be trusted, as it was made like theirs; else `high` is a bound.
    """
    why: str = ""
    """The change that was predicted, or the cause that it can mend."""

    @property
    def in_words(self) -> str:
        """Returns such as `+5.1% (2.0 to 8.3)`, or `+2.7%, at most 7.0% (issued_late)`."""
        if not self.is_predicted:
            return f"{self.gain:+.1%}, at most {self.high:.1%}{f' ({self.why})' if self.why else ''}"
        return f"{self.gain:+.1%} ({100 * self.low:.1f} to {100 * self.high:.1f})"


class TriedKnobs(msgspec.Struct, kw_only=True):
    """One setting that was measured. Times in microseconds, without the machine's drift."""

    changed: dict[str, str]
    """Values that differ from the baseline, by key."""
    time_us: float
    noise_us: float
    measurements: int
    """Number of measurements in the search, without those of the proof."""
    gain: Gain | None = None
    """Over the baseline; null of the baseline itself."""
    change: str = ""
    """What was tried with it, on top of the best setting until then, as `KEY=VALUE`; empty where that was more than one
    change."""
    added: Gain | None = None
    """What that gained over the setting that it was tried on; null if `change` is empty."""
    points: list[str] = []
    """Names of the points that measured it, those of the proof included."""


class FailedKnobs(msgspec.Struct, kw_only=True):
    """One setting that could not be measured, or must not be used."""

    changed: dict[str, str]
    reason: str
    change: str = ""
    """As of what was measured."""
    points: list[str] = []
    """Names of the points that measured it, if it must not be used."""


class Noises(msgspec.Struct, kw_only=True):
    """Noise of a setting's measured time, as a fraction of it, by what is compared."""

    times: float
    """That of plain times."""
    ratios: float
    """That of times relative to the reference that was measured with each."""


class KnobSearch(msgspec.Struct, kw_only=True):
    """One search over the knobs, for one model, number of ranks and other fixed options."""

    label: str
    overrides: list[str]
    """Overrides of the baseline, as typed."""
    knobs: dict[str, list[str]]
    """Values to search by key, the baseline's first."""
    best: dict[str, str] = {}
    """Values of the best setting that differ from the baseline, by key; empty if nothing is faster."""
    best_points: list[str] = []
    """Names of the points that measured the best setting, next to knobs.json."""
    baseline_points: list[str] = []
    """Names of those that measured the baseline."""
    time_us: float | None = None
    """Time of the best setting: of a step, or what the workload measures."""
    baseline_us: float | None = None
    gain: Gain | None = None
    """Gain of the best setting over the baseline."""
    over_none: Gain | None = None
    """Gain of the best setting over the same with no overlap."""
    proven: bool = False
    """Whether the gain was measured after the choice, in alternation with the baseline."""
    verdict: Literal["proven", "keep", "undecided", ""] = ""
    """What the measurements say, of a search that expected something of changes. `keep`: nothing gains what is worth
    having, and they would have shown it."""
    seemed: dict[str, str] = {}
    """Values of the setting that is likeliest to be faster, while that is undecided; empty if none was measured."""
    by_time: bool = False
    """Whether plain times are compared; otherwise times relative to each point's own reference, which does not depend
    on the knobs."""
    disturbed: Noises | None = None
    """Why plain times are compared, if it is that the references change by chance; else null."""
    contributions: list[Contribution] = []
    points: int = 0
    settings: int = 0
    """Number of settings of the grid that were measured."""
    grid: int = 0
    host_bound: int = 0
    """Number of points limited by the host."""
    stopped: str = ""
    """Why the search ended early; empty if it did not."""
    dropped: str = ""
    """Why there is no answer; empty if there is one."""
    notes: list[str] = []
    refused: dict[str, int] = {}
    """Number of invalid settings by reason."""
    left_out: dict[str, str] = {}
    """Why a knob was not searched, by key."""
    tried: list[TriedKnobs] = []
    """The measured settings, fastest first."""
    failed: list[FailedKnobs] = []
    expected: dict[str, Expected] = {}
    """What single changes of the baseline were expected to gain, by `KEY=VALUE`."""
    expected_scale: float = 1.0
    """How many times what was predicted was gained."""
    hopeless: dict[str, float] = {}
    """The most that values were thought to gain when their turn came, as shares, by `KEY=VALUE`: too little, so that
    they were not measured."""

    def __post_init__(self) -> None:
        if self.answered and self.best and not self.gain:
            raise ValueError("a best setting without its gain")

    @property
    def answered(self) -> bool:
        """Returns whether the search has an answer, which may be to keep the baseline."""
        return self.time_us is not None and self.baseline_us is not None

    @property
    def settles(self) -> bool:
        """Returns whether the answer overrides the ranking of the single points."""
        return self.answered and (self.proven or not self.best or bool(self.verdict))

    def expected_of(self, changed: Mapping[str, str], change: str = "") -> Expected | None:
        """Returns what was expected of a setting, or of the `change` that was tried with it; None of several changes,
        and where nothing was."""
        names = [change] if change else [f"{key}={value}" for key, value in changed.items()]
        return self.expected.get(names[0]) if len(names) == 1 else None

    @property
    def never_tried(self) -> dict[str, list[str]]:
        """Returns the values that no setting had, by key."""
        found = {}
        for key, values in self.knobs.items():
            had = {tried.changed.get(key, values[0]) for tried in self.tried} if values else set()
            # Values of process groups are joined.
            parts = {part for value in had for part in value.split("+")}
            if missing := [value for value in values if value not in had | parts]:
                found[key] = missing
        return found

    @property
    def untried(self) -> list[str]:
        """Returns the values, as `KEY=VALUE`, that may gain and were not measured."""
        known = {*self.hopeless, *(f"{key}={value}" for one in self.failed for key, value in one.changed.items())}
        values = (f"{key}={value}" for key, missing in self.never_tried.items() for value in missing)
        return [value for value in values if value not in known]


class Finalist(msgspec.Struct, kw_only=True):
    """One setting among the best of several searches, as measured at the end. Times in microseconds."""

    label: str
    """That of its search."""
    overrides: list[str]
    """Overrides of its search's baseline, as typed."""
    changed: dict[str, str]
    """Values that differ from this baseline, by key."""
    time_us: float
    """For as much work as in all others."""
    noise_us: float
    """Including the noise between repeated points."""
    freedom: float | None = None
    """Degrees of freedom of the noise; null if they are infinite."""
    points: list[str]
    """Its points, by name."""
    place: Literal["fastest", "tie", ""] = ""
    """`tie`: within the noise of the fastest, which is a tie then, too."""
    deviation: str = ""
    """How it computes something else than the finalists of other searches; empty if it doesn't."""

    @property
    def time(self) -> Estimate:
        freedom = math.inf if self.freedom is None else self.freedom
        return Estimate(self.time_us, self.noise_us, len(self.points), freedom)


class KnobFinal(msgspec.Struct, kw_only=True):
    """The best settings of searches that compete with each other, measured again in turns."""

    rounds: int
    finalists: list[Finalist]
    """From fast to slow."""
    work_of: str = ""
    """Label of the search of whose work all times are, if steps have different amounts."""
    left_out: dict[str, str] = {}
    """Why a search has no setting here, by its label."""
    stopped: str = ""
    """Why there are fewer rounds than asked for; empty if there aren't."""


class KnobRecord(Record, kw_only=True):
    """The content of knobs.json."""

    FILE = "knobs.json"
    MEND = "search again with resume="

    points: int = 0
    reused: int = 0
    """Number of them that an earlier run measured."""
    elapsed_s: float = 0.0
    searches: list[KnobSearch] = msgspec.field(default_factory=list)
    finals: list[KnobFinal] = msgspec.field(default_factory=list)


@dataclass(frozen=True)
class Records:
    """The records by the sweep's directory, sorted."""

    tuners: dict[Path, TunerRecord]
    searches: dict[Path, SearchRecord]
    knobs: dict[Path, KnobRecord]
    problems: list[str]
    """One sentence per record that cannot be read; its points are analysed anyway."""

    @property
    def layer_trials(self) -> dict[Path, LayerTrial]:
        """Returns the layer points that tuners measured, by run directory."""
        tuners = self.tuners.items()
        return {folder / trial.point: trial for folder, one in tuners for trial in (*one.together, *one.proofs)}


def read_records(root: Path) -> Records:
    problems: list[str] = []
    tuners, searches = TunerRecord.read_all(root, problems), SearchRecord.read_all(root, problems)
    return Records(tuners, searches, KnobRecord.read_all(root, problems), problems)
