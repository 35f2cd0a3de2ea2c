"""Recorded response surfaces: what was measured once, as cells that a search can ask.

One JSON line per measurement: `model`, `tp`, `kind` (`none`, `floor` or `overlap`), `cfg` (the ub_cfgs; a slot that it
does not name ran at the library's default), and `times[operator]`: forward ms, backward ms, spread of the forward and
of the backward ms over the repeats. A line may hold some of the operators only.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.search.cell import NONE, Candidate, Cell
from overlap_sweep.search.start import collectives
from overlap_sweep.search.trail import Baselines

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
    """In the order in which they were recorded; `none` among them."""
    floor_us: float
    """NaN where it was not recorded."""
    collective_us: float
    """The median over the recorded passes of the model."""

    @property
    def cell(self) -> Cell:
        label = f"{self.model} TP={self.tp_size} {self.operator} {self.pass_name}"
        return Cell(label, tuple(candidate for candidate in self.samples if candidate != NONE))

    @property
    def baselines(self) -> Baselines:
        none = self.samples[NONE]
        time_us = self.time_us(NONE)
        noise_us = statistics.median(sample.noise_us for sample in none)
        return Baselines(Estimate(time_us, noise_us, REPEATS * len(none)), self.floor_us, self.collective_us)

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
        raise UserError(f"{path} cannot be read ({error}); give a recorded surface, one JSON object a line.") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {number}: no JSON ({error.msg}); give a recorded surface.") from None
    try:
        cells = list(_cells(lines))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UserError(f"{path} is no recorded surface ({type(error).__name__}: {error}).") from None
    if not cells:
        raise UserError(f"{path} has no model with a `none` and an `overlap` measurement; give a recorded surface.")
    return cells


def _cells(lines: Iterable[Mapping[str, Any]]) -> Iterable[RecordedCell]:
    samples: dict[Any, dict[Candidate, list[Estimate]]] = defaultdict(lambda: defaultdict(list))
    floors_us: dict[Any, list[float]] = defaultdict(list)
    for line in lines:
        for operator, times in line["times"].items():
            for index, pass_name in enumerate(space.PASSES):
                key = line["model"], line["tp"], operator, pass_name
                time_us, spread_us = 1e3 * times[index], 1e3 * times[index + 2]
                if line["kind"] == "floor":
                    floors_us[key].append(time_us)
                    continue
                overlapped = line["kind"] == "overlap"
                candidate = (
                    Candidate.of(overlap_cfg.settings_of_pass(line["cfg"], operator, pass_name)) if overlapped else NONE
                )
                noise_us = 1.57 * spread_us / math.sqrt(REPEATS)
                samples[key][candidate].append(Estimate(time_us, noise_us, REPEATS))
    whole = {key: found for key, found in samples.items() if NONE in found and len(found) > 1}
    # Only where to look first depends on the floor: a recording may do without.
    floor_us = {key: statistics.median(floors_us[key]) if key in floors_us else math.nan for key in whole}
    collective_us: dict[Any, list[float]] = defaultdict(list)
    for key, found in whole.items():
        # The first ones of a model include start-up.
        found[NONE] = found[NONE][1:] or found[NONE]
        model, tp_size, operator, pass_name = key
        exposed_us = _median_us(found[NONE]) - floor_us[key]
        collective_us[model, tp_size].append(exposed_us / collectives(space.OPERATORS[operator], pass_name))
    for key, found in whole.items():
        model, tp_size, operator, pass_name = key
        of_model = statistics.median(collective_us[model, tp_size])
        yield RecordedCell(model, tp_size, operator, pass_name, dict(found), floor_us[key], of_model)


def _median_us(samples: Iterable[Estimate]) -> float:
    return statistics.median(sample.time_us for sample in samples)
