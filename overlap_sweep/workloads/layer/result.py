"""The measurements of a workload=layer point: times of the whole layer by variant."""

from typing import Annotated, Any

import msgspec

from overlap_sweep.declared import one_of
from overlap_sweep.overlap.overlap_cfg import FLOOR, NONE, NONE_IN_WORDS, SWITCH_DEFAULTS
from overlap_sweep.results.measured import (
    Measured,
    Setting,
    Slot,
    Timing,
    check_pairs,
)
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.verdict import gain_of_point

PASSES = ("fwd", "bwd", "all")
"""The passes that every variant is timed for; `both` only with several micro batches, `step` only with an optimizer."""

_Switches = dict[Annotated[str, one_of(*SWITCH_DEFAULTS)], bool]


class VariantTimes(msgspec.Struct, kw_only=True):
    """One variant of a layer: the same layer and inputs under another overlap configuration."""

    times: dict[str, Timing]
    """Times by pass: `fwd`, `both` (of several micro batches, each backward but the last and the next one's forward),
    `bwd`, `step` (the optimizer, if any), and `all`. The i-th samples of all variants were
    taken in the same round, so they pair."""
    settings: dict[str, dict[str, Any]] = {}
    """Settings of the slots that the configuration names; the others ran at the library's default, if it has one.
    `switches` decide which slots were on."""
    switches: _Switches = {}
    """Values of Megatron-Core's switches; empty for `none` and `floor`."""
    arguments: dict[str, bool | int | str] = {}
    """Megatron-Core's arguments of a layer with experts; empty for `none`, `floor` and other layers."""
    relative_error: dict[str, float] = {}
    """Relative error by tensor against `none`; empty for `none`, and for `floor`, which computes nothing meaningful."""
    launch_bound: bool = False

    def __post_init__(self) -> None:
        msgspec.convert(self.settings, dict[Slot, Setting])


class LayerTimes(Measured, kw_only=True, tag="layer"):
    variants: Annotated[dict[str, VariantTimes], msgspec.Meta(min_length=1)]
    """Variants by name: `none`, `floor`, `default`, `file:<path>`."""
    attention_backend: str | None = None
    """Implementation of the attention, such as `fused (cuDNN 9.19.0)`; None for layers without attention."""

    def __post_init__(self) -> None:
        for variant in self.variants.values():
            if missing := set(PASSES) - variant.times.keys():
                raise ValueError(f"a variant has no {min(missing)} times")
        check_pairs(timing for variant in self.variants.values() for timing in variant.times.values())

    def compared(self, result: Result) -> str | None:
        """Returns the gain of the fastest variant."""
        whole = {name: one.times["all"] for name, one in self.variants.items() if name != FLOOR}
        none = whole.pop(NONE, None)
        if none is None or not whole:
            return None
        fastest = min(whole.values(), key=lambda time: time.median_us)
        return gain_of_point(fastest, none, result.point.runtime.device, len(whole)).in_words(NONE_IN_WORDS)


def attention_backend(result: Result | None) -> str | None:
    """Returns the attention backend of a layer point; None without attention or measurements."""
    measured = result.measured if result else None
    return measured.attention_backend if isinstance(measured, LayerTimes) else None


MEASURED = LayerTimes
