"""Times variants of an operator or layer in turns, by the slowest rank, and compares their results.

A repeat is timed by the host's or the GPU's clock. The host needs longer to enqueue a small operator than the GPU needs
to run it, so the passes are enqueued behind a spin kernel that keeps the GPU busy; if the host is still too late, the
turn is marked `late`. Whole training steps are timed between marks on their stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap_sweep.measure import Ranks
from overlap_sweep.measure.instruments import debugging, named, say_difference
from overlap_sweep.results.measured import summarise as summarise

Forward = Callable[[int], Any]
Backward = Callable[[int, Any], Mapping[str, torch.Tensor]]

L2_BYTES = 128 * 2**20
"""More than any GPU's L2 cache: inputs rotate through at least this much memory."""
MOST_INPUTS = 64
"""Most inputs to rotate: of 2 MiB each, as a small model has at TP=8."""

LEAST_REPEATS = 6
"""Repeats of every variant, also if fewer would be enough."""
EVERY = 3
"""Repeats between two questions whether they are enough, and between two turns of a variant that seldom takes one. That
one takes every turn of the first EVERY repeats, so that its noise is known."""

SPIN_MARGIN = 1.5
"""Length of the spin / longest of the variants' last enqueue times."""

FIRST_SPIN_US = 2000.0
"""Shortest spin, in microseconds."""

REST = 0.7
"""Rest before a pass / longest of the variants' last times of that pass on the GPU. With less rest GEMMs of
milliseconds reach the GPU's power limit, and its clock moves: on an H100 passes of 5 ms then vary by 5 % from turn to
turn, otherwise by 0.3 %."""

LONG_TURN_US = 20_000.0
REST_OF_LONG_TURNS = 2.5
"""The same where a turn's passes take longer than LONG_TURN_US together. A layer of Llama-3 70B, 34 ms on two H200s,
relative to `none` then varies by 0.2 % from round to round; with REST by 0.6 %, and by 2 % where a turn begins with all
of that rest."""

STREAM_PRIORITY = {"normal": 0, "high": -1}
"""torch's stream priorities: lower runs first. Blocks of a high-priority kernel take free SMs before others."""


class Mark:
    """A moment on the current stream; on a CPU the moment of its creation."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self.host_ns = time.perf_counter_ns()

    def after_ns(self, origin: Mark) -> int:
        """Returns the time since the origin in nanoseconds; the device must have passed both marks."""
        if self._event is None or origin._event is None:
            return self.host_ns - origin.host_ns
        return round(origin._event.elapsed_time(self._event) * 1e6)

    def wait(self) -> None:
        """Waits for the mark on the host."""
        if self._event is not None:
            self._event.synchronize()


class Anchor(Mark):
    """A mark that an idle device passes when the host creates it, which aligns the two clocks. They drift apart by
    microseconds per second."""

    def host_after_ns(self, host_ns: int, origin: Mark) -> int:
        """Returns a host time as device time since the origin."""
        return self.after_ns(origin) + host_ns - self.host_ns

    def lead_ns(self, mark: Mark) -> int:
        """Returns how long after its creation on the host the device passed a later mark."""
        return mark.after_ns(self) - (mark.host_ns - self.host_ns)


@dataclass(frozen=True)
class Variant:
    """Passes that run after each other. `forward` and `backward` take the turn's number, which rotates their inputs."""

    forward: Forward
    """Returns the output, which the next pass takes."""
    backward: Backward | None = None
    """Returns the gradients by name. None: forward only."""
    step: Callable[[], object] | None = None
    """The rest of a training step: the optimizer."""
    prepare: Callable[[], None] | None = None
    """Called untimed before each of the variant's turns, followed by an untimed forward pass, or with an optimizer by
    an untimed repeat."""
    both: Callable[[int, Any], Any] | None = None
    """Runs between forward and backward what is neither alone, such as one micro batch's backward and another's
    forward. Returns the output that `backward` takes."""
    waits: bool = False
    """Whether its host waits for the device, such as for sizes that it must know: nothing can be enqueued ahead."""

    def get_ready(self) -> None:
        if self.prepare:
            self.prepare()

    def passes(self) -> Iterator[tuple[str, Callable[[int, Any], Any]]]:
        """Yields each pass's name and its function of the repeat and the previous pass's result."""
        yield from self.computation()
        if step := self.step:
            yield "step", lambda _repeat, _kept: step()

    def computation(self) -> Iterator[tuple[str, Callable[[int, Any], Any]]]:
        """Yields the passes without the optimizer's."""
        yield "fwd", lambda repeat, _: self.forward(repeat)
        if self.both:
            yield "both", self.both
        if self.backward:
            yield "bwd", self.backward


@dataclass(frozen=True)
class Turn:
    """One repeat on this rank."""

    us: dict[str, float]
    late: bool
    """Whether the host was slower than the GPU."""


Clock = Callable[[Variant, int], Turn]
"""Times every pass of the variant in the repeat of this number. Collective."""


Marks = dict[str, tuple[Mark, Mark]]


def _marked(variant: Variant, repeat: int, device: torch.device, get_ready: Callable[[str], None]) -> Marks:
    """Runs the passes, each once the ranks are ready for the one of that name. Returns the marks before and behind
    each."""
    marks, kept = {}, None
    for name, run in variant.passes():
        get_ready(name)
        start = Mark(device)
        kept = run(repeat, kept)
        marks[name] = start, Mark(device)
    return marks


def _us(marks: Marks) -> dict[str, float]:
    return {name: end.after_ns(start) / 1e3 for name, (start, end) in marks.items()}


def host_clock(ranks: Ranks) -> Clock:
    """Returns a clock by marks without anything enqueued ahead; every pass starts when all ranks are ready."""

    def turn(variant: Variant, repeat: int) -> Turn:
        marks = _marked(variant, repeat, ranks.device, lambda _: ranks.barrier())
        ranks.synchronize()
        return Turn(_us(marks), late=False)

    return turn


def gpu_clock(ranks: Ranks) -> Clock:
    """Returns a clock by marks on the stream, behind a spin kernel; ranks synchronise before each pass to start
    together."""
    # Only the last times of each variant count: the first run may include a second of compilation.
    last_enqueue_us: dict[Variant, float] = {}
    last_gpu_us: dict[str, dict[Variant, float]] = {}

    def turn(variant: Variant, repeat: int) -> Turn:
        ahead_us = max(FIRST_SPIN_US, SPIN_MARGIN * max(last_enqueue_us.values(), default=0.0))
        longest_us = {name: max(of_variants.values()) for name, of_variants in last_gpu_us.items()}
        rest = rest_for(sum(longest_us.values()))
        first = next(variant.passes())[0]

        def get_ready(name: str) -> None:
            rest_us = rest * longest_us.get(name, 0.0)
            spin(ranks, max(rest_us, ahead_us) if name == first else rest_us)
            meet(ranks)

        ranks.barrier()
        start_ns = time.perf_counter_ns()
        marks = _marked(variant, repeat, ranks.device, get_ready)
        enqueue_us = (time.perf_counter_ns() - start_ns) / 1e3
        ranks.barrier()
        us = _us(marks)
        late = enqueue_us > ahead_us
        # A GPU that waited for the host has rested. All ranks spin for the same time, or the first would wait for the
        # last inside its collective.
        busy_us = [0.0 if late else one_us for one_us in us.values()]
        last_enqueue_us[variant], *busy_us = ranks.slowest([enqueue_us, *busy_us])
        for name, one_us in zip(us, busy_us, strict=True):
            last_gpu_us.setdefault(name, {})[variant] = one_us
        return Turn(us, late)

    return turn


def rest_for(turn_us: float) -> float:
    """Returns the rest before a pass over its time, where all passes of the turn take that long."""
    return REST_OF_LONG_TURNS if turn_us > LONG_TURN_US else REST


def spin(ranks: Ranks, us: float) -> None:
    """Keeps the GPU's current stream busy, so that the host can enqueue meanwhile."""
    torch.cuda._sleep(int(us * _cycles_per_us(ranks.device)))


def meet(ranks: Ranks) -> None:
    """Makes the GPUs' streams wait for each other; the host does not wait."""
    if ranks.world_size > 1:
        dist.all_reduce(_token(ranks.device))


@cache
def _token(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, device=device)


@cache
def _cycles_per_us(device: torch.device) -> float:
    """Returns the rate of the clock that `torch.cuda._sleep` counts, per microsecond."""
    cycles = 20_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize(device)
    return cycles / (start.elapsed_time(end) * 1e3)


@dataclass
class Samples:
    """Times of every repeat per pass in microseconds, slowest rank; `all` is the sum of the passes."""

    us: dict[str, list[float]]
    launch_bound: bool


Enough = Callable[[Mapping[str, Samples]], bool]
"""Takes the samples so far by variant, which are the same on all ranks; returns whether no more are needed."""


def time_variants(
    variants: Mapping[str, Variant],
    ranks: Ranks,
    warmup: int,
    repeats: int,
    clock: Clock | None = None,
    *,
    enough: Enough | None = None,
    seldom: Collection[str] = (),
) -> dict[str, Samples]:
    """Times every variant in rotating turns, so that drift and order affect all alike: `repeats` times, or fewer if
    they are `enough`. Variants in `seldom` take part in every third repeat, for baselines that every point has.

    Turns are numbered consecutively, so that none finds its input in a cache where another variant has just read it.
    Collective over the ranks; with `ranks.world_size` 1 no other rank is waited for.
    """
    clock = clock or (gpu_clock if enqueues_ahead(variants.values(), ranks.device) else host_clock)(ranks)
    variants = {name: named(name, variant) for name, variant in variants.items()}
    names, number = list(variants), count()
    for _ in range(warmup):
        for name in names:
            _take_turn(clock, variants[name], next(number))
    measured: dict[str, list[Turn]] = {name: [] for name in names}
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            if name not in seldom or repeat < EVERY or repeat % EVERY == 0:
                measured[name].append(_take_turn(clock, variants[name], next(number)))
        done = repeat + 1
        if enough and LEAST_REPEATS <= done < repeats and done % EVERY == 0 and enough(_over_ranks(measured, ranks)):
            break
    return _over_ranks(measured, ranks)


def enqueues_ahead(variants: Iterable[Variant], device: torch.device) -> bool:
    """Returns whether the host can enqueue turns ahead of the device. A point that is debugged waits for each pass: it
    would wait for the spin, too, and make the next one longer by that, until nothing is measured any more."""
    return device.type == "cuda" and not debugging() and not any(variant.waits for variant in variants)


def _take_turn(clock: Clock, variant: Variant, number: int) -> Turn:
    if variant.prepare:
        variant.prepare()
        # After new userbuffers the first pass of any variant is slower, by 2.5 % for an 8B layer; those after it are
        # not. Only a whole step leaves the scales of a layer that trains as they were.
        clock(variant if variant.step else replace(variant, both=None, backward=None), number)
    return clock(variant, number)


def _over_ranks(measured: Mapping[str, Sequence[Turn]], ranks: Ranks) -> dict[str, Samples]:
    samples = {}
    for name, turns in measured.items():
        us = {one: ranks.slowest([turn.us[one] for turn in turns]) for one in turns[0].us}
        us["all"] = [sum(passes) for passes in zip(*us.values(), strict=True)]
        late = ranks.slowest([float(turn.late) for turn in turns])
        # A single late repeat does not change the median.
        samples[name] = Samples(us, sum(late) > len(late) / 2)
    return samples


def relative_error(
    candidate: Variant, reference: Variant, ranks: Ranks, candidate_name: str = "point"
) -> dict[str, float]:
    """Returns each tensor's largest difference / the reference's largest magnitude, over all ranks; inf for NaN.

    Two different inputs are used in a row, to detect a variant that reads the previous call's buffer. Both variants
    draw the same random numbers, such as those of NVFP4's stochastic rounding.
    """
    errors: dict[str, Tensor] = {}
    variants = named(f"check: {candidate_name}", candidate), named("check: none", reference)
    for repeat in range(2):
        ours, theirs = (_results(variant, repeat) for variant in variants)
        for name, expected in theirs.items():
            say_difference(f"{candidate_name} {name}, turn {repeat},", ours[name], expected)
            difference = (ours[name].float() - expected.float()).abs().max()
            error = torch.nan_to_num(difference / expected.float().abs().max(), nan=torch.inf, posinf=torch.inf)
            # 0 / 0: both tensors are zero.
            error = torch.where(difference == 0, difference, error)
            errors[name] = torch.maximum(error, errors[name]) if name in errors else error
    return dict(zip(errors, ranks.slowest(torch.stack(list(errors.values())).tolist()), strict=True))


def _results(variant: Variant, repeat: int) -> dict[str, Tensor]:
    torch.manual_seed(repeat)
    results: dict[str, Tensor] = {}
    kept = None
    for name, run in variant.computation():
        kept = run(repeat, kept)
        results |= kept if name == "bwd" else {"output" if name == "fwd" else f"output of {name}": kept.detach()}
    return results
