"""Diagnoses of traces for people and programs: tables of findings, process groups and steps, and the text of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from overlap_sweep.diagnosis import Diagnosis, Finding, StepLoss, as_share, some_of
from overlap_sweep.diagnosis.causes import CAUSES_IN_WORDS
from overlap_sweep.report.numbers import PASS_WORDS, as_count, as_percent, as_rate, as_us, counted
from overlap_sweep.report.table import Column, PointRow, Row, Table, item, through

if TYPE_CHECKING:
    from rich.console import Console

    from overlap_sweep.diagnosis.findings import Found
    from overlap_sweep.diagnosis.groups import NodeTimes
    from overlap_sweep.diagnosis.runs import Run


NODES: Column[PointRow] = Column("nodes", lambda row: row.point.case.nodes, kind="count", header="nodes", usual=1)


def _times(name: str, read: str) -> Column[NodeTimes | None]:
    known = attrgetter(read)
    # Of unknown process groups a part may be on either side.
    column: Column[NodeTimes] = Column(name, lambda times: None if times.unknown_us else known(times))
    return through(column, lambda times: times)


NODE_TIMES: Table[NodeTimes | None] = Table(
    "nodes",
    "communication within and between nodes, from the traces of each row's point",
    (
        _times("within_node_us", "within_us"),
        _times("between_nodes_us", "between_us"),
        _times("within_node_gb_s", "within_gb_s"),
        _times("between_nodes_gb_s", "between_gb_s"),
    ),
)
"""Columns that a query can add to any table of points."""


_text, _count = partial(item, kind="text"), partial(item, kind="count")
RUN = _text("run", "Common name of the traces of all ranks, with their directory.")
PASS = "fwd, bwd, or other (the optimizer and what follows the backward pass); empty if several or unknown."
GROUP = _text("process_group", "Name and description of the process group; empty if unknown.", "group")

FINDINGS: Table[Row] = Table(
    "findings",
    "one row per finding, in each run those of the cause first that loses most in all its findings",
    (
        RUN,
        _text(
            "cause",
            f"none (on average a rank exposes less than 2 % of the step), {CAUSES_IN_WORDS}.",
            "cause",
        ),
        item(
            "lost_us",
            "Time lost per step, median over the steps, of the rank that loses most: an upper bound of what fixing "
            "this cause alone could gain.",
            "lost us",
        ),
        item("share", "lost_us / time of the step.", "share", show=as_share),
        item(
            "predicted_us",
            "Gain per step that is predicted of the change, of the whole step: at the first finding of a run that it "
            "answers; negative if it costs time. Empty if none applies.",
            "predicted us",
            dropped=3,
        ),
        _text("change", "The best change of those that are tried, as `analyze.py predict` names it.", dropped=2),
        _count(
            "rank",
            "Rank that loses most; for a straggler the rank that the others wait for. Empty if ranks are late in turn, "
            "or if the traces do not show it.",
            "rank",
        ),
        GROUP,
        _text("collective", "Such as all_gather; empty if the cause is not about one.", "collective"),
        _text("pass", PASS, "pass"),
        _text(
            "where", "Module, annotation or operator that launched it; empty if the trace does not show it.", "where"
        ),
        item(
            "waiting_us",
            "Exposed time per step in which calls wait for the last rank to start, median, of the rank that waits "
            "most; it is lost to stragglers. Empty if the cause is not about collectives, or if it is unknown.",
            "waiting us",
            dropped=1,
        ),
        item(
            "transfer_us",
            "The rest of these calls' exposed time, of the rank that loses most.",
            "transfer us",
            dropped=1,
        ),
        _text("evidence", "Sentence with the numbers that the finding rests on."),
        _text("try", "Sentence with the setting to change; empty if there is none."),
    ),
)
STEPS: Table[Row] = Table(
    "steps",
    "one row per step and rank",
    (
        RUN,
        _count("rank", "Rank that recorded the trace; empty if the trace does not name it.", "rank"),
        _count("step", "N of ProfilerStep#N, or counted from 0.", "step"),
        item("step_us", "Time from the first work of the step to that of the next one.", "step us"),
        item(
            "comm_us",
            "Time in which a communication kernel runs or waits for other ranks; at the same time they count once.",
            "comm us",
        ),
        item("exposed_comm_us", "Part of comm_us in which nothing computes.", "exposed us"),
        item("idle_us", "Time in which nothing computes or communicates.", "idle us"),
        item("slowed_us", "Time that GEMMs lost to communication beside them.", "slowed us"),
        item(
            "startup",
            "Whether the step contains the profiler's start, on any rank.",
            "start-up",
            kind="flag",
            words=lambda row: "left out" if row["startup"] else "",
        ),
    ),
)


def _transfer(name: str, about: str, header: str, bound: str, show: Callable[[float], str]) -> Column[Row]:
    """Returns a column of what is only a bound if not all ranks of the group have a trace."""

    def words(row: Row) -> str:
        value = row[name]
        return "" if value is None else f"{bound if row['transfer_is'] == 'at_most' else ''}{show(value)}"

    return item(name, about, header, words=words)


GROUPS: Table[Row] = Table(
    "groups",
    "one row per process group, collective, size and pass",
    (
        RUN,
        GROUP,
        _text("ranks", "Ranks of the process group; empty if unknown."),
        _count("group_size", "Number of ranks of the process group; empty if unknown.", "ranks", dropped=1),
        _text(
            "node",
            "within (all its ranks are on one node), between (nodes) or unknown; empty unless there are several nodes.",
            "node",
        ),
        _text("backend", "Whose kernels they are, such as nccl, gloo, userbuffers or symm_mem.", "backend", dropped=2),
        _text("collective", "Such as all_gather.", "collective"),
        _text("pass", PASS, "pass"),
        _text("dtype", "Type of the elements, as PyTorch calls it; empty if unknown."),
        _count(
            "bytes",
            "Size of one call as nccl-tests counts it: the whole buffer, which is an all-gather's output and a "
            "reduce-scatter's input. For all-to-alls, whose sizes may change: the median.",
            "bytes",
            show=as_count,
        ),
        item("calls", "Calls per step of a rank, on average.", "calls", show="{:.4g}".format),
        item("time_us", "Median of all calls, with the wait for the last rank.", "time us"),
        _transfer(
            "transfer_us",
            "Median of all calls without waiting: from the last rank's start to the end.",
            header="transfer us",
            bound="<= ",
            show=as_us,
        ),
        _text(
            "transfer_is",
            "measured (from the traces of all ranks of the group), at_most (some are missing; with a single rank's "
            "trace the fastest call of the same size), or empty if unknown.",
        ),
        _transfer("algbw_gb_per_s", "bytes / transfer_us; at_most: at least this much.", "", ">= ", as_rate),
        _transfer(
            "busbw_gb_per_s",
            "algbw_gb_per_s times the part of the data that the links of each rank carry, by the formulas of "
            "nccl-tests: comparable between collectives and sizes.",
            header="bus GB/s",
            bound=">= ",
            show=as_rate,
        ),
        item(
            "skew_us",
            "Time from the first rank's start to the last rank's, median of all calls; empty with one rank's trace.",
            "skew us",
            dropped=4,
        ),
        item("skew_max_us", "The same, largest.", "max us", dropped=3),
        item(
            "exposed_comm_us",
            "Time per step in which its calls run while their rank computes nothing, median, of the rank with most of "
            "it. What several groups expose at once counts for each.",
            "exposed us",
        ),
        item(
            "hidden",
            "Part of the calls' time, over all ranks, in which their rank computes.",
            "hidden",
            show=as_percent,
        ),
        item(
            "slowdown",
            "Time of the GEMMs beside the calls / time of the same GEMMs alone; empty if none of them ever ran alone.",
            "GEMMs",
            show="{:.2f}x".format,
            dropped=5,
        ),
    ),
)
TABLES = {"of findings": FINDINGS, "with --by group": GROUPS, "with --by step": STEPS}


def _group_rows(runs: Iterable[Run]) -> list[Row]:
    return [
        {
            "run": run.name,
            **msgspec.to_builtins(group),
            "process_group": f"{group.group} ({group.about})" if group.about else group.group,
            "ranks": ",".join(map(str, group.ranks)) or None,
            "group_size": group.size,
            "algbw_gb_per_s": group.algbw_gbs,
            "busbw_gb_per_s": group.busbw_gbs,
            "exposed_comm_us": group.exposed_us,
            "node": (group.place or "unknown") if run.found.node_times else None,
        }
        for run in runs
        if run.found
        for group in run.found.groups
    ]


TABLE_BY: dict[str, tuple[Table[Row], Callable[[Iterable[Run]], list[Row]]]] = {
    "finding": (
        FINDINGS,
        lambda runs: [finding_row(run.name, one) for run in runs if run.found for one in run.found.diagnosis.findings],
    ),
    "group": (GROUPS, _group_rows),
    "step": (
        STEPS,
        lambda runs: [
            {"run": run.name, **msgspec.to_builtins(one)}
            for run in runs
            if run.found
            for one in run.found.diagnosis.steps
        ],
    ),
}
"""Table and its rows by what a row is."""


def finding_row(run: str, finding: Finding) -> Row:
    """Returns the row of a finding, of which nothing is predicted."""
    return {"run": run, **msgspec.to_builtins(finding), "predicted_us": None, "change": None}


def warnings_of(runs: Sequence[Run]) -> list[str]:
    """Returns a sentence for everything that was left out or is unknown."""
    diagnoses = (run.found.diagnosis for run in runs if run.found)
    notes = (f"{diagnosis.run}: {note}" for diagnosis in diagnoses for note in diagnosis.notes)
    return [*(warning for run in runs for file in run.files for warning in file.warnings), *notes]


@dataclass(frozen=True)
class Lost:
    """What one rank loses per step: medians over its steps, without start-up."""

    rank: int | None
    num_steps: int
    step_us: float
    exposed_comm_us: float
    idle_us: float
    slowed_us: float


def lost(diagnosis: Diagnosis) -> Lost | None:
    """Returns what the rank loses that loses most to communication; None if there is no step."""
    steps: dict[int | None, list[StepLoss]] = {}
    for step in diagnosis.steps:
        if not step.startup:
            steps.setdefault(step.rank, []).append(step)
    names = ("step_us", "exposed_comm_us", "idle_us", "slowed_us")
    ranks = [
        Lost(rank, len(own), *(median(getattr(step, name) for step in own) for name in names))
        for rank, own in steps.items()
    ]
    return max(ranks, key=lambda one: (one.exposed_comm_us + one.slowed_us, one.idle_us), default=None)


def headline(diagnosis: Diagnosis) -> str:
    """Returns a sentence: the time of a step, and what of it is lost."""
    found = lost(diagnosis)
    if not found:
        return "No step to diagnose."
    parts = {
        "exposed communication": found.exposed_comm_us,
        "idle for": found.idle_us,
        "GEMMs slowed by communication": found.slowed_us,
    }
    listed = ", ".join(f"{name} {_with_share(us, found.step_us)}" for name, us in parts.items() if us > 0)
    several = len(diagnosis.ranks) > 1
    steps = f"{counted(found.num_steps, 'step')} of {as_us(found.step_us)} us (median) on {diagnosis.device}"
    who = f"{len(diagnosis.ranks)} ranks, {steps}. Rank {found.rank} loses most" if several else f"{steps}. Lost"
    late = {one.rank for one in diagnosis.findings if one.cause == "straggler" and one.rank is not None}
    waits = f" Others wait for rank {some_of(sorted(late))}." if late else ""
    return f"{who}: {listed or 'nothing'}.{waits}"


def title(finding: Finding) -> str:
    """Returns the finding in a line: cause, what is lost, and which communication."""
    about = [
        finding.collective,
        f"process group {finding.process_group}" if finding.process_group else "",
        {**PASS_WORDS, "other": "outside of the passes"}.get(finding.pass_, ""),
        finding.where,
    ]
    rank = "" if finding.rank is None else f", rank {finding.rank}"
    named = ", ".join(filter(None, about))
    share = f"{as_us(finding.lost_us)} us ({as_share(finding.share)})"
    return f"{finding.cause}: {share}{rank}{f': {named}' if named else ''}"


def _with_share(time_us: float, step_us: float) -> str:
    return f"{as_us(time_us)} us ({as_share(time_us / step_us if step_us else 0.0)})"


def print_diagnosis(
    found: Found, console: Console, advice: Sequence[str] = (), predicted: Sequence[str] = (), best: str = ""
) -> None:
    """Prints what a run loses, then each finding with its evidence and what to try. `advice`: for each what to try, if
    not what it says itself; `predicted`: a sentence on what the change that mends it is predicted to gain; `best`: on
    the change that is predicted to gain most."""
    from overlap_sweep.report.console import print_lines

    diagnosis = found.diagnosis
    console.print(f"\n{diagnosis.run}", style="bold")
    print_lines([headline(diagnosis), *filter(None, [between_nodes_in_a_sentence(found.node_times), best])], console)
    tries: dict[str, int] = {}
    said: dict[str | None, int] = {}
    tried = advice or [one.try_ for one in diagnosis.findings]
    for number, (finding, try_, gain) in enumerate(zip_longest(diagnosis.findings, tried, predicted), 1):
        console.print()
        print_lines([f"{number}. {title(finding)}"], console, hanging=3)
        first = tries.setdefault(try_, number)
        text = try_ if first == number else f"as for {first}."
        # One change may answer several findings. What costs time has been said.
        is_new = gain and said.setdefault(gain, number) == number and try_ == finding.try_
        lines = [finding.evidence, f"Try: {text}" if try_ else "", gain if is_new else None]
        print_lines([*filter(None, lines)], console, indent=5, hanging=0)


def between_nodes_in_a_sentence(times: NodeTimes | None) -> str:
    """Returns how much communication is between nodes, and at which bandwidth; empty for a single node."""
    if times is None or not times.comm_us:
        return ""
    if not times.between_us and times.unknown_us:
        return "How much of the communication is between nodes is unknown: the traces do not name its process groups."
    least = "at least " if times.at_least else ""
    rate = f", at {least}{as_rate(times.between_gb_s)} GB/s" if times.between_gb_s else ""
    exposed = f" ({as_us(times.exposed_between_us)} us exposed)" if times.between_us else ""
    unknown = f"; of {as_us(times.unknown_us)} us it is unknown" if times.unknown_us else ""
    return (
        f"{as_us(times.between_us)} of {as_us(times.comm_us)} us of communication is between nodes{rate}"
        f"{exposed}{unknown}."
    )
