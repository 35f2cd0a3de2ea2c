"""Which purposes the process groups of a training serve."""

from collections.abc import Mapping, Sequence

import pytest

from overlap_sweep.diagnosis import Finding
from overlap_sweep.diagnosis.collectives import Group
from overlap_sweep.diagnosis.facts import RankFacts
from overlap_sweep.levers import levers
from overlap_sweep.optimizer.groups import Purpose, purposes_of, values_for
from tests.diagnosis.made_facts import call, rank_facts


def on_ranks(*groups: Mapping[str, tuple[str, Sequence[int]]]) -> list[RankFacts]:
    """Returns ranks, each with one collective of NCCL in each of its process groups: name, description and ranks."""
    found = []
    for rank, own in enumerate(groups):
        calls = [call(0, 10, group=name, library="nccl", blocks=8 * (1 + int(name))) for name in own]
        known = [Group(name, about, tuple(ranks), len(ranks)) for name, (about, ranks) in own.items()]
        found.append(rank_facts(rank, calls, known))
    return found


def finding(cause: str, group: str, share: float) -> Finding:
    return Finding(
        cause=cause,
        lost_us=1.0,
        share=share,
        rank=0,
        process_group=group,
        collective="all_reduce",
        where="",
        evidence="",
    )


def test_dimensions_of_a_mesh_are_purposes_with_their_own_causes() -> None:
    ranks = on_ranks(
        {"1": ("mesh_tp", (0, 1)), "2": ("mesh_dp", (0, 2))},
        {"1": ("mesh_tp", (0, 1)), "3": ("mesh_dp", (1, 3))},
    )
    findings = [
        finding("contention", "2 (mesh_dp)", 0.1),
        finding("contention", "3 (mesh_dp)", 0.05),
        finding("latency", "1 (mesh_tp)", 0.2),
        finding("host_bound", "", 0.3),
    ]

    tp, dp = purposes_of(ranks, findings)

    assert (tp.scopes, tp.shares, tp.blocks) == (["mesh_tp"], {"latency": 0.2}, 16)
    assert (dp.scopes, dp.blocks) == (["mesh_dp"], 32)
    assert dp.shares == {"contention": pytest.approx(0.15)}
    assert dp.value(8) == "mesh_dp:8"


def test_groups_without_description_are_told_by_their_ranks() -> None:
    pairs = ({"1": ("", (0, 1)), "2": ("", (0, 2))}, {"1": ("", (0, 1))}, {"3": ("", (2, 3)), "2": ("", (0, 2))})
    near, far = purposes_of(on_ranks(*pairs), [])
    assert near.value(True) == "0-1:true+2-3:true"
    assert far.value(4) == "0-2/2:4"


def test_the_only_purpose_is_all_groups() -> None:
    (only,) = purposes_of(on_ranks({"0": ("default_pg", (0, 1))}, {"0": ("default_pg", (0, 1))}), [])
    assert only.value(8) == "8"
    assert only.is_meant("8")
    assert not only.is_meant("dp:8")


def test_groups_that_no_value_tells_apart_are_left_out() -> None:
    ranks = on_ranks({"1": ("mesh_dp", (0, 1)), "2": ("", (0, 1))})
    (only,) = purposes_of(ranks, [])
    assert only.scopes == ["mesh_dp"]


def test_values_that_change_nothing_are_not_tried() -> None:
    dp = Purpose((), ["dp"], 8, {})
    assert [*values_for(levers()["group.max_ctas"], dp)] == ["dp:2", "dp:4"]
    assert "dp:16" in values_for(levers()["group.max_ctas"], Purpose((), ["dp"], 0, {}))
    assert [*values_for(levers()["group.min_ctas"], dp)] == ["dp:16", "dp:32"]
    assert [*values_for(levers()["group.high_priority"], dp)] == ["dp:true"]
