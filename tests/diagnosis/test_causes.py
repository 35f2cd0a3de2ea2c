"""Each rule on a timeline that is drawn by hand: what is lost to which cause."""

from pathlib import Path

import pytest

from overlap_sweep.diagnosis.arrivals import arrivals
from overlap_sweep.diagnosis.causes import CAUSES
from overlap_sweep.diagnosis.findings import diagnosis_of
from overlap_sweep.diagnosis.groups import group_rows
from overlap_sweep.diagnosis.losses import ENOUGH_CALLS
from tests.timeline import AUTOGRAD, COMPUTE, NCCL, SIDE, Timeline, diagnosed, findings, one_step

ACCUMULATES = "torch::autograd::AccumulateGrad"


def tensor_parallel(start: float = 0) -> Timeline:
    """GEMM, all-reduce of its output, GEMM: the collective is launched in time."""
    made = one_step(start - 2000, start + 1500)
    made.kernel(start, start + 1000)
    made.collective("all_reduce", start + 1000, start + 1400, launch=start - 400)
    made.kernel(start + 1400, start + 2400, launch=start - 300)
    return made


def count_that_is_gathered() -> Timeline:
    """In a group that looks like one of sharded parameters by itself."""
    made = one_step(-2000, 1500)
    made.kernel(0, 1000)
    made.collective("all_gather", 1000, 1400, launch=600, elements=2)
    made.kernel(1400, 2400, launch=700)
    made.backward(800, 1500)
    made.collective("reduce_scatter", 2400, 2500, launch=1000, thread=AUTOGRAD)
    return made


def hidden() -> Timeline:
    made = one_step(-1000, 900)
    made.kernel(0, 1000)
    made.kernel(1000, 2000)
    made.collective("all_reduce", 100, 1900)
    return made


def data_parallel(reduced_at: float, launch: float) -> Timeline:
    """A forward and a backward pass of 2 ms each, one reduction of all gradients, and an optimizer's kernel."""
    made = one_step(-3000, 3900)
    made.kernel(0, 2000)
    made.backward(1400, 3800, ACCUMULATES)
    made.kernel(2000, 3000, thread=AUTOGRAD)
    made.kernel(3000, 4000, thread=AUTOGRAD)
    made.collective("all_reduce", reduced_at, reduced_at + 800, launch=launch, thread=AUTOGRAD)
    made.optimizer(3820, 3900)
    made.kernel(max(4000, reduced_at + 800), reduced_at + 1800, launch=3840)
    return made


def too_much() -> Timeline:
    made = one_step(-3000, 1700)
    made.kernel(0, 500)
    made.backward(0, 1600, ACCUMULATES)
    made.kernel(500, 1000, launch=100, thread=AUTOGRAD)
    made.collective("all_reduce", 600, 2600, launch=590, thread=AUTOGRAD)
    made.optimizer(1620, 1700)
    made.kernel(2600, 2700, launch=1650)
    return made


def many_calls(made: Timeline) -> Timeline:
    """Returns it with so many calls before its step that their order shows whether streams share a queue."""
    for i in range(ENOUGH_CALLS):
        made.collective("all_reduce", -4000 + 20 * i, -3995 + 20 * i, launch=-4010 + 20 * i, group="another")
    return made


def reducing(until: float, stream: int = NCCL) -> Timeline:
    """A GEMM, one of the backward pass, and the reduction of its gradients."""
    made = one_step(-3000, 4900)
    made.kernel(0, 1000)
    made.backward(100, 4900, ACCUMULATES)
    made.kernel(1000, 2000, launch=600, thread=AUTOGRAD)
    made.collective("all_reduce", 2000, until, launch=700, thread=AUTOGRAD, stream=stream)
    return made


def behind_a_reduction(stream: int = NCCL) -> Timeline:
    made = reducing(2500, stream)
    made.kernel(2504, 3500, launch=760, thread=AUTOGRAD)
    return many_calls(made)


def host_waits_for_gradients() -> Timeline:
    made = reducing(2800)
    made.wait(720, 2810, "cudaDeviceSynchronize")
    made.kernel(2860, 3860, launch=2840, thread=AUTOGRAD)
    return made


def sharded(gather_at: float, launch: float, *, copied: bool = False) -> Timeline:
    """Two layers whose parameters are gathered, and a backward pass that reduces gradients. The second gather takes
    from `gather_at` to 600 us later."""
    made = one_step(-3000, 5800)
    made.collective("all_gather", -600, 0, launch=-1000)
    made.kernel(0, 1000, launch=-900)
    if copied:
        made.kernel(gather_at - 22, gather_at - 4, "cat_copy_kernel", launch=launch - 5, stream=SIDE)
    made.collective("all_gather", gather_at, gather_at + 600, launch=launch)
    second = max(gather_at + 600, 1000)
    made.kernel(second, second + 1000, launch=-700)
    made.backward(0, 5700)
    made.kernel(second + 1000, second + 3000, launch=100, thread=AUTOGRAD)
    made.collective("reduce_scatter", second + 1200, second + 1800, launch=150, thread=AUTOGRAD)
    return made


def gather_after_a_wait() -> Timeline:
    made = sharded(1050, 1040)
    made.operator("aten::item", -650, 1010)
    made.wait(-640, 1005)
    return made


def gather_without_room() -> Timeline:
    made = sharded(900, -800)
    # A copy overtakes it: streams have queues of their own.
    made.kernel(10, 20, "cat_copy_kernel", launch=-100, stream=SIDE)
    made.kernel(30, 40, "cat_copy_kernel", launch=-750, stream=19)
    return made


def host_waits() -> Timeline:
    made = one_step(-1000, 2500)
    made.kernel(0, 1000)
    made.operator("aten::item", 100, 1030)
    made.wait(110, 1020, "cudaStreamSynchronize")
    made.kernel(1200, 2200, launch=1190)
    return made


def slow_launches() -> Timeline:
    made = one_step(-1000, 1000)
    for start in range(0, 1000, 20):
        made.kernel(start, start + 5, launch=start - 8)
    return made


def slowed_gemms() -> Timeline:
    """The same kernel also multiplies a larger size."""
    made = one_step(-900, 9000)
    start = 0
    for took in (1000, 1000, 3000, 3000, 1300, 1300):
        made.kernel(start, start + took)
        start += took
    made.collective("all_reduce", 8000, 10_550)
    return made


def stalled(launch: float = -300, *, function: bool = False) -> Timeline:
    """Two GEMMs, the second 2,000 us after the first."""
    made = one_step(-3000, 3500)
    made.kernel(0, 1000)
    if function:
        made.add("cuda_runtime", "cudaLaunchHostFunc", -400, -396, 100, 1, correlation=0)
    made.kernel(3000, 4000, launch=launch)
    return made


def stalled_by_a_copy() -> Timeline:
    made = stalled()
    made.copy(1010, 2990)
    return made


def cuda_graph() -> Timeline:
    made = one_step(-1000, 3000)
    made.add("cuda_runtime", "cudaGraphLaunch", -500, -490, 100, 1, correlation=1)
    for start, end, name, stream in (
        (0, 1000, "nvjet_gemm", 7),
        (1000, 1500, "ncclDevKernel_AllReduce", 17),
        (1500, 2500, "nvjet_gemm", 7),
    ):
        made.add("kernel", name, start, end, 0, stream, correlation=1)
    return made


ITEM = "cudaStreamSynchronize (aten::item)"
GEMM = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_TNT (stream 7)"


def case(name: str, made: Timeline, *words: str, without: str = "", **lost_us: float) -> object:
    """Returns what is lost to which cause, what must not be found (`*`: anything else), and words of the first cause's
    finding."""
    absent = (set(CAUSES) if without == "*" else {without}) - set(lost_us)
    return pytest.param(made, words, absent, lost_us, id=name)


@pytest.mark.parametrize(
    ("made", "words", "absent", "lost_us"),
    [
        case("the next kernel needs it", tensor_parallel(), dependency=400, without="*"),
        case("a count that is gathered", count_that_is_gathered(), "next to nothing", dependency=400),
        case("it costs nothing", hidden(), none=0, without="*"),
        case("one bucket", data_parallel(4000, 3700), "AccumulateGrad", issued_late=800, without="*"),
        case("reduced during the backward pass", data_parallel(3000, 2600), none=0, without="*"),
        # 2,000 us beside 500 us of the backward pass: 1,600 are exposed, 100 of them for its start.
        case("more communication than computation", too_much(), bandwidth=1500, issued_late=100),
        case("behind a reduction that it does not need", behind_a_reduction(), queue_order=500),
        case("as the program orders", behind_a_reduction(COMPUTE), dependency=500, without="queue_order"),
        case("until gradients are reduced", host_waits_for_gradients(), "cudaDeviceSynchronize", host_sync=800),
        case("a gather that the host launches late", sharded(1000, 990), issued_late=600),
        case("three calls show no order", sharded(1000, -800, copied=True), without="queue_order"),
        case(
            "behind other streams", many_calls(sharded(1000, -800, copied=True)), queue_order=600, without="issued_late"
        ),
        case("a gather that starts at once", sharded(30, -800, copied=True), without="issued_late"),
        case("a gather after a wait", gather_after_a_wait(), "all_gather", host_sync=600, without="issued_late"),
        case("a kernel leaves no room", gather_without_room(), queue_order=500, without="issued_late"),
        case("the device runs dry", host_waits(), ITEM, host_sync=200, without="host_bound"),
        case("launches take longer than kernels", slow_launches(), host_bound=49 * 15, none=0),
        case("GEMMs next to communication", slowed_gemms(), "30% longer", "2,550 us", "1,950 us", contention=600),
        case("a CUDA graph of both passes", cuda_graph(), "all_reduce", dependency=500, without="*"),
        case(
            "what is not recorded", stalled(), GEMM, "launched 3,300 us before", unexplained=2000, none=0, without="*"
        ),
        case("a function of the host", stalled(function=True), "cudaLaunchHostFunc", unexplained=2000),
        case("idle until a launch", stalled(2500), host_bound=1500, unexplained=500),
        case("copies explain a pause", stalled_by_a_copy(), without="unexplained"),
    ],
)
def test_what_is_lost_to_which_cause(
    tmp_path: Path, made: Timeline, words: tuple[str, ...], absent: set[str], lost_us: dict[str, float]
) -> None:
    found = findings(tmp_path, made)
    assert {cause: found[cause].lost_us for cause in lost_us} == pytest.approx(lost_us, abs=1)
    assert not absent & set(found)
    for word in words:
        one = found[next(iter(lost_us))]
        assert word in f"{one.evidence} {one.try_} {one.where} {one.collective}"


def loading(until: float) -> Timeline:
    """A kernel of 100 us, while the host waits for the next batch, and one that it launches at 442."""
    made = one_step(-1000, 2000)
    made.kernel(0, 100)
    made.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, until)
    made.kernel(450, 650, launch=442)
    return made


@pytest.mark.parametrize(("until", "share", "is_most"), [(400, "43%", True), (200, "14%", False), (105, "", False)])
def test_the_host_waits_for_the_next_batch(tmp_path: Path, until: float, share: str, is_most: bool) -> None:
    made = loading(until)
    made.kernel(1000, 1200, launch=992)
    found = findings(tmp_path, made)["host_bound"]
    assert (f"In {share} of that time the host waits for a DataLoader's next batch" in found.evidence) == bool(share)
    assert (f"for {until - 100} us per step" in found.evidence) == bool(share)
    assert ("num_workers" in found.try_) == is_most


def test_another_thread_that_loads_and_what_is_copied_meanwhile_do_not_count(tmp_path: Path) -> None:
    made = loading(400)
    assert "for 300 us per step" in findings(tmp_path, made)["host_bound"].evidence
    made.copy(200, 350)
    assert "for 150 us per step" in findings(tmp_path, made)["host_bound"].evidence
    next(event for event in made.events if event["name"].startswith("enumerate"))["tid"] = AUTOGRAD
    assert "DataLoader" not in findings(tmp_path, made)["host_bound"].evidence


@pytest.mark.parametrize("more", ["computation", "a pause of the host", "data"])
def test_the_other_rank_is_late(tmp_path: Path, more: str) -> None:
    ranks = [Timeline(rank) for rank in range(2)]
    for rank, made in enumerate(ranks):
        for step in range(3):
            start = 10_000 * step
            made.step(step, start - 900, start + 5900)
            made.kernel(start, start + 1000)
            late = 2000 * rank
            if rank and more == "computation":
                made.kernel(start + 1000, start + 3000, "relu_kernel")
            if more == "data":
                # Also the rank that waits loads, but not for long.
                made.annotation("enumerate(DataLoader)#Iter.__next__", start + 900, start + 950 + late)
            pause = 990 + late if more != "computation" else None
            made.collective("all_reduce", start + 1000 + late, start + 3400, launch=pause and start + pause)
            made.kernel(start + 3400, start + 6000)
    found = findings(tmp_path, *ranks)
    assert found["straggler"].lost_us == 2000
    assert found["straggler"].rank == 1
    assert found["dependency"].lost_us == 400
    said = "it computes 2,000 us more" if more == "computation" else "it is idle for 2,000 us more"
    assert said in found["straggler"].evidence
    waits = "its host waits 1,950 us longer for a DataLoader's next batch"
    assert (waits in found["straggler"].evidence) == (more == "data")
    assert ("num_workers" in found["straggler"].try_) == (more == "data")


def test_one_ranks_trace_alone(tmp_path: Path) -> None:
    made = Timeline(0)
    for step in range(4):
        start, waits = 10_000 * step, 3000 * (step > 0)
        made.step(step, start - 900, start + 5900)
        made.kernel(start, start + 1000)
        made.collective("all_reduce", start + 1000, start + 1400 + waits)
        made.kernel(start + 1400 + waits, start + 6000)
    diagnosis = diagnosed(tmp_path, made)
    found = {finding.cause: finding for finding in diagnosis.findings}
    assert found["straggler"].rank is None
    assert found["straggler"].lost_us == 3000
    assert "unknown without the others' traces" in found["straggler"].evidence
    assert any("rank 0 of 2" in note for note in diagnosis.notes)


def test_two_groups_are_told_apart(tmp_path: Path) -> None:
    made = tensor_parallel()
    made.backward(-200, 1400, ACCUMULATES)
    made.kernel(2400, 3400, launch=0, thread=AUTOGRAD)
    made.collective("all_reduce", 3400, 4000, launch=100, thread=AUTOGRAD, group="2")
    made.optimizer(1410, 1490)
    made.kernel(4000, 4100, "multi_tensor_apply_kernel", launch=1420)
    found = diagnosed(tmp_path, made).findings
    assert [(one.cause, one.process_group, one.lost_us) for one in found] == [
        ("issued_late", "2", 600),
        ("dependency", "1", 400),
    ]


def test_reductions_that_a_straggler_delays(tmp_path: Path) -> None:
    # Rank 1 computes 2,000 us more in its forward pass. Rank 0 waits for it next to its own computation, and then at
    # the end, where both reductions are late.
    ranks = [Timeline(rank) for rank in range(2)]
    for rank, made in enumerate(ranks):
        late = 2000 * rank
        made.step(0, -3000, 6000)
        made.kernel(0, 1000 + late)
        made.backward(-1000, 4900, ACCUMULATES)
        made.kernel(1000 + late, 2000 + late, launch=-800, thread=AUTOGRAD)
        made.collective("all_reduce", 2000 + late, 4400, launch=-700, thread=AUTOGRAD)
        made.kernel(2000 + late, 3000 + late, launch=-600, thread=AUTOGRAD)
        made.collective("all_reduce", max(4402, 3000 + late), 5400, launch=-500, thread=AUTOGRAD)
        made.optimizer(4950, 5050)
        made.kernel(5410, 5600, "multi_tensor_apply_kernel", launch=5000)
    found = findings(tmp_path, *ranks)
    assert next(iter(found)) == "straggler"
    assert found["straggler"].rank == 1
    # From 3,000 to 5,000 us: only 400 us would have been exposed without it.
    assert found["straggler"].lost_us == pytest.approx(2000, abs=10)


def test_rccl(tmp_path: Path) -> None:
    made = tensor_parallel()
    names = {
        "cudaLaunchKernel": "hipLaunchKernel",
        "ncclDevKernel_all_reduce": "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
        "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_TNT": "Cijk_Ailk_Bjlk_BBS_BH_MT128x128x32_SN",
    }
    for event in made.events:
        event["name"] = names.get(event["name"], event["name"])
    facts = made.facts(tmp_path)
    [finding] = diagnosis_of("made", [facts]).findings
    assert (finding.cause, finding.lost_us, finding.collective) == ("dependency", 400, "all_reduce")
    [row] = group_rows([facts], arrivals([facts]))
    assert (row.backend, row.group, row.bytes) == ("rccl", "1", 2 << 20)


def test_a_launch_in_which_the_host_is_held_up(tmp_path: Path) -> None:
    made = stalled()
    next(event for event in made.events if event["ts"] == -300)["dur"] = 3295
    found = findings(tmp_path, made)["host_bound"]
    # All but what the launch itself takes.
    assert (found.where, found.lost_us) == ("inside cudaLaunchKernel", 1995)
