"""What a point of workload=layer measured: the whole layer by variant."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS
from overlap_sweep.results.measured import (
    AskedWorkload,
    Count,
    Measured,
    Setting,
    ShardedConfig,
    Slot,
    Speedup,
    Timing,
    check_pairs,
    one_of,
)
from overlap_sweep.results.run_directory import Result

PASSES = ("fwd", "bwd", "all")
"""What every variant has times of; `step` only where an optimizer runs."""

_Switches = dict[Annotated[str, one_of(SWITCH_DEFAULTS)], bool]


class VariantTimes(msgspec.Struct, kw_only=True):
    """One variant of a whole layer: the same layer and inputs under another overlap configuration."""

    times: dict[str, Timing]
    """By pass: `fwd`, `bwd`, `step` (the optimizer, where there is one), and `all`. The i-th samples of all variants
    were taken side by side, so they pair."""
    settings: dict[str, dict[str, Any]] = {}
    """The slots that the configuration names; the others ran at the library's default, if it has one. Which of them all
    were on, `switches` says."""
    switches: _Switches = {}
    """Megatron-Core's names: which classes of overlap were on; empty for `none` and `floor`."""
    relative_error: dict[str, float] = {}
    """Against `none`; empty for it and for `floor`, which computes nothing meaningful."""
    launch_bound: bool = False

    def __post_init__(self) -> None:
        msgspec.convert(self.settings, dict[Slot, Setting])


class _Configuration(msgspec.Struct):
    slots: dict[Slot, Setting]
    switches: _Switches


class _Layer(msgspec.Struct):
    kind: str
    num_replicas: Count
    training: bool
    configurations: dict[str, _Configuration] = {}


class LayerConfig(ShardedConfig, kw_only=True):
    workload: AskedWorkload
    layer: _Layer


class LayerTimes(Measured, kw_only=True, tag="layer"):
    composed = LayerConfig
    resolved = LayerConfig

    variants: Annotated[dict[str, VariantTimes], msgspec.Meta(min_length=1)]
    """By name: `none`, `floor`, `default`, `file:<path>`."""
    attention_backend: str | None = None
    """Of a layer with attention: who computed it, such as `fused (cuDNN 9.19.0)`."""

    def __post_init__(self) -> None:
        for variant in self.variants.values():
            if missing := set(PASSES) - variant.times.keys():
                raise ValueError(f"a variant without {min(missing)} times")
        check_pairs(timing for variant in self.variants.values() for timing in variant.times.values())

    def compared(self, result: Result) -> Speedup | None:
        none = self.variants.get("none")
        return Speedup(none.times["all"].median_us / result.objective_us) if none and result.objective_us else None


def attention_backend(result: Result | None) -> str | None:
    """Returns the attention backend of a layer's point; None if there was no attention, or nothing measured."""
    measured = result.measured if result else None
    return measured.attention_backend if isinstance(measured, LayerTimes) else None


MEASURED = LayerTimes
