from __future__ import annotations

from typing import Any

import pytest

from overlap_sweep import space
from tests.make_point import copy_config, resolved, stack_config


def point(**changes: Any) -> dict[str, Any]:
    """fc1 by bulk on two ranks, unless it is changed."""
    return resolved("operator", **{"model": "m", "method": "bulk", "num_sm": 4, **changes})


def layer(kind: str = "transformer_layer", num_replicas: int = 1, **changes: Any) -> dict[str, Any]:
    options = {"kind": kind, "num_replicas": num_replicas}
    return resolved("layer", **{"model": "m", "tp_size": 2, "num_sm": 4, "layer": options, **changes})


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
RING = {"method": "ring_exchange"}
BULK = {"method": "bulk", "num_sm": 4}


@pytest.mark.parametrize("name", TAKES)
def test_methods_of_every_slot(name: str) -> None:
    operator, phase = name.split("_")
    assert set(space.methods_of(operator, phase)) == set(space.SLOTS[name]) == TAKES[name]
    for method in space.METHODS[1:]:
        given = point(operator=operator, phase=phase, method=method)
        assert (space.refusal(given) is None) == (method in TAKES[name])


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {"fc1_dgrad": BULK, "fc1_wgrad": BULK}),
        ({"phase": "wgrad"}, {"fc1_wgrad": BULK}),
        ({"operator": "proj", "method": "pipeline"}, {"proj_fprop": {"method": "pipeline", "num_sm": 4}}),
        # Knobs only where they mean something; and wgrad takes nothing beside a dgrad that is not in bulk.
        (
            {"method": "ring_exchange", "aggregate": True, "num_splits": 4, "fp8_buf": False},
            {"fc1_fprop": {**RING, "num_sm": 4, "aggregate": True}, "fc1_dgrad": {**RING, "num_sm": 4}},
        ),
        ({"method": "pipeline", "num_sm": None}, {"fc1_dgrad": {"method": "pipeline"}}),
        ({"method": "none"}, {}),
        (
            {"phases": {"wgrad": {"method": "bulk", "num_sm": 2}, "fprop": RING, "dgrad": {"method": "none"}}},
            {"fc1_fprop": RING, "fc1_wgrad": {"method": "bulk", "num_sm": 2}},
        ),
    ],
)
def test_a_method_goes_to_every_phase_that_takes_it(changes: dict[str, Any], settings: dict[str, Any]) -> None:
    found = space.settings(point(**changes))
    assert found == settings
    # In the order of the phases.
    assert list(found) == [name for name in ("fc1_fprop", "fc1_dgrad", "fc1_wgrad", "proj_fprop") if name in settings]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"operator": "fc2", "phase": "fprop", "method": "ring_exchange", "aggregate": True}, ["all-gather"]),
        ({"operator": "fc2"}, ["bulk does not fit fc2: ", "fc2_fprop takes none, ring_exchange, pipeline"]),
        ({"operator": "fc2", "phase": "wgrad"}, ["bulk does not fit fc2_wgrad: ", "fc2_wgrad takes none"]),
        ({"phases": {"fprop": {"method": "pipeline"}, "dgrad": RING}}, ["pipeline does not fit fc1_fprop: "]),
        ({"phases": {"dgrad": RING, "wgrad": {"method": "bulk"}}}, ["fc1_wgrad", "fc1_dgrad by ring_exchange"]),
        ({"tp_size": 1}, ["tp_size=1"]),
        ({"method": "ring_exchange", "fp8_buf": True}, ["fp8_buf", "ring_exchange on fc1_fprop, fc1_dgrad"]),
        ({"tp_size": 1, "method": "none"}, None),
        ({"method": "ring_exchange", "aggregate": True}, None),
        ({"operator": "fc2", "method": "pipeline", "fp8_buf": True}, None),
        ({"phases": {"fprop": RING, "dgrad": {"method": "bulk"}, "wgrad": {"method": "none"}}}, None),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], parts: list[str] | None) -> None:
    reason = space.refusal(point(**changes))
    assert (reason is None) == (parts is None)
    assert all(part in str(reason) for part in parts or [])


@pytest.mark.parametrize(
    ("phases", "mistake"),
    [
        ("bulk", "phases=bulk is no map"),
        ({}, "phases={} is no map"),
        ({"fwd": RING}, "fwd is not known"),
        ({"fprop": "bulk"}, "phases.fprop.method is not one of"),
        ({"fprop": RING, "dgrad": {"num_sm": 4}}, "phases.dgrad.method is not one of"),
        ({"dgrad": {"method": "bulk", "sms": 4, 1: 2}}, "phases.dgrad: 1, sms is no knob"),
        ({"dgrad": {"method": "bulk", "num_sm": "many"}}, "num_sm=many is no whole number"),
        ({"dgrad": {"method": "bulk", "num_sm": True}}, "num_sm=True is no whole number"),
        ({"dgrad": {"method": "bulk", "cga_size": 0}}, "phases.dgrad.cga_size=0 is out of range"),
        ({"fprop": {**RING, "aggregate": 1}}, "aggregate=1 is neither true nor false"),
        ({"fprop": {**RING, "aggregate": True, "num_sm": None, "use_ce": None}, "dgrad": {"num_sm": 1, **RING}}, None),
        ({"wgrad": {"method": "none", "set_sm_margin": True, "atomic_gemm": False, "fp8_buf": False}}, None),
    ],
)
def test_mistakes_in_phases(phases: Any, mistake: str | None) -> None:
    found = space.phases_mistake(phases)
    assert found is None if mistake is None else mistake in str(found)


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, ("bwd",)),
        ({"method": "ring_exchange"}, ("fwd", "bwd")),
        ({"operator": "proj", "method": "pipeline"}, ("fwd",)),
        ({"method": "none"}, ("fwd", "bwd")),
        ({"method": "none", "phase": "fprop"}, ("fwd",)),
        ({"phases": {"dgrad": {"method": "none"}}}, ("bwd",)),
        ({"phase": "wgrad"}, ("bwd",)),
    ],
)
def test_the_objective_covers_the_passes_that_the_point_touches(changes: dict[str, Any], passes: tuple[str]) -> None:
    assert space.passes(point(**changes)) == passes


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"precision": "fp32"}, 1e-4),
        ({"precision": "bf16"}, 2e-2),
        ({"operator": "fc2", "method": "pipeline", "fp8_buf": True, "precision": "fp8_delayed"}, 0.2),
        ({"operator": "fc2", "method": "pipeline", "fp8_buf": False, "precision": "fp8_delayed"}, 2e-2),
        ({"precision": "fp32", "workload": {"tolerance": 0.0}}, 0.0),
    ],
)
def test_tolerance(changes: dict[str, Any], tolerance: float) -> None:
    assert space.tolerance(point(**changes)) == tolerance


SHOWN = {
    "operator": "model model.name tp_size workload operator phase method phases num_sm fp8_buf",
    "layer": "model model.name tp_size workload layer layer.num_replicas",
    "kernel": "model model.name tp_size workload kernel m n k operator phase method phases num_sm",
    "fsdp": "model model.name workload distributed.strategy distributed.dp_size",
    "tp_training": "model model.name tp_size workload impl dp_size",
    "copy_engine": "model workload copy_engine.matrix_size copy_engine.copy_mb copy_engine.direction",
}
"""By workload what a name shows anyway."""
KERNEL = {"model": "m", "tp_size": 2, "num_sm": None, "method": "none", "m": 8, "n": 4, "k": 2}
FSDP = resolved("fsdp", distributed={"dp_size": 4, "strategy": "fsdp2"})


@pytest.mark.parametrize(
    ("given", "subject", "ranks", "name"),
    [
        (point(tp_size=4), "fc1", 4, "m_tp4_fc1_bulk_sm4"),
        # An operator's ranks are its tensor-parallel ones, whatever is said of layers.
        ({**point(tp_size=4), "layer": {"num_replicas": 8}}, "fc1", 4, "m_tp4_fc1_bulk_sm4"),
        (layer(), "transformer_layer", 2, "m_tp2_transformer_layer"),
        (layer("linear", 4), "linear", 8, "m_tp2_linear_dp4"),
        (layer(num_replicas=8, tp_size=1), "transformer_layer", 8, "m_tp1_transformer_layer_dp8"),
        (resolved("kernel", **KERNEL), "ag_gemm 8x4x2", 2, "ag_gemm_tp2_m8_n4_k2"),
        (resolved("kernel", **{**KERNEL, "n": None, "k": None}), "ag_gemm 8xNonexNone", 2, "m_tp2_fc1_ag_gemm_m8"),
        (FSDP, "fsdp2 step", 4, "ranking_dp4_fsdp2"),
        (stack_config("megatron", 2, 4), "megatron step", 8, "qwen3_tiny_tp2_dp4_megatron"),
        ({**stack_config(), "dp_size": None}, "fsdp_dtensor step", 2, "qwen3_tiny_tp2_dp1_fsdp_dtensor"),
        ({**copy_config("peer"), "tp_size": 2}, "4096 GEMM, 64 MiB peer", 1, "copy_peer_gemm4096_64mb"),
    ],
)
def test_subject_ranks_and_name_of_a_point_of_every_workload(
    given: dict[str, Any], subject: str, ranks: int, name: str
) -> None:
    assert (space.subject(given), space.world_size(given)) == (subject, ranks)
    # Every configuration that Hydra resolves has a method; what the name shows is not appended.
    overrides = [f"{option}=x" for option in SHOWN[given["workload"]["name"]].split()]
    assert space.point_name({"method": "none", **given}, overrides) == name
    # One GPU more is copied to.
    assert space.gpus_of(given) == ranks + name.startswith("copy_peer")


@pytest.mark.parametrize(
    ("given", "overrides", "name"),
    [
        (point(phase="dgrad"), ["phase=dgrad"], "m_tp2_fc1_dgrad_bulk_sm4"),
        (
            point(model="/data/llama/config.json", method="pipeline", num_splits=8),
            [],
            "llama_tp2_fc1_pipeline_sm4_split8",
        ),
        (
            point(),
            ["tp_size=2", "workload.tokens=512", "+experiment=four_operators", "runtime.timeout_s=9", "hydra.job.x=1"],
            "m_tp2_fc1_bulk_sm4_workload.tokens=512",
        ),
        (point(phases={"fprop": RING, "dgrad": {"method": "none"}}), [], "m_tp2_fc1_fprop.ring+dgrad.none"),
        # No overlap is named by its num_sm only in a sweep over it.
        (point(method="none"), ["method=none"], "m_tp2_fc1_none"),
        (point(method="none"), ["method=none", "num_sm=4"], "m_tp2_fc1_none_sm4"),
        # What a backend has no knob for is in no name.
        (point(method="none", backend="symm_mem"), ["num_sm=4"], "m_tp2_fc1_none"),
        (point(method="ring_exchange", aggregate=False, backend="symm_mem"), [], "m_tp2_fc1_ring"),
        (point(method="ring_exchange", aggregate=True, backend="symm_mem"), [], "m_tp2_fc1_ring_agg1"),
        (point(), ["method=bulk", "repetition=1"], "m_tp2_fc1_bulk_sm4_repetition=1"),
        (layer(), ["workload=layer", "layer=linear", "layer.num_replicas=1"], "m_tp2_transformer_layer"),
        *(
            (layer(), ["workload=layer", override], f"m_tp2_transformer_layer_{override}")
            for override in ("layer.training=true", "num_sm=8", "precision=fp8_delayed", "repetition=3")
        ),
        (
            layer(),
            ["layer.variants=[none,bulk,file:/a/b.yaml]"],
            "m_tp2_transformer_layer_layer.variants=-none,bulk,file-a-b.yaml-",
        ),
        # A name stays inside its sweep.
        (point(model="a/../.."), ["workload.tokens=../../x"], ".._tp2_fc1_bulk_sm4_workload.tokens=..-..-x"),
    ],
)
def test_what_the_fixed_part_of_a_name_does_not_show_is_appended(
    given: dict[str, Any], overrides: list[str], name: str
) -> None:
    assert space.point_name(given, overrides) == name


def test_a_long_name_is_cut_and_stays_different() -> None:
    fits = "workload.tolerance=" + "9" * (space.LONGEST_NAME - len("m_tp2_fc1_bulk_sm4_workload.tolerance="))
    assert space.point_name(point(), [fits]) == f"m_tp2_fc1_bulk_sm4_{fits}"
    names = {space.point_name(point(), [f"workload.seed={seed}", f"{fits}9"]) for seed in (1, 2)}
    assert [len(name) for name in names] == [space.LONGEST_NAME] * 2


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        (None, "none"),
        ({}, "none"),
        ({"method": "none", "num_sm": 4}, "none"),
        (BULK, "bulk_sm4"),
        ({"method": "bulk", "num_sm": 4, "cga_size": 2, "set_sm_margin": True}, "bulk_sm4"),
        ({"method": "bulk", "num_sm": 4, "cga_size": 1, "set_sm_margin": False}, "bulk_sm4_cga1_margin0"),
        ({**RING, "aggregate": False, "num_sm": 1, "use_ce": True}, "ring_agg0_sm1"),
        ({**RING, "aggregate": True, "num_sm": 1, "use_ce": False}, "ring_agg1_sm1_ce0"),
        ({**RING, "cga_size": 2, "set_sm_margin": True}, "ring_cga2_margin1"),
        ({"method": "pipeline", "num_sm": 16, "num_splits": 4, "cga_size": 2}, "pipeline_sm16_split4"),
        ({"method": "pipeline", "num_splits": 4, "fp8_buf": True}, "pipeline_split4_fp8buf1"),
    ],
)
def test_a_brief_name_shows_no_knob_that_is_as_usual(setting: dict[str, Any] | None, name: str) -> None:
    assert space.brief_name(setting) == name


@pytest.mark.parametrize("method", space.METHODS[1:])
def test_names_tell_every_unusual_knob_and_are_read_again(method: str) -> None:
    usual = space.USERBUFFERS_DEFAULTS[method]
    others = [{**usual, knob: not value if isinstance(value, bool) else value + 1} for knob, value in usual.items()]
    settings = [{"method": method, **knobs} for knobs in (usual, *others)]
    assert len({space.brief_name(setting) for setting in settings}) == len(settings)
    assert [space.setting_of(space.setting_name(setting)) for setting in settings] == settings


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("pipeline_split8_sm512", {"method": "pipeline", "num_sm": 512, "num_splits": 8}),
        ("ring_fp8buf1_agg0", {**RING, "aggregate": False, "fp8_buf": True}),
        *(
            (name, None)
            for name in ("none", "", "bulky", "bulk_", "bulk_sm", "bulk_sm04", "bulk_sm513", "bulk_sm0", "ring_agg2")
        ),
        *((name, None) for name in ("bulk_sm4_sm4", "bulk_sms4", "pipeline_split1025", "pipeline_cga17", "x_sm4")),
    ],
)
def test_settings_are_read_from_names(name: str, setting: space.Setting | None) -> None:
    assert space.setting_of(name) == setting


def test_a_ring_exchange_by_copy_engines_is_the_same_whatever_its_num_sm() -> None:
    by_engines = {**RING, "num_sm": 8, "use_ce": True}
    assert space.without_idle_knobs(by_engines) == {**by_engines, "num_sm": space.COPY_ENGINE_SMS}
    for other in ({**RING, "num_sm": 8}, {"method": "bulk", "num_sm": 8}):
        assert space.without_idle_knobs(other) == other


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "none"),
        ({"fc1_fprop": {**RING, "aggregate": False}}, "ring_agg0"),
        ({"fc1_dgrad": BULK}, "dgrad bulk_sm4"),
        (
            {"fc1_dgrad": BULK, "fc1_wgrad": {"method": "bulk", "num_sm": 2}},
            "dgrad bulk_sm4 + wgrad bulk_sm2",
        ),
        ({"fc1_fprop": RING, "fc1_dgrad": RING}, "fprop ring + dgrad ring"),
    ],
)
def test_the_phase_is_named_where_a_setting_could_be_of_two(settings: dict[str, space.Setting], name: str) -> None:
    assert space.settings_name(settings) == name


SHARED = {"num_sm", "cga_size", "set_sm_margin"}


@pytest.mark.parametrize(
    ("operator", "phase", "method", "gathers", "knobs"),
    [
        ("fc1", "dgrad", "bulk", True, SHARED),
        ("fc1", "wgrad", "bulk", False, SHARED),
        # Only gathers are aggregated, and only what is reduced can be in FP8 or not.
        ("fc2", "fprop", "pipeline", False, {*SHARED, "num_splits", "atomic_gemm", "fp8_buf"}),
        ("fc2", "fprop", "ring_exchange", False, {*SHARED, "use_ce", "atomic_gemm", "fp8_buf"}),
        ("fc1", "dgrad", "pipeline", False, {*SHARED, "num_splits", "atomic_gemm", "fp8_buf"}),
        ("fc1", "dgrad", "ring_exchange", False, {*SHARED, "use_ce", "atomic_gemm"}),
        ("fc1", "fprop", "ring_exchange", True, {*SHARED, "use_ce", "atomic_gemm", "aggregate"}),
        ("fc2", "dgrad", "ring_exchange", True, {*SHARED, "use_ce", "atomic_gemm", "aggregate"}),
        ("fc2", "dgrad", "none", True, set()),
    ],
)
def test_what_a_slot_carries_and_its_knobs(
    operator: str, phase: str, method: str, gathers: bool, knobs: set[str]
) -> None:
    assert space.gathers(operator, phase, method) == gathers
    assert set(space.knobs_of(operator, phase, method)) == knobs
