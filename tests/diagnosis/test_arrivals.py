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
    return [facts_of(read_trace(path)) for path in paths]


def matched(facts: list[RankFacts]) -> set[tuple[tuple[int, int], ...]]:
    return set(arrivals(facts).matches)


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


def test_one_rank() -> None:
    found = arrivals([rank_facts(0, [call(0, 9)])])
    assert found.last_ns[0].tolist() == [NEVER]
    assert found.last_rank[0].tolist() == [UNKNOWN_RANK]
    assert arrivals([]).offsets_ns == []


def in_group(number: int, name: str, ranks: tuple[int, ...], size: int = 2, **given: Any) -> RankFacts:
    return rank_facts(number, [call(0, 9, group=name)], [Group(name, "", ranks, size)], **given)


def in_groups(number: int, *groups: tuple[str, str]) -> RankFacts:
    """Returns a rank of two that calls once in each of these groups, of which it has the name and what they are for."""
    calls = [call(i, i + 9, group=name) for i, (name, _) in enumerate(groups)]
    return rank_facts(number, calls, [Group(name, about, (0, 1), 2) for name, about in groups])


def at_once(number: int, *kinds: str) -> RankFacts:
    """Returns calls in one long moment, so that only the sequences decide."""
    return rank_facts(number, [call(i, 99, kind) for i, kind in enumerate(kinds)])


def exchanging(number: int, *sizes: int) -> RankFacts:
    return rank_facts(number, [call(i, 99, "all_to_all", sent=size, received=size) for i, size in enumerate(sizes)])


def kernels(number: int, *lanes: int) -> RankFacts:
    own = [call(10 * i, 10 * i + 5, "userbuffers", "", lane=lane) for i, lane in enumerate(lanes)]
    return rank_facts(number, own)


PAIRS = [("1", (0, 1)), ("2", (0, 1)), ("1", (2, 3)), ("1", (3, 2))]
EARLY, LATE = call(0, 9, launch_ns=1), call(0, 9, "all_gather", launch_ns=2)
SENDS = [call(0, 5, "send"), call(10, 15, "send"), call(20, 25, "recv")]
RECEIVES = [call(0, 15, "recv"), call(2, 30, "send"), call(10, 35, "recv")]
OF_THREE = [Group("0", "", (0, 1, 2), 3)]
AR, AG, B = "all_reduce", "all_gather", "barrier"
# By what it shows, the ranks, and the matched calls of the first two, or of all.
MATCHED: dict[str, tuple[list[RankFacts], set[tuple[int, ...]]]] = {
    "exchanges of two ranks": (recorded("send_recv"), {(0, 0), (1, 1)}),
    "groups of one name": ([in_groups(n, ("1", ""), ("2", "")) for n in (0, 1)], {(0, 0), (1, 1)}),
    "groups for one thing": (
        [in_groups(0, ("1", "dp"), ("2", "cp")), in_groups(1, ("7", "dp"), ("8", "cp"))],
        {(0, 0), (1, 1)},
    ),
    "groups of no common name": ([in_groups(0, ("1", ""), ("2", "")), in_groups(1, ("7", ""), ("8", ""))], set()),
    "a name of more ranks than members says nothing": ([in_group(n, "tp", ()) for n in range(3)], set()),
    "a name": ([in_group(n, "tp", ()) for n in range(2)], {(0, 0)}),
    "order is that of launches": ([rank_facts(0, [EARLY, LATE]), rank_facts(1, [LATE, EARLY])], {(0, 1), (1, 0)}),
    "a trace ends within the step": ([at_once(0, AR, AG, B), at_once(1, AR, AG)], {(0, 0), (1, 1)}),
    "a trace begins within the step": ([at_once(0, B, AR, AG), at_once(1, AR, AG)], {(1, 0), (2, 1)}),
    "other calls in the middle": ([at_once(0, AR, B, AG), at_once(1, AR, "all_to_all", AG)], {(0, 0), (2, 2)}),
    "either end would do": ([at_once(0, AR, AR, AR), at_once(1, AR, AR)], set()),
    "other sizes": ([rank_facts(0, [call(0, 9)]), rank_facts(1, [call(0, 9, sent=8)])], set()),
    "a send and its receipt": ([rank_facts(0, SENDS), rank_facts(1, RECEIVES)], {(0, 0), (1, 2), (2, 1)}),
    "sends in larger groups": ([rank_facts(0, SENDS, OF_THREE), rank_facts(1, RECEIVES, OF_THREE)], set()),
    "kernels of the same streams": ([kernels(0, 1, 2, 1), kernels(1, 8, 9, 8)], {(0, 0), (1, 1), (2, 2)}),
    "kernels of fewer streams": ([kernels(0, 1, 2, 1), kernels(1, 8, 8, 8)], set()),
    "more kernels": ([kernels(0, 1, 2), kernels(1, 8, 8, 9)], set()),
    "exchanges that one trace begins within": (
        [exchanging(0, 1, 2, 3, 1), exchanging(1, 2, 3, 1)],
        {(1, 0), (2, 1), (3, 2)},
    ),
    "experts are sent different amounts": ([exchanging(0, 1, 2, 3), exchanging(1, 4, 5, 6)], {(0, 0), (1, 1), (2, 2)}),
    "different amounts, and how often": ([exchanging(0, 1, 2, 3), exchanging(1, 5, 6)], set()),
    "the same amounts in another order are other exchanges": ([exchanging(0, 1, 2), exchanging(1, 2, 1)], set()),
    "pairs whose groups are unknown, at different times": (
        [
            rank_facts(n, [call(at, at + 50, group="", group_size=None) for at in times], [], on_device=False)
            for n, times in enumerate([(0, 1000), (0, 1000), (5000, 6000), (5000, 6000)])
        ],
        set(),
    ),
}


@pytest.mark.parametrize(("facts", "expected"), MATCHED.values(), ids=list(MATCHED))
def test_matches(facts: list[RankFacts], expected: set[tuple[int, ...]]) -> None:
    assert matched(facts) == {tuple(enumerate(calls)) for calls in expected}


def test_groups_are_their_ranks() -> None:
    # Two pairs of ranks: they call their group differently, or different groups the same.
    facts = [in_group(number, name, ranks, world_size=4) for number, (name, ranks) in enumerate(PAIRS)]
    assert matched(facts) == {((0, 0), (1, 0)), ((2, 0), (3, 0))}


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


def repeatedly(start_us: float, end_us: float, every_us: int = 10_000) -> list[Call]:
    return [call(every_us * i + start_us, every_us * i + end_us) for i in range(6)]


def exchanges(at_us: float) -> list[Call]:
    return [nameless(1000 * i + at_us, 1000 * i + 10 + at_us, "all_to_all", 7) for i in range(9)]


SHORT = [repeatedly(70_000 + at_us, 70_010 + at_us, 100) for at_us in (0, 100)]


@pytest.mark.parametrize(
    ("first", "second", "offset_ns"),
    [
        # Who waited sees a long collective end later; without a short one, a late rank looks like a clock ahead.
        (repeatedly(0, 2040), repeatedly(1500, 2000), 0),
        (repeatedly(0, 2000) + SHORT[0], repeatedly(1600, 2100) + SHORT[1], -100_000),
        (exchanges(0), exchanges(70), -70_000),
    ],
)
def test_short_collectives_tell_the_clock(first: list[Call], second: list[Call], offset_ns: int) -> None:
    assert arrivals([rank_facts(0, first), rank_facts(1, second)]).offsets_ns == [0, offset_ns]


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
