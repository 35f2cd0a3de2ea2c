"""What bars and dots share: a row for each, its name on the left, columns of cells on the right, and references."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from overlap_sweep.report.charts.palette import colour
from overlap_sweep.report.charts.parts import LETTER_PX, Align, Scaled, detail_fields, drawn_from, header, tooltip

if TYPE_CHECKING:
    import altair as alt

LINE_PX = 14
ROW_GAP_PX = 12
NAME_CHARACTERS = 48
MOST_LINES = 4
COLUMN_GAP_PX = 20
CELL_LETTER_PX = 6.8
WHISKER_PX = 8


@dataclass(frozen=True)
class Column:
    title: str
    align: Align = "right"
    bold: bool = False


@dataclass(frozen=True)
class Reference:
    """A line at what rows are compared with."""

    at: float
    label: str = ""
    below: str = ""
    """What being below it means; above it `above`."""
    above: str = ""
    colour: str = "ink"


class Row(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def cells(self) -> Sequence[str]: ...
    @property
    def bold(self) -> bool: ...
    @property
    def details(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Frame:
    """Rows to draw in, from top to bottom."""

    rows: Sequence[Row]
    columns: Sequence[Column]
    names: list[str] = field(init=False)
    """In lines, each different."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", wrapped([row.name for row in self.rows]))

    @property
    def height_px(self) -> int:
        lines = max(name.count("\n") + 1 for name in self.names)
        return (LINE_PX * lines + ROW_GAP_PX) * len(self.rows)

    @property
    def y(self) -> alt.Y:
        import altair as alt

        # An axis would not centre names of several lines.
        return alt.Y("row:O", title=None, axis=None, scale=alt.Scale(domain=list(range(len(self.rows)))))

    def tooltip(self) -> list[alt.Tooltip]:
        return tooltip(max((row.details for row in self.rows), key=len))

    def fields(self, i: int) -> dict[str, Any]:
        """Returns what everything that is drawn in a row has in common."""
        row = self.rows[i]
        weight = 700 if row.bold else 400
        return {"row": i, "name": self.names[i], "weight": weight, **detail_fields(row.details)}

    def layers(self) -> list[alt.Chart]:
        """Returns names and columns."""
        import altair as alt

        base = drawn_from(
            {
                **self.fields(i),
                "up_px": -LINE_PX * self.names[i].count("\n") / 2,
                **{f"cell{j}": row.cells[j] if row.cells else "" for j in range(len(self.columns))},
            }
            for i, row in enumerate(self.rows)
        )
        names = base.mark_text(
            align="right",
            baseline="middle",
            dx=-8,
            dy=alt.ExprRef("datum.up_px"),
            fontSize=12,
            lineBreak="\n",
            lineHeight=LINE_PX,
            fontWeight=alt.ExprRef("datum.weight"),
        )
        found = [names.encode(x=alt.value(0), y=self.y, text="name:N", tooltip=self.tooltip())]
        left_px = 0
        for j, column in enumerate(self.columns):
            cells = [row.cells[j] for row in self.rows if row.cells]
            left_px += COLUMN_GAP_PX
            right_px = left_px + round(
                max(LETTER_PX * len(column.title), *(CELL_LETTER_PX * len(cell) for cell in cells), 0)
            )
            at_px = left_px if column.align == "left" else right_px
            weight = alt.ExprRef("600" if column.bold else "datum.weight")
            mark = base.mark_text(align=column.align, dx=at_px, fontSize=12, fontWeight=weight)
            found.append(header(column.title, alt.value("width"), at_px, column.align))
            found.append(mark.encode(x=alt.value("width"), y=self.y, text=f"cell{j}:N", tooltip=self.tooltip()))
            left_px = right_px
        return found

    def whiskers(self, rows: Sequence[dict[str, Any]], x: Any, own: Any) -> list[alt.Chart]:
        """Returns the ranges from `low` to `high`; x takes a field's name."""
        base = drawn_from(row for row in rows if row["low"] is not None)
        ends = (
            base.mark_tick(thickness=1.5, size=WHISKER_PX, orient="vertical", opacity=1).encode(
                x=x(end), y=self.y, **own
            )
            for end in ("low", "high")
        )
        rule = base.mark_rule(strokeWidth=1.5)
        return [rule.encode(x=x("low"), x2="high:Q", y=self.y, tooltip=self.tooltip(), **own), *ends]

    def describe(self) -> list[str]:
        said = []
        for row in self.rows:
            cells = ", ".join(f"{c.title} {cell}" for c, cell in zip(self.columns, row.cells, strict=False) if cell)
            said.append(f"{row.name}: {cells}" if cells else row.name)
        return said


def wrapped(names: Sequence[str]) -> list[str]:
    """Returns names broken into lines; those that are cut to the same are numbered."""
    broken = [
        "\n".join(textwrap.wrap(name, NAME_CHARACTERS, max_lines=MOST_LINES, placeholder=" ...")) for name in names
    ]
    was_cut = [one.endswith(" ...") and broken.count(one) > 1 for one in broken]
    return [f"{one} ({i})" if cut else one for i, (one, cut) in enumerate(zip(broken, was_cut, strict=True), start=1)]


def references(shown: Sequence[Reference], x: Any, scaled: Scaled) -> list[alt.Chart]:
    """Returns their lines and what stands above these; x takes a field's name."""
    import altair as alt

    drawn: list[alt.Chart] = []
    for reference in shown:
        at, share = alt.XDatum(reference.at), scaled.share(reference.at)
        rule = drawn_from([{"at": reference.at}]).mark_rule(color=colour(reference.colour))
        drawn.append(rule.encode(x=x("at")))
        half_px = LETTER_PX * len(reference.label) // 2
        align: Align = "right" if share > 0.85 else "left" if share < 0.15 else "center"
        if reference.label:
            drawn.append(header(reference.label, at, {"right": 4, "left": -4, "center": 0}[align], align))
        below_px = {"right": 2 * half_px, "left": 0, "center": half_px}[align] + 8
        if reference.below and share > 0.2:
            drawn.append(header(reference.below, at, -below_px, "right"))
        if reference.above and share < 0.8:
            above_px = {"right": 0, "left": 2 * half_px, "center": half_px}[align] + 8
            drawn.append(header(reference.above, at, above_px, "left"))
    return drawn
