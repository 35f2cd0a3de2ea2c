"""Pieces that several charts are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from overlap_sweep.report.page.palette import colour

if TYPE_CHECKING:
    import altair as alt

Align = Literal["left", "center", "right"]


def drawn_from(rows: Iterable[Any]) -> alt.Chart:
    """A chart of dataclasses, or of dictionaries."""
    import altair as alt

    return alt.Chart(alt.InlineData(values=[row if isinstance(row, dict) else asdict(row) for row in rows]))


def tooltip(titles: Mapping[str, str]) -> list[alt.Tooltip]:
    """By field, written as they are, what each is called."""
    import altair as alt

    return [alt.Tooltip(f"{field}:N", title=title) for field, title in titles.items()]


def header(text: str, where: Any, dx: int, align: Align) -> alt.Chart:
    """Words above the plot; `where` is what `x` takes."""
    import altair as alt

    mark = drawn_from([{}]).mark_text(align=align, dx=dx, color=colour("muted"))
    return mark.encode(x=where, y=alt.value(-8), text=alt.value(text))


def row_axis(limit_px: int) -> alt.Axis:
    """Names on the left of bars."""
    import altair as alt

    return alt.Axis(
        domain=False, ticks=False, labelColor=colour("ink"), labelFontSize=12, labelLimit=limit_px, labelPadding=8
    )
