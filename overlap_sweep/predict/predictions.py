"""Predicts the time of a step with something changed, from a recording: what can be changed by name, the interval, and
what becomes critical."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from math import prod
from statistics import stdev
from typing import Literal

import msgspec

from overlap_sweep.diagnosis import NEVER, as_share, as_time, once
from overlap_sweep.errors import UserError
from overlap_sweep.predict.contention import usual_contention
from overlap_sweep.predict.graph import CannotTell, StepGraph
from overlap_sweep.predict.named import CHANGES, Change, number_of, parsed, singles
from overlap_sweep.predict.replay import (
    POWER,
    Replayed,
    kind_of,
    parts_us,
    recorded,
    replay,
    replay_at_power,
    spans_ns,
    step_us,
)

NOISE, NOISE_ON_CPU = 0.041, 0.1
"""What an interval has at least on each side of what contention, clocks and costs leave open, as a share of the step.
On GPUs chosen by leaving each pair of recordings out, so that 85% of those left out lie within
(docs/results/2026-11-28-predict.md)."""

HOST_BOUND = 0.35
"""Share of the critical path that are launches from which on a recording does not hold what the GPU could gain."""

MOST_POWER = 0.7
"""Exponent of `replay.POWER` with which the highest time is predicted; the lowest with 0."""

LEAST = 0.001
"""Least change of a step, as a share of it, that is listed if no change is named."""

OF_GPUS = ("cuda", "env", "host")
"""Families of changes that a CPU knows nothing of: its streams, and a host that launches."""

CRITICAL_FROM = 0.03
"""Least share of the critical path that is named."""

Status = Literal["predicted", "bound", "cannot tell"]


class Prediction(msgspec.Struct, kw_only=True):
    """What a step would take with a change. Microseconds."""

    change: str
    step_us: float
    """Of the recording: mean of its steps, of the slowest rank; `diagnose` has the median."""
    steps_us: list[float] = []
    """Times of the recorded steps, whose mean it is."""
    predicted_us: float | None = None
    """None if it cannot be told; of a bound the least time."""
    low_us: float | None = None
    high_us: float | None = None
    gain_us: float | None = None
    """For the work of a recorded step: of a step with more samples, the time for as many as the recorded one has."""
    gain_low_us: float | None = None
    gain_high_us: float | None = None
    critical: str = ""
    """What then takes the step's time, as shares of the longest chain of what waits for each other."""
    reason: str
    """Why it cannot be told, or what else to know."""
    status: Status
    work: float = 1.0
    """Samples of the changed step over those of the recorded one."""
    parts_us: dict[str, float] = {}
    """What each kind takes of the changed step, as `replay.parts_us`."""


def predict(graph: StepGraph, wanted: Sequence[str] = ()) -> list[Prediction]:
    """Returns a prediction for each change, in their order; without any for all that apply, best first. UserError for
    an unknown one. A change is `NAME=VALUE`, or several joined by `+`."""
    if not graph.steps or not graph.nodes:
        raise UserError("No step that all ranks have was recorded without the profiler's start; record more steps.")
    if wanted:
        return [_predicted(graph, each) for each in wanted]
    found: list[Prediction] = []
    for name, one in CHANGES.items():
        values = [_predicted(graph, f"{name}={value}") for value in one.values]
        known = [each for each in values if each.gain_us is not None]
        # If one of its values gains or costs something, the others do less, which is to be seen.
        if any(not _is_same(each) for each in known):
            found += known
    return sorted(_without_equal(found), key=lambda one: -(one.gain_us or 0.0))


def _without_equal(found: Iterable[Prediction]) -> Iterator[Prediction]:
    """Yields the predictions, of one change's values that take equally long the first, which names the others."""
    for _, same in groupby(found, key=lambda one: one.change.partition("=")[0]):
        left = [*same]
        while left:
            first, *rest = left
            equal = [one for one in rest if _gains_alike(one, first)]
            left = [one for one in rest if one not in equal]
            values = " and ".join(one.change.partition("=")[2] for one in equal)
            reason = f"It takes as long with {values}. {first.reason}".strip() if equal else first.reason
            yield msgspec.structs.replace(first, reason=reason)


def _is_same(one: Prediction) -> bool:
    """Returns whether the step takes as long with the change."""
    return abs(one.gain_us or 0.0) < LEAST * one.step_us


def _gains_alike(one: Prediction, other: Prediction) -> bool:
    return abs((one.gain_us or 0.0) - (other.gain_us or 0.0)) < LEAST * one.step_us


def _predicted(graph: StepGraph, change: str) -> Prediction:
    changes = parsed(change)
    overlaps = any(one.overlaps for one, _ in changes)
    original_us = step_us(graph, recorded(graph))

    def replayed(contention: float, end: Literal[0, 1] | None, power: float) -> tuple[StepGraph, Replayed]:
        changed = _changed(graph, changes, contention, end)
        return changed, replay_at_power(changed, graph, power if overlaps else 0.0)

    try:
        for each in singles(change):
            _check_family(graph, each.partition(".")[0])
        if graph.on_device and not any(one.of_host for one, _ in changes):
            _refuse_host_bound(graph)
        usual, times = replayed(1.0, None, POWER)
        spread_us = [step_us(*replayed(0.5, 0, 0.0)), step_us(*replayed(1.5, 1, MOST_POWER))]
    except CannotTell as error:
        return unpredicted(graph, change, str(error))
    predicted_us, half_us = step_us(usual, times), half_width_us(graph)
    low_us, high_us = min(*spread_us, predicted_us) - half_us, max(*spread_us, predicted_us) + half_us
    bounds = [one for one, _ in changes if one.is_bound]
    work = prod(number_of(value) for one, value in changes if one.is_batch)
    low_us = max(low_us, 0.0)
    most_us = None if any(one.is_open for one in bounds) else max(high_us, original_us if bounds else 0.0)
    found = Prediction(
        change=change,
        step_us=original_us,
        steps_us=_steps_us(graph),
        predicted_us=predicted_us,
        low_us=low_us,
        high_us=most_us,
        gain_us=original_us - predicted_us / work,
        gain_low_us=None if most_us is None else original_us - most_us / work,
        gain_high_us=original_us - low_us / work,
        critical=critical_path(usual, times),
        reason="",
        status="bound" if bounds else "predicted",
        work=work,
        parts_us=parts_us(usual, times),
    )
    notes = [one.note for one, _ in changes if one.note]
    if (graph.world_size or 0) > graph.ranks:
        notes.append(
            f"Traces of {graph.ranks} of {graph.world_size} ranks: what they wait for in others is taken to stay."
        )
    if overlaps and graph.on_device and not any(graph.shows_contention):
        gpus = usual_contention(graph.device_name, graph.world_size).gpus
        notes.append(f"No GEMM that also ran alone ran mostly beside communication: what that costs is as on {gpus}.")
    if graph.on_device and original_us > predicted_us and _launches_share(usual, times) >= HOST_BOUND:
        notes.append(
            "The host's launches are the limit then, which recording slows down: without the profiler it may gain more."
        )
    notes = [*notes, *usual.notes, *_of_gain(found, half_us)]
    return msgspec.structs.replace(found, reason=" ".join(dict.fromkeys(notes)))


def unpredicted(graph: StepGraph, change: str, reason: str) -> Prediction:
    """Returns that it cannot be told what a change gains."""
    recorded_us = step_us(graph, recorded(graph))
    return Prediction(
        change=change, step_us=recorded_us, steps_us=_steps_us(graph), reason=reason, status="cannot tell"
    )


def _of_gain(found: Prediction, half_us: float) -> Iterator[str]:
    """Yields what to know of a gain: whether it may be nothing, and what it is of a step of more samples. `half_us`:
    what the interval has at least on each side."""
    gain_us, predicted_us = found.gain_us or 0.0, (found.predicted_us or 0.0) / found.work
    low_us, high_us = found.gain_low_us or 0.0, found.gain_high_us or 0.0
    least = f"no interval is narrower than {as_share(half_us / found.step_us)} of the step to each side"
    if found.status == "bound" and found.high_us is not None:
        yield f"It gains at most {as_time(gain_us)}, {as_time(high_us)} with the prediction's own error, or nothing."
    elif found.status == "predicted" and low_us <= 0 <= high_us:
        if _is_same(found):
            yield f"The step is predicted to take as long; {least}."
        else:
            what = "gain nothing, or cost time" if gain_us > 0 else "cost nothing, or gain time"
            yield f"It may {what}: {least}."
    if found.work != 1:
        share = as_share(abs(gain_us) / found.step_us)
        yield (
            f"A step of {found.work:g} times the samples: {as_time(predicted_us)} for as many as now, "
            f"{share} {'less' if gain_us > 0 else 'more'}."
        )


def in_words(one: Prediction) -> str:
    """Returns what a change is predicted to gain or to cost of the whole step, such as `fsdp2.prefetch=1 gains 6,822 us
    of 83,249 us (1,562 us to 13,016 us)`."""
    gain_us, low_us, high_us = one.gain_us or 0.0, one.gain_low_us or 0.0, one.gain_high_us or 0.0
    if gain_us < 0:
        gain_us, low_us, high_us, verb = -gain_us, -high_us, -low_us, "cost"
    else:
        verb = "gain"
    sure = f"{verb}s at most" if one.status == "bound" else f"{verb}s" if low_us > 0 else f"may {verb}"
    return f"{one.change} {sure} {as_time(gain_us)} of {as_time(one.step_us)} ({as_time(low_us)} to {as_time(high_us)})"


DIFFERS = 0.005
"""Least difference, as a share of the step, that is named of a prediction that was checked."""


def where_wrong(prediction: Prediction, graph: StepGraph) -> str:
    """Returns which parts of the changed step take longer or shorter than predicted, the largest difference first.
    `graph`: that of a recording with the change."""
    measured_us = parts_us(graph, recorded(graph))
    more_us = {
        name: measured_us.get(name, 0.0) - prediction.parts_us.get(name, 0.0)
        for name in {*measured_us, *prediction.parts_us}
    }
    named = sorted(
        (one for one in more_us.items() if abs(one[1]) >= DIFFERS * prediction.step_us), key=lambda one: -abs(one[1])
    )
    return "; ".join(f"{name} {as_time(abs(us))} {'more' if us > 0 else 'less'} than predicted" for name, us in named)


def _changed(
    graph: StepGraph, singles: Sequence[tuple[Change, str]], contention: float, end: Literal[0, 1] | None
) -> StepGraph:
    """Returns the graph with the changes. `contention`: factor of what computation and communication cost each other;
    `end`: whether what was not recorded takes the least or the most time that it may, or as long as it usually does."""
    copy = graph.copy()
    for single, value in singles:
        single.apply(copy, value)
    for node in copy.nodes:
        node.slowdown *= contention
        if end is not None:
            node.duration_ns *= node.leeway[end]
    return copy


def _steps_us(graph: StepGraph) -> list[float]:
    """Returns the times of the recorded steps of the slowest rank, from each one's first kernel to the next one's, of
    the last one to its end."""
    spans = spans_ns(graph, recorded(graph))
    running = [
        node for node in graph.nodes if node.kind in ("compute", "comm") and node.rank == spans.index(max(spans))
    ]
    starts: dict[int, float] = {}
    for node in running:
        starts[node.step] = min(starts.get(node.step, node.recorded_ns[0]), node.recorded_ns[0])
    moments = [*sorted(starts.values()), max(node.recorded_ns[1] for node in running)]
    return [(after - before) / 1000 for before, after in pairwise(moments)]


def half_width_us(graph: StepGraph, least: float | None = None) -> float:
    """Returns what an interval has at least on each side: the standard deviation of the recorded steps, or a share of
    one, NOISE if none is given."""
    ends = [
        max((node.recorded_ns[1] for node in graph.nodes if node.step == step and node.kind == "compute"), default=0.0)
        for step in graph.steps
    ]
    took = [(after - before) / 1000 for before, after in pairwise(ends)]
    if least is None:
        least = NOISE if graph.on_device else NOISE_ON_CPU
    return max(stdev(took) if len(took) > 1 else 0.0, least * step_us(graph, recorded(graph)))


def _check_family(graph: StepGraph, family: str) -> None:
    calls = [(node.role, node.call.collective) for node in graph.nodes if node.call]
    if family == "ddp" and ("gradient", "all_reduce") not in calls:
        raise CannotTell("No all-reduce of gradients was recorded.")
    if family == "fsdp2" and ("parameter", "all_gather") not in calls:
        raise CannotTell("No all-gather of parameters was recorded.")
    if family in OF_GPUS and not graph.on_device:
        raise CannotTell("It was recorded on a CPU.")
    if family == "nccl" and not any(node.call and node.call.library == "nccl" for node in graph.nodes):
        raise CannotTell("No collective of NCCL was recorded.")


def _refuse_host_bound(graph: StepGraph) -> None:
    share = once(graph, _recorded_launches_share)
    if share >= HOST_BOUND:
        raise CannotTell(
            f"{as_share(share)} of the recorded step is the host's launches, which recording slows down; "
            "only changes of the host can be told."
        )


def _recorded_launches_share(graph: StepGraph) -> float:
    return _launches_share(graph, replay(graph))


def _launches_share(graph: StepGraph, times: Replayed) -> float:
    return _critical_shares(graph, times).get("launches", 0.0)


def critical_path(graph: StepGraph, times: Replayed) -> str:
    """Returns what makes up the longest chain, such as `GEMMs 71%, all_reduce bwd 12%, launches 8%`."""
    listed = [(name, share) for name, share in _critical_shares(graph, times).items() if share >= CRITICAL_FROM]
    return ", ".join(f"{name} {as_share(share)}" for name, share in listed)


def _critical_shares(graph: StepGraph, times: Replayed) -> dict[str, float]:
    """Returns the shares, the largest first, of the chain in which each node waited for the one before, from the first
    kernel of the last one's rank on."""
    spent: dict[str, float] = defaultdict(float)
    running = [i for i, node in enumerate(graph.nodes) if node.kind in ("compute", "comm")]
    place = max(running, key=lambda i: times.ends_ns[i])
    first_ns = min(times.starts_ns[i] for i in running if graph.nodes[i].rank == graph.nodes[place].rank)
    until_ns = times.ends_ns[place]
    while place != NEVER and until_ns > first_ns:
        node, before = graph.nodes[place], times.waited_for[place]
        since_ns = max(times.moved_ns[place], first_ns)
        spent[kind_of(node)] += max(until_ns - since_ns, 0.0)
        if before != NEVER:
            is_late_rank = node.meeting != NEVER and graph.nodes[before].meeting == node.meeting
            ended_ns = since_ns if is_late_rank else max(times.ends_ns[before], first_ns)
            of_host = graph.nodes[before].kind in ("launch", "sync")
            spent["launches" if of_host else "pauses"] += max(since_ns - ended_ns, 0.0)
            until_ns = ended_ns
        place = before
    total = sum(spent.values())
    return {name: spent[name] / total for name in sorted(spent, key=lambda name: -spent[name])} if total else {}
