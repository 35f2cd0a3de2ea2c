"""The measurements of a workload=layer point: times of the whole layer by variant."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from overlap_sweep.declared import one_of
from overlap_sweep.overlap.overlap_cfg import FLOOR, NONE, NONE_IN_WORDS, SWITCH_DEFAULTS
from overlap_sweep.results.estimate import EXACTLY_ONE, estimate
from overlap_sweep.results.gain import Gain, gain_over
from overlap_sweep.results.measured import (
    Measured,
    Setting,
    Slot,
    Timing,
    check_pairs,
)
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.verdict import TYPICAL_SCATTER_OF_LAYERS, Scatter, steadied

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
        others = {name: one for name, one in self.variants.items() if name != FLOOR}
        none = others.pop(NONE, None)
        if none is None or not others:
            return None
        pairs = [(one, none) for one in others.values()]
        gains = compare(pairs, result.point.runtime.device, len(pairs))
        return min(gains, key=lambda gain: gain.ratio).in_words(NONE_IN_WORDS)


def compare(pairs: Sequence[tuple[VariantTimes, VariantTimes]], device_kind: str, tried: int = 1) -> list[Gain]:
    """Returns the gain of the first of each pair of variants over the other, i-th samples of which were taken side by
    side. `tried`: number of candidates among which the best is chosen."""
    between = Scatter(TYPICAL_SCATTER_OF_LAYERS[device_kind])
    ratios = []
    for one, other in pairs:
        samples = zip(one.times["all"].samples_us, other.times["all"].samples_us, strict=True)
        rounds = [time_us / other_us for time_us, other_us in samples]
        ratios.append(EXACTLY_ONE if one is other else between.added_to(estimate(rounds), 1))
    return [gain_over(EXACTLY_ONE, ratio, tried) for ratio in steadied(ratios)]


def attention_backend(result: Result | None) -> str | None:
    """Returns the attention backend of a layer point; None without attention or measurements."""
    measured = result.measured if result else None
    return measured.attention_backend if isinstance(measured, LayerTimes) else None


MEASURED = LayerTimes
