from __future__ import annotations

from typing import Any

import pytest

from overlap_sweep import space


def point(**changes: Any) -> dict[str, Any]:
    base = {"model": {"name": "m"}, "tp_size": 2, "operator": "fc1", "phase": "all", "method": "bulk", "num_sm": 4}
    return {**base, **dict.fromkeys(space.KNOBS[1:]), **changes}


# Transformer Engine 2.x's table of slots, written out.
TAKES = {
    "qkv_fprop": {"ring_exchange"},
    "fc1_fprop": {"ring_exchange"},
    "proj_fprop": {"ring_exchange", "pipeline"},
    "fc2_fprop": {"ring_exchange", "pipeline"},
    "qkv_dgrad": {"bulk", "ring_exchange", "pipeline"},
    "fc1_dgrad": {"bulk", "ring_exchange", "pipeline"},
    "qkv_wgrad": {"bulk"},
    "fc1_wgrad": {"bulk"},
    "proj_dgrad": {"ring_exchange"},
    "fc2_dgrad": {"ring_exchange"},
    "proj_wgrad": set(),
    "fc2_wgrad": set(),
}


@pytest.mark.parametrize("name", TAKES)
def test_methods_of_every_slot(name: str) -> None:
    operator, phase = name.split("_")
    assert set(space.methods_of(operator, phase)) == TAKES[name]
    for method in space.METHODS[1:]:
        given = point(operator=operator, phase=phase, method=method)
        assert (space.refusal(given) is None) == (method in TAKES[name])


def test_a_method_goes_to_every_phase_that_takes_it() -> None:
    assert space.settings(point()) == {
        "fc1_dgrad": {"method": "bulk", "num_sm": 4},
        "fc1_wgrad": {"method": "bulk", "num_sm": 4},
    }
    assert set(space.settings(point(method="ring_exchange"))) == {"fc1_fprop", "fc1_dgrad"}
    assert set(space.settings(point(operator="proj", method="pipeline"))) == {"proj_fprop"}
    assert set(space.settings(point(phase="wgrad"))) == {"fc1_wgrad"}
    assert space.settings(point(method="none")) == {}


def test_a_non_bulk_dgrad_leaves_wgrad_alone() -> None:
    for method in ("ring_exchange", "pipeline"):
        assert "fc1_wgrad" not in space.settings(point(method=method))


def test_knobs_only_where_they_mean_something() -> None:
    given = space.settings(point(method="ring_exchange", aggregate=True, num_splits=4))
    assert given["fc1_fprop"] == {"method": "ring_exchange", "num_sm": 4, "aggregate": True}
    assert given["fc1_dgrad"] == {"method": "ring_exchange", "num_sm": 4}


def test_aggregate_without_an_all_gather_is_refused() -> None:
    reason = space.refusal(point(operator="fc2", phase="fprop", method="ring_exchange", aggregate=True))
    assert reason is not None
    assert "all-gather" in reason


def test_the_refusal_says_what_the_operator_takes() -> None:
    reason = space.refusal(point(operator="fc2"))
    assert reason is not None
    assert "fc2_fprop takes none, ring_exchange, pipeline" in reason


def test_one_rank_has_nothing_to_overlap() -> None:
    assert space.refusal(point(tp_size=1)) is not None
    assert space.refusal(point(tp_size=1, method="none")) is None


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, ("bwd",)),
        ({"method": "ring_exchange"}, ("fwd", "bwd")),
        ({"operator": "proj", "method": "pipeline"}, ("fwd",)),
        ({"method": "none"}, ("fwd", "bwd")),
        ({"method": "none", "phase": "fprop"}, ("fwd",)),
    ],
)
def test_the_objective_covers_the_passes_that_the_point_touches(changes: dict[str, Any], passes: tuple[str]) -> None:
    assert space.passes(point(**changes)) == passes


def test_point_names() -> None:
    assert space.point_name(point(), []) == "m_tp2_fc1_bulk_sm4"
    assert space.point_name(point(phase="dgrad"), ["phase=dgrad"]) == "m_tp2_fc1_dgrad_bulk_sm4"
    named = point(model={"name": "/data/llama/config.json"}, method="pipeline", num_splits=8)
    assert space.point_name(named, []) == "llama_tp2_fc1_pipeline_sm4_split8"
    other = ["tp_size=2", "workload.tokens=512", "+experiment=four_operators"]
    assert space.point_name(point(), other) == "m_tp2_fc1_bulk_sm4_workload.tokens=512"


def test_a_long_name_is_cut_and_stays_different() -> None:
    names = {
        space.point_name(point(), [f"workload.seed={seed}", "runtime.start_timeout_s=" + "9" * 300]) for seed in (1, 2)
    }
    assert len(names) == 2
    assert max(map(len, names)) == space.LONGEST_NAME


def test_a_name_stays_inside_its_sweep() -> None:
    name = space.point_name(point(model={"name": "a/../.."}), ["workload.tokens=../../x"])
    assert "/" not in name
    assert name not in (".", "..")
