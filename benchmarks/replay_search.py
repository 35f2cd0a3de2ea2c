"""Runs the search of hydra/sweeper=bisect on recorded response surfaces: its cost and its result.

python -m benchmarks.replay_search FILE... [--format table|json]

A recording has one JSON line per measurement: `model`, `tp`, `kind` (`none`, `floor` or `overlap`), `cfg` (the ub_cfgs;
a slot that it does not name ran at the library's default), and `times[operator]`: forward ms, backward ms, spread of
the forward and of the backward ms over the repeats. A line may have only some of the operators.
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from overlap_sweep.config import Search
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import space
from overlap_sweep.report.console import console_for
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.search import conduct
from overlap_sweep.search.bisect import bisect
from overlap_sweep.search.cell import NONE, Candidate, Cell, Trail

REPEATS = 12
"""Behind each recorded median."""


@dataclass(frozen=True)
class RecordedCell:
    """One pass of one operator of one model at one TP size."""

    model: str
    tp_size: int
    operator: str
    pass_name: str
    samples: Mapping[Candidate, list[Estimate]]
    """Measurements in the order of recording, including `none`."""

    @property
    def cell(self) -> Cell:
        return Cell(tuple(candidate for candidate in self.samples if candidate != NONE))

    @property
    def none(self) -> Estimate:
        samples = self.samples[NONE]
        noise_us = statistics.median(sample.noise_us for sample in samples)
        return Estimate(self.time_us(NONE), noise_us, REPEATS * len(samples))

    def time_us(self, candidate: Candidate) -> float:
        """The median over the recorded measurements of the candidate."""
        return _median_us(self.samples[candidate])

    @property
    def best(self) -> Candidate:
        return min(self.samples, key=self.time_us)


def read(path: Path) -> list[RecordedCell]:
    """All cells of a recording. UserError when the file is none."""
    lines = []
    try:
        for number, line in enumerate(path.read_text().splitlines(), start=1):  # noqa: B007
            if line.strip():
                lines.append(json.loads(line))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); give a recorded surface, one JSON object per line."
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {number}: not JSON ({error.msg}); give a recorded surface.") from None
    try:
        cells = list(_cells(lines))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UserError(f"{path} is not a recorded surface ({type(error).__name__}: {error}).") from None
    if not cells:
        raise UserError(f"{path} has no model with a `none` and an `overlap` measurement; give a recorded surface.")
    return cells


def _cells(lines: Iterable[Mapping[str, Any]]) -> Iterable[RecordedCell]:
    samples: dict[Any, dict[Candidate, list[Estimate]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for operator, times in line["times"].items():
            for index, pass_name in enumerate(space.PASSES):
                key = line["model"], line["tp"], operator, pass_name
                time_us, spread_us = 1e3 * times[index], 1e3 * times[index + 2]
                if line["kind"] == "floor":
                    continue
                candidate = _candidate(line["cfg"], operator, pass_name) if line["kind"] == "overlap" else NONE
                noise_us = 1.57 * spread_us / math.sqrt(REPEATS)
                samples[key][candidate].append(Estimate(time_us, noise_us, REPEATS))
    whole = {key: found for key, found in samples.items() if NONE in found and len(found) > 1}
    for (model, tp_size, operator, pass_name), found in whole.items():
        # The first ones of a model include start-up.
        found[NONE] = found[NONE][1:] or found[NONE]
        yield RecordedCell(model, tp_size, operator, pass_name, dict(found))


def settings_of_pass(slots: Mapping[str, Mapping[str, Any]], operator: str, pass_name: str) -> dict[str, space.Setting]:
    """Returns what ub_cfgs give to the slots of one pass of an operator, with every knob that changes anything: the
    library takes what they do not say from the slot's default, and a slot that they do not name has its default
    whole."""
    given = {}
    for phase in space.PHASES:
        slot = space.slot(operator, phase)
        if space.PASS_OF_PHASE[phase] == pass_name and space.methods_of(operator, phase):
            whole = {**space.USERBUFFERS_DEFAULT_SETTINGS[slot], **slots.get(slot, {})}
            if whole["method"] == "none":
                continue
            knobs = space.knobs_of(operator, phase, whole["method"])
            setting = {"method": whole["method"], **{knob: whole[knob] for knob in knobs if knob in whole}}
            given[slot] = space.without_idle_knobs(setting)
    if space.wgrad_refusal(operator, given):
        del given[space.slot(operator, "wgrad")]
    return given


def _candidate(cfg: Mapping[str, Any], operator: str, pass_name: str) -> Candidate:
    settings = settings_of_pass(cfg, operator, pass_name)
    for setting in settings.values():
        if setting["method"] == "bulk":
            # It follows from num_sm: clusters of two want even counts.
            setting.pop("cga_size", None)
    return Candidate.of(settings)


def _median_us(samples: Iterable[Estimate]) -> float:
    return statistics.median(sample.time_us for sample in samples)


@dataclass(frozen=True)
class Row:
    """One search."""

    model: str
    tp_size: int
    operator: str
    phase: str
    """`fwd` or `bwd`: what a recording has times of. Backward, dgrad and wgrad are chosen together."""
    evaluations: int
    """Measurements that the search asked for, repeated ones too. `none` is not among them: it is measured beside
    every one."""
    exhaustive: int
    """Different settings that were recorded, `none` apart."""
    regret: float
    """Recorded time of what was chosen over that of the best recorded, `none` included, minus 1."""
    chosen: str
    settings: dict[str, dict[str, Any]]
    """Chosen settings by slot; empty for no overlap."""
    time_us: float
    best: str
    best_us: float


class RecordingEndedError(Exception):
    """A candidate is to be measured more often than it was recorded."""


def replay(recorded: RecordedCell) -> Trail:
    """Search one recorded cell to the end, or that of the recording: only contenders are measured again, at last."""
    trail = Trail(recorded.cell, recorded.none, floor_us=math.nan)

    def next_sample(candidate: Candidate) -> Estimate:
        samples, asked = recorded.samples[candidate], len(trail.samples.get(candidate, ()))
        if asked == len(samples):
            raise RecordingEndedError
        return samples[asked]

    try:
        steps = bisect(trail, Search())
        trail.stopped = conduct(steps, lambda wanted: {candidate: next_sample(candidate) for candidate in wanted})
    except RecordingEndedError:
        trail.stopped = "the recording ended"
    return trail


def row(recorded: RecordedCell, trail: Trail) -> Row:
    chosen_us, best_us = recorded.time_us(trail.best), recorded.time_us(recorded.best)
    return Row(
        model=recorded.model,
        tp_size=recorded.tp_size,
        operator=recorded.operator,
        phase=recorded.pass_name,
        evaluations=trail.evaluations,
        exhaustive=len(recorded.cell.candidates),
        regret=chosen_us / best_us - 1,
        chosen=str(trail.best),
        settings=trail.best.settings,
        time_us=chosen_us,
        best=str(recorded.best),
        best_us=best_us,
    )


def totals(rows: Sequence[Row]) -> str:
    used, of = sum(row.evaluations for row in rows), sum(row.exhaustive for row in rows)
    regrets = [row.regret for row in rows]
    return (
        f"{len(rows)} searches: {used} of {of} evaluations ({used / of:.1%}); regret: median "
        f"{statistics.median(regrets):.2%}, mean {statistics.mean(regrets):.2%}, worst {max(regrets):.2%}"
    )


class Format(StrEnum):
    table = "table"
    json = "json"


def main(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Recorded surfaces, one JSON object per line.")],
    format: Annotated[
        Format, typer.Option(help="Format of the rows; with json the totals go to stderr.")
    ] = Format.table,
) -> None:
    """Run the search of hydra/sweeper=bisect against recorded response surfaces.

    Prints for each model, operator and phase what the search would have measured and chosen. regret is the recorded
    time of what was chosen over that of the best that was recorded, minus 1.
    """
    rows = [row(cell, replay(cell)) for path in files for cell in read(path)]
    if format is Format.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        print(totals(rows), file=sys.stderr)
        return
    _print_table(rows)
    print(totals(rows))


def _print_table(rows: Sequence[Row]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("model", "TP", "operator", "phase", "evaluations", "share", "regret", "chosen", "best recorded"):
        left = header in ("model", "operator", "phase", "chosen", "best recorded")
        table.add_column(header, justify="left" if left else "right", no_wrap=left)
    for r in rows:
        counts = f"{r.evaluations} of {r.exhaustive}", f"{r.evaluations / r.exhaustive:.0%}"
        best = "" if r.best == r.chosen else r.best
        table.add_row(r.model, str(r.tp_size), r.operator, r.phase, *counts, f"{r.regret:.2%}", r.chosen, best)
    console_for(sys.stdout).print(table)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(context_settings={"help_option_names": ["-h", "--help"]})(main)
    try:
        app(prog_name="python -m benchmarks.replay_search")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
