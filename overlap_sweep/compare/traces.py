"""Compares traces rank by rank: quantities of every phase, and kernels that got slower, appeared or disappeared."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from typing import TYPE_CHECKING, Literal, NamedTuple

from rich.console import Console

from overlap_sweep.errors import UserError
from overlap_sweep.report.charts import TICK, Axis, Dot, Key, Row, Rows
from overlap_sweep.report.comparison import Chart, Comparison, mean_change, ratio_column, ratios_file, verdict_style
from overlap_sweep.report.console import print_lines, print_table
from overlap_sweep.report.numbers import as_us
from overlap_sweep.report.table import Column, Listing, Table, attribute
from overlap_sweep.results.estimate import estimate
from overlap_sweep.results.verdict import ratio
from overlap_sweep.trace import Grouping, Overlap, PhaseSummary, summarise
from overlap_sweep.trace.files import TraceFile, read_trace_files, startup_warnings

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

PHASES = ("fwd", "bwd", "recompute", "all")
FEW_KERNELS = 15
CHARTED = ("span_us", "gemm_us", "comm_us", "overlap_us", "exposed_comm_us", "wait_us", "idle_us")

Change = Literal["faster", "slower", "same", "appeared", "disappeared"]


@dataclass(frozen=True)
class TraceDataset:
    """The traces of one operand: one run, one trace per rank."""

    label: str
    path: Path
    files: list[TraceFile]
    """The traces that could be analysed."""
    problems: list[str]

    @property
    def ranks(self) -> dict[int, TraceFile]:
        """Returns the traces by rank; empty unless every trace's rank is known."""
        found = {file.rank: file for file in self.files if file.rank is not None}
        return found if len(found) == len(self.files) else {}


class Pair(NamedTuple):
    """A trace and the reference's trace of the same rank."""

    rank: int | None
    """The rank of both traces; None where the traces of a single pair have different ranks."""
    ours: TraceFile
    theirs: TraceFile


@dataclass(frozen=True)
class Match:
    """A value of a dataset and of the reference: a median over the iterations, and over the ranks."""

    dataset: str
    reference: str
    phase: str
    value: float | None
    """None where it is undefined."""
    reference_value: float | None

    @property
    def difference(self) -> float:
        """Returns the difference; NaN where either is undefined."""
        if self.value is None or self.reference_value is None:
            return math.nan
        return self.value - self.reference_value

    @property
    def ratio(self) -> float:
        """Returns the ratio; NaN where it is undefined."""
        return ratio(self.value, self.reference_value)


@dataclass(frozen=True)
class QuantityMatch(Match):
    """One quantity of one phase."""

    rank: int | None
    """None for the median over the ranks in common."""
    quantity: str


@dataclass(frozen=True)
class PartMatch(Match):
    """Busy time of a kernel class, kernel or stream in microseconds, the length of the union of its spans: median over
    the ranks, then over the iterations without start-up. A rank or iteration that lacks it counts 0."""

    by: Grouping
    kind: str
    library: str
    name: str
    num_events: float
    reference_num_events: float
    change: Change
    """`same` where the ranges of the iterations' times overlap."""


@dataclass(frozen=True)
class TraceComparison:
    """The whole comparison of two or more traces."""

    datasets: list[TraceDataset]
    reference: str
    pairs: dict[str, list[Pair]]
    """Pairs by dataset; the reference has none."""
    unmatched: list[str]
    """A sentence for each dataset with ranks that the other one lacks."""
    quantities: list[QuantityMatch]
    """By dataset and phase, first over the ranks and then of each rank."""
    parts: list[PartMatch]
    """By dataset, phase and grouping, the largest difference first."""

    def quantities_by(self, by: str) -> list[QuantityMatch]:
        """Returns those of each rank with by="rank", else those over the ranks."""
        return [match for match in self.quantities if (match.rank is not None) == (by == "rank")]

    def parts_by(self, by: str) -> list[PartMatch]:
        return [part for part in self.parts if part.by == by]


_PHASE = "fwd, bwd, recompute (part of bwd), or all (the whole iteration)."
RATIO: Column = ratio_column("ratio", lambda match: match.ratio, "ratio", dropped=2)
_WHO = (attribute("dataset", kind="text"), attribute("reference", kind="text"))
QUANTITIES: Table[QuantityMatch] = Table(
    "rows",
    "one row per quantity, phase and dataset, per rank or over all ranks",
    (
        *_WHO,
        attribute("rank", kind="count", header="rank"),
        attribute("phase", _PHASE, kind="text", header="phase"),
        attribute("quantity", kind="text", header="quantity"),
        attribute("reference_value", header="reference", show="{:,.6g}".format),
        attribute("value", header="value", show="{:,.6g}".format),
        attribute("difference", header="difference", show="{:+,.6g}".format),
        RATIO,
    ),
)
PARTS: Table[PartMatch] = Table(
    "rows",
    "one row per kernel class, kernel or stream, phase and dataset",
    (
        *_WHO,
        attribute("phase", _PHASE, kind="text"),
        attribute("by", kind="text"),
        attribute("kind", "Class of the kernels: gemm, comm, wait, compute or memory; empty for a stream.", "text"),
        attribute("library", kind="text"),
        attribute("reference_busy_us", read="reference_value", header="reference us"),
        attribute("busy_us", read="value", header="busy us"),
        attribute("difference_us", read="difference", header="difference", show="{:+,.1f}".format),
        RATIO,
        attribute("reference_num_events", header="reference runs", show="{:g}".format, dropped=1),
        attribute("num_events", header="runs", show="{:g}".format, dropped=1),
        attribute("change", kind="text", header="change"),
        # Kernel names are wider than any terminal, so this column is last and the only one that is cut.
        attribute("name", kind="text", header="name"),
    ),
)


def compare(operands: Sequence[tuple[str, Path, Sequence[Path]]], reference: str, by: str) -> Comparison:
    """Compares traces, given as label, directory or file, and its traces. UserError where no rank is in common.
    `by`: phase, rank, class, kernel or stream."""
    compared = compare_traces([read_trace_dataset(*operand) for operand in operands], reference)
    table: Table = QUANTITIES if by in ("phase", "rank") else PARTS
    rows: Sequence[Match] = compared.quantities_by(by) if table is QUANTITIES else compared.parts_by(by)
    if by == "rank" and not rows:
        raise UserError("--by rank: the traces record no ranks, or different ones; use --by phase.")
    files = [file for dataset in compared.datasets for file in dataset.files]
    return Comparison(
        table=table,
        rows=rows,
        show=lambda console: _print(compared, console, by),
        summary=lambda: _summary(compared),
        charts=lambda: [
            Chart(ratios_file(label, list(compared.pairs)), [_dots(compared, label)]) for label in compared.pairs
        ],
        problems=[problem for dataset in compared.datasets for problem in dataset.problems],
        headlines=[f"{_headline(label, reference, pairs)}." for label, pairs in compared.pairs.items()],
        warnings=[*(warning for file in files for warning in file.warnings), *startup_warnings(files)],
    )


def read_trace_dataset(label: str, path: Path, files: Sequence[Path]) -> TraceDataset:
    """Reads the traces of `path`. UserError when none can be analysed."""
    read = read_trace_files(files)
    problems = [file.problem for file in read if file.problem]
    if len(problems) == len(read):
        raise UserError(problems[0])
    good = sorted((f for f in read if not f.problem), key=lambda file: (file.rank is None, file.rank or 0))
    return TraceDataset(label, path, good, problems)


def compare_traces(datasets: Sequence[TraceDataset], reference: str) -> TraceComparison:
    """Returns the comparison; `reference` is the label of one dataset. UserError where no rank is in common."""
    base = next(dataset for dataset in datasets if dataset.label == reference)
    others = [dataset for dataset in datasets if dataset is not base]
    pairs = {other.label: _pairs(other, base) for other in others}
    return TraceComparison(
        datasets=list(datasets),
        reference=reference,
        pairs=pairs,
        unmatched=[
            f"Left out: ranks {', '.join(map(str, only))}, which {one.label} has and {another.label} has not."
            for other in others
            for one, another in ((base, other), (other, base))
            if (only := sorted(one.ranks.keys() - another.ranks.keys())) and len(one.files) > 1
        ],
        quantities=[match for label, found in pairs.items() for match in _quantities(label, reference, found)],
        parts=[
            part
            for label, found in pairs.items()
            for phase in PHASES
            for part in _parts(label, reference, found, phase)
        ],
    )


def _pairs(dataset: TraceDataset, base: TraceDataset) -> list[Pair]:
    """Returns the pairs by rank; two single traces always make a pair. UserError where no rank is in common."""
    if len(dataset.files) == len(base.files) == 1:
        (one,), (other,) = dataset.files, base.files
        return [Pair(one.rank if one.rank == other.rank else None, one, other)]
    common = sorted(dataset.ranks.keys() & base.ranks.keys())
    if not common:
        found = (f"{one.label} has {sorted(one.ranks) or 'unknown ranks'}" for one in (dataset, base))
        raise UserError(f"No rank in common: {', '.join(found)}; compare one file with one file.")
    return [Pair(rank, dataset.ranks[rank], base.ranks[rank]) for rank in common]


def _quantities(dataset: str, reference: str, pairs: Sequence[Pair]) -> Iterator[QuantityMatch]:
    for phase in PHASES:
        # By rank, and first over all ranks.
        members: dict[int | None, list[list[PhaseSummary]]] = {None: []}
        for pair in pairs:
            rows = [
                row for file in (pair.ours, pair.theirs) for row in summarise(file.steady_rows) if row.phase == phase
            ]
            if len(rows) == 2:
                members[None].append(rows)
                members[pair.rank] = members[None] if pair.rank is None else [rows]
        for rank, summaries in members.items() if members[None] else ():
            for name in Overlap.__struct_fields__:
                value, other = (_median(getattr(both[i], name) for both in summaries) for i in (0, 1))
                yield QuantityMatch(dataset, reference, phase, value, other, rank, name)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return median_low(known) if isinstance(known[0], int) else median(known)


_Part = tuple[Grouping, str, str, str]


def _parts(dataset: str, reference: str, pairs: Sequence[Pair], phase: str) -> list[PartMatch]:
    """Returns a phase's parts by grouping, the largest difference first; none where only one of the two has it."""
    import numpy as np

    ours, theirs = _by_turn([pair.ours for pair in pairs], phase), _by_turn([pair.theirs for pair in pairs], phase)
    found = []
    for part in dict.fromkeys([*theirs, *ours]) if ours and theirs else ():
        # A part that is in no trace took no time.
        one, other = (side[part] if part in side else next(iter(side.values())) * 0 for side in (ours, theirs))
        (busy_us, count), (other_us, other_count) = (map(float, np.median(turns, axis=0)) for turns in (one, other))
        change = _change(one, other)
        found.append(PartMatch(dataset, reference, phase, busy_us, other_us, *part, count, other_count, change))
    return sorted(found, key=lambda part: (part.by, -abs(part.difference)))


def _by_turn(files: Sequence[TraceFile], phase: str) -> dict[_Part, NDArray[float64]]:
    """Returns busy time and number of events of each part in the first, second, ... iteration of the traces [turns, 2],
    medians over the traces that have that iteration; iteration numbers may differ between traces."""
    import numpy as np

    iterations = [sorted({row.iteration for row in file.steady_rows if row.phase == phase}) for file in files]
    nothing = np.full((len(files), max(map(len, iterations)), 2), np.nan)
    for number, of_file in enumerate(iterations):
        nothing[number, : len(of_file)] = 0.0
    found: dict[_Part, NDArray[float64]] = defaultdict(nothing.copy)
    for number, file in enumerate(files):
        for row in (row for row in file.steady_parts if row.phase == phase):
            # A stream is identified by its name alone: the kernels on it may change.
            kind_and_library = ("", "") if row.by == "stream" else (row.kind, row.library)
            turn = iterations[number].index(row.iteration)
            found[row.by, *kind_and_library, row.name][number, turn] += (row.busy_us, row.num_events)
    return {part: np.nanmedian(values, axis=0) for part, values in found.items()}


def _change(ours: NDArray[float64], theirs: NDArray[float64]) -> Change:
    if not theirs.any() and ours.any():
        return "appeared"
    if not ours.any() and theirs.any():
        return "disappeared"
    if ours[:, 0].min() > theirs[:, 0].max():
        return "slower"
    return "faster" if ours[:, 0].max() < theirs[:, 0].min() else "same"


def _headline(label: str, reference: str, pairs: Sequence[Pair]) -> str:
    ours, theirs = _iterations_us([pair.ours for pair in pairs]), _iterations_us([pair.theirs for pair in pairs])
    change = mean_change([[(estimate(ours), estimate(theirs))]])
    medians = f"{as_us(median(ours))} us an iteration against {as_us(median(theirs))} us"
    return f"{change.in_words(label, reference)}: {medians}, medians of {len(ours)} and {len(theirs)}"


def _iterations_us(files: Sequence[TraceFile]) -> list[float]:
    """Returns the time of the first, second, ... iteration, each the median over the ranks that have it."""
    each = [[row.active_us for row in file.steady_rows if row.phase == "all"] for file in files]
    return [median(spans[turn] for spans in each if turn < len(spans)) for turn in range(max(map(len, each)))]


def _summary(compared: TraceComparison) -> dict[str, object]:
    return {
        "kind": "traces",
        "reference": compared.reference,
        "datasets": {
            dataset.label: {
                "path": str(dataset.path),
                "files": [str(file.path) for file in dataset.files],
                "ranks": [file.rank for file in dataset.files],
                "startup_iterations": max(len(file.startup) for file in dataset.files),
            }
            for dataset in compared.datasets
        },
        "quantities": QUANTITIES.records(compared.quantities_by("phase")),
        "classes": PARTS.records(compared.parts_by("class")),
        "unmatched": compared.unmatched,
    }


def _print(compared: TraceComparison, console: Console, by: str) -> None:
    """Prints the quantities of every phase, and the times of kernel classes, kernels or streams of the whole
    iteration."""
    for label, pairs in compared.pairs.items():
        console.print(f"\n{label} against {compared.reference}", style="bold")
        ranks = ", ".join(str(pair.rank) for pair in pairs if pair.rank is not None)
        print_lines([f"matched by rank: {ranks}" if ranks else "one trace each"], console)
        if by in ("phase", "rank"):
            listing = Listing(QUANTITIES, [match for match in compared.quantities_by(by) if match.dataset == label])
            print_table("", listing.columns, listing.rows, console, group=lambda match: (match.rank, match.phase))
        parts = [part for part in compared.parts if part.dataset == label and part.phase == "all"]
        _print_parts("Kernel classes", [part for part in parts if part.by == "class"], console)
        if by in ("kernel", "stream"):
            _print_parts(f"{by.capitalize()}s", [part for part in parts if part.by == by], console)
        else:
            changed = [part for part in parts if part.by == "kernel" and part.change != "same"]
            _print_parts("Kernels that changed most", changed[:FEW_KERNELS], console)
            if len(changed) > FEW_KERNELS:
                print_lines([f"... and {len(changed) - FEW_KERNELS} more; --by kernel prints all"], console)
    print_lines(compared.unmatched, console)
    console.print(f"\nMedians. ratio: value / {compared.reference}'s value. same: the iterations' times overlap.")


def _print_parts(title: str, parts: Sequence[PartMatch], console: Console) -> None:
    if parts:
        title = f"{title}, whole iteration"
        print_table(title, PARTS.columns, parts, console, style=lambda part: verdict_style(part.change), cut_last=True)


def _dots(compared: TraceComparison, label: str) -> Rows:
    rows: list[Row] = []
    for match in compared.quantities_by("phase"):
        if match.dataset != label or match.quantity not in CHARTED:
            continue
        ours, theirs = match.value or 0.0, match.reference_value or 0.0
        worse = ours < theirs if match.quantity == "overlap_us" else ours > theirs
        own = "wait" if ours == theirs else "bad" if worse else "good"
        dots = [Dot(theirs, colour="ink", shape=TICK), Dot(ours, colour=own)]
        cell = "new" if math.isnan(match.ratio) else f"{match.ratio:.2f}x"
        rows.append(Row(name=f"{match.phase} {match.quantity.removesuffix('_us')}", dots=dots, cells=[cell]))
    return Rows(
        title=f"{label} against {compared.reference}",
        subtitle="medians over iterations and ranks; number: ratio",
        axis=Axis("time, us", from_zero=True),
        columns=["ratio"],
        rows=rows,
        legend=[
            Key(compared.reference, "ink", shape=TICK),
            Key(f"{label}, better", "good", shape="circle"),
            Key(f"{label}, worse", "bad", shape="circle"),
            Key(f"{label}, same", "wait", shape="circle"),
        ],
    )
