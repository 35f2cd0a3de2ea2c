"""The times that layers give to comparisons and histories, pooled over all points of the same layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import FLOOR, NONE, without_folders
from overlap_sweep.report.comparison import Comparing
from overlap_sweep.results.comparable import WHOLE, Comparable, Key, Sample, key_of_pass, pooled_by_key
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import LayerTrial, Records
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.verdict import TYPICAL_SCATTER_OF_LAYERS
from overlap_sweep.workloads.layer.answer import described, labels, of_moe
from overlap_sweep.workloads.layer.config import Resolved
from overlap_sweep.workloads.layer.result import LayerTimes


def measured(points: Sequence[Point], records: Records) -> Comparable:
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


def samples(result: Result) -> dict[str, Sample]:
    """Returns each variant that is not launch-bound, except the floor."""
    variants = result.measured_as(LayerTimes).variants
    none_us = variants[NONE].times[WHOLE].median_us if NONE in variants else None
    return {
        name: Sample((variant.times[WHOLE],), none_us, WHOLE, result.point_as(Resolved).workload.tokens)
        for name, variant in variants.items()
        if name != FLOOR and not variant.launch_bound
    }


_OF_LAYER = ("kind", "num_replicas", "training", "configurations", "variants", "moe")
COMPARED = Comparing(measured, samples, matched=(*(f"layer.{name}" for name in _OF_LAYER), *space.KNOBS))
