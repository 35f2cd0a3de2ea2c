"""Results of layer points, made up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from overlap_sweep import workloads
from overlap_sweep.overlap_cfg import OverlapConfig
from overlap_sweep.run_directory import Result, VariantTimes
from tests.make_point import timing_of

NONE_US = 10000.0
ROUNDS = (0.999, 1.0, 1.001, 1.0, 0.999, 1.001, 1.0)
"""What the machine does to all variants of a round alike."""


def layer_result(point: Mapping[str, Any], ratio: Callable[[OverlapConfig], float], **fields: Any) -> Result:
    """Every variant that can run takes `ratio` of none, by its configuration; the floor takes half."""
    configs = workloads.load("layer").overlap_configs(point)
    ratios = {"none": 1.0, **{name: ratio(config) for name, config in configs.items()}, "floor": 0.5}
    variants = {name: _variant(share, configs.get(name, OverlapConfig({}, {}))) for name, share in ratios.items()}
    known = {"variants": variants, "objective_us": NONE_US, "attention_backend": "made up"}
    return Result(name="", point=dict(point), **{"status": "ok", **known, **fields})


def _variant(ratio: float, config: OverlapConfig) -> VariantTimes:
    whole = [NONE_US * ratio * share for share in ROUNDS]
    times = {"fwd": [us / 3 for us in whole], "bwd": [us * 2 / 3 for us in whole], "all": whole}
    return VariantTimes(
        times={name: timing_of(us) for name, us in times.items()}, settings=config.slots, switches=config.switches
    )
