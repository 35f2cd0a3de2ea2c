"""The report on whole layers: columns, the fastest variant of each, charts, and what is compared between sweeps: times
pooled over all points of the same layer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import (
    FILE,
    FLOOR,
    NONE,
    USERBUFFER_BACKENDS,
    OverlapConfig,
    megatron_arguments,
    set_in_training,
    without_folders,
)
from overlap_sweep.report import causes, charts, table
from overlap_sweep.report.comparison import Comparing
from overlap_sweep.report.diagnosis import NODES
from overlap_sweep.report.iterations import Timeline, timeline
from overlap_sweep.report.numbers import as_percent, as_sentence, as_us
from overlap_sweep.report.section import Answer, Card, Exhibit, Section, Sources
from overlap_sweep.report.table import Column, Kind, Listing, PointRow, Table, asked, attribute, points_table
from overlap_sweep.results.comparable import WHOLE, Comparable, Key, Sample, key_of_pass, pooled_by_key
from overlap_sweep.results.estimate import CONFIDENCE
from overlap_sweep.results.gain import nothing_beat
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.points import Point, group_cases
from overlap_sweep.results.provenance import cpu_only, measured_on, recorded
from overlap_sweep.results.records import LayerTrial, Records
from overlap_sweep.results.run_directory import Result, settings_file
from overlap_sweep.results.traces import drawn_trace, on_nodes
from overlap_sweep.results.verdict import TYPICAL_SCATTER_OF_LAYERS
from overlap_sweep.study.section import EFFECT, LAUNCH_BOUND_NOTE
from overlap_sweep.workloads.layer.answer import (
    LayerAnalysis,
    VariantRow,
    analyse_layer,
    described,
    labels,
    of_moe,
    sharding,
)
from overlap_sweep.workloads.layer.config import Asked, Resolved
from overlap_sweep.workloads.layer.moe import megatron_arguments as megatron_moe_arguments
from overlap_sweep.workloads.layer.result import LayerTimes, attention_backend
from overlap_sweep.workloads.layer.traces import shown_by_traces, with_traces

C = Column[VariantRow]
OfPoint = Column[PointRow[VariantRow]]


def _asked_of_experts(name: str, about: str = "", kind: Kind = "count", header: str = "") -> OfPoint:
    """Returns the column of an option of layers with experts; empty for others."""
    return OfPoint(name, lambda row: getattr(of_moe(row.point.config_as(Asked)), name, None), about, kind, header)


OF_POINT = (
    replace(table.MODEL, differing=True, dropped=1),
    replace(table.BACKEND, header=""),
    table.DEVICE,
    replace(table.PRECISION, header=""),
    OfPoint("tokens", lambda row: row.point.case.tokens, kind="count"),
    asked("kind", "layer", "kind", kind="text", header="layer"),
    asked("tp_size", kind="count", header="TP"),
    asked("num_replicas", "layer", "num_replicas", kind="count"),
    _asked_of_experts("ep_size", "Ranks that the experts are spread over.", header="EP"),
    _asked_of_experts("routing", "How tokens are sent to experts: balanced, or at random.", "text"),
    _asked_of_experts("micro_batches", "Micro batches of an iteration."),
    _asked_of_experts("num_sm"),
    NODES,
    table.PROCESS_WIDE,
    asked(
        "training",
        "layer",
        "training",
        kind="flag",
        about="Whether the iteration has an optimizer step after the backward pass.",
    ),
    OfPoint("attention_backend", lambda row: attention_backend(row.point.result), kind="text"),
    table.measured_column(attribute("", kind="text", read="label", header="variant", style="setting")),
)
TIMES = (
    *(
        C(f"{name}_us", lambda row, part=part: row.median_us(part), header=f"{name} us", show=as_us)  # type: ignore[misc]
        for name, part in {"fwd": "fwd", "both": "both", "bwd": "bwd", "optimizer": "step"}.items()
    ),
    attribute("time_us", read="whole.time_us", header="time us", show=as_us),
    attribute("noise_us", read="whole.noise_us", header="noise us", show=as_us, page_only=True, queried=True),
    attribute("none_us"),
    attribute("floor_us"),
    attribute("speedup"),
    attribute("reference", "Variant that the ratio refers to: none, or if it was not measured the first one.", "text"),
    attribute(
        "ratio",
        "time_us over that of the reference in the same round, median of the rounds; below 1 is faster.",
        read="gain.ratio",
        header="ratio",
        show="{:.3f}".format,
    ),
    attribute("ratio_low", read="gain.low", header="low", show="{:.3f}".format),
    attribute("ratio_high", read="gain.high", header="high", show="{:.3f}".format),
    attribute("hidden_fraction", header="hidden", show=as_percent, high_first=True),
    attribute("launch_bound", kind="flag"),
    C(
        "relative_error",
        lambda row: max(row.measured.relative_error.values(), default=None),
    ),
    EFFECT,
    LAUNCH_BOUND_NOTE,
)
VARIANT = attribute("variant", kind="text", read="name")
TABLE = points_table(
    "layers",
    "one row per point and variant",
    OF_POINT,
    (replace(VARIANT, queried=True), *TIMES),
    point=replace(table.POINT, queried=True),
)
LABEL = C("", lambda row: row.label, kind="text", header="variant", style="setting")
COMPARED = Table("layers", "one row per variant", (LABEL, VARIANT, *TIMES))


def section(sources: Sources) -> Section | None:
    """Returns the section on layers, with an answer for each except the tuner's, which are reported with the operators;
    None without such points."""
    points = sources.points("layer")
    if not points:
        return None
    analysed = with_traces([analyse_layer(point) for point in points if point.status == "ok"])
    layers = {layer.point.directory: layer for layer in analysed}
    tuned = sources.records.layer_trials
    cases = group_cases(sources.reading.points, "operator") if tuned else {}
    root = sources.reading.root
    rows = [
        PointRow(point, root, row, variant=row.name if row else "")
        for point in points
        for row in (layers[point.directory].rows if point.directory in layers else [None])
    ]
    return Section(
        name="layers",
        what="layers",
        title="Whole layers",
        topic="overlap in whole layers",
        explained="Times are medians over the rounds; in each round all variants ran in turn.",
        answers=[
            _answer(layer, root)
            for directory, layer in layers.items()
            if directory not in tuned or layer.point.case not in cases
        ],
        points=Listing(TABLE, rows, "Every variant of the whole layers."),
        report={"layers": [report(point, layers.get(point.directory), root) for point in points]},
    )


def _answer(layer: LayerAnalysis, root: Path) -> Answer:
    point, case, config = layer.point, layer.point.case, layer.point.config_as(Resolved)
    assert point.result
    routing = f", {moe.routing} routing" if (moe := of_moe(config)) else ""
    brief = f"{case.model} {config.layer.kind} {sharding(config)}{routing}"
    replicas = f", {config.layer.num_replicas} replicas" if config.layer.num_replicas > 1 else ""
    more = f", {case.process_wide}" if case.process_wide else ""
    attention = f", attention {found}" if (found := attention_backend(point.result)) else ""
    return Answer(
        title=f"{case.model} {', '.join(described(config))}{replicas}, {case.tokens} tokens, "
        f"{case.precision}, backend {case.backend} on {case.device}{on_nodes(case.nodes)}{attention}{more}",
        brief=brief,
        sentences=[layer.verdict],
        card=card(layer, brief, root),
        cautions=[*layer.cautions, *filter(None, [cpu_only([point])]), *point.result.warnings],
        compared=compared(layer, layer.winner),
        points=[point],
        legend=legend(layer),
        charts=[
            Exhibit(chart=partial(layer_bars, brief, layer, layer.winner.name if layer.winner else None)),
            Exhibit(chart=partial(_fastest_timeline, brief, layer), name="timeline", heading="Timeline"),
            causes.exhibit(
                {
                    "": {
                        layer.spoken_reference if row.name == layer.reference else row.label: causes.Side(
                            point, row.name, time_us=row.whole.time_us
                        )
                        for row in layer.rows
                        if row.name == layer.reference or row is layer.best
                    }
                }
            ),
        ],
        more=list(shown_by_traces(layer.best, layer.best.label if layer.best else "")),
        details=[measured_on([point]), f"in {point.directory}"],
    )


def card(layer: LayerAnalysis, title: str, root: Path) -> Card:
    """Returns the answer card; its file is relative to the analysed directory."""
    best, rounds = layer.winner, f"{layer.rounds} interleaved rounds, {CONFIDENCE:.0%} confidence intervals"
    if best is None:
        keep = "keep overlap off" if layer.reference == NONE else f"keep {layer.spoken_reference}"
        return Card(
            title,
            nothing_beat(layer.spoken_reference, keep) if layer.contenders else "No verdict",
            [f"{as_sentence(layer.verdict)}.", f"Measured in {rounds}."],
        )
    hidden = f"It hides {as_percent(best.hidden_fraction)} of the communication. " if best.hidden_fraction > 0 else ""
    gain = best.gain.in_words(layer.spoken_reference)
    sentences = [f"{hidden}Measured in {rounds}.", *set_in_training(layer.point.case.process_wide)]
    winner, config = best.measured, layer.point.config_as(Resolved)
    limits, shown = cpu_only([layer.point]), Card(title, f"Use {best.label}: {gain}", sentences)
    if winner.arguments:
        use = megatron_moe_arguments(winner.arguments, config.world_size)
        return replace(shown, use=use, limits=limits)
    if config.backend not in USERBUFFER_BACKENDS or not winner.switches:
        return shown
    given = best.name.removeprefix(FILE) if best.name.startswith(FILE) else ""
    written = (layer.point.directory.relative_to(root) / settings_file(best.name)).as_posix()
    overlap, file = OverlapConfig(winner.settings, winner.switches), (given or written) if winner.settings else ""
    use = megatron_arguments(overlap, config.tp_size, file)
    return replace(shown, file="" if given else file, use=use, limits=limits)


def compared(layer: LayerAnalysis, best: VariantRow | None) -> Listing[VariantRow]:
    """Returns the table of the variants, with `best` marked."""
    return Listing(COMPARED, layer.rows, "Every variant, in the order of measuring.", chosen=lambda row: row is best)


def legend(layer: LayerAnalysis) -> str:
    """Returns the legend of the ratios in the layer's table."""
    return (
        f"ratio: time over that of {layer.reference} in the same round, median of {layer.rounds} rounds with "
        f"{CONFIDENCE:.0%} interval; below 1 is faster"
    )


def report(point: Point, layer: LayerAnalysis | None, root: Path) -> dict[str, object]:
    """Returns the layer's entry in tuning_report.json."""
    row = PointRow[VariantRow](point, root, None)
    of_point = (table.POINT, table.DIRECTORY, *OF_POINT, table.STATUS, table.ERROR)
    return {
        **{column.name: column.value(row) for column in of_point if column.name},
        **recorded([point]),
        "warnings": point.result.warnings if point.result else [],
        "verdict": layer.verdict if layer else None,
        "variants": list(variants(layer).values()),
    }


def variants(layer: LayerAnalysis | None) -> dict[str, dict[str, object]]:
    """Returns the entries of the layer's variants in tuning_report.json, by name."""
    rows = layer.rows if layer else []
    return {
        row.name: {
            **cells,
            "settings": row.measured.settings,
            "switches": row.measured.switches,
            **({"slots": msgspec.to_builtins(row.slots)} if row.slots else {}),
            **({"rests": msgspec.to_builtins(row.rests)} if row.rests else {}),
            **({"arguments": row.measured.arguments} if row.measured.arguments else {}),
        }
        for row, cells in zip(rows, COMPARED.records(rows), strict=True)
    }


def layer_bars(title: str, layer: LayerAnalysis, best: str | None) -> charts.Rows:
    """Returns a bar for each variant, from fast to slow, with `best` marked."""
    return charts.Rows(
        title=title,
        subtitle=legend(layer),
        axis=charts.Axis(f"change of the time against {layer.spoken_reference}, %", format="+.1~%"),
        parts=[charts.Key("change", "accent")],
        columns=["time us", "change"],
        rows=[
            charts.Row(
                name=row.label,
                ends=[row.gain.ratio - 1],
                cells=[as_us(row.whole.time_us), f"{row.gain.ratio - 1:+.1%}"],
                low=row.gain.low - 1,
                high=row.gain.high - 1,
                colour=_colour(row, best),
                bold=row.name == best,
                details=COMPARED.details(row),
            )
            for row in sorted(layer.rows, key=lambda row: row.gain.ratio)
        ],
        references=[charts.Reference(f"faster than {layer.spoken_reference} | slower", 0.0)],
    )


def _colour(row: VariantRow, best: str | None) -> str:
    if row.name == FLOOR:
        return "wait"
    return "good" if row.name == best else "bad" if row.gain.low > 1 else "accent"


def _fastest_timeline(title: str, layer: LayerAnalysis) -> charts.Gantt | None:
    """Returns the timelines of the reference and of the fastest variant; None if the latter was not traced."""
    best, none = layer.best, layer.reference
    shown = layer_timeline(title, layer.point, (none, none), (best.label, best.name)) if best else None
    return shown.chart if shown else None


def layer_timeline(title: str, point: Point, none: tuple[str, str], best: tuple[str, str]) -> Timeline | None:
    """Returns the timelines of `none` and of the best variant, each given as its display name and its name in the
    point; None if the latter has no trace."""
    sides = {name: drawn_trace(point, variant) for name, variant in (none, best)}
    return timeline(title, sides) if sides[best[0]] else None


def _measured(points: Sequence[Point], records: Records) -> Comparable:
    """Returns the whole time of every variant that is not launch-bound, under a name that is the same in all sweeps;
    a tuner's variants have their labels."""
    ok = (point for point in points if point.workload == "layer" and point.status == "ok")
    times = (_times(point, records.layer_trials.get(point.directory)) for point in ok)
    return Comparable(pooled_by_key(times, TYPICAL_SCATTER_OF_LAYERS))


def _times(point: Point, trial: LayerTrial | None) -> tuple[Key, Point, Mapping[str, Timing]]:
    config, variants = point.config_as(Resolved), point.measured_as(LayerTimes).variants
    if trial:
        variants = {label: variants[name] for label, name in labels(trial, variants).items()}
    short = without_folders(variants)
    layer = config.layer
    replicas = f" x{layer.num_replicas}" if layer.num_replicas > 1 else ""
    kind = " ".join(described(config)) if of_moe(config) else layer.kind
    key = key_of_pass(point.case, config.tp_size, f"{kind}{replicas}{' training' if layer.training else ''}", WHOLE)
    return key, point, {short[name]: one.times[WHOLE] for name, one in variants.items() if not one.launch_bound}


def _samples(result: Result) -> dict[str, Sample]:
    """Returns each variant that is not launch-bound, except the floor."""
    variants = result.measured_as(LayerTimes).variants
    none_us = variants[NONE].times[WHOLE].median_us if NONE in variants else None
    return {
        name: Sample((variant.times[WHOLE],), none_us, WHOLE, result.point_as(Resolved).workload.tokens)
        for name, variant in variants.items()
        if name != FLOOR and not variant.launch_bound
    }


_OF_LAYER = ("kind", "num_replicas", "training", "configurations", "variants", "moe")
COMPARING = Comparing(_measured, _samples, matched=(*(f"layer.{name}" for name in _OF_LAYER), *space.KNOBS))
