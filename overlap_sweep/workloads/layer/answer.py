"""Whole layers: the variants of each compared round by round, and the fastest one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from overlap_sweep.effects import NO_SLOTS, Rest, Slots
from overlap_sweep.effects import Setting as InForce
from overlap_sweep.overlap.overlap_cfg import FLOOR, NONE, USERBUFFER_BACKENDS, named, spoken, without_folders
from overlap_sweep.overlap.space import LAYER_KINDS, MOE_KIND
from overlap_sweep.report.causes import Side
from overlap_sweep.results.estimate import Estimate, estimate, hidden_fraction
from overlap_sweep.results.gain import Gain
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import LayerTrial
from overlap_sweep.study import effects
from overlap_sweep.workloads.layer.config import KnobsConfig, Moe, Resolved
from overlap_sweep.workloads.layer.moe import VARIANTS, max_connections
from overlap_sweep.workloads.layer.result import LayerTimes, VariantTimes, compare

if TYPE_CHECKING:
    from overlap_sweep.effects.comparison import Effect


@dataclass(frozen=True)
class VariantRow:
    """One variant of a layer, compared with the reference."""

    name: str
    label: str
    """Name in tables and charts."""
    reference: str
    """Name of the reference of the ratio: `none`, or if it was not measured the first variant."""
    measured: VariantTimes
    gain: Gain
    """Gain of its whole time over the reference's of the same rounds."""
    none_us: float
    """Median whole time of `none`; NaN if it was not measured."""
    floor_us: float
    """Median whole time of the floor; NaN if it was not measured."""
    effect: Effect | None = None
    """Its differences from the reference in what ran; None without traces of both."""
    rests: Sequence[Rest] = ()
    """What keeps it from the floor; empty without traces of both."""

    @property
    def slots(self) -> list[InForce]:
        """Returns whether what it asks of slots ran; empty without traces."""
        found = self.effect.settings if self.effect else []
        return [one for one in found if one.name in self.measured.settings]

    @property
    def launch_bound(self) -> bool:
        return self.measured.launch_bound

    @cached_property
    def whole(self) -> Estimate:
        """Returns the time of all passes together."""
        return estimate(self.measured.times["all"].samples_us)

    @property
    def speedup(self) -> float:
        return self.none_us / self.whole.time_us

    @property
    def hidden_fraction(self) -> float:
        return hidden_fraction(self.whole.time_us, self.none_us, self.floor_us)

    def median_us(self, pass_name: str) -> float | None:
        """Returns the median time of a pass; None for the optimizer if there is none."""
        timing = self.measured.times.get(pass_name)
        return timing.median_us if timing else None


@dataclass(frozen=True)
class LayerAnalysis:
    """One `ok` layer point, with its variants in the order of measuring."""

    point: Point
    rows: list[VariantRow]
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of rows in the point, where a tuner has labels instead."""

    @property
    def reference(self) -> str:
        """Returns the variant that ratios refer to."""
        return self.rows[0].reference

    @property
    def spoken_reference(self) -> str:
        return spoken(self.reference, self.point.case.backend)

    @property
    def rounds(self) -> int:
        return len(self.rows[0].measured.times["all"].samples_us)

    @property
    def contenders(self) -> list[VariantRow]:
        """Returns the usable alternatives to the reference, fastest first. The floor computes nothing meaningful, and a
        launch-bound variant's time says nothing about the device."""
        if any(row.launch_bound for row in self.rows if row.name == self.reference):
            return []
        rows = [row for row in self.rows if row.name not in (self.reference, FLOOR) and not row.launch_bound]
        return sorted(rows, key=lambda row: row.gain.ratio)

    @property
    def winner(self) -> VariantRow | None:
        """Returns the fastest variant that beats the reference beyond the noise, or None."""
        return next((row for row in self.contenders if row.gain.faster), None)

    @property
    def best(self) -> VariantRow | None:
        """Returns the fastest variant besides the reference, whether it beats it or not; None without one."""
        return self.winner or next(iter(self.contenders), None)

    @property
    def verdict(self) -> str:
        """Returns how the fastest compares with the reference, in one line."""
        best = self.best
        if best is None:
            return f"no verdict: nothing to compare with {self.spoken_reference}"
        return f"{best.label} is {best.gain.in_words(self.spoken_reference)}"

    @property
    def cautions(self) -> list[str]:
        """Returns the caveats of the ratios."""
        bound = ", ".join(row.label for row in self.rows if row.launch_bound)
        winner, found = self.winner, [row.effect for row in self.rows]
        return [
            *effects.cautions(winner.label if winner else "", winner.effect if winner else None, found),
            *(
                [f"Launch-bound variants are not compared, their times say nothing about the device: {bound}."]
                if bound
                else []
            ),
            *_moe_cautions(self.point.config_as(Resolved), {row.name for row in self.rows}),
        ]


def _moe_cautions(config: Resolved, names: Collection[str]) -> list[str]:
    """Returns what keeps communication of experts from overlapping, whatever the variant."""
    runtime, overlapped = config.runtime, sorted({"shared_experts", "micro_batches"}.intersection(names))
    if not of_moe(config) or not overlapped:
        return []
    if runtime.device == "cpu" and "shared_experts" in overlapped:
        return ["A CPU has no streams: shared_experts computes them between the all-to-alls there, not during one."]
    if runtime.device == "cuda" and (runtime.max_connections or max_connections(config.tp_size)) == 1:
        return [
            f"CUDA_DEVICE_MAX_CONNECTIONS=1 puts communication and computation into one queue, so that "
            f"{' and '.join(overlapped)} may overlap less than with more."
        ]
    return []


def of_moe(config: KnobsConfig) -> Moe | None:
    """Returns the options of a layer with experts; None for other layers."""
    return config.layer.moe if config.layer.kind == MOE_KIND else None


def sharding(config: Resolved) -> str:
    """Returns over how many ranks the layer is spread: `TP=4`, or for experts `EP=8` or `TP=2 EP=8`."""
    cut, moe = f"TP={config.tp_size}", of_moe(config)
    if not moe:
        return cut
    return f"{cut} EP={moe.ep_size}" if config.tp_size > 1 else f"EP={moe.ep_size}"


def described(config: Resolved) -> list[str]:
    """Returns the layer in words: `transformer_layer`, `TP=4`; with experts also how tokens reach them."""
    moe, layer = of_moe(config), [config.layer.kind, sharding(config)]
    if not moe:
        return layer
    num_sm = [f"num_sm={moe.num_sm}"] if moe.num_sm else []
    several = "1 micro batch" if moe.micro_batches == 1 else f"{moe.micro_batches} micro batches"
    ungrouped = config.runtime.device == "cuda" and not moe.grouped_gemm
    return [*layer, f"{moe.routing} routing", several, *num_sm, *(["a GEMM for each expert"] if ungrouped else [])]


def labels(trial: LayerTrial, measured: Iterable[str]) -> dict[str, str]:
    """Returns the names of the measured variants by label; those that a tuner did not label keep their names."""
    names = {label: name for label, name in trial.variants.items() if name in measured}
    return names | {name: name for name in measured if name not in names.values()}


def analyse_layer(point: Point, names: Mapping[str, str] | None = None) -> LayerAnalysis:
    """Returns the variants of an `ok` layer point, each compared with the reference. `names` are as in the answer."""
    variants = point.measured_as(LayerTimes).variants
    reference = NONE if NONE in variants else next(iter(variants))
    # A tuner's configuration may be the reference under another label.
    others = [name for name, one in variants.items() if name != FLOOR and one is not variants[reference]]
    pairs = [(variant, variants[reference]) for variant in variants.values()]
    compared = compare(pairs, point.config.runtime.device, max(len(others), 1))
    whole_us = {name: variant.times["all"].median_us for name, variant in variants.items()}
    short = without_folders(variants)
    rows = [
        VariantRow(
            name=name,
            label=named(short[name], point.case.backend),
            reference=reference,
            measured=variant,
            gain=gain,
            none_us=whole_us.get(NONE, math.nan),
            floor_us=whole_us.get(FLOOR, math.nan),
        )
        for (name, variant), gain in zip(variants.items(), compared, strict=True)
    ]
    return LayerAnalysis(point, rows, names or {})


def with_effects(layers: Sequence[LayerAnalysis]) -> list[LayerAnalysis]:
    """Returns the layers with the effects of the variants that have traces, where the reference has some, too."""

    def compared(layer: LayerAnalysis, row: VariantRow) -> effects.Compared:
        trace, of_reference = (
            effects.first_trace(Side(layer.point, layer.names.get(name, name))) for name in (row.name, layer.reference)
        )
        asked = _asked(layer.point, row)
        return effects.Compared(row.label, trace, layer.spoken_reference, of_reference, *asked)

    found = iter(effects.effects_of([compared(layer, row) for layer in layers for row in layer.rows]))
    return [replace(layer, rows=[replace(row, effect=next(found)) for row in layer.rows]) for layer in layers]


def _asked(point: Point, row: VariantRow) -> tuple[dict[str, tuple[str, str]], Slots]:
    """Returns the settings that traces may show, with the values of no overlap and of the variant, and its slots."""
    config, measured = point.config_as(Resolved), row.measured
    if measured.arguments:
        new = {name: value for name, value in measured.arguments.items() if VARIANTS[NONE].get(name) != value}
        return {name: ("", str(value)) for name, value in new.items()}, NO_SLOTS
    if config.backend not in USERBUFFER_BACKENDS or config.with_cublasmp or not measured.switches:
        return {}, NO_SLOTS
    switch = {"tp_comm_overlap": ("False", str(measured.switches.get("tp_comm_overlap", True)))}
    return switch, Slots(measured.settings, LAYER_KINDS[config.layer.kind])
