"""Labels at the ends of lines, one below the other where the lines end too close together."""

from __future__ import annotations

from collections.abc import Sequence

LABEL_GAP_PX = 14.0


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near to the wanted ones as can be, in their order, `gap` apart and within `low` to `high`.

    Neighbours that would overlap share their displacement. Where there are too many for the room, they overflow at
    `high`.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[tuple[float, list[int]]] = []
    for i in order:
        blocks.append((_within(wanted[i], 1, gap, low, high), [i]))
        while len(blocks) > 1 and _top(blocks[-1], gap) < _bottom(blocks[-2], gap) + gap:
            (one, of_one), (other, of_other) = blocks.pop(-2), blocks.pop()
            members = of_one + of_other
            centre = (one * len(of_one) + other * len(of_other)) / len(members)
            blocks.append((_within(centre, len(members), gap, low, high), members))
    places = [0.0] * len(wanted)
    for centre, members in blocks:
        for rank, i in enumerate(members):
            places[i] = centre + (rank - (len(members) - 1) / 2) * gap
    return places


def _top(block: tuple[float, list[int]], gap: float) -> float:
    return block[0] - (len(block[1]) - 1) * gap / 2


def _bottom(block: tuple[float, list[int]], gap: float) -> float:
    return block[0] + (len(block[1]) - 1) * gap / 2


def _within(centre: float, members: int, gap: float, low: float, high: float) -> float:
    half = (members - 1) * gap / 2
    return max(low + half, min(centre, high - half))
