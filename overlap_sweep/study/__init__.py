"""What a workload compares: settings of one case, measured in points, of which the fastest is to be found.

A workload declares it as a `Study`, the object `STUDY` of its module `study`: what must be equal (the case), what may
differ (the options of a setting), the time, and the columns. From that come rows, choice, tables, page, report,
comparisons and histories, for every workload in the same way.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

from overlap_sweep.declared import SCHEDULES, Role
from overlap_sweep.report.causes import Side, first_traced
from overlap_sweep.report.charts import Key as Part
from overlap_sweep.report.numbers import as_us
from overlap_sweep.report.section import Exhibit, File
from overlap_sweep.report.table import PointRow, Table
from overlap_sweep.results.comparable import Key, Sample
from overlap_sweep.results.gain import Gain
from overlap_sweep.results.measured import Scalar
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import different_environments
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.traces import TraceReading
from overlap_sweep.study.rows import R as R
from overlap_sweep.study.rows import SettingRow as SettingRow
from overlap_sweep.study.rows import Times as Times
from overlap_sweep.study.rows import in_brief as in_brief
from overlap_sweep.study.rows import step_times as step_times
from overlap_sweep.study.rows import time_of_point as time_of_point
from overlap_sweep.study.settings import Naming, Options, key

if TYPE_CHECKING:
    from overlap_sweep.study.equality import Run

STEP = "step"
"""The work that times are of where no amount of work is known."""


class Case(Protocol):
    """A NamedTuple of the properties that must be equal for points to be compared."""

    @property
    def brief(self) -> str:
        """Returns the case in words, without the device."""

    @property
    def device(self) -> str: ...

    @property
    def nodes(self) -> int: ...

    def __iter__(self) -> Iterator[object]: ...

    def _asdict(self) -> dict[str, object]: ...


C = TypeVar("C", bound=Case)


@dataclass(frozen=True)
class CaseAnalysis(Generic[C, R]):
    """The settings of one case, and the best of them."""

    case: C
    title: str
    points: list[Point]
    rows: list[R]
    """Rows from fast to slow."""
    reference: R
    """The setting that gains compare with."""
    best: R
    """The best setting: a search's answer if there was one, else that of `verdict.choose`."""
    work: str
    """Settings are compared by the time of this, such as `sample`."""
    gain: Gain | None
    """Gain of the best over `against`; None if it is the reference."""
    against: str
    """The reference, or what a search compared its answer with, in words."""
    proven: bool
    """Whether a search measured the best setting again after choosing it, and found it faster."""
    reason: str
    """Why it is the best."""
    unjudged: list[R]
    """Settings of too few runs to be better or worse than the reference."""
    differing: list[str]
    """Options that differ between the settings."""
    shared: str
    """The changed options that all rows have alike, in words; empty if there are none."""
    searched: bool = False
    """Whether a search decided, by times of its own."""
    undecided: str = ""
    """What a search that could not decide knows: the reference is only what is there already. Empty if it could."""

    @property
    def answer(self) -> R | None:
        """Returns the best setting; None if it must not be used."""
        return self.best if self.best.may_win else None

    @property
    def per(self) -> str:
        """Returns `per sample`: by what times are compared."""
        return f"by {self.best.unit}" if self.best.unit else f"per {self.work}"

    @property
    def too_few_runs(self) -> bool:
        """Returns whether there are too few runs to tell any settings apart."""
        return bool(self.unjudged) and len(self.unjudged) == len(self.rows) - 1

    @property
    def shown_first(self) -> tuple[R, R]:
        """Returns the rows that are shown however slow they are."""
        return self.best, self.reference

    def with_rows(self, rows: list[R]) -> Self:
        """Returns the analysis with other rows in the places of its own."""
        by_setting = {row.setting: row for row in rows}
        return replace(
            self,
            rows=rows,
            reference=by_setting[self.reference.setting],
            best=by_setting[self.best.setting],
            unjudged=[by_setting[row.setting] for row in self.unjudged],
        )


class Bar(NamedTuple):
    """One setting in the chart of all."""

    ends: list[float]
    """End of each part, in microseconds per unit of the work that is compared."""
    cells: list[str]
    """Texts beside it, one for each of the study's `bar_columns`; a column without any is not drawn."""


class Study(ABC, Generic[C, R]):
    """What a workload compares. A subclass says what it must, and replaces what it says otherwise."""

    workload: ClassVar[str]
    row: type[R]
    naming: ClassVar[Naming] = Naming()
    reference: ClassVar[Literal["first", "simplest"]] = "first"
    """The setting that gains compare with: the one that was started first, or that with the fewest changes."""
    times_of_proof: ClassVar[bool] = False
    """Whether a search's answer and its baseline are shown with the times of its proof."""
    stopped_searches_settle: ClassVar[bool] = False
    """Whether a search that ran out of budget and found nothing faster overrules the ranking of its points, because
    points that are measured one after the other drift apart."""

    name: ClassVar[str]
    """Name of its section, for addresses and files."""
    what: ClassVar[str]
    """What was measured, in one or two words, plural."""
    heading: ClassVar[str]
    topic: ClassVar[str]
    legend: ClassVar[str]
    explained: ClassVar[str] = ""
    """What the page says after the legend: how the best is chosen."""
    measured_as: ClassVar[str] = "Every point, as measured."
    """Caption of the table of all points."""
    points_table: Table[PointRow[R]]
    compared: Table[R]
    """The settings of one case."""
    answers: Table[CaseAnalysis[C, R]]
    """The best setting of each case."""
    points_key: ClassVar[str]
    """Name of the table of points in tuning_report.json."""
    use: ClassVar[str] = "Run"
    """Beginning of the sentence on how to get the best setting."""
    if_launch_bound: ClassVar[str] = ""
    """What to do if settings are launch-bound."""
    bars_subtitle: ClassVar[str] = "mean of the runs, slowest rank, with its noise"
    bar_columns: ClassVar[Sequence[str]] = ("time us",)
    most_diagnosed: ClassVar[int] = 0
    """Settings whose traces are diagnosed on the page, where all ranks' traces of each are read. 0: only the best and
    the reference."""

    shows_predictions: ClassVar[bool] = False
    """Whether the page says what changes of the reference would gain."""

    shows_effects: ClassVar[bool] = False
    """Whether the traces of its settings are compared, for the column of effects."""
    reads_traces: ClassVar[bool] = False
    """Whether rows have values from the points' traces."""

    matched: ClassVar[Sequence[str]] = ()
    """As in `report.comparison.Comparing`."""
    changes_nothing: ClassVar[Sequence[str]] = ()
    """As in `report.comparison.Comparing`."""

    def over(self, points: Sequence[Point], traces: Mapping[Path, TraceReading]) -> Self:
        """Returns the study of these `ok` points, for values of rows that depend on other points or on the traces.
        `traces`: by run directory, if the study reads them."""
        return self

    @abstractmethod
    def case(self, point: Point) -> C:
        """Returns the case of an `ok` point."""

    @abstractmethod
    def options(self, point: Point) -> Options:
        """Returns the setting of a point."""

    @abstractmethod
    def times(self, settings: Sequence[Sequence[Point]]) -> Sequence[Times]:
        """Returns the times of each setting, given the points of all settings of a case."""

    @abstractmethod
    def times_of_point(self, point: Point) -> Times:
        """Returns the times of an `ok` point, with the noise within it."""

    def identity(self, point: Point) -> Hashable:
        """Returns what is equal for points with the same setting."""
        return key(self.options(point))

    def computed(self, point: Point) -> "Run":
        """Returns what an `ok` point has computed, to see whether settings compute the same."""
        return {}

    def effect_entry(self, option: str) -> str | None:
        """Returns the entry of effects/settings.yaml by which one sees an option; empty if traces do not show it, None
        if its name says it."""
        return None

    def change(self, option: str, value: Scalar) -> str | None:
        """Returns the change, as `predict` names it, that an option makes of a setting without it; None if that is not
        predicted."""
        return None

    def roles(self, option: str) -> Collection[Role]:
        """Returns what changing the option changes."""
        return (SCHEDULES,)

    def order(self, case: C) -> tuple[object, ...]:
        """Returns the sort key of a case."""
        return tuple(case)

    def to_use(self, analysis: CaseAnalysis[C, R]) -> str:
        """Returns the command or overrides that give the best setting; empty if nothing is needed."""
        return ""

    def to_write(self, analysis: CaseAnalysis[C, R]) -> str:
        """Returns the lines for the user's script that the best setting needs besides; empty if there are none."""
        return ""

    def sentences(self, analysis: CaseAnalysis[C, R]) -> Iterable[str]:
        """Returns further sentences of the answer."""
        return ()

    def cautions(self, analysis: CaseAnalysis[C, R]) -> Iterable[str]:
        """Returns the caveats that only this workload has."""
        return ()

    def environments(self, analysis: CaseAnalysis[C, R]) -> Iterable[str]:
        """Returns the caveat that points were measured in different environments."""
        return different_environments(analysis.points)

    def legend_of(self, analysis: CaseAnalysis[C, R]) -> str:
        """Returns the explanation of the columns below the table."""
        return self.legend

    def limits(self, analysis: CaseAnalysis[C, R]) -> str:
        """Returns why the answer may not hold where training runs; empty if it does."""
        return ""

    def parts(self, analysis: CaseAnalysis[C, R]) -> list[Part]:
        """Returns the parts of the bars in the chart of all settings."""
        return [Part("time", "gemm")]

    def bar(self, analysis: CaseAnalysis[C, R], row: R) -> Bar:
        """Returns the row's bar in that chart."""
        return Bar([row.per(analysis.work).time_us], [as_us(row.time_us)])

    def streams(self, analysis: CaseAnalysis[C, R]) -> Mapping[str, Path | None]:
        """Returns the traces whose streams are drawn below each other, by name, the best setting's last."""
        return {}

    def side(self, row: R) -> Side | None:
        """Returns the traces of the row's first point that has some; None if none has."""
        return first_traced(row.points, time_us=None if row.unit else row.time_us)

    def charts(self, analysis: CaseAnalysis[C, R]) -> list[Exhibit]:
        """Returns further charts."""
        return []

    def more(self, analysis: CaseAnalysis[C, R]) -> list[Exhibit]:
        """Returns further tables."""
        return []

    def details(self, analysis: CaseAnalysis[C, R]) -> list[str]:
        """Returns lines for summary.txt only."""
        return []

    def files(self, rows: Sequence[PointRow[R]]) -> list[File]:
        """Returns files besides tables and charts. `rows`: all points."""
        return []

    def report(self, analysis: CaseAnalysis[C, R]) -> Mapping[str, object]:
        """Returns further contents of a case's entry in tuning_report.json."""
        return {}

    def report_of_row(self, row: R) -> Mapping[str, object]:
        """Returns further contents of a setting's entry there."""
        return {"options": row.options}

    def key(self, analysis: CaseAnalysis[C, R], row: R) -> Key:
        """Returns what identifies the row's time in comparisons, without device and nodes; `setting`, if it is None, is
        that of the row. A workload with a module `compare` needs neither this nor `samples`."""
        raise AssertionError(f"{self.workload} is compared by its module `compare`")

    def samples(self, result: Result) -> Mapping[str, Sample]:
        """Returns the times of an ok result by setting, as `report.comparison.Comparing` wants them."""
        raise AssertionError(f"{self.workload} is compared by its module `compare`")
