from __future__ import annotations

from typing import Any

import pytest

from overlap_sweep import space


def point(**changes: Any) -> dict[str, Any]:
    base = {"model": {"name": "m"}, "tp_size": 2, "operator": "fc1", "phase": "all", "method": "bulk", "num_sm": 4}
    return {**base, **dict.fromkeys(space.KNOBS[1:]), "workload": {"name": "operator"}, **changes}


def layer(kind: str = "transformer_layer", num_replicas: int = 1, **changes: Any) -> dict[str, Any]:
    return point(workload={"name": "layer"}, layer={"kind": kind, "num_replicas": num_replicas}, **changes)


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


def test_no_overlap_is_named_by_its_num_sm_only_in_a_sweep_over_it() -> None:
    assert space.point_name(point(method="none"), ["method=none"]) == "m_tp2_fc1_none"
    assert space.point_name(point(method="none"), ["method=none", "num_sm=4"]) == "m_tp2_fc1_none_sm4"


def test_repetitions_of_a_point_have_names_of_their_own() -> None:
    names = [space.point_name(point(), ["method=bulk", f"repetition={n}"]) for n in range(2)]
    assert names == ["m_tp2_fc1_bulk_sm4_repetition=0", "m_tp2_fc1_bulk_sm4_repetition=1"]


def test_a_layers_name_is_its_kind_and_not_the_operators() -> None:
    assert space.point_name(layer(), ["workload=layer"]) == "m_tp2_transformer_layer"
    named = ["workload=layer", "layer=linear", "tp_size=8", "layer.num_replicas=1"]
    assert space.point_name(layer("linear", tp_size=8), named) == "m_tp8_linear"
    assert space.point_name(layer(num_replicas=4), ["layer.num_replicas=4"]) == "m_tp2_transformer_layer_dp4"


@pytest.mark.parametrize("override", ["layer.training=true", "num_sm=8", "precision=fp8_delayed", "repetition=3"])
def test_what_a_layers_name_does_not_show_is_appended(override: str) -> None:
    assert space.point_name(layer(), ["workload=layer", override]) == f"m_tp2_transformer_layer_{override}"


def test_a_list_of_variants_makes_a_name_without_brackets() -> None:
    name = space.point_name(layer(), ["layer.variants=[none,bulk,file:/a/b.yaml]"])
    assert name == "m_tp2_transformer_layer_layer.variants=-none,bulk,file-a-b.yaml-"


@pytest.mark.parametrize(("tp_size", "num_replicas", "ranks"), [(1, 1, 1), (2, 1, 2), (2, 4, 8), (1, 8, 8)])
def test_a_layer_runs_on_all_ranks_of_its_replicas(tp_size: int, num_replicas: int, ranks: int) -> None:
    assert space.world_size(layer(tp_size=tp_size, num_replicas=num_replicas)) == ranks


def test_an_operator_runs_on_its_tensor_parallel_ranks() -> None:
    assert space.world_size(point(tp_size=4)) == 4
    assert space.world_size(point(tp_size=4, layer={"num_replicas": 8})) == 4


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        (None, "none"),
        ({}, "none"),
        ({"method": "none"}, "none"),
        ({"method": "bulk", "num_sm": 4}, "bulk_sm4"),
        ({"method": "bulk", "num_sm": 4, "cga_size": 2, "set_sm_margin": True}, "bulk_sm4"),
        ({"method": "bulk", "num_sm": 4, "cga_size": 1, "set_sm_margin": False}, "bulk_sm4_cga1_margin0"),
        ({"method": "ring_exchange", "aggregate": False, "num_sm": 1, "use_ce": True}, "ring_agg0_sm1"),
        ({"method": "ring_exchange", "aggregate": True, "num_sm": 1, "use_ce": False}, "ring_agg1_sm1_ce0"),
        ({"method": "ring_exchange", "cga_size": 2, "set_sm_margin": True}, "ring_cga2_margin1"),
        ({"method": "pipeline", "num_sm": 16, "num_splits": 4, "cga_size": 2}, "pipeline_sm16_split4"),
        ({"method": "pipeline", "num_splits": 4, "fp8_buf": True}, "pipeline_split4_fp8buf1"),
    ],
)
def test_a_brief_name_shows_no_knob_that_is_as_usual(setting: dict[str, Any] | None, name: str) -> None:
    assert space.brief_name(setting) == name


@pytest.mark.parametrize("method", space.METHODS[1:])
def test_a_brief_name_tells_every_unusual_knob(method: str) -> None:
    usual = space.USERBUFFERS_DEFAULTS[method]
    names = {space.brief_name({"method": method, **usual})}
    for knob, value in usual.items():
        names.add(space.brief_name({"method": method, **usual, knob: value + 1 if value > 1 else not value}))
    assert len(names) == 1 + len(usual)


def test_a_long_name_is_cut_and_stays_different() -> None:
    names = {
        space.point_name(point(), [f"workload.seed={seed}", "workload.tolerance=0." + "9" * 300]) for seed in (1, 2)
    }
    assert len(names) == 2
    assert max(map(len, names)) == space.LONGEST_NAME


def test_a_name_stays_inside_its_sweep() -> None:
    name = space.point_name(point(model={"name": "a/../.."}), ["workload.tokens=../../x"])
    assert "/" not in name
    assert name not in (".", "..")


@pytest.mark.parametrize(
    ("operator", "phase", "method", "has_it"),
    [
        ("fc2", "fprop", "pipeline", True),
        ("fc2", "fprop", "ring_exchange", True),
        ("fc1", "dgrad", "pipeline", True),
        ("fc1", "dgrad", "ring_exchange", False),
        ("fc1", "fprop", "ring_exchange", False),
        ("fc2", "dgrad", "ring_exchange", False),
    ],
)
def test_only_what_is_reduced_can_be_in_fp8_or_not(operator: str, phase: str, method: str, has_it: bool) -> None:
    assert ("fp8_buf" in space.knobs_of(operator, phase, method)) == has_it


def test_fp8_buf_where_no_slot_has_it_is_refused() -> None:
    given = {"operator": "fc1", "phase": "all", "method": "ring_exchange", "tp_size": 2, "fp8_buf": True}
    assert "fp8_buf is for a reduce-scatter that can be in FP8" in str(space.refusal(given))
