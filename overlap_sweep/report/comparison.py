"""Parts common to all comparisons: how workloads take part, tables, charts and files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
from rich.console import Console

from overlap_sweep.errors import UserError
from overlap_sweep.report.charts import Form, Json, figures
from overlap_sweep.report.charts.figures import why_it_cannot_run
from overlap_sweep.report.numbers import shortened, some_of
from overlap_sweep.report.table import Column, Listing, Table, table_files
from overlap_sweep.results.comparable import Comparable, Sample
from overlap_sweep.results.estimate import Estimate, gap_noise_us
from overlap_sweep.results.gain import Gain
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import Records
from overlap_sweep.results.run_directory import Result, write_atomically
from overlap_sweep.results.verdict import MARGIN

if TYPE_CHECKING:
    import pandas as pd

R = TypeVar("R")

STYLES = {
    **dict.fromkeys(("faster", "better", "disappeared"), "green"),
    **dict.fromkeys(("slower", "worse"), "red"),
    "appeared": "yellow",
}
"""Style of a row by its verdict."""
FEW_VALUES = 3
LONGEST_VALUE = 60
LONGEST_WORD = 120
"""Most characters of a label in a file's name."""


@dataclass(frozen=True)
class Chart:
    """One PNG: charts below each other, with a common title if there are several."""

    file_name: str
    drawn: Sequence[Form]
    title: str = ""
    subtitle: Sequence[str] = ()

    @property
    def spec(self) -> Json:
        drawn = [figures.figure(f"{self.file_name}_{i}", form) for i, form in enumerate(self.drawn)]
        return figures.column_spec(drawn, {"text": self.title, "subtitle": list(self.subtitle)} if self.title else None)


@dataclass(frozen=True)
class Comparison:
    """A comparison of two or more datasets, to be printed and written."""

    table: Table
    """The table of the rows; its name is the plural of what a row is."""
    rows: Sequence[object]
    show: Callable[[Console], None]
    """Prints the comparison for people."""
    summary: Callable[[], Mapping[str, object]]
    """Returns the content of `summary_file`; NaN for undefined values."""
    charts: Callable[[], list[Chart]]
    problems: Sequence[str]
    headlines: Sequence[str]
    """Sentences for each dataset but the reference: how much faster it is, or that it is not."""
    cautions: Sequence[str] = ()
    """What to know before believing them."""
    warnings: Sequence[str] = ()
    summary_file: str = "comparison.json"
    details: Mapping[str, Listing] = field(default_factory=dict)
    """Further rows by the label of the dataset that they are of, for files alone."""

    def frame(self) -> pd.DataFrame:
        return self.table.frame(self.rows)


class Telemetry(NamedTuple):
    """How directories with telemetry are compared."""

    compare: Callable[..., Comparison]
    """Takes labels with directories, the label of the reference, that of the only candidate or None, and `all_runs`:
    whether tables have every quantity of every run."""
    tables: Mapping[str, Table]
    """Tables of such comparisons by heading."""


@dataclass(frozen=True)
class Comparing:
    """How a workload takes part in comparisons and histories: `COMPARED` in its module `compare`."""

    measured: Callable[[Sequence[Point], Records], Comparable]
    """Returns the workload's times in a dataset, given all points of the dataset."""
    samples: Callable[[Result], Mapping[str, Sample]]
    """Returns the times of an ok point by setting, without launch-bound ones."""
    matched: Sequence[str] = ()
    """Options, or groups of them, that the keys cover: they do not count as differences of configuration."""
    changes_nothing: Sequence[str] = ()
    """Options, or groups of them, that do not change the time, such as `training.max_steps`: points that differ only in
    these share a history."""
    telemetry: Telemetry | None = None


def write_files(directory: Path, compared: Comparison, frame: pd.DataFrame, plots: bool) -> list[Path]:
    """Writes all files once all contents are complete. UserError where the directory cannot be written to."""
    summary = {"headlines": list(compared.headlines), **compared.summary()}
    if compared.cautions:
        summary["cautions"] = list(compared.cautions)
    # NaN and infinities become null.
    contents = {compared.summary_file: msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"}
    frames = {"comparison": frame}
    for label, listing in compared.details.items():
        name = _unused(f"{_word(label)}_{listing.table.name}", frames)
        frames[name] = listing.frame
    for name, rows in frames.items():
        contents |= table_files(name, rows)
    for chart in compared.charts() if plots and not why_it_cannot_run() else ():
        contents[_unused(chart.file_name, contents)] = as_png(chart)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return [write_atomically(directory / name, content) for name, content in contents.items()]
    except OSError as error:
        reason = f"cannot be written to ({error.strerror})"
        raise UserError(f"{directory} {reason}; give another with --output.") from None


def _unused(name: str, taken: Iterable[str]) -> str:
    """Returns the name, numbered if labels differ only in characters that file names cannot have."""
    lower = {one.lower() for one in taken}
    label, _, end = name.rpartition("_")
    names = chain([name], (f"{label}-{i}_{end}" for i in count(2)))
    return next(one for one in names if one.lower() not in lower)


def as_png(chart: Chart) -> bytes:
    return figures.rendered(chart.spec)


def ratios_file(label: str, candidates: Sequence[str]) -> str:
    return "ratios.png" if len(candidates) == 1 else f"{_word(label)}_ratios.png"


def timeline_file(label: str) -> str:
    return f"{_word(label)}_timeline.png"


def _word(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", label[:LONGEST_WORD]).strip("-.") or "dataset"


def ratio_column(name: str, value: Callable[[R], float], header: str, **more: Any) -> Column[R]:
    return Column(name, value, header=header, words=lambda row: as_ratio(value(row)), **more)


def verdict_style(verdict: str | None) -> str:
    return STYLES.get(verdict or "", "")


def as_ratio(ratio: float) -> str:
    return "-" if math.isnan(ratio) else f"{ratio:.3f}"


def by_label(values: Mapping[str, Iterable[object]]) -> str:
    """Returns `old=2.10.0, new=2.11.0 or 2.12.0`."""
    texts = {label: some_of(map(_value, every), FEW_VALUES, " or ") for label, every in values.items()}
    return ", ".join(f"{label}={text or '-'}" for label, text in texts.items())


def _value(value: object) -> str:
    if isinstance(value, str) and "\n" in value:
        return f"({len(value.splitlines())} lines)"
    text = str(value).lower() if isinstance(value, bool) else "-" if value is None else str(value)
    return shortened(text, LONGEST_VALUE)


def flat(nested: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Returns `packages.torch` of {"packages": {"torch": ...}}."""
    found: dict[str, object] = {}
    for name, value in nested.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


Times = tuple[Estimate, Estimate]
"""A time and the reference's."""


@dataclass(frozen=True)
class Change:
    """The geometric mean of several times over the reference's."""

    ratio: float
    """Below 1 is faster."""
    noise: float
    """Half-width of its confidence interval, as a share of the ratio; NaN if it is unknown."""

    @property
    def differs(self) -> bool:
        """Returns whether it is faster or slower beyond the noise and MARGIN."""
        return not math.isnan(self.noise) and abs(math.log(self.ratio)) > max(MARGIN, self.noise)

    @property
    def word(self) -> str:
        return "faster" if self.ratio < 1 else "slower"

    @property
    def ends(self) -> tuple[float, float]:
        return self.ratio * math.exp(-self.noise), self.ratio * math.exp(self.noise)

    def in_words(self, label: str, reference: str) -> str:
        """Returns `new is 9.5% slower than old (9.4 to 9.7%)`, or that they do not differ, without a full stop."""
        if self.differs:
            return f"{label} is {Gain(1 - self.ratio, self.ratio * self.noise).in_words(reference)}"
        if math.isnan(self.noise):
            return f"{label} takes {self.ratio:.3f} of {reference}'s time; measured too rarely, its noise is unknown"
        low, high = self.ends
        beyond = f"by {MARGIN:.1%} or more" if abs(math.log(self.ratio)) > self.noise else "beyond the noise"
        return f"{label} and {reference} do not differ {beyond} (ratio {self.ratio:.3f}, {low:.3f} to {high:.3f})"


def mean_change(passes: Iterable[Sequence[Times]]) -> Change:
    """Returns the mean change of the times of all passes. The times of one pass share their baseline, so that their
    noises add up; those of several passes are independent. There must be a time."""
    groups = [[(ours.time_us / theirs.time_us, _noise(ours, theirs)) for ours, theirs in times] for times in passes]
    number = sum(map(len, groups))
    mean_log = sum(math.log(ratio) for times in groups for ratio, _ in times) / number
    noises = (sum(noise for _, noise in times) for times in groups)
    return Change(math.exp(mean_log), math.hypot(*noises) / number)


def _noise(ours: Estimate, theirs: Estimate) -> float:
    if math.isnan(gap_noise_us(ours, theirs)):
        return math.nan
    return math.hypot(ours.noise_us / ours.time_us, theirs.noise_us / theirs.time_us)
