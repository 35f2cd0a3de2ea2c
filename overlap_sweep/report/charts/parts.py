"""What the four forms share: axes, colours' keys, tooltips, words above the plot, labels that keep their distance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from overlap_sweep.report.charts.palette import colour

if TYPE_CHECKING:
    import altair as alt

Align = Literal["left", "center", "right"]
LOGARITHMIC_FROM = 4.0
"""Ratio of the largest to the smallest value from which on an axis is logarithmic."""
LETTER_PX = 6
KEYS_Y_PX = -28
_SHAPES = {"dot": "circle", "ring": "circle", "tick": "stroke", "square": "square"}


@dataclass(frozen=True)
class Axis:
    title: str = ""
    format: str = ""
    """As d3 has it, such as `.0%`; empty: as many digits as the values need."""
    domain: tuple[float, float] | None = None
    """Where it begins and ends; None: where the values do, and a margin."""
    ticks: list[float] = field(default_factory=list)
    """Empty: wherever they fit."""
    from_zero: bool = False
    logarithmic: bool | None = None
    """None: where the values are above 0 and LOGARITHMIC_FROM apart, unless there is a domain."""


@dataclass(frozen=True)
class Key:
    """What a colour means."""

    name: str
    colour: str
    opacity: float = 1.0
    shape: Literal["square", "dot", "ring", "tick"] = "square"


@dataclass(frozen=True)
class Scaled:
    """An axis fitted to values."""

    axis: Axis
    low: float
    high: float
    logarithmic: bool

    def share(self, value: float) -> float:
        """Returns where a value lies between both ends, from 0 to 1."""
        low, high, at = (math.log(one) if self.logarithmic else one for one in (self.low, self.high, value))
        return (at - low) / (high - low)

    def at(self, share: float) -> float:
        """Returns the value that lies there; the inverse of `share`."""
        if self.logarithmic:
            return float(self.low * (self.high / self.low) ** share)
        return self.low + share * (self.high - self.low)

    @property
    def title(self) -> str | None:
        return (f"{self.axis.title}, logarithmic" if self.logarithmic else self.axis.title) or None

    def scale(self, *, clamp: bool = False) -> alt.Scale:
        import altair as alt

        # Vega warns of a logarithmic scale that is told about zero.
        kind = {"type": "log"} if self.logarithmic else {"zero": False}
        return alt.Scale(domain=[self.low, self.high], nice=False, clamp=clamp, **kind)

    def drawn(self, count: int = 6, **options: Any) -> alt.Axis:
        """Returns the axis with about `count` ticks, where it has none of its own."""
        import altair as alt

        ticks = self.axis.ticks or (log_ticks(self.low, self.high) if self.logarithmic else [])
        form = self.axis.format or ",.5~r"
        # Nobody writes "+0%".
        signed = f"datum.value ? format(datum.value, '{form}') : '0'" if form.startswith("+") else alt.Undefined
        # Of ticks that are given Vega would leave some out, had it a count.
        wanted = {"values": ticks} if ticks else {"tickCount": count}
        return alt.Axis(format=form, labelExpr=signed, domain=False, ticks=False, **wanted, **options)


def fitted(axis: Axis, values: Iterable[float | None], margin: float = 0.07) -> Scaled:
    """Returns the axis with its ends: those wanted, or of the values with a margin, which is a share of their range."""
    known = [value for value in values if value is not None]
    if axis.domain:
        return Scaled(axis, *axis.domain, logarithmic=bool(axis.logarithmic))
    low, high = min(known, default=0.0), max(known, default=1.0)
    logarithmic = axis.logarithmic
    if logarithmic is None:
        logarithmic = not axis.from_zero and 0 < LOGARITHMIC_FROM * low < high
    if logarithmic:
        return Scaled(axis, low / 1.12, high * 1.12, logarithmic=True)
    if axis.from_zero:
        low = min(0.0, low)
    gap = margin * (high - low) or 0.01 * abs(high) or 1.0
    begins = 0.0 if low == 0.0 and axis.from_zero else low - gap
    return Scaled(axis, max(0.0, begins) if low >= 0 else begins, high + gap, logarithmic=False)


def log_ticks(low: float, high: float) -> list[float]:
    """Returns 1, 2 and 5 times powers of ten within `low` to `high`, both above 0; in a narrow range more of them."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in (
        (1, 2, 5),
        (1, 1.5, 2, 3, 4, 5, 6, 8),
        (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9),
    ):
        ticks = [round(step * 10.0**decade, 9) for decade in decades for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) > 2:
            break
    return ticks


def drawn_from(rows: Iterable[Any]) -> alt.Chart:
    """Returns a chart of dataclasses, or of dictionaries."""
    import altair as alt

    return alt.Chart(alt.InlineData(values=[row if isinstance(row, dict) else asdict(row) for row in rows]))


def detail_fields(details: Mapping[str, str]) -> dict[str, str]:
    return {f"detail{i}": text for i, text in enumerate(details.values())}


def tooltip(details: Mapping[str, str]) -> list[alt.Tooltip]:
    """Returns what is shown of rows with the `detail_fields` of such details."""
    import altair as alt

    return [alt.Tooltip(f"detail{i}:N", title=title) for i, title in enumerate(details)]


def header(text: str, where: Any, dx: int, align: Align) -> alt.Chart:
    """Returns words above the plot; `where` is what `x` takes."""
    import altair as alt

    mark = drawn_from([{}]).mark_text(align=align, dx=dx, color=colour("muted"))
    return mark.encode(x=where, y=alt.value(-8), text=alt.value(text))


def keys(shown: Sequence[Key]) -> list[alt.Chart]:
    """Returns what colours mean, in a row above the plot; nothing where there is but one."""
    import altair as alt

    drawn, at_px = [], 0
    for key in shown if len(shown) > 1 else ():
        mark = drawn_from([{}]).mark_point(
            shape=_SHAPES[key.shape],
            filled=key.shape in ("dot", "square"),
            size=90,
            angle=90 if key.shape == "tick" else 0,
            color=colour(key.colour),
            opacity=key.opacity,
        )
        text = drawn_from([{}]).mark_text(align="left", color=colour("muted"))
        drawn.append(mark.encode(x=alt.value(at_px + 5), y=alt.value(KEYS_Y_PX)))
        drawn.append(text.encode(x=alt.value(at_px + 14), y=alt.value(KEYS_Y_PX), text=alt.value(key.name)))
        at_px += 34 + LETTER_PX * len(key.name)
    return drawn


def heading(title: str, subtitle: str | Sequence[str]) -> dict[str, Any]:
    """Returns a chart's title as a property; the second of two charts below each other may have none."""
    import altair as alt

    if not title:
        return {}
    return {"title": alt.TitleParams(title, subtitle=subtitle or alt.Undefined, offset=14)}


def described(title: str, subtitle: str, said: Iterable[str]) -> str:
    """Returns what a chart shows, for those who cannot see it."""
    return f"{f'{title}: {subtitle}' if subtitle else title}. {'; '.join(said)}."


def number_text(value: float, form: str = "") -> str:
    """Returns a value as it is said; `form` is its axis's."""
    if form.endswith("%"):
        return f"{value:{'+' if form.startswith('+') else ''}.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Returns places as near to the wanted ones as can be, in their order, `gap` apart and within `low` to `high`.

    Neighbours that would overlap share their displacement. Where there are too many for the room, they overflow at
    `high`.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[tuple[float, list[int]]] = []
    for i in order:
        blocks.append((_within(wanted[i], 1, gap, low, high), [i]))
        while len(blocks) > 1 and _end(blocks[-1], -gap) < _end(blocks[-2], gap) + gap:
            (one, of_one), (other, of_other) = blocks.pop(-2), blocks.pop()
            members = of_one + of_other
            centre = (one * len(of_one) + other * len(of_other)) / len(members)
            blocks.append((_within(centre, len(members), gap, low, high), members))
    places = [0.0] * len(wanted)
    for centre, members in blocks:
        for rank, i in enumerate(members):
            places[i] = centre + (rank - (len(members) - 1) / 2) * gap
    return places


def _end(block: tuple[float, list[int]], gap: float) -> float:
    """Returns a block's last place, or with a negative gap its first."""
    return block[0] + (len(block[1]) - 1) * gap / 2


def _within(centre: float, members: int, gap: float, low: float, high: float) -> float:
    half = (members - 1) * gap / 2
    return max(low + half, min(centre, high - half))
