"""Why communication is exposed in the traces of measured points: on the page, in a sentence, and as columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from overlap_sweep.diagnosis import END_OF_STEP, LISTED, RECORDING_SLOWS, Finding, as_share
from overlap_sweep.report.diagnosis import FINDINGS, NODE_TIMES, between_nodes_in_a_sentence, finding_row, headline
from overlap_sweep.report.numbers import as_us
from overlap_sweep.report.section import Exhibit
from overlap_sweep.report.table import Listing, PointRow, Row, RowText, Table, item
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import is_trace_of
from overlap_sweep.results.traces import listed_trace, ranks_of_each

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.runs import Run

WORTH_A_SENTENCE = 0.05
"""Share of the step from which on a cause is named outside of the page."""
MOST_NAMED = 3
"""Most causes in a sentence."""
AT_ONCE = 16
"""Points that a query diagnoses at once: what is read of their traces is in memory together."""


@dataclass(frozen=True)
class Side:
    """What is diagnosed: the traces of all ranks with one setting."""

    point: Point
    variant: str = ""
    """Variant in the traces' names; empty: the point's own traces."""
    pass_name: str = ""
    """Pass whose causes are shown; empty: all."""
    least_share: float = LISTED
    """Share of a step from which on a cause is shown."""
    time_us: float | None = None
    """Time of a step without the profiler; None: not shown."""

    @property
    def traces(self) -> list[Path]:
        """Returns the traces of the ranks; empty if there are none."""
        names = self.point.result.traces if self.point.result else []
        paths = (listed_trace(self.point, name) for name in names if is_trace_of(self.variant, name))
        return [path for path in paths if path]

    @property
    def is_users_program(self) -> bool:
        """Returns whether the traces are of a user's program, whose steps are not ours."""
        return bool(self.point.result and self.point.result.measured and self.point.result.measured.is_users_program)

    @property
    def host_was_ahead(self) -> bool:
        """Returns whether the host is known to have been ahead of the GPU when times were taken, without the
        profiler."""
        result = self.point.result
        if result is None or self.point.config.runtime.device != "cuda":
            return False
        is_ahead = result.measured is not None and result.measured.host_was_ahead
        return is_ahead if self.is_users_program else not self.point.launch_bound


def diagnosed(sides: Sequence[Side]) -> list[Run | None]:
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.diagnosis.runs import read_runs

    paths = list(dict.fromkeys(path for side in sides for path in side.traces))
    ranks_of = [(side, ranks_of_each(side.point.config)) for side in sides]
    per_node = {path: ranks for side, ranks in ranks_of if ranks for path in side.traces}
    run_of = {file.path: run for run in read_runs(paths, per_node) for file in run.files} if paths else {}
    return [next((run_of[path] for path in side.traces), None) for side in sides]


def findings_of(side: Side, run: Run | None) -> list[Finding]:
    """Returns what explains exposed communication in training, the most worthwhile first.

    Our own recordings of steps wait for the device at the end of each, which is no cause in training.
    """
    found = run.found.diagnosis.findings if run and run.found else []
    return [
        one
        for one in found
        if (one.where != END_OF_STEP or side.is_users_program)
        and side.pass_name in ("", one.pass_ or side.pass_name)
        and (one.share >= side.least_share or one.cause == "none")
    ]


def in_a_sentence(side: Side | None) -> str:
    """Returns what is between nodes, and the causes that cost most, where they are worth a sentence; else an empty
    text."""
    if side is None:
        return ""
    run = diagnosed([side])[0]
    between = between_nodes_in_a_sentence(run.found.node_times if run and run.found else None)
    sentences = [f"In a profiled step, {between}"] if between else []
    shares: dict[str, float] = {}
    for one in findings_of(side, run):
        if one.share >= WORTH_A_SENTENCE:
            shares.setdefault(one.cause, one.share)
    # If the profiler made the host late, it disturbed the rest, too.
    if shares and not (side.host_was_ahead and "host_bound" in shares):
        named = ", ".join(f"{cause} up to {as_share(share)}" for cause, share in list(shares.items())[:MOST_NAMED])
        evidence = "report.html has the evidence and what to try"
        sentences.append(f"Why communication is exposed: {named} of a profiled step; {evidence}.")
    return " ".join(sentences)


DROPPED = {"waiting_us": 1, "transfer_us": 1, "where": 2, "process_group": 3, "pass": 4, "rank": 5, "collective": 6}
"""Order in which a narrow page drops columns."""


def first_traced(points: Iterable[Point], variant: str = "", time_us: float | None = None) -> Side | None:
    """Returns the traces of the first point that has some; None if none has. The arguments are as in `Side`."""
    sides = (Side(point, variant, time_us=time_us) for point in points)
    return next((side for side in sides if side.traces), None)


def exhibit(cases: Mapping[str, Mapping[str, Side | None]]) -> Exhibit:
    """Returns the exhibit with a table of the causes of each side, by its name, for each case, by the text to click for
    unfolding it, which is empty for a single one; only the page diagnoses them."""
    return Exhibit(
        name="causes",
        heading="Why communication is exposed",
        drawn="What costs time in a profiled step, from the traces of all ranks, the most worthwhile first. lost: an "
        "upper bound of what fixing this cause alone could gain.",
        parts=lambda: list(_tables(cases)),
    )


def _tables(cases: Mapping[str, Mapping[str, Side | None]]) -> Iterator[Exhibit]:
    runs = iter(diagnosed([side for sides in cases.values() for side in sides.values() if side]))
    for title, sides in cases.items():
        found = {name: (side, run) for name, side in sides.items() if side and (run := next(runs))}
        rows = [finding_row(name, one) for name, (side, run) in found.items() for one in findings_of(side, run)]
        with_causes = {row["run"] for row in rows}
        without = []
        for name, (side, run) in found.items():
            if name not in with_causes:
                small = [f"No cause costs {side.least_share:.0%} of it."] if run.found else []
                without.append(" ".join([f"{name}:", *_about(side, run), *small]))
        if found:
            yield Exhibit(folded=title, listing=_listing(rows, found) if rows else None, notes=without)


def _listing(rows: Sequence[Row], found: Mapping[str, tuple[Side, Run]]) -> Listing[Row]:
    about = {name: list(_about(side, run)) for name, (side, run) in found.items()}
    one_group = len({row["process_group"] for row in rows} - {""}) < 2
    columns = [
        replace(column, dropped=DROPPED.get(column.name, 0), style="setting" if column.name == "where" else "")
        for column in FINDINGS.columns
        if not (one_group and column.name == "process_group")
    ]
    advice_before: list[str] = []
    listed = []
    for row in rows:
        advice = row["try"]
        says_nothing = not advice or row["cause"] == "none" or advice in advice_before[-1:]
        tries = [] if says_nothing else [f"Try: {'as above.' if advice in advice_before else advice}"]
        listed.append({**row, "text": RowText(row["run"], about[row["run"]], [row["evidence"], *tries])})
        advice_before.append(advice)
    return Listing(replace(FINDINGS, columns=tuple(columns)), listed, text=itemgetter("text"))


def _about(side: Side, run: Run) -> Iterator[str]:
    """Yields what a side loses in all, and what to know before believing it."""
    yield from (file.problem for file in run.files if file.problem)
    if not run.found:
        return
    diagnosis = run.found.diagnosis
    steps_us = [step.step_us for step in diagnosis.steps if not step.startup]
    if side.pass_name and steps_us:
        yield f"The step, both passes, takes {as_us(median(steps_us))} us."
    else:
        without = f" Without the profiler it took {as_us(side.time_us)} us." if side.time_us else ""
        yield f"{headline(diagnosis)}{without}"
    if between := between_nodes_in_a_sentence(run.found.node_times):
        yield between
    if not side.host_was_ahead:
        yield from diagnosis.notes
        return
    yield from (note for note in diagnosis.notes if note != RECORDING_SLOWS)
    if any(one.cause == "host_bound" for one in findings_of(side, run)):
        yield (
            "Without the profiler the host was ahead of the GPU: host_bound is the profiler's, and so may be a "
            "straggler whose host launches nothing."
        )


OF_POINT: Table[Row] = Table(
    "causes",
    "what costs most in the traces of each row's point",
    (item("cause", kind="text"), item("cause_lost_us"), item("cause_share"), item("cause_try", kind="text")),
)
"""Columns that a query can add to any table of points. They are in none, as reports would diagnose every point."""


def cause_rows(rows: Sequence[PointRow]) -> list[Row]:
    """Returns the columns of OF_POINT and NODE_TIMES for each row, empty without traces. host_bound only counts if the
    host was late without the profiler, too."""
    keys = [(row.point.directory, row.variant, row.pass_name) for row in rows]
    sides = {key: Side(row.point, row.variant, row.pass_name) for key, row in zip(keys, rows, strict=True)}
    found: dict[tuple[Path, str, str], Row] = {}
    for start in range(0, len(sides), AT_ONCE):
        some = dict(list(sides.items())[start : start + AT_ONCE])
        for (key, side), run in zip(some.items(), diagnosed([*some.values()]), strict=True):
            own = (one for one in findings_of(side, run) if one.cause != "host_bound" or not side.host_was_ahead)
            row: Row = dict.fromkeys(OF_POINT.types)
            if first := next(own, None):
                shown = (first.cause, first.lost_us, first.share, first.try_)
                row = dict(zip(OF_POINT.types, shown, strict=True))
            elif run and run.found:
                row |= {"cause": "none", "cause_try": ""}
            found[key] = row | NODE_TIMES.records([run.found.node_times if run and run.found else None])[0]
    return [found[key] for key in keys]
