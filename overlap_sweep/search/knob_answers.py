"""What a search over knobs found out, as it is recorded."""

from __future__ import annotations

from collections import Counter

from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.records import Contribution, Gain, KnobSearch, TriedKnobs
from overlap_sweep.search.knob_trail import KnobTrail, Samples, Setting
from overlap_sweep.search.knobs import alone, put_back


def answer(
    trail: KnobTrail,
    label: str = "",
    overrides: list[str] | None = None,
    stopped: str = "",
    refused: Counter[str] | None = None,
) -> KnobSearch:
    """Of a search under way, or ended; `stopped`: why before its end."""
    search = KnobSearch(
        label=label,
        overrides=overrides or [],
        knobs={knob.key: list(knob.values) for knob in trail.knobs},
        stopped=stopped,
        notes=trail.notes,
        refused=dict(refused or {}),
        grid=trail.grid,
    )
    base = trail.baseline
    if base not in trail.found.of:
        search.dropped = trail.failed.get(base, "")
        return search
    best = trail.best
    search.proven = best == base or {base, best} <= trail.proof.of.keys()
    judged = trail.proof if search.proven and best != base else trail.found
    search.best = _changed(trail, best)
    search.time_us, search.baseline_us = judged.time_us(best), judged.time_us(base)
    search.gain = _share(judged, base, best)
    search.over_none = _over_none(judged, best)
    search.by_time = best != base and not judged.beside
    search.contributions = [_contribution(trail, judged, best, index) for index in trail.changed(best)]
    search.settings = len(trail.found.of) + len(trail.failed)
    search.tried = sorted((_tried(trail, setting) for setting in trail.found.of), key=lambda tried: tried.time_us)
    return search


def _changed(trail: KnobTrail, setting: Setting) -> dict[str, str]:
    return {trail.knobs[index].key: value for index, value in trail.changed(setting).items()}


def _contribution(trail: KnobTrail, judged: Samples, best: Setting, index: int) -> Contribution:
    with_it, without = alone(trail, best)[index], put_back(trail, best)[index]
    return Contribution(
        key=trail.knobs[index].key,
        baseline=trail.baseline[index],
        value=best[index],
        alone=_known_share([judged, trail.found], trail.baseline, with_it),
        taken_away=_known_share([judged, trail.found], without, best),
    )


def _known_share(sources: list[Samples], slower: Setting | None, faster: Setting | None) -> Gain | None:
    """From the first that has measured both."""
    for samples in sources:
        if slower in samples.of and faster in samples.of:
            assert slower is not None
            assert faster is not None
            return _share(samples, slower, faster)
    return None


def _share(samples: Samples, slower: Setting, faster: Setting) -> Gain:
    gain, slower_us = samples.gain(slower, faster), samples.time_us(slower)
    return Gain(gain.time_us / slower_us, gain.noise_us / slower_us)


def _over_none(samples: Samples, setting: Setting) -> Gain | None:
    """Pair by pair, of all samples of the setting."""
    pairs = [pair for sample in samples.of[setting] for pair in zip(sample.times_us, sample.none_us, strict=False)]
    if not pairs:
        return None
    ratio: Estimate = estimate([time_us / none_us for time_us, none_us in pairs])
    return Gain(1 - ratio.time_us, ratio.noise_us)


def _tried(trail: KnobTrail, setting: Setting) -> TriedKnobs:
    found = trail.found.estimate(setting)
    return TriedKnobs(
        changed=_changed(trail, setting),
        time_us=found.time_us,
        noise_us=found.noise_us,
        measurements=len(trail.found.of[setting]),
    )
