"""What the traces of a layer's variants show: whether slots ran as they are set, and what keeps it from the floor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from overlap_sweep.effects import Rest
from overlap_sweep.overlap.overlap_cfg import FLOOR
from overlap_sweep.overlap.space import LAYER_KINDS
from overlap_sweep.report.causes import Side
from overlap_sweep.report.numbers import as_us
from overlap_sweep.report.section import Exhibit
from overlap_sweep.report.table import Listing, Table, attribute
from overlap_sweep.workloads.layer.answer import LayerAnalysis, VariantRow, with_effects
from overlap_sweep.workloads.layer.config import Resolved

SLOTS: Table[Any] = Table(
    "slots",
    "one row per slot of a file",
    (
        attribute("slot", kind="text", read="name", header="slot"),
        attribute(
            "setting", "Method and the knobs that a trace shows, as in the file.", "text", "after", header="setting"
        ),
        attribute("verdict", "As docs/effects.md lists them.", "text", header="verdict", style="setting"),
        attribute("evidence", "What ran in its place.", "text", header="evidence", style="reason"),
    ),
)
RESTS: Table[Rest] = Table(
    "rests",
    "one row per operator and pass",
    (
        attribute("pass", kind="text", read="pass_", header="pass"),
        attribute(
            "operator", "Empty for what is in none.", "text", header="operator", show=lambda name: name or "elsewhere"
        ),
        attribute("rest_us", "Time beyond the floor's; the sum of the next four.", header="rest us", show=as_us),
        attribute("gemm_us", "Of GEMMs, which are in pieces or share the GPU.", header="GEMMs us", show=as_us),
        attribute("other_us", "Of other kernels and copies within the GPU.", header="others us", show=as_us),
        attribute("exposed_us", "Of communication while nothing computed.", header="exposed us", show=as_us),
        attribute("gap_us", "Nothing ran, or only waited.", header="gaps us", show=as_us),
        attribute("beside_us", "Communication while a GEMM ran, not part of the sum.", header="beside us", show=as_us),
    ),
)


def with_traces(layers: Sequence[LayerAnalysis]) -> list[LayerAnalysis]:
    """Returns the layers with what the traces of their variants show."""
    return _with_rests(with_effects(layers))


def _with_rests(layers: Sequence[LayerAnalysis]) -> list[LayerAnalysis]:
    """Returns the layers with what keeps each variant that has traces from the floor, where that has some, too."""
    paths = {id(layer): _paths(layer) for layer in layers}
    wanted = list(dict.fromkeys(path for of_layer in paths.values() for own in of_layer.values() for path in own))
    if not wanted:
        return list(layers)
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.effects.rests import rests
    from overlap_sweep.effects.runs import read_prints

    spent = {path: one.spent for path, one in read_prints(wanted).items()}

    def of(layer: LayerAnalysis, row: VariantRow) -> VariantRow:
        if row.name == FLOOR:
            return row
        own, floor = ([spent[path] for path in paths[id(layer)].get(name, ())] for name in (row.name, FLOOR))
        kind = layer.point.config_as(Resolved).layer.kind
        return replace(row, rests=rests(own, floor, LAYER_KINDS.get(kind, ())))

    return [replace(layer, rows=[of(layer, row) for row in layer.rows]) for layer in layers]


def _paths(layer: LayerAnalysis) -> Mapping[str, list[Path]]:
    """Returns the traces of the variants by row; empty without those of the floor."""
    found = {row.name: Side(layer.point, layer.names.get(row.name, row.name)).traces for row in layer.rows}
    return found if found.get(FLOOR) else {}


def shown_by_traces(row: VariantRow | None, of_file: str) -> Iterator[Exhibit]:
    """Yields what the traces show of the variant, called `of_file` in headings; nothing without them."""
    if row and row.slots:
        caption = "Whether each slot ran as it is set, from the traces of the whole layer."
        yield Exhibit(heading=f"What ran in the slots of {of_file}", listing=Listing(SLOTS, row.slots, caption))
    if row and row.rests:
        yield Exhibit(
            heading=f"What keeps {of_file} from the floor",
            listing=Listing(RESTS, row.rests, "How much longer each operator takes than without communication."),
            explained="Means over ranks and profiled steps. GEMMs take longer in pieces, on fewer SMs or at a lower "
            "clock. Others are copies into userbuffers and sums of what ranks sent. Elsewhere: attention, and "
            "what is between operators.",
            notes=[_in_all(row.rests)],
        )


def _in_all(rests: Sequence[Rest]) -> str:
    """Returns what the rests add up to, in words."""
    parts = {"GEMMs": "gemm_us", "other kernels": "other_us", "exposed communication": "exposed_us", "gaps": "gap_us"}
    shares = (f"{name} {as_us(sum(getattr(one, part) for one in rests))}" for name, part in parts.items())
    return f"In all {as_us(sum(one.rest_us for one in rests))} us: {', '.join(shares)}."
