"""knobs.json, which a search over knobs leaves beside its points, and what it says to people."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from overlap_sweep.errors import UserError
from overlap_sweep.report.console import print_lines
from overlap_sweep.report.numbers import as_duration, as_us
from overlap_sweep.run_directory import write_atomically

KNOBS_FILE = "knobs.json"
SCHEMA = 1


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


class KnobRecord(msgspec.Struct, kw_only=True):
    """The content of knobs.json."""

    schema: int = SCHEMA
    points: int = 0
    reused: int = 0
    """How many of them an earlier run had measured."""
    elapsed_s: float = 0.0
    searches: list[KnobSearch] = []


def write_knobs(directory: Path, record: KnobRecord) -> Path:
    text = msgspec.json.format(msgspec.json.encode(record), indent=2)
    return write_atomically(directory / KNOBS_FILE, text + b"\n")


def read_knobs(path: Path) -> KnobRecord:
    """UserError when it is none of this or an earlier schema."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=KnobRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); remove it, or search again.") from None
    if record.schema > SCHEMA:
        raise UserError(f"{path} has schema {record.schema}, this version reads up to {SCHEMA}; update overlap_sweep.")
    return record


def find_knobs(directory: Path) -> list[Path]:
    """The knobs.json of every search at or below the directory, sorted."""
    return sorted(directory.rglob(KNOBS_FILE))


def print_knob_searches(directory: Path, console: Console) -> None:
    """What the searches over knobs at or below the directory came to; nothing where there are none."""
    for path in find_knobs(directory):
        where = f" in {path.parent.relative_to(directory).as_posix()}" if path.parent != directory else ""
        console.print(f"\nKnobs{where}", style="bold")
        print_lines(knob_lines(read_knobs(path)), console)


def knob_lines(record: KnobRecord) -> list[str]:
    """The answers, and what they rest on."""
    reused = f", {record.reused} of them measured before" if record.reused else ""
    lines = [line for search in record.searches for line in _search_lines(search)]
    return [*lines, f"{record.points} points{reused} in {as_duration(record.elapsed_s)}"]


def headline(search: KnobSearch) -> str:
    """The answer in a sentence."""
    if search.time_us is None or search.baseline_us is None:
        return f"no answer: {search.dropped or search.stopped}"
    if not search.best:
        early = f" in what was measured until {search.stopped}" if search.stopped else ""
        return f"nothing is faster than the baseline{early}, {as_us(search.time_us)} us: keep it"
    assert search.gain
    over_none = f", {_in_words(search.over_none)} than the same without overlap" if search.over_none else ""
    times = f"{as_us(search.time_us)} us instead of {as_us(search.baseline_us)}"
    what = f"{times}, {_in_words(search.gain)} than the baseline{over_none}"
    return what if search.proven else f"{what}; NOT PROVEN: no points were left to measure it again"


def pasted(search: KnobSearch) -> str:
    """What runs the best setting."""
    overrides = dict(override.partition("=")[::2] for override in search.overrides)
    changed = {**overrides, **search.best}
    return shlex.join(["python", "launch.py", *(f"{key}={value}" for key, value in changed.items())])


def _search_lines(search: KnobSearch) -> list[str]:
    lines = [f"{search.label}: {headline(search)}"]
    if search.time_us is not None:
        lines += [f"  {pasted(search)}"] if search.best else []
        lines += [f"  {line}" for line in _table(search.contributions)]
        lines.append(f"  {search.settings} of {search.grid} settings measured, in {search.points} points")
    if search.stopped and search.time_us is not None:
        lines.append(f"  Stopped early: {search.stopped}; there may be something faster.")
    if search.by_time:
        lines.append(
            "  What was measured beside the settings differs between them: compared by their times as they are."
        )
    if search.host_bound:
        lines.append(f"  In {search.host_bound} of the points the host, not the device, is what takes so long.")
    lines += [f"  {note}" for note in search.notes]
    lines += [f"  refused {count} times: {reason}" for reason, count in search.refused.items()]
    lines += [f"  {key} was not searched: {reason}" for key, reason in search.left_out.items()]
    return lines


def _table(contributions: Sequence[Contribution]) -> list[str]:
    if not contributions:
        return []
    rows = [("knob", "baseline", "best", "gains alone", "gains in the best setting")]
    rows += [(c.key, c.baseline, c.value, _share(c.alone), _share(c.taken_away)) for c in contributions]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: tuple[str, ...]) -> str:
        cells = [
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [line(row) for row in rows]


def _share(gain: Gain | None) -> str:
    if gain is None:
        return "not possible"
    return f"{100 * gain.share:+.1f} % ± {100 * gain.noise:.1f}" + ("" if gain.sure else " (noise)")


def _in_words(gain: Gain) -> str:
    size = f"{100 * abs(gain.share):.1f} % (± {100 * gain.noise:.1f})"
    if not gain.sure:
        return f"no faster beyond the noise, {100 * gain.share:+.1f} % (± {100 * gain.noise:.1f}),"
    return f"{size} {'less' if gain.share > 0 else 'more'} time"
