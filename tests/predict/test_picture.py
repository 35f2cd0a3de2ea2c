"""A step of made steps as it was recorded and as it is replayed with a change."""

from dataclasses import replace
from itertools import pairwise

import pytest

from overlap_sweep.predict.picture import MOST_BARS, MOST_STREAMS, Lane, Step, picture_of
from overlap_sweep.predict.predictions import predict
from overlap_sweep.trace.activity import BWD, NEITHER
from tests.predict.made_steps import Kernel, graph, training


def lane(step: Step, name: str) -> Lane:
    (found,) = (one for one in step.lanes if one.name == name)
    return found


def spans(step: Step, name: str) -> list[tuple[str, float, float]]:
    return [(bar.shown, bar.start_us, bar.end_us) for bar in lane(step, name).bars]


def test_a_faster_link_is_drawn_below_the_recorded_step() -> None:
    picture = picture_of(graph(training(), training()), "link.times=2")

    for step, reduced_us in ((picture.before, 2000), (picture.after, 1000)):
        assert [one.name for one in step.lanes] == ["GEMMs", "other computation", "all_reduce"]
        assert len(lane(step, "GEMMs").bars) == 6
        assert step.passes == [("fwd", 0, 2000), ("bwd", 2000, 6000)]
        assert spans(step, "all_reduce") == [("comm", 6000, pytest.approx(6000 + reduced_us))]
        assert step.exposed_us == pytest.approx(reduced_us)
        assert spans(step, "other computation") == [
            ("compute", pytest.approx(6000 + reduced_us), pytest.approx(6300 + reduced_us))
        ]
    assert picture.merged_us == 0


def test_the_slowest_rank_is_drawn_and_its_waiting_is_grey() -> None:
    """Rank 1 has launched its all-reduce 500 us before rank 0, and ends 10 us later."""
    first = training(steps=3)
    *second, last = (replace(one, start_us=one.start_us - 500 * bool(one.megabytes)) for one in first)
    second.append(replace(last, end_us=last.end_us + 10))

    picture = picture_of(graph(first, second), "link.times=2")

    assert (picture.rank, picture.step) == (1, 2)
    assert spans(picture.before, "all_reduce") == [("wait", 5500, 6000), ("comm", 6000, 8000)]


@pytest.mark.parametrize("change", ["link.times=2", "ddp.bucket_cap_mb=25", "ddp.bucket_cap_mb=25+link.times=2"])
def test_what_is_drawn_is_what_is_predicted(change: str) -> None:
    made = graph(training(steps=3), training(steps=3))

    (prediction,) = predict(made, [change])

    assert picture_of(made, change).step_us == prediction.predicted_us


@pytest.mark.parametrize(("streams", "lanes"), [(MOST_STREAMS, MOST_STREAMS), (MOST_STREAMS + 1, 1)])
def test_many_streams_that_take_turns_share_a_lane(streams: int, lanes: int) -> None:
    *kernels, optimizer = training()
    starts_us = [optimizer.start_us + 100 * number for number in range(streams - 1)]
    kernels += [Kernel(start_us, start_us + 90, BWD, 1.0, step=2) for start_us in starts_us]
    made = graph(kernels, kernels)
    for place, node in enumerate(made.nodes):
        node.lane = place if node.call else node.lane

    step = picture_of(made, "link.times=2").before

    assert [one.name for one in step.lanes] == ["GEMMs", *["all_reduce"] * lanes]
    assert sum(len(one.bars) for one in step.lanes[1:]) == streams


def test_thousands_of_kernels_become_few_bars() -> None:
    *kernels, optimizer = training()
    starts_us = [optimizer.start_us + 5 * number for number in range(3000)]
    kernels += [Kernel(start_us, start_us + 3, NEITHER, step=2) for start_us in starts_us]

    picture = picture_of(graph(kernels, kernels), "link.times=2")

    bars = lane(picture.before, "other computation").bars
    assert len(bars) <= MOST_BARS
    assert sum(bar.count for bar in bars) == 3000
    assert all(after.start_us - before.end_us >= picture.merged_us for before, after in pairwise(bars))
    assert bars[-1].end_us == pytest.approx(8000 + 2999 * 5 + 3)
    assert picture.merged_us > 2
    assert len(lane(picture.before, "GEMMs").bars) == 6
