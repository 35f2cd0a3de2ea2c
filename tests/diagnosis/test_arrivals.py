from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.diagnosis import NEVER, UNKNOWN_RANK
from overlap_sweep.diagnosis.arrivals import arrivals
from overlap_sweep.diagnosis.calls import Call
from overlap_sweep.diagnosis.collectives import Group
from overlap_sweep.diagnosis.facts import RankFacts, facts_of
from overlap_sweep.trace.kineto import read_trace
from tests.diagnosis.made_facts import call, rank_facts

TRACES = Path(__file__).parents[1] / "data" / "traces"


def recorded(name: str) -> list[RankFacts]:
    paths = [TRACES / f"h200x2_{name}_rank{rank}.json.gz" for rank in range(2)]
    return [facts_of(read_trace(path), path, []) for path in paths]


def matched(facts: list[RankFacts]) -> set[tuple[tuple[int, int], ...]]:
    return set(arrivals(facts).matches)


def in_turn(*kinds: str, late_us: float = 0) -> list[Call]:
    """Returns calls of these collectives, one each 100 us."""
    return [call(100 * i + late_us, 100 * i + 50, kind) for i, kind in enumerate(kinds)]


def pairs(*indices: int) -> set[tuple[tuple[int, int], ...]]:
    return {((0, i), (1, i)) for i in indices}


@pytest.mark.parametrize("name", ["cuda_graph", "fsdp2_checkpoint", "symm_mem"])
def test_every_call_of_a_recording_is_matched_and_ends_with_the_other(name: str) -> None:
    facts = recorded(name)
    found = arrivals(facts)
    assert found.offsets_ns == [0, 0]
    assert len(found.matches) == len(facts[0].calls) == len(facts[1].calls)
    for (first, i), (second, j) in found.matches:
        one, other = facts[first].calls[i], facts[second].calls[j]
        assert one.collective == other.collective
        assert found.last_ns[0][i] == found.last_ns[1][j] == max(one.start_ns, other.start_ns)
        if one.collective != "peer_copy":
            assert abs(one.end_ns - other.end_ns) < 5_000


def test_a_rank_that_a_recording_shows_late_comes_last() -> None:
    # Rank 1 starts its first collective 0.9 ms before rank 0.
    found = arrivals(recorded("fsdp2_checkpoint"))
    assert [last.tolist() for last in found.last_rank] == [[0] * 12, [0] * 12]


def test_exchanges_of_two_ranks() -> None:
    assert matched(recorded("send_recv")) == pairs(0, 1)


def test_one_rank() -> None:
    found = arrivals([rank_facts(0, in_turn("all_reduce"))])
    assert found.last_ns[0].tolist() == [NEVER]
    assert found.last_rank[0].tolist() == [UNKNOWN_RANK]
    assert arrivals([]).offsets_ns == []


def test_groups_are_their_ranks() -> None:
    # Two pairs of ranks: they call their group differently, or different groups the same.
    def rank(number: int, name: str, ranks: tuple[int, int]) -> RankFacts:
        return rank_facts(number, [call(0, 9, group=name)], [Group(name, "", ranks, 2)], world_size=4)

    facts = [rank(0, "1", (0, 1)), rank(1, "2", (0, 1)), rank(2, "1", (2, 3)), rank(3, "1", (3, 2))]
    assert matched(facts) == {((0, 0), (1, 0)), ((2, 0), (3, 0))}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([("1", ""), ("2", "")], [("1", ""), ("2", "")], pairs(0, 1)),
        ([("1", "dp"), ("2", "cp")], [("7", "dp"), ("8", "cp")], pairs(0, 1)),
        ([("1", ""), ("2", "")], [("7", ""), ("8", "")], set()),
    ],
)
def test_several_groups_of_the_same_ranks(
    first: list[tuple[str, str]], second: list[tuple[str, str]], expected: set[tuple[tuple[int, int], ...]]
) -> None:
    facts = [
        rank_facts(
            number,
            [call(i, i + 9, group=name) for i, (name, _) in enumerate(groups)],
            [Group(name, about, (0, 1), 2) for name, about in groups],
        )
        for number, groups in enumerate([first, second])
    ]
    assert matched(facts) == expected


def test_a_name_of_more_ranks_than_members_says_nothing() -> None:
    groups = [Group("tp", "", (), 2)]
    facts = [rank_facts(number, [call(0, 9, group="tp")], groups) for number in range(3)]
    assert matched(facts) == set()
    assert matched(facts[:2]) == pairs(0)


def test_order_is_that_of_launches() -> None:
    early, late = call(0, 9, launch_ns=1), call(0, 9, "all_gather", launch_ns=2)
    facts = [rank_facts(0, [early, late]), rank_facts(1, [late, early])]
    assert matched(facts) == {((0, 0), (1, 1)), ((0, 1), (1, 0))}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        # The second trace ends, or begins, within the step.
        (("all_reduce", "all_gather", "barrier"), ("all_reduce", "all_gather"), {(0, 0), (1, 1)}),
        (("barrier", "all_reduce", "all_gather"), ("all_reduce", "all_gather"), {(1, 0), (2, 1)}),
        # They differ in the middle.
        (("all_reduce", "barrier", "all_gather"), ("all_reduce", "all_to_all", "all_gather"), {(0, 0), (2, 2)}),
        # Either end would do.
        (("all_reduce",) * 3, ("all_reduce",) * 2, set()),
    ],
)
def test_calls_that_differ(first: tuple[str, ...], second: tuple[str, ...], expected: set[tuple[int, int]]) -> None:
    # One long moment, so that only the sequences decide.
    facts = [
        rank_facts(number, [call(i, 99, kind) for i, kind in enumerate(kinds)])
        for number, kinds in enumerate([first, second])
    ]
    assert {(i, j) for (_, i), (_, j) in matched(facts)} == expected


def test_sizes_differ() -> None:
    facts = [rank_facts(0, [call(0, 9)]), rank_facts(1, [call(0, 9, sent=8)])]
    assert matched(facts) == set()
    exchanged = [rank_facts(number, [call(0, 9, "all_to_all", sent=number)]) for number in range(2)]
    assert matched(exchanged) == pairs(0)


def test_a_send_and_its_receipt() -> None:
    facts = [
        rank_facts(0, [call(0, 5, "send"), call(10, 15, "send"), call(20, 25, "recv")]),
        rank_facts(1, [call(0, 15, "recv"), call(2, 30, "send"), call(10, 35, "recv")]),
    ]
    assert matched(facts) == {((0, 0), (1, 0)), ((0, 1), (1, 2)), ((0, 2), (1, 1))}


def test_sends_in_larger_groups_stay_alone() -> None:
    groups = [Group("0", "", (0, 1, 2), 3)]
    facts = [rank_facts(0, [call(0, 5, "send")], groups), rank_facts(1, [call(0, 5, "recv")], groups)]
    assert matched(facts) == set()


def test_kernels_without_a_group_need_the_same_streams() -> None:
    def kernels(*lanes: int) -> list[Call]:
        return [call(10 * i, 10 * i + 5, "userbuffers", "", lane=lane) for i, lane in enumerate(lanes)]

    assert matched([rank_facts(0, kernels(1, 2, 1)), rank_facts(1, kernels(8, 9, 8))]) == pairs(0, 1, 2)
    assert matched([rank_facts(0, kernels(1, 2, 1)), rank_facts(1, kernels(8, 8, 8))]) == set()
    assert matched([rank_facts(0, kernels(1, 2)), rank_facts(1, kernels(8, 8, 9))]) == set()


def nameless(at_us: float, end_us: float, kind: str, stream: int, **others: Any) -> Call:
    return call(at_us, end_us, kind, "", lane=stream, group_size=None, **others)


def test_without_names_each_stream_is_a_process_group() -> None:
    # Numbers of streams differ between ranks; what the first one launches first the second one launches last.
    first = [nameless(0, 50, "all_reduce", 7), nameless(0, 90, "all_reduce", 20), nameless(60, 90, "all_gather", 7)]
    second = [nameless(0, 90, "all_reduce", 24, launch_ns=9), nameless(0, 50, "all_reduce", 3, launch_ns=10)]
    second.append(nameless(80, 90, "all_gather", 3))
    facts = [rank_facts(0, first), rank_facts(1, second)]
    assert {tuple(facts[rank].calls[i].end_ns for rank, i in match) for match in matched(facts)} == {
        (50_000, 50_000),
        (90_000, 90_000),
    }
    assert len(matched(facts)) == 3


def test_streams_that_do_the_same_are_one_group_whatever_their_numbers() -> None:
    first = [nameless(0, 50, "all_reduce", 7), nameless(0, 90, "all_gather", 20)]
    second = [nameless(0, 50, "all_reduce", 20), nameless(0, 90, "all_gather", 7)]
    assert matched([rank_facts(0, first), rank_facts(1, second)]) == pairs(0, 1)


def test_of_several_groups_without_names_those_that_end_together_are_one() -> None:
    # Ranks 0 and 1, and 2 and 3, reduce on one stream, and exchange on another; all reduce on the third.
    def rank(number: int) -> RankFacts:
        late_us = 300 * (number // 2)
        own = [nameless(1000 * i + late_us, 1000 * i + 500 + late_us, "all_reduce", 7) for i in range(5)]
        own += [nameless(1000 * i + 600, 1000 * i + 900, "all_to_all", 13) for i in range(5)]
        own += [nameless(1000 * i + 950 + number, 1000 * i + 990, "all_reduce", 20) for i in range(5)]
        return rank_facts(number, own, [], world_size=4)

    facts = [rank(number) for number in range(4)]
    found = [{facts[rank].calls[i].lane for rank, i in match} for match in matched(facts)]
    assert found == [{20}] * 5
    # Of two ranks in all each group is both.
    assert len(matched([rank_facts(number, facts[number].calls, []) for number in range(2)])) == 15


def test_a_single_stream_without_names_is_one_group_if_its_reductions_end_together() -> None:
    def rank(number: int, apart_us: float) -> RankFacts:
        own = [nameless(100 * i, 100 * i + 50, "all_to_all", 7) for i in range(5)]
        own += [nameless(600 + number * apart_us, 900 + number * apart_us, "all_reduce", 7)]
        return rank_facts(number, own, [], world_size=3)

    assert len(matched([rank(number, 10) for number in range(3)])) == 6
    assert matched([rank(number, 200) for number in range(3)]) == set()


def test_short_all_to_alls_tell_the_clocks_of_one_host() -> None:
    def rank(number: int) -> RankFacts:
        at_us = 70.0 * number
        return rank_facts(
            number, [nameless(1000 * i + at_us, 1000 * i + 10 + at_us, "all_to_all", 7) for i in range(9)]
        )

    assert arrivals([rank(0), rank(1)]).offsets_ns == [0, -70_000]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        # The second trace begins within the step.
        ((1, 2, 3, 1), (2, 3, 1), {(1, 0), (2, 1), (3, 2)}),
        # Experts are sent different amounts, so that sizes don't tell.
        ((1, 2, 3), (4, 5, 6), {(0, 0), (1, 1), (2, 2)}),
        ((1, 2, 3), (5, 6), set()),
        # The same sizes in another order are other exchanges.
        ((1, 2), (2, 1), set()),
    ],
)
def test_sizes_that_all_ranks_exchange(
    first: tuple[int, ...], second: tuple[int, ...], expected: set[tuple[int, int]]
) -> None:
    facts = [
        rank_facts(number, [call(i, 99, "all_to_all", sent=size, received=size) for i, size in enumerate(sizes)])
        for number, sizes in enumerate([first, second])
    ]
    assert {(i, j) for (_, i), (_, j) in matched(facts)} == expected


def test_collectives_that_did_not_meet_are_not_one() -> None:
    # Two pairs of ranks, whose groups the traces do not know, communicate at different times.
    facts = [
        rank_facts(number, [call(at, at + 50, group="", group_size=None) for at in times], [], on_device=False)
        for number, times in enumerate([(0, 1000), (0, 1000), (5000, 6000), (5000, 6000)])
    ]
    assert matched(facts) == set()


@pytest.mark.parametrize(
    ("ahead_us", "noise_us", "expected_us"),
    [(5000, 3, 5000), (12, 3, 0), (-7000, 100, -7000), (0, 900, 0), (300, 900, 0)],
)
def test_clocks(ahead_us: float, noise_us: float, expected_us: float) -> None:
    """The second rank's clock is ahead; ends differ by up to the noise."""
    noise = [noise_us * (i - 5) / 5 for i in range(11)]
    first = [call(10_000 * i, 10_000 * i + 1000) for i in range(11)]
    second = [call(10_000 * i + 900 + ahead_us, 10_000 * i + 1000 + ahead_us + noise[i]) for i in range(11)]
    facts = [rank_facts(0, first), rank_facts(1, second)]
    (zero, offset_ns) = arrivals(facts).offsets_ns
    assert (zero, offset_ns) == (0, pytest.approx(-expected_us * 1000, abs=noise_us * 1000))
    assert (offset_ns == 0) == (expected_us == 0)


def test_who_waited_for_a_long_collective_sees_it_end_later() -> None:
    # Without a short one among them, a late rank looks like a clock that is ahead.
    early = [call(10_000 * i, 10_000 * i + 2040) for i in range(6)]
    late = [call(10_000 * i + 1500, 10_000 * i + 2000) for i in range(6)]
    assert arrivals([rank_facts(0, early), rank_facts(1, late)]).offsets_ns == [0, 0]


def test_short_collectives_tell_the_clock() -> None:
    early = [call(10_000 * i, 10_000 * i + 2000) for i in range(6)]
    late = [call(10_000 * i + 1600, 10_000 * i + 2100) for i in range(6)]
    short = [[call(70_000 + 100 * i + at, 70_010 + 100 * i + at) for i in range(6)] for at in (0, 100)]
    facts = [rank_facts(0, early + short[0]), rank_facts(1, late + short[1])]
    assert arrivals(facts).offsets_ns == [0, -100_000]


def test_times_count_from_where_each_trace_says() -> None:
    facts = [
        rank_facts(0, [call(500, 600)], base_time_ns=1_000_000),
        rank_facts(1, [call(1570, 1600)], base_time_ns=0),
    ]
    found = arrivals(facts)
    assert found.offsets_ns == [0, -1_000_000]
    assert [last.tolist() for last in found.last_ns] == [[570_000], [1_570_000]]
    assert [last.tolist() for last in found.last_rank] == [[1], [1]]


def test_clocks_are_compared_through_other_ranks() -> None:
    # 0 and 2 have no group in common; 2 and 3 are on another host.
    names = {"a": (0, 1), "b": (1, 2), "c": (2, 3)}
    ahead_us = {0: 0, 1: 0, 2: 8000, 3: 8000}
    facts = [
        rank_facts(
            rank,
            [call(at + ahead_us[rank], at + 50 + ahead_us[rank], group=name) for name, at in times.items()],
            [Group(name, "", names[name], 2) for name in times],
        )
        for rank, times in enumerate([{"a": 0}, {"a": 0, "b": 100}, {"b": 100, "c": 200}, {"c": 200}])
    ]
    assert arrivals(facts).offsets_ns == [0, 0, -8_000_000, -8_000_000]
