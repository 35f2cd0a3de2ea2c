"""What is listed of a recording, and what is said of it."""

from pathlib import Path

import pytest

from benchmarks.agent_recordings import straggler_timeline
from benchmarks.predictions_table import DATA, graph_of, unpacked
from overlap_sweep.predict.costs import Cost, cost_of
from overlap_sweep.predict.graph import StepGraph
from overlap_sweep.predict.predictions import predict
from overlap_sweep.trace.activity import BWD, FWD, NEITHER
from tests.golden.archives import unpack
from tests.predict.made_steps import Kernel, graph
from tests.timeline import Timeline


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("gpu"), DATA / "causes" / "h200x2")


@pytest.fixture(scope="module")
def one_bucket(recordings: Path) -> StepGraph:
    found = graph_of(recordings / "ddp_one_bucket")
    assert found is not None
    return found


def test_values_that_take_equally_long_are_one_row(one_bucket: StepGraph) -> None:
    """Its gradients of 128 MB are too large for all of them."""
    listed = {one.change: one.reason for one in predict(one_bucket)}
    buckets = [change for change in listed if change.startswith("ddp.bucket_cap_mb")]
    named = predict(one_bucket, ["ddp.bucket_cap_mb=25", "ddp.bucket_cap_mb=4"])

    assert buckets == ["ddp.bucket_cap_mb=25"]
    assert listed["ddp.bucket_cap_mb=25"].startswith("It takes as long with 4 and 100.")
    assert {"nccl.max_ctas=8", "nccl.max_ctas=16"} <= listed.keys()
    assert [one.change for one in named] == ["ddp.bucket_cap_mb=25", "ddp.bucket_cap_mb=4"]
    assert "takes as long" not in named[0].reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("nccl.cta_policy=2", "No collective of NCCL was recorded."),
        ("nccl.max_ctas=8", "No collective of NCCL was recorded."),
        ("nccl.min_ctas=32", "No collective of NCCL was recorded."),
        ("env.CUDA_DEVICE_MAX_CONNECTIONS=1", "It was recorded on a CPU."),
        ("cuda.max_connections=1", "It was recorded on a CPU."),
        ("host.launch=graph", "It was recorded on a CPU."),
        ("host.sync=none", "It was recorded on a CPU."),
    ],
)
def test_what_gloo_on_a_cpu_does_not_have_cannot_be_told(tmp_path: Path, change: str, reason: str) -> None:
    on_cpu = graph_of(next(trace.parent for trace in unpack("job", tmp_path).rglob("trace_rank*")))
    assert on_cpu is not None

    (one,) = predict(on_cpu, [change])

    assert (one.status, one.reason) == ("cannot tell", reason)


def test_a_rank_that_computes_longer_costs_the_others_half_of_it(tmp_path: Path) -> None:
    """Of 6 ms more; the all-reduce moves data for 3 ms."""
    straggler_timeline("", tmp_path)
    made = graph_of(tmp_path)
    assert made is not None

    equal, both, faster = predict(made, ["ranks.equal=true", "host.launch=graph+ranks.equal=true", "link.times=2"])

    assert equal.gain_us == pytest.approx(3000, abs=1)
    assert both.gain_us == pytest.approx(3000, abs=1)
    assert faster.gain_us == pytest.approx(1500, abs=1)
    assert equal.critical == "GEMMs 56%, other computation 33%, all_reduce 11%"


def test_where_the_host_limits_the_changed_step_it_may_gain_more(tmp_path: Path) -> None:
    """The host is 0.5 ms ahead of GEMMs between which it does something else for most of the time."""
    made = Timeline()
    for number in range(3):
        at = 30_000 * number
        made.step(number, at, at + 30_000)
        made.kernel(at + 1000, at + 13_000, launch=at + 500)
        made.collective("all_reduce", at + 13_010, at + 30_990, launch=at + 600)
        made.kernel(at + 30_992, at + 30_998, "multi_tensor_apply_kernel", launch=at + 700)
    made.write(tmp_path / "trace_rank0.json")
    found = graph_of(tmp_path)
    assert found is not None

    (one,) = predict(found, ["link.times=4"])

    assert one.critical.startswith("launches")
    assert "The host's launches are the limit then, which recording slows down" in one.reason


def test_gradients_of_one_layer_are_summed_one_by_one_as_they_are() -> None:
    """A bias and a weight after the two multiplications of their layer, whichever of these made them."""
    kernels, now_us = [], 1_000_000.0
    for step in (1, 2):
        kernels.append(Kernel(now_us, now_us + 1000, FWD, step=step))
        now_us += 1000
        for _ in range(4):
            for _ in range(2):
                kernels.append(Kernel(now_us, now_us + 1000, BWD, step=step))
                now_us += 1000
            kernels += [
                Kernel(now_us, now_us + 300, BWD, 0.01, step),
                Kernel(now_us + 300, now_us + 900, BWD, 4, step),
            ]
        now_us += 900
        kernels.append(Kernel(now_us, now_us + 300, NEITHER, step=step))
        now_us += 300

    (one,) = predict(graph(kernels, kernels), ["ddp.hooks=true"])

    assert one.reason.startswith("Gradients are summed so already: it changes nothing. The step is predicted to take")
    assert one.gain_us == pytest.approx(0, abs=1)


def test_hooks_say_how_they_are_written(recordings: Path) -> None:
    by_hand = graph_of(recordings / "reduce_after_backward")
    assert by_hand is not None

    (one,) = predict(by_hand, ["ddp.hooks=true"])

    assert "register_post_accumulate_grad_hook()" in one.reason


def test_what_takes_as_long_for_fewer_bytes_is_latency() -> None:
    """A thousandth of a gigabyte a second is no link: 9,216 bytes take 74 us at 1 Gbit/s."""
    few = cost_of({192: 720_000.0, 9216: 704_000.0})
    many = cost_of({2**20: 520_000.0, 2**22: 500_000.0})

    assert few == Cost(712_000 - 73_728, 8)
    assert many == Cost(255_000, 255_000 / 2**22)
