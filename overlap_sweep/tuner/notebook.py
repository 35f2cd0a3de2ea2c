"""Renders a report in a notebook: a card with the answer for each TP size, and a table of the best settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep.overlap import space
from overlap_sweep.report.table import Column
from overlap_sweep.workloads.operator.section import ANSWERS

if TYPE_CHECKING:
    from overlap_sweep.tuner.content import BestSetting
    from overlap_sweep.tuner.report import Report


def html(report: Report) -> str:
    """Returns an HTML element with inline styles and without scripts."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    columns = [column for column in ANSWERS.shown if any(_text(best, column) for best in report.best)]
    return environment.get_template("notebook.html.j2").render(report=report, columns=columns, text=_text)


def _text(best: BestSetting, column: Column[Any]) -> str:
    if column.name == "setting":
        setting = space.brief_name(best.setting)
        return setting if setting == best.final_setting else f"{setting}, in the file {best.final_setting}"
    return column.shown(getattr(best, column.name))
