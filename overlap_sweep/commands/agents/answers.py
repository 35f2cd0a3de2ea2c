"""Types of what tools answer: every figure with its noise, every claim with its status."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from overlap_sweep.report.numbers import shortened, visible
from overlap_sweep.report.table import Column, Row

DIGITS = 5
"""Significant digits of figures: noise is never as small as what is cut."""
LONGEST_NAME = 120
LONGEST_SENTENCE = 700
"""Most characters of names and sentences, both of which may have text from traces in them."""

Status = Literal["measured", "predicted", "bound", "cannot tell"]


class Answered(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class Figure(Answered):
    value: float | None
    """None if it is unknown."""
    low: float | None
    """Lower end of what it may be: of the 95 % confidence interval where it is measured, of what the recording leaves
    open where it is predicted. None: the noise is unknown, so nothing follows from small differences."""
    high: float | None
    """Upper end."""
    status: Status
    """bound: what is gained at most, not what will be gained. cannot tell: no claim can rest on it."""


Cell = Figure | str | int | bool | None


class Conclusion(Answered):
    """What a whole analysis says of one case."""

    about: str
    sentences: list[str]
    others: list[str]
    """How much each other setting that could win differs from the chosen one, with the interval of the difference."""
    cautions: list[str]
    """What to know before believing it."""


class CauseAnswer(Answered):
    """A cause of exposed communication."""

    cause: str
    status: Status
    """Of the cause itself: measured if the recording shows it; cannot tell if traces of ranks are missing, so that
    waiting for them looks the same. What it may gain is a bound even if it is measured."""
    may_gain_us: Figure
    """Per step, of fixing this cause alone: a bound. Bounds of several causes do not add up."""
    share_of_step: float
    """may_gain_us.value over the median step of the rank that loses it, which is not always the rank of step_us."""
    rank: int | None
    """Rank that loses most; of a straggler the late one."""
    where: str
    evidence: str
    advice: str
    change: str
    """The change of `predict` that the advice means, and that gains most or costs least; empty if none is predicted.
    `levers` says whether it can be made without the script."""
    predicted_gain_us: Figure | None
    """Of that change on the whole step, which may be more than may_gain_us of one cause. One change may answer several
    findings: it is given once, at the first of them, and null at the others. Negative: it costs time."""


class DiagnosedRun(Answered):
    run: str
    ranks_recorded: list[int | None]
    ranks_of_run: int | None
    device: str
    """Name of the GPU, GPU if the traces do not name it, or CPU: then ranks use gloo, and may share cores."""
    step_us: Figure
    """Median step of the rank that loses most; `predict` has the mean of the slowest."""
    exposed_comm_us: Figure
    """Per step, of that rank, while nothing computes."""
    mean_exposed_share: float | None
    """The same as a share of the step, as the mean of all ranks: below 0.02 the finding is `none`."""
    summary: str
    best_change: str
    """Of all changes that are predicted the one that gains most of the whole step, whatever the findings advise; empty
    if none gains 1 % of it."""
    best_gain_us: Figure | None
    findings: list[CauseAnswer]
    """Those of the cause first that loses most in all its findings. Every cause is among them before a second finding
    of any."""
    more_findings: int


class DiagnoseAnswer(Answered):
    notes: list[str]
    """What was left out or is unknown, such as ranks to record as well: read it first."""
    runs: list[DiagnosedRun]
    more_runs: int


class ChangeAnswer(Answered):
    """A change and what it would gain."""

    run: str
    change: str
    status: Status
    step_us: Figure
    """As recorded, the mean, of the slowest rank, with the noise of the steps; the profiler slows the host. `diagnose`
    has the median."""
    predicted_us: Figure
    gain_us: Figure
    """Of a bound: `value` is the most that it gains, and `high` that with the error of the prediction itself."""
    then_critical: str
    """What the step's time would then consist of."""
    note: str
    """Why it cannot be told, or what else to know."""
    compared: dict[str, Cell] | None
    """With `against`: what was measured with the change made, and whether it is in the interval."""


class PredictAnswer(Answered):
    changes: list[ChangeAnswer]
    """The best first, or as they were named."""
    more_changes: int
    notes: list[str]


class LeversAnswer(Answered):
    about: list[str]
    """What was found, and what names mean or why they are no levers."""
    gains: Status
    """Of the rows with gain_us the best status; cannot tell if there is none, as without a recording."""
    levers: list[dict[str, Cell]]
    """What gains most first: change is what gain_us is of, a bound where the lever gains at most that. A lever that can
    mend a cause and has no gain_us may gain nothing. In write VALUE stands for one of the values; without write none is
    predicted to gain. Of a training with a trace those that mend a cause found in it, or are predicted to gain."""
    more_levers: int
    """Further ones that may apply; most of them mend nothing that was found."""
    do_not_apply: int
    """Further ones that do not apply to the training; `full` has them with the reason."""


class RowsAnswer(Answered):
    conclusions: list[Conclusion]
    """What the analysis of the whole directory concludes, ties decided; what holds more than any two rows."""
    notes: list[str]
    columns: dict[str, str]
    """What each column is."""
    rows: list[dict[str, Cell]]
    more_rows: int


class Passage(Answered):
    page: str
    """Name to read it by."""
    heading: str
    text: str
    more_characters: int
    read_on: str
    """The call that has the rest; empty if this is all."""


class DocsAnswer(Answered):
    pages: list[Passage]
    more_pages: int


class OptimizeAnswer(Answered):
    state: Literal["plan", "running", "ended"]
    """plan: nothing was started."""
    command: str
    """What would be run, or runs, in a shell; empty if it was started by an earlier call."""
    directory: str
    """To be given to the next call, which reads the answer so far."""
    verdict: Literal["proven", "keep", "undecided"] | None = None
    """keep: nothing that was tried is faster beyond the noise; null: nothing is known yet."""
    gain: Figure | None = None
    """Share of the step's time: of `settings`, or while undecided of what seems fastest."""
    settings: dict[str, str | int | float | bool | None] = {}
    lines: list[str]
    """The answer in words: what to write, whether results stay equal, cautions, what is left, what was tried."""


def figure(
    value: float | None, low: float | None = None, high: float | None = None, status: Status = "measured"
) -> Figure:
    """Returns the figure, rounded."""
    return Figure(value=rounded(value), low=rounded(low), high=rounded(high), status=status)


def rounded(value: float | None) -> float | None:
    """Returns the value with DIGITS digits; None for NaN and infinities, which JSON does not have."""
    return float(f"{value:.{DIGITS}g}") if value is not None and math.isfinite(value) else None


def at_most(value: float | None) -> Figure:
    """Returns what is gained at most, which may be nothing."""
    return figure(value, 0.0, value, "bound")


def name(text: object) -> str:
    """Returns a name in one line, shortened: traces may have any text in it."""
    return shortened(visible(" ".join(str(text or "").split())), LONGEST_NAME)


def sentence(text: object) -> str:
    return shortened(visible(" ".join(str(text or "").split())), LONGEST_SENTENCE)


NOISE_OF = {
    "time_us": "noise_us",
    "value": "noise",
    "ratio": "ratio_noise",
    "gain": "gain_noise",
    "hidden_fraction": "hidden_noise",
    "saved_us": "saved_noise_us",
    "chunk_gain": "chunk_gain_noise",
    "reference_time_us": "reference_noise_us",
    "reference_value": "reference_noise",
}
"""Columns with the half-width of another's interval."""
ENDS_OF = {
    "ratio": ("ratio_low", "ratio_high"),
    "predicted_us": ("low_us", "high_us"),
    "gain_us": ("gain_low_us", "gain_high_us"),
}
"""Columns with the ends of it."""
COMPARING = {
    *("ratio", "none_ratio", "floor_ratio", "speedup", "gain", "difference", "difference_us", "hidden_fraction"),
    *("saved_us", "chunk_gain", "over_bound", "error_share"),
}
"""Columns that compare two times: without their noise one cannot tell whether these differ."""
DECIDED = {
    *("faster", "slower", "better", "worse", "appeared", "disappeared"),
    *("higher", "lower", "waits", "awaited"),
}
PREDICTED, BOUNDS = {"predicted_us", "predicted_speedup", "gain_us"}, {"lost_us", "share", "main_cause_share"}


def cells(row: Row, columns: Sequence[Column]) -> dict[str, Cell]:
    """Returns the row's cells: of numbers figures with their noise, whose columns are left out; counts as they
    are. What the host limits says nothing about the GPU."""
    found: dict[str, Cell] = {}
    for column in columns:
        value = row.get(column.name)
        counts = column.unit == "count" or str(row.get("quantity", "")).startswith("num_")
        if counts and column.name != "ratio" and isinstance(value, int | float) and float(value).is_integer():
            found[column.name] = int(value)
        elif column.kind == "number":
            found[column.name] = None if value is None else _figure_of(column.name, float(value), row)
        else:
            found[column.name] = name(value) if isinstance(value, str) else value
    return found


def _figure_of(column: str, value: float, row: Mapping[str, Any]) -> Figure:
    low_name, high_name = ENDS_OF.get(column, ("", ""))
    low, high, noise = row.get(low_name), row.get(high_name), row.get(NOISE_OF.get(column, ""))
    if noise is not None:
        low, high = value - noise, value + noise
    return figure(value, low, high, _status(column, row, is_known=low is not None or high is not None))


def _status(column: str, row: Mapping[str, Any], *, is_known: bool) -> Status:
    if column in PREDICTED:
        status: Status = row["status"] if row.get("status") in ("bound", "cannot tell") else "predicted"
        return status
    if column in BOUNDS:
        return "bound"
    # Of traces: beyond what iterations differ by. Where these overlap, nothing follows from the ratio.
    decided = row.get("verdict") == "same" or {row.get("verdict"), row.get("change")} & DECIDED
    unsure = column in COMPARING and not is_known and not decided
    return "cannot tell" if unsure or row.get("verdict") == "unknown" or row.get("launch_bound") else "measured"


def is_noise(column: str) -> bool:
    """Returns whether the column is part of another one's figure."""
    return column in NOISE_OF.values() or any(column in ends for ends in ENDS_OF.values())
