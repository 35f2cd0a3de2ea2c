"""The GPU's clock against a simulated GPU; tests/measure/test_timing.py has the host's, and a real GPU's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from overlap_sweep.measure.clock import FIRST_SPIN_US, SPIN_MARGIN, GpuClock, HostClock, clock_for
from overlap_sweep.measure.timing import time_variants
from overlap_sweep.measure.variant import Variant
from overlap_sweep.ranks import Ranks
from tests.measure.simulation import SimulatedStream, kernels

ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("launch_us", [0.0, 1.0, 50.0, FIRST_SPIN_US / 8])
@pytest.mark.parametrize("left_over_us", [0.0, 1e6])
def test_passes_are_timed_by_the_gpus_clock_whatever_runs_before_and_however_slow_the_host(
    launch_us: float, left_over_us: float
) -> None:
    stream = SimulatedStream()
    stream.run(1, 0.0, left_over_us)
    turn = GpuClock(stream).time(kernels(stream, launch_us), 0)
    assert turn.us == {"fwd": 40.0, "bwd": 80.0}
    assert not turn.late


def test_the_ranks_meet_on_the_gpu_before_each_pass_and_outside_of_its_time() -> None:
    stream = SimulatedStream()
    GpuClock(stream).time(kernels(stream, 1.0), 0)
    passes = ["meet", "mark", "fwd", "mark", "meet", "mark", "bwd", "mark"]
    assert stream.calls == ["wait", "spin", *passes, "wait"]


@pytest.mark.parametrize(("launch_us", "bwd_us"), [(1.01 * FIRST_SPIN_US / 8, 80.0), (1000.0, 4010.0)])
def test_a_host_that_outlasts_the_spin_is_late_until_the_spin_has_grown(launch_us: float, bwd_us: float) -> None:
    stream = SimulatedStream()
    clock, variant = GpuClock(stream), kernels(stream, launch_us)
    first, second = (clock.time(variant, repeat) for repeat in range(2))
    assert (first.late, second.late) == (True, False)
    assert (first.us["bwd"], second.us) == (bwd_us, {"fwd": 40.0, "bwd": 80.0})


def test_the_spin_outlasts_the_slowest_variant_and_never_falls_below_the_first() -> None:
    stream = SimulatedStream()
    clock, slow, fast = GpuClock(stream), kernels(stream, 1000.0), kernels(stream, 1.0)
    for variant in (fast, slow, fast, slow):
        clock.time(variant, 0)
    grown = SPIN_MARGIN * 8000.0
    assert stream.spins == [FIRST_SPIN_US, FIRST_SPIN_US, grown, grown]


def growing_slower(stream: SimulatedStream, *host_us: float) -> Variant:
    """Its forward passes take the host so long, one after the other."""
    times = iter(host_us)
    return replace(kernels(stream, 1.0), forward=lambda repeat: [stream.run(1, next(times), 1.0), repeat][1])


def test_a_variant_that_was_slow_once_is_not_waited_for_again() -> None:
    """Its first run compiles: were every spin as long, a layer's 21 rounds would take a minute more."""
    stream = SimulatedStream()
    clock, compiling, other = GpuClock(stream), growing_slower(stream, 1e6, 1.0, 1.0), kernels(stream, 1.0)
    for repeat in range(3):
        clock.time(compiling, repeat)
        clock.time(other, repeat)
    assert [spin_us > 1e6 for spin_us in stream.spins] == [False, True, True, False, False, False]


def test_the_spin_is_long_enough_for_the_slowest_rank() -> None:
    stream = SimulatedStream(slowest_us=30_000.0)
    clock = GpuClock(stream)
    turns = [clock.time(kernels(stream, 1.0), repeat) for repeat in range(2)]
    assert stream.spins == [FIRST_SPIN_US, SPIN_MARGIN * 30_000.0]
    assert not any(turn.late for turn in turns)


def test_a_step_is_a_pass_of_its_own() -> None:
    stream = SimulatedStream()
    stepping = replace(kernels(stream, 1.0), step=lambda: stream.run(1, 1.0, 7.0))
    assert GpuClock(stream).time(stepping, 0).us == {"fwd": 40.0, "bwd": 80.0, "step": 7.0}


def test_a_variant_that_the_warm_up_enqueued_in_time_is_never_launch_bound() -> None:
    stream = SimulatedStream()
    variants = {"slow": kernels(stream, 1000.0), "fast": kernels(stream, 1.0)}
    samples = time_variants(variants, ALONE, warmup=1, repeats=3, clock=GpuClock(stream))
    assert {name: taken.launch_bound for name, taken in samples.items()} == {"slow": False, "fast": False}
    assert samples["slow"].us == samples["fast"].us == {"fwd": [40.0] * 3, "bwd": [80.0] * 3, "all": [120.0] * 3}


def test_a_host_that_grows_slower_and_slower_is_launch_bound() -> None:
    stream = SimulatedStream()
    late = growing_slower(stream, 1e3, 1e4, 1e5, 1e6)
    assert time_variants({"late": late}, ALONE, warmup=1, repeats=3, clock=GpuClock(stream))["late"].launch_bound


def test_without_a_gpu_the_hosts_clock_is_used() -> None:
    assert isinstance(clock_for(ALONE), HostClock)
