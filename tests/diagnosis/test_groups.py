from collections.abc import Sequence
from pathlib import Path

import pytest

from overlap_sweep.diagnosis.arrivals import arrivals
from overlap_sweep.diagnosis.calls import Call
from overlap_sweep.diagnosis.collectives import Group
from overlap_sweep.diagnosis.facts import RankFacts, facts_of
from overlap_sweep.diagnosis.groups import GroupRow, bus_factor, group_rows, group_totals
from overlap_sweep.trace.iterations import IterationSpan
from overlap_sweep.trace.kineto import read_trace
from tests.diagnosis.made_facts import call, rank_facts, work
from tests.timeline import Timeline

TRACES = Path(__file__).parents[1] / "data" / "traces"


def rows(*facts: RankFacts) -> list[GroupRow]:
    return group_rows(facts, arrivals(facts))


def row(*facts: RankFacts) -> GroupRow:
    (only,) = rows(*facts)
    return only


def recorded(*names: str) -> list[GroupRow]:
    paths = [TRACES / f"{name}.json.gz" for name in names]
    return rows(*(facts_of(read_trace(path)) for path in paths))


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0), (1,)])
def test_bandwidths_of_a_recording_are_those_of_its_links(ranks: Sequence[int]) -> None:
    """Two H200s gather and scatter 100 MB over NVLink; rank 0 comes late, so that only rank 1 waits."""
    found = recorded(*(f"h200x2_fsdp2_checkpoint_rank{rank}" for rank in ranks))
    assert {(one.group, tuple(one.ranks), one.size, one.backend) for one in found} == {("0", (0, 1), 2, "nccl")}
    assert {(one.collective, one.pass_, one.bytes, one.dtype, one.calls) for one in found} == {
        ("reduce_scatter", "bwd", 100667392, "bfloat16", 2),
        ("all_gather", "fwd", 100667392, "bfloat16", 2),
        ("all_gather", "bwd", 100667392, "bfloat16", 2),
    }
    for one in found:
        assert one.transfer_us
        assert one.busbw_gbs
        assert one.algbw_gbs == pytest.approx(2 * one.busbw_gbs)
        if len(ranks) == 2:
            assert one.transfer_is == "measured"
            assert 200 < one.busbw_gbs < 250
            assert one.transfer_us < one.time_us / 2
            assert one.skew_us
            assert one.skew_max_us
            assert one.skew_max_us >= one.skew_us > 600
        else:
            assert one.transfer_is == "at_most"
            assert one.busbw_gbs < 90
            assert one.skew_us is None


def test_totals_of_several_groups_and_steps() -> None:
    steps = [IterationSpan(i, 100_000 * i, 100_000 * (i + 1), startup=i == 0) for i in range(3)]
    groups = [Group("dp", "data", (0, 1), 2), Group("tp", "", (0, 2), 2)]
    calls = [
        call(0, 90, group="dp", step=0),
        call(100, 110, group="dp", step=1),
        call(120, 130, "all_gather", group="dp", step=1),
        call(200, 230, group="dp", step=2),
        call(210, 220, group="tp", step=2),
    ]
    facts = rank_facts(0, calls, groups, work=work((105, 110), (200, 215)), steps=steps)
    found = {
        total.group: (total.about, total.exposed_us, total.hidden_us)
        for total in group_totals([facts], arrivals([facts]))
    }
    assert found == {"dp": ("data", 15.0, 10.0), "tp": ("", 2.5, 2.5)}


def test_graphs_know_neither_group_nor_size() -> None:
    found = recorded("h200x2_cuda_graph_rank0", "h200x2_cuda_graph_rank1")
    assert {(one.group, one.collective, one.bytes, one.algbw_gbs) for one in found} == {
        ("", "all_gather", None, None),
        ("", "reduce_scatter", None, None),
    }
    # All ranks of the run were matched.
    assert {(tuple(one.ranks), one.size, one.transfer_is) for one in found} == {((0, 1), 2, "measured")}


@pytest.mark.parametrize(
    ("collective", "sent", "received", "dtype", "expected"),
    [
        ("all_gather", 10, 40, "Float", 160),
        ("all_gather", 10, None, "Float", 160),
        ("reduce_scatter", 40, 10, "Float", 160),
        ("reduce_scatter", None, 10, "Float", 160),
        ("all_reduce", 10, 10, "Float", 40),
        ("all_to_all", 40, 44, "Float", 160),
        ("broadcast", 10, 10, "Float", 40),
        ("gather", 10, None, "Float", 160),
        ("scatter", None, 10, "Float", 160),
        ("send", 10, None, "Float", 40),
        ("recv", None, 10, "Float", 40),
        ("all_reduce", None, None, "Float", None),
        ("all_reduce", 10, 10, None, None),
    ],
)
def test_bytes_are_those_of_nccl_tests(
    collective: str, sent: int | None, received: int | None, dtype: str | None, expected: int | None
) -> None:
    one = call(0, 10, collective, sent=sent, received=received, dtype=dtype)
    assert row(rank_facts(0, [one], [Group("0", "", (0, 1, 2, 3), 4)])).bytes == expected


@pytest.mark.parametrize(
    ("collective", "size", "expected"),
    [
        ("all_reduce", 8, 1.75),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 2, 0.5),
        ("all_to_all", 4, 0.75),
        ("broadcast", None, 1),
        ("send", 2, 1),
        ("all_reduce", None, None),
        ("barrier", 2, None),
        ("userbuffers", 2, None),
    ],
)
def test_bus_bandwidth(collective: str, size: int | None, expected: float | None) -> None:
    assert bus_factor(collective, size) == expected


def test_without_waiting() -> None:
    # 4096 bytes in 10 us after the second rank has come.
    found = row(rank_facts(0, [call(0, 30)]), rank_facts(1, [call(20, 30)]))
    assert (found.time_us, found.transfer_us, found.transfer_is) == (20, 10, "measured")
    assert (found.skew_us, found.skew_max_us) == (20, 20)
    assert (found.algbw_gbs, found.busbw_gbs) == (pytest.approx(0.4096), pytest.approx(0.4096))


def test_ranks_that_are_missing_may_have_come_later() -> None:
    groups = [Group("0", "", (0, 1, 2), 3)]
    found = row(rank_facts(0, [call(0, 30)], groups), rank_facts(1, [call(20, 30)], groups))
    assert (found.transfer_us, found.transfer_is) == (10, "at_most")


def test_of_one_rank_the_fastest_call_of_the_size() -> None:
    calls = [call(0, 30), call(40, 50, pass_="bwd"), call(60, 61, sent=8, received=8)]
    found = {(one.bytes, one.pass_): (one.transfer_us, one.transfer_is) for one in rows(rank_facts(0, calls))}
    at_most = "at_most"
    assert found == {(4096, "fwd"): (10, at_most), (4096, "bwd"): (10, at_most), (32, "fwd"): (1, at_most)}
    unknown = [call(0, 30, dtype=None), call(40, 50, dtype=None)]
    assert row(rank_facts(0, unknown)).transfer_us is None


def test_a_send_may_end_before_its_receipt_starts() -> None:
    found = rows(rank_facts(0, [call(0, 5, "send")]), rank_facts(1, [call(20, 26, "recv")]))
    assert {(one.collective, one.transfer_us, one.skew_us) for one in found} == {("send", 6, 20), ("recv", 6, 20)}


def test_experts_exchange_different_sizes() -> None:
    calls = [call(20 * i, 20 * i + 10, "all_to_all", sent=100 * i, received=7) for i in (1, 2, 4)]
    assert row(rank_facts(0, calls)).bytes == 800


def step_facts(rank: int, steps: Sequence[Sequence[Call]], *spans_us: tuple[float, float]) -> RankFacts:
    calls = [one for own in steps for one in own]
    numbers = [IterationSpan(number, 0, 1, startup=number == 0) for number in range(len(steps))]
    return rank_facts(rank, calls, work=work(*spans_us), steps=numbers)


def test_exposed_of_the_slowest_rank() -> None:
    """Step 0 is the start-up. Rank 0 hides 4 of 10 and 10 of 10 us, rank 1 nothing of 10 us each."""
    calls = [[call(100 * step, 100 * step + 10, step=step)] for step in range(3)]
    facts = [step_facts(0, calls, (98, 102), (101, 103), (109, 120), (199, 300)), step_facts(1, calls)]
    found = row(*facts)
    assert (found.calls, found.exposed_us, found.hidden) == (1, 10, pytest.approx(14 / 40))
    assert row(facts[0]).exposed_us == 3
    assert rows() == rows(rank_facts(0, [])) == []


def test_calls_at_once_count_once_and_steps_without_any_count() -> None:
    both = [call(0, 10, lane=1, step=1), call(5, 15, lane=2, step=1)]
    found = row(step_facts(0, [[], both, [], []]))
    assert (found.calls, found.exposed_us, found.hidden) == (pytest.approx(2 / 3), 0, 0)
    assert row(step_facts(0, [[], both])).exposed_us == 15


def test_what_was_launched_before_the_trace_began_is_in_no_row(tmp_path: Path) -> None:
    # The device was a step behind the host: two kernels of the step before run first, without a launch.
    made = Timeline()
    made.step(3, 10, 30)
    for start in (20, 35):
        made.add("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", start, start + 10, 0, 17)
    for start in (50, 65):
        made.kernel(start, start + 10, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", launch=15, stream=17)
    facts = made.facts(tmp_path)
    assert [(one.calls, one.backend, one.collective) for one in rows(facts)] == [(2, "nccl", "all_reduce")]
    assert [(step.number, step.start_ns) for step in facts.steps] == [(3, 50_000)]
