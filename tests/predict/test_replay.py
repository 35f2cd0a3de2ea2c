"""Replays of made steps, whose changed times follow from arithmetic."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_sweep.predict.changes import gathers, hosts, reductions, resources
from overlap_sweep.predict.graph import CannotTell, StepGraph
from overlap_sweep.predict.predictions import critical_path
from overlap_sweep.predict.replay import recorded, replay, replay_at_power, step_us
from overlap_sweep.trace.activity import BWD, FWD, NEITHER
from tests.predict.made_steps import Kernel, graph, taking_turns, training

RECORDED_US = 8300
"""Six GEMMs of 1 ms, 2 ms of all-reduce, 0.3 ms of optimizer."""


def replayed_us(changed: StepGraph) -> float:
    return step_us(changed, replay(changed))


def test_steps_take_as_long_as_they_were_recorded() -> None:
    made = graph(training(), training())

    assert step_us(made, recorded(made)) == RECORDED_US
    assert replayed_us(made) == pytest.approx(RECORDED_US)


def test_a_step_after_which_something_else_ran_is_not_followed_by_the_next() -> None:
    """Benchmarks let the GPU rest between their steps, which no change of a step would shorten."""
    rested = [
        replace(one, start_us=one.start_us + 5000, end_us=one.end_us + 5000) if one.step > 1 else one
        for one in training(3)
    ]

    made = graph(rested, rested)

    assert made.steps == [2, 3]
    assert replayed_us(made) == pytest.approx(RECORDED_US)


def test_buckets_are_reduced_beside_the_rest_of_the_backward_pass() -> None:
    """Half of the four GEMMs make gradients: two buckets of 32 MB, 15 us and 0.9925 ms each. The first is there when
    the second GEMM ends, and is held by the third."""
    made = graph(training(), training()).copy()

    reductions.in_buckets(made, 16e6)

    assert replayed_us(made) == pytest.approx(6300 - 1000 + 2 * (15 + 992.5))


def test_microbatches_wait_for_the_sums_of_those_before() -> None:
    """DistributedDataParallel waits at the end of each backward pass: buckets of one pass never run beside the next."""
    made = graph(*[taking_turns(optimizers=False)] * 2).copy()

    reductions.in_buckets(made, 16e6)

    # Two passes, in each of which the first of two buckets is held by the third of four GEMMs.
    assert replayed_us(made) == pytest.approx(2 * (5000 - 1000 + 2 * (15 + 992.5)) + 300)


def test_reductions_of_microbatches_are_saved_and_those_of_other_optimizers_are_not() -> None:
    accumulating = graph(*[taking_turns(optimizers=False)] * 2).copy()
    recorded_us = replayed_us(accumulating)

    reductions.unsynchronised(accumulating)

    assert replayed_us(accumulating) == pytest.approx(recorded_us - 2000)
    with pytest.raises(CannotTell, match="after one backward pass"):
        reductions.unsynchronised(graph(*[taking_turns(optimizers=True)] * 2).copy())


def test_a_faster_link_shortens_what_is_exposed() -> None:
    made = graph(training(), training()).copy()

    resources.faster_link(made, 2)

    assert replayed_us(made) == pytest.approx(RECORDED_US - 1000)


def waiting_for(slow: list[Kernel]) -> list[Kernel]:
    """Returns what a rank runs whose GEMMs take 1 ms, and who waits for the other in their all-reduces."""
    found: list[Kernel] = []
    now_us = slow[0].start_us
    for one in slow:
        if one.megabytes or one.pass_ == NEITHER:
            start_us, end_us = now_us, one.end_us
        else:
            start_us, end_us = now_us, now_us + 1000
        found.append(replace(one, start_us=start_us, end_us=end_us))
        now_us = end_us
    return found


def test_ranks_that_compute_equally_long_meet_in_the_middle() -> None:
    slow = training(gemm_us=1200)
    made = graph(waiting_for(slow), slow)
    assert replayed_us(made) == pytest.approx(RECORDED_US + 1200)

    changed = made.copy()
    hosts.equal_ranks(changed)

    assert replayed_us(changed) == pytest.approx(RECORDED_US + 600)


def test_copy_engines_cannot_reduce() -> None:
    made = graph(training(), training())
    for node in made.nodes:
        node.slowdown = 0.1

    with pytest.raises(CannotTell, match="cannot do all_reduce"):
        resources.beside_nothing(made)


def test_what_one_rank_alone_computes_can_be_left_out() -> None:
    made = graph(training(), training())
    as_recorded_us = replayed_us(made)
    late = [node for node in made.nodes if node.kind == "compute" and node.rank == 1]
    for node in late[:2]:
        node.name = "another"
    with pytest.raises(CannotTell, match="another may do by other kernels"):
        hosts.without_surplus(made.copy())

    # The other rank has as much less to compute.
    others = [node for node in made.nodes if node.kind == "compute" and node.rank == 0]
    for node in others[:2]:
        node.kind, node.duration_ns = "none", 0.0
    changed = made.copy()
    hosts.without_surplus(changed)

    assert replayed_us(changed) == pytest.approx(as_recorded_us - 2000 / 2)


def test_equal_hosts_cannot_be_told_of_one_that_has_launched_ahead_of_the_recording() -> None:
    made = graph(training(), training()).copy()
    hosts.equal_ranks(made.copy())
    for node in made.nodes:
        if node.kind == "launch" and node.rank == 1:
            node.delay_ns = 2 * replayed_us(made) * 1000
    with pytest.raises(CannotTell, match=r"The host of rank 1 took .* had begun before them"):
        hosts.equal_ranks(made)


def test_what_does_not_apply_cannot_be_told() -> None:
    made = graph(training(), training())

    for change in (
        resources.without_queue,
        hosts.without_sync,
        reductions.unsynchronised,
        gathers.kept_after_forward,
        hosts.ready_batches,
        resources.beside_nothing,
        lambda one: gathers.prefetched(one, 1),
    ):
        with pytest.raises(CannotTell):
            change(made.copy())


def test_the_critical_path_says_what_the_step_consists_of() -> None:
    made = graph(training(), training())

    # 12.0, 4.0 and 0.6 of 16.6 ms.
    assert critical_path(made, replay(made)) == "GEMMs 72%, all_reduce bwd 24%, other computation 3.6%"


def test_a_gpu_that_waits_less_runs_slower() -> None:
    made = graph(training(), training())
    changed = made.copy()
    resources.faster_link(changed, 1e6)

    at_power = step_us(changed, replay_at_power(changed, made, power=0.35))

    # 6 ms of GEMMs in 6.3 ms instead of 8.3.
    assert 6300 * 1.05 < at_power < 6300 * (8300 / 6300) ** 0.35


durations_us = st.integers(20, 3000)


@st.composite
def steps_of_two_ranks(draw: st.DrawFn) -> tuple[list[Kernel], list[Kernel]]:
    """Steps with buckets of any sizes anywhere in the backward pass, ranks that are late at any place, and pauses."""
    size, kinds = draw(st.integers(2, 5)), []
    for _ in range(size):
        kinds += [(BWD, 0.0)] + ([(BWD, draw(st.integers(1, 64)) * 1.0)] if draw(st.booleans()) else [])
    kinds.append((BWD, 8.0))
    ranks: tuple[list[Kernel], list[Kernel]] = ([], [])
    free = [[1e6, 1e6], [1e6, 1e6]]
    for step in (1, 2, 3):
        for pass_, megabytes in ((FWD, 0.0), (FWD, 0.0), *kinds, (NEITHER, 0.0)):
            took = [draw(durations_us) for _ in ranks]
            if megabytes:
                starts = [max(own) for own in free]
                end = max(starts) + took[0]
                for rank, kernels in enumerate(ranks):
                    kernels.append(Kernel(starts[rank], end, pass_, megabytes, step))
                    free[rank][1] = end
                continue
            for rank, kernels in enumerate(ranks):
                own = free[rank]
                start = max(own) if pass_ == NEITHER else own[0]
                start += draw(st.sampled_from((0, 0, 5, 40)))
                kernels.append(Kernel(start, start + took[rank], pass_, 0.0, step))
                own[0] = start + took[rank]
    return ranks


@settings(max_examples=60, deadline=None)
@given(steps_of_two_ranks())
def test_no_change_takes_the_recorded_time(ranks: tuple[list[Kernel], list[Kernel]]) -> None:
    made = graph(*ranks, contention=True)

    assert replayed_us(made) == pytest.approx(step_us(made, recorded(made)), rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(steps_of_two_ranks(), st.floats(1, 100))
def test_less_communication_never_takes_longer(ranks: tuple[list[Kernel], list[Kernel]], times: float) -> None:
    made = graph(*ranks)
    changed = made.copy()
    resources.faster_link(changed, times)

    assert replayed_us(changed) <= replayed_us(made) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(steps_of_two_ranks())
def test_no_step_is_shorter_than_its_computation_or_its_communication(
    ranks: tuple[list[Kernel], list[Kernel]],
) -> None:
    changed = graph(*ranks).copy()
    reductions.in_buckets(changed, 4e6)

    times = replay(changed)

    for rank in (0, 1):
        own = [node for node in changed.nodes if node.rank == rank]
        for kind in ("compute", "comm"):
            took_ns = sum(node.duration_ns for node in own if node.kind == kind)
            assert step_us(changed, times) * 3000 >= took_ns * (1 - 1e-9)
