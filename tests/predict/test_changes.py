"""Changes of made steps, whose times follow from arithmetic, and of recordings, whose numbers are known."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.calibration_table import calibration
from benchmarks.predictions_table import DATA, graph_of, unpacked
from overlap_sweep.diagnosis.collectives import Group
from overlap_sweep.predict.calibration import Calibration, Rates, RateSeen, SlowdownSeen, calibrations, fitted
from overlap_sweep.predict.changes.blocks import kernels_of, with_blocks
from overlap_sweep.predict.changes.computation import fused, kept
from overlap_sweep.predict.changes.scale import FLOOR_NS, USUAL, larger_batch, more_ranks
from overlap_sweep.predict.graph import CannotTell, Node, StepGraph
from overlap_sweep.predict.predictions import Prediction, predict
from overlap_sweep.predict.replay import replay, step_us
from tests.predict.made_steps import graph, training

LATENCY_US = 15
"""Of collectives that all have one size."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@cache
def recorded(folder: Path, archive: str, name: str) -> StepGraph:
    assert (DATA / f"{archive}.tar.xz").exists()
    found = graph_of(unpacked(folder, DATA / archive) / name)
    assert found is not None
    return found


def replayed_us(changed: StepGraph) -> float:
    return step_us(changed, replay(changed))


def on_nccl(*blocks: int) -> StepGraph:
    """Returns steps whose all-reduces of 64 MB are kernels of NCCL, by step with so many thread blocks, and take 24 ms
    over these, by their bandwidth."""
    made = graph(training(len(blocks)), training(len(blocks)))
    for node in reductions(made):
        assert node.call is not None
        own = blocks[made.steps.index(node.step)]
        node.call = replace(node.call, library="nccl", kernel="ncclDevKernel_AllReduce", blocks=own)
        node.duration_ns = (LATENCY_US + 24_000 / own) * 1000
    return made


def reductions(made: StepGraph) -> list[Node]:
    return [node for node in made.nodes if node.kind == "comm"]


def test_collectives_take_as_long_as_recorded_ones_with_as_many_blocks() -> None:
    made = on_nccl(8, 24)

    with_blocks(made, most=lambda _: 8)

    assert [node.duration_ns for node in reductions(made)] == pytest.approx([3_015_000] * 4, rel=1e-3)
    assert {node.call.blocks for node in reductions(made) if node.call} == {8}
    assert made.notes == [
        "What thread blocks do to GEMMs was measured on 2 NVIDIA H200, NCCL 2.28.9, not on such GPUs or so many ranks "
        "as here: the interval is wider. What they do to collectives is in this recording."
    ]


def test_gemms_lose_less_beside_fewer_blocks() -> None:
    made = on_nccl(24, 24)
    for node in made.nodes:
        node.slowdown = 0.4

    with_blocks(made, most=lambda _: 8)

    power = calibrations()[0].exponent
    assert 0.5 < power < 1
    assert {round(node.slowdown, 6) for node in made.nodes if node.is_gemm} == {round(0.4 * (8 / 24) ** power, 6)}


def test_blocks_that_are_there_change_nothing() -> None:
    made = on_nccl(24, 24)
    before_us = replayed_us(made)

    with_blocks(made, most=lambda _: 64)

    assert replayed_us(made) == before_us
    assert made.notes == ["NCCL's kernels have at most 24 thread blocks as it is."]


def test_process_groups_have_blocks_of_their_own() -> None:
    made = on_nccl(24, 24)
    name = next(node.call.group for node in reductions(made) if node.call)
    (as_it_is,) = predict(made, ["nccl.max_ctas=8"])
    with_groups = replace(made, groups=[{name: Group(name, "mesh_dp", (0, 1), 2)}] * made.ranks)

    several, other, missing = predict(
        with_groups, ["nccl.max_ctas=dp:8+tp:2", "nccl.max_ctas=tp:2+24", "nccl.max_ctas=tp:2"]
    )

    assert several.predicted_us == as_it_is.predicted_us != as_it_is.step_us
    assert other.predicted_us == pytest.approx(replayed_us(made))
    assert (missing.status, missing.reason) == ("cannot tell", "No collective of such a process group was recorded.")


def test_small_buffers_keep_their_few_blocks(folder: Path) -> None:
    made = recorded(folder, "causes/h200x2", "ddp_overlapped").copy()

    with_blocks(made, least=lambda _: 32)

    assert {(one.node.bytes or 0) > 1e6: one.blocks for one in kernels_of(made)} == {True: 32, False: 1}


def test_what_no_recording_shows_cannot_be_told(folder: Path) -> None:
    (one,) = predict(recorded(folder, "causes/h200x2", "moe_all_to_all"), ["nccl.max_ctas=8"])

    assert one.status == "cannot tell"
    assert one.reason == (
        "No recording shows how long all_to_all takes with other thread blocks; "
        "+experiment=nccl_calibration measures it."
    )


def test_a_collective_that_only_an_own_calibration_has_is_predicted_by_it(folder: Path) -> None:
    made = recorded(folder, "causes/h200x2", "moe_all_to_all").copy()
    before = {one.node.call.collective: one.node.duration_ns for one in kernels_of(made) if one.node.call}
    (blocks,) = {one.blocks for one in kernels_of(made) if one.family.collective == "all_to_all"}
    seen = [RateSeen(number, 10.0 * number, 64.0, "measured") for number in (1, 4, 16)]
    slowdowns = [SlowdownSeen(number, 0.01 * number, "measured") for number in (1, 16)]
    own = Calibration("NVIDIA H200", 2, "2.30.1", {"all_to_all": seen}, slowdowns)

    with_blocks(made, most=lambda _: blocks // 2, known=[own, *calibrations()])

    after = {one.node.call.collective: one.node.duration_ns for one in kernels_of(made) if one.node.call}
    assert 1.5 * before["all_to_all"] < after["all_to_all"] < 2 * before["all_to_all"]
    assert "2 NVIDIA H200, NCCL 2.30.1" in made.notes[0]


def test_another_kind_of_gpu_is_said_and_widens_the_interval(folder: Path) -> None:
    other = recorded(folder, "judged/h100x2", "balanced")
    assert other.device_name == "NVIDIA H100 80GB HBM3"

    def width_us(one: Prediction) -> float:
        assert one.low_us is not None
        assert one.high_us is not None
        return one.high_us - one.low_us

    (there,) = predict(other, ["nccl.max_ctas=8"])
    (here,) = predict(replace(other, device_name="NVIDIA H200"), ["nccl.max_ctas=8"])

    assert "on 2 NVIDIA H200, NCCL 2.28.9, not on such GPUs" in there.reason
    assert "on 2 NVIDIA H200, NCCL 2.28.9." in here.reason
    assert width_us(there) > 1.1 * width_us(here)


rates = st.floats(1, 1000)


@given(rates, rates)
def test_rates_are_found_again(of_block: float, of_link: float) -> None:
    known = Rates(of_block, of_link)

    found = fitted({blocks: known.of(blocks) for blocks in (1, 4, 64)})

    assert found.of(16) == pytest.approx(known.of(16), rel=1e-3)


@given(rates, st.floats(0.1, 0.9))
def test_on_a_slower_link_blocks_do_less(of_block: float, share: float) -> None:
    known = Rates(of_block, 10 * of_block)
    usual = known.of(16)

    assert known.longer(16, 4, usual) > known.longer(16, 4, share * usual) >= 1
    assert known.longer(16, 64, usual) < known.longer(16, 64, share * usual) <= 1


@pytest.mark.end_to_end
def test_the_calibration_is_what_the_recordings_show(folder: Path) -> None:
    assert calibrations() == [calibration(folder)]


def test_a_compiler_fuses_pytorchs_own_kernels_of_the_passes_alone() -> None:
    made = graph(training(), training()).copy()
    for node in made.nodes:
        if node.kind == "compute" and node.pass_ != "bwd":
            node.name, node.is_gemm = "void at::native::vectorized_elementwise_kernel<4, Gelu>(int)", False
    before_us = replayed_us(made)
    forward_us = sum(node.duration_ns for node in made.nodes if node.rank == 0 and node.pass_ == "fwd") / 1000

    fused(made)

    assert before_us - replayed_us(made) == pytest.approx(forward_us / len(made.steps))
    assert not any(node.duration_ns for node in made.nodes if node.pass_ == "fwd")


def test_what_is_computed_again_can_be_kept() -> None:
    made = graph(training(), training()).copy()
    with pytest.raises(CannotTell, match="computes nothing again"):
        kept(made)
    again = [node for node in made.nodes if node.kind == "compute" and node.pass_ == "bwd"][::2]
    for node in again:
        node.recomputes = True
    before_us = replayed_us(made)

    kept(made)

    assert replayed_us(made) < before_us
    assert not any(node.duration_ns for node in again)


def test_what_a_compiler_gains_at_most_is_a_bound_that_needs_pytorchs_kernels(folder: Path) -> None:
    (gemms,) = predict(graph(training(), training()), ["kernels.fused=true"])
    assert (gemms.gain_us, "No kernel of PyTorch's own runs" in gemms.reason) == (0.0, True)
    change = "kernels.fused=true+host.launch=graph"
    (found,) = predict(recorded(folder, "causes/h200x2", "tp_sequence_parallel"), [change])
    assert (found.status, found.gain_low_us) == ("bound", 0.0)
    assert 0 < (found.gain_us or 0.0) < found.step_us


def test_computation_grows_with_the_batch_and_nothing_else() -> None:
    made = graph(training(), training()).copy()

    larger_batch(made, 2)

    floor_us = FLOOR_NS / 1000
    assert replayed_us(made) == pytest.approx(6 * (floor_us + (1000 - floor_us) * 2**USUAL) + 2000 + 300)


def test_activations_grow_with_the_batch_and_copies_of_parameters_do_not(folder: Path) -> None:
    before = recorded(folder, "causes/h200x2", "tp_sequence_parallel")
    made = before.copy()

    larger_batch(made, 2)

    for old, new in zip(before.nodes, made.nodes, strict=True):
        if old.kind == "comm" and old.bytes:
            assert new.bytes == 2 * old.bytes
            assert 1.5 < new.duration_ns / old.duration_ns < 2
    sharded = recorded(folder, "causes/h200x2", "fsdp2_tiny_batch")
    made = sharded.copy()
    larger_batch(made, 8)
    kept = [
        new.duration_ns == old.duration_ns
        for old, new in zip(sharded.nodes, made.nodes, strict=True)
        if "split_with_sizes_copy" in old.name or old.kind == "comm"
    ]
    assert all(kept)
    assert kept


def test_the_gain_of_a_batch_is_for_equal_work(folder: Path) -> None:
    (one,) = predict(recorded(folder, "causes/h200x2", "ddp_tiny_batch"), ["batch.times=8"])

    assert one.predicted_us is not None
    assert one.gain_us is not None
    assert one.predicted_us > one.step_us
    assert one.gain_us == pytest.approx(one.step_us - one.predicted_us / 8)
    assert one.low_us is not None
    assert one.high_us is not None
    assert one.gain_low_us == pytest.approx(one.step_us - one.high_us / 8)
    assert one.gain_high_us == pytest.approx(one.step_us - one.low_us / 8)
    assert one.reason == "A step of 8 times the samples: 5,123 us for as many as now, 77% less."


def test_more_ranks_move_more_in_more_steps() -> None:
    made = graph(training(), training()).copy()

    more_ranks(made, 2)

    # Of four instead of two each sends 3/2 instead of 1, in a tree of two levels instead of one.
    assert replayed_us(made) == pytest.approx(6000 + 2 * LATENCY_US + 1.5 * (2000 - LATENCY_US) + 300)
    with pytest.raises(CannotTell):
        more_ranks(made, 0.5)


def test_more_ranks_are_a_lower_bound_without_a_highest_time(folder: Path) -> None:
    sharded = recorded(folder, "causes/h200x2", "fsdp2_tiny_batch")
    (one,) = predict(sharded, ["ranks.times=4"])

    assert (one.status, one.high_us) == ("bound", None)
    assert one.low_us is not None
    assert one.predicted_us is not None
    assert one.low_us <= one.predicted_us
    assert one.predicted_us > one.step_us
    assert one.reason == "At least so long: links between nodes, which the recording does not have, are slower."


def test_kept_parameters_name_their_memory(folder: Path) -> None:
    """Three blocks of 1,073,758,208 bytes are gathered again."""
    (one,) = predict(recorded(folder, "causes/h200x2", "fsdp2_no_prefetch"), ["fsdp2.reshard_after_forward=false"])

    assert one.reason.startswith("All gathered parameters stay in memory: at most 3.22 GB more on each GPU.")


def test_a_gain_within_the_interval_is_not_claimed(folder: Path) -> None:
    made = recorded(folder, "causes/h200x2", "ddp_overlapped")
    doubtful, certain = predict(made, ["nccl.max_ctas=16", "nccl.max_ctas=1"])

    assert "It may cost nothing, or gain time: no interval is narrower than 4.1% of the step" in doubtful.reason
    assert certain.low_us is not None
    assert certain.low_us > certain.step_us
    assert "nothing" not in certain.reason
