"""Layers in comparisons and histories: their variants, pooled over all points of the same layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import FLOOR, NONE, without_folders
from overlap_sweep.report.comparison import Comparing
from overlap_sweep.results.comparable import WHOLE, Comparable, Key, KeyedTime, Sample, key_of_pass
from overlap_sweep.results.estimate import Estimate, estimate, normalised, pooled_none
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import Records
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.verdict import TYPICAL_SCATTER_OF_LAYERS, Scatter
from overlap_sweep.workloads.layer.result import LayerTimes, VariantTimes
from overlap_sweep.workloads.layer.section import labels

_Layer = tuple[str, dict[str, Timing]]
"""A point's name, and the times of its variants."""


def measured(points: Sequence[Point], records: Records) -> Comparable:
    """Returns the whole time of every variant; a tuner's have the names that reports use."""
    trials = records.layer_trials
    layers: dict[Key, list[_Layer]] = defaultdict(list)
    between: dict[Key, Scatter] = {}
    for point in points:
        if point.workload == "layer" and point.status == "ok":
            key = key_of_pass(point.case, point.config["tp_size"], _name(point.config["layer"]), WHOLE)
            variants, trial = point.measured_as(LayerTimes).variants, trials.get(point.directory)
            if trial:
                variants = {label: variants[name] for label, name in labels(trial, variants).items()}
            layers[key].append((point.name, _times(variants)))
            between[key] = Scatter(TYPICAL_SCATTER_OF_LAYERS[point.config["runtime"]["device"]])
    return Comparable([time for key, of_key in layers.items() for time in _pooled(key, of_key, between[key])])


def samples(result: Result) -> dict[str, Sample]:
    """Returns each variant that the host did not limit, but the floor."""
    variants = result.measured_as(LayerTimes).variants
    none_us = variants[NONE].times[WHOLE].median_us if NONE in variants else None
    return {
        name: Sample((variant.times[WHOLE],), none_us, WHOLE, result.point["workload"]["tokens"])
        for name, variant in variants.items()
        if name != FLOOR and not variant.launch_bound
    }


_OF_LAYER = ("kind", "num_replicas", "training", "configurations", "variants")
COMPARED = Comparing(measured, samples, matched=(*(f"layer.{name}" for name in _OF_LAYER), *space.KNOBS))


def _name(layer: Mapping[str, Any]) -> str:
    replicas = f" x{layer['num_replicas']}" if layer["num_replicas"] > 1 else ""
    return f"{layer['kind']}{replicas}{' training' if layer['training'] else ''}"


def _times(variants: Mapping[str, VariantTimes]) -> dict[str, Timing]:
    """By the name that the same variant has in another sweep. Without the launch-bound, whose times say nothing."""
    short = without_folders(variants)
    return {short[name]: variant.times[WHOLE] for name, variant in variants.items() if not variant.launch_bound}


def _pooled(key: Key, layers: Sequence[_Layer], between: Scatter) -> list[KeyedTime]:
    all_have_none = all(NONE in times for _, times in layers)
    none = pooled_none([times[NONE] for _, times in layers]) if all_have_none else None
    names = dict.fromkeys(name for _, times in layers for name in times)
    estimates = {name: _estimate(name, [times for _, times in layers if name in times], none) for name in names}
    floor = estimates.get(FLOOR)
    return [
        KeyedTime(
            key=key._replace(setting=name),
            time=between.added_to(time, sum(name in times for _, times in layers)),
            none_us=none.time_us if none else None,
            floor_us=floor.time_us if floor else None,
            points=tuple(point for point, times in layers if name in times),
        )
        for name, time in estimates.items()
    ]


def _estimate(name: str, layers: Sequence[Mapping[str, Timing]], none: Estimate | None) -> Estimate:
    """Through the none beside it, where every layer has one."""
    if none is None:
        return estimate(*(times[name].samples_us for times in layers))
    return none if name == NONE else normalised([(times[name], times[NONE]) for times in layers], none)
