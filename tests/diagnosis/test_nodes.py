"""Communication within nodes and between them, and what each costs. Its advice: test_advice.py, and
made/two_nodes among the golden files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.diagnosis.arrivals import arrivals
from overlap_sweep.diagnosis.collectives import Group
from overlap_sweep.diagnosis.facts import RankFacts, place_of
from overlap_sweep.diagnosis.groups import NodeTimes, group_rows, node_times_of
from overlap_sweep.diagnosis.runs import read_runs
from overlap_sweep.report.diagnosis import NODE_TIMES
from tests.diagnosis.made_facts import call, rank_facts, work
from tests.made_nodes import RANKS, training_trace
from tests.timeline import Timeline

WORLD, NODE, ACROSS = Group("0", "", (0, 1, 2, 3), 4), Group("1", "", (0, 1), 2), Group("2", "", (0, 2), 2)
UNLISTED, OF_TWO = Group("3", "", (), 64), Group("4", "", (), 2)
GROUPS = (WORLD, NODE, ACROSS, UNLISTED, OF_TWO)


def place(collective: str = "all_gather", group: str = "", *, rank: int | None = 0, **given: Any) -> str:
    """Returns the place of a call of a rank among four, by default on two nodes."""
    run = {"ranks_per_node": 2, "world_size": 4, **{n: given.pop(n) for n in tuple(given) if n in _RUN}}
    one = call(0, 10, collective, group, **{"group_size": None, "sent": None, "received": None, **given})
    return place_of(rank_facts(rank, [one], GROUPS, **run), one)


_RUN = ("ranks_per_node", "world_size", "known_groups")


ALONE = Group("5", "", (0,), 1)
PLACES: list[tuple[str, dict[str, Any], str]] = [
    # A collective goes to all ranks of its group; one whose ranks are cut is between if it is larger than a node.
    *(("all_gather", {"group": n}, where) for n, where in {"0": "between", "1": "within", "2": "between"}.items()),
    ("all_gather", {"group": "4"}, ""),
    ("all_gather", {"group": "3", "world_size": 128}, "between"),
    ("all_gather", {"group": "3", "world_size": 128, "ranks_per_node": 64}, ""),
    ("all_gather", {"group": "3", "world_size": 64, "ranks_per_node": 32}, "between"),
    # Nothing is known without the ranks of a node, and all of a single one.
    ("all_gather", {"group": "0", "ranks_per_node": None}, ""),
    ("all_gather", {"ranks_per_node": 4}, "within"),
    ("all_gather", {"group": "0", "ranks_per_node": 8, "world_size": None}, "within"),
    # A message goes to its peer, which a group of two or of a node need not name.
    *((one, {"group": "0", "peer": 1}, "within") for one in ("send", "recv")),
    *((one, {"group": "0", "peer": 2}, "between") for one in ("send", "recv")),
    *((one, {"group": "0", "peer": None}, "") for one in ("send", "recv")),
    ("send", {"group": "2"}, "between"),
    ("send_recv", {"group": "1"}, "within"),
    ("send_recv", {"group": "0"}, ""),
    ("send_recv", {"group": "0", "ranks_per_node": 1}, "between"),
    # Without a group, as in traces of gloo, all that the rank is in must agree.
    ("all_gather", {"known_groups": [WORLD, ALONE]}, "between"),
    ("all_gather", {"known_groups": [WORLD, NODE]}, ""),
    ("all_gather", {"known_groups": [WORLD, NODE], "group_size": 2}, "within"),
    ("all_gather", {"known_groups": [WORLD, NODE], "sent": 8, "received": 32}, "between"),
    ("all_gather", {"known_groups": [Group("1", "", (2, 3), 2), WORLD]}, "between"),
    ("all_gather", {"known_groups": []}, ""),
    ("all_gather", {"group_size": 3}, "between"),
    ("all_gather", {"ranks_per_node": 1}, "between"),
    # One rank alone, and the memory of other GPUs, are within a node.
    ("all_gather", {"group_size": 1, "ranks_per_node": 1}, "within"),
    ("userbuffers", {"library": "userbuffers", "known_groups": [WORLD]}, "within"),
    ("nccl", {"library": "nccl", "known_groups": [WORLD]}, "between"),
]


@pytest.mark.parametrize(("collective", "given", "expected"), PLACES)
def test_where_a_call_communicates(collective: str, given: dict[str, Any], expected: str) -> None:
    assert place(collective, **given) == expected


def times(*facts: RankFacts) -> NodeTimes:
    found = node_times_of(facts, group_rows(facts, arrivals(facts)))
    assert found
    return found


def test_times_are_those_of_the_rank_that_communicates_most_between_nodes() -> None:
    """1000 us within a node, of which half is at the same time as 1500 us between nodes, which computation hides but
    for 500 us."""
    given: dict[str, Any] = {"ranks_per_node": 2, "world_size": 4, "work": work((1500, 2500))}
    inside = call(0, 1000, "all_gather", "1", group_size=2, sent=10**6, received=2 * 10**6)
    across = call(500, 2000, "all_reduce", "2", group_size=2, sent=10**6, received=10**6)
    busy = rank_facts(0, [inside, across], GROUPS, **given)
    idle = rank_facts(1, [replace(inside)], GROUPS, **given)
    found = times(busy, idle)
    assert (found.comm_us, found.within_us, found.between_us, found.unknown_us) == (2000.0, 1000.0, 1500.0, 0.0)
    assert found.exposed_between_us == 1000.0
    # Of 4-byte elements: half of 8 MB in 1 ms, and all of 4 MB in 1.5 ms.
    assert found.within_gb_s == pytest.approx(4.0)
    assert found.between_gb_s == pytest.approx(4 / 1.5)
    assert found.at_least


def test_without_sizes_there_is_no_bandwidth_and_on_one_node_nothing_to_say() -> None:
    unsized = call(0, 1000, "all_gather", "0", group_size=None, sent=None, received=None)
    found = times(rank_facts(0, [unsized], GROUPS, ranks_per_node=2, world_size=4))
    assert (found.between_us, found.between_gb_s, found.within_gb_s) == (1000.0, None, None)
    for per_node in (None, 4, 8):
        assert node_times_of([rank_facts(0, [unsized], GROUPS, ranks_per_node=per_node, world_size=4)], []) is None


def test_columns_are_empty_if_some_process_groups_are_unknown() -> None:
    calls = [call(0, 1000, "all_gather", "0", group_size=4), call(2000, 2500, "all_gather", "4", group_size=2)]
    known, some = (times(rank_facts(0, calls[:n], GROUPS, ranks_per_node=2, world_size=4)) for n in (1, 2))
    assert (known.unknown_us, some.unknown_us, some.between_us) == (0.0, 500.0, 1000.0)
    whole, partial = NODE_TIMES.records([known, some])
    assert whole["between_nodes_us"] == 1000.0
    assert set(partial.values()) == {None}


def test_the_nodes_of_a_run_decide_the_advice_and_are_part_of_what_is_kept(tmp_path: Path) -> None:
    paths = [training_trace(rank, hybrid=False).write(tmp_path / f"t_rank{rank}.json") for rank in range(RANKS)]
    tries = {}
    for per_node in (None, 2, 4, 1):
        (run,) = read_runs(paths, dict.fromkeys(paths, per_node) if per_node else None)
        assert run.found
        (gather,) = (one for one in run.found.diagnosis.findings if one.collective == "all_gather")
        tries[per_node] = gather.try_
        assert ("between nodes" in gather.evidence) == (per_node in (1, 2))
        assert bool(run.found.node_times) == (per_node in (1, 2))
        assert {row.place for row in run.found.groups} == {"within" if per_node == 4 else "between" if per_node else ""}
    assert "fsdp.replicas=nodes" in tries[2] == tries[1]
    assert tries[None] == tries[4] != tries[2]


def test_the_peer_of_a_message_is_read(tmp_path: Path) -> None:
    made = Timeline(1, 4)
    made.step(0, 0, 3000)
    for peer, start in ((0, 1000), (3, 2000)):
        made.kernel(
            start,
            start + 500,
            "ncclDevKernel_SendRecv",
            **{"Collective name": "send", "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2, 3]"},
            **{"Group size": 4, "Dst Rank": peer, "In msg nelems": 8, "Out msg nelems": 8, "dtype": "Float"},
        )
    facts = replace(made.facts(tmp_path), ranks_per_node=2)
    assert [(one.peer, place_of(facts, one)) for one in facts.calls] == [(0, "within"), (3, "between")]
