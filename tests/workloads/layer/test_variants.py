"""The configurations that variants stand for; which names are none, or said twice, is in tests/golden."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig, methods_allowed
from overlap_sweep.results.identity import point_key
from overlap_sweep.results.registry import decoded_point
from overlap_sweep.workloads import layer as layer_variants
from overlap_sweep.workloads.layer import PRESETS
from tests.make_point import layer_point


@pytest.mark.parametrize(
    ("layer", "overlapped"),
    [
        ({"ub_overlap_rs_dgrad": True}, "rs_dgrad"),
        ({"tp_comm_overlap_cfg": "/a/b.yaml"}, "file:/a/b.yaml"),
    ],
)
def test_the_users_one_configuration_runs_beside_none(layer: dict[str, Any], overlapped: str) -> None:
    for backend in ("transformer_engine", "torch"):
        assert layer_variants.names(layer_point(backend=backend, layer=layer)) == ["none", overlapped, "floor"]


@pytest.mark.parametrize(
    ("changes", "overlapped"),
    [
        ({}, ["default", "rs_dgrad", "ring_exchange", "bulk"]),
        ({"backend": "torch"}, ["bulk", "ring_exchange", "pipeline"]),
        # It has no slot that takes bulk.
        ({"backend": "torch", "layer": {"kind": "linear"}}, ["ring_exchange", "pipeline"]),
        # Its own overlap cannot run.
        ({"precision": "fp8_block"}, []),
        ({"backend": "torch", "tp_size": 1}, []),
        ({"tp_size": 1}, ["default"]),
    ],
)
def test_unasked_whatever_can_run_is_compared_with_none(changes: dict[str, Any], overlapped: list[str]) -> None:
    assert layer_variants.names(layer_point(**changes)) == ["none", *overlapped, "floor"]


@pytest.mark.parametrize("name", ["default ub_bulk_dgrad=off", "bulk  ub_bulk_dgrad=true", "none ub_overlap_ag=true"])
def test_what_follows_a_name_must_be_a_switch(name: str) -> None:
    with pytest.raises(UserError, match=rf"layer\.variants: {name}.* is not (a switch|known); "):
        configuration(name)


AG_OFF = {"ub_overlap_ag": False}


@pytest.mark.parametrize(
    ("options", "name", "switches"),
    [
        (AG_OFF, "default ub_overlap_ag=false", {"tp_comm_overlap_ag": False}),
        # What the default does anyway makes no other variant.
        ({"ub_overlap_ag": True, "ub_overlap_rs": True, "ub_bulk_dgrad": True}, "default", {}),
        (
            {"ub_overlap_rs": False, "ub_bulk_wgrad": False, "ub_bulk_dgrad": False},
            "default ub_overlap_rs=false ub_bulk_dgrad=false ub_bulk_wgrad=false",
            dict.fromkeys(("tp_comm_overlap_rs", "tp_comm_bulk_dgrad", "tp_comm_bulk_wgrad"), False),
        ),
        (
            {"ub_overlap_rs_dgrad": True, **AG_OFF},
            "rs_dgrad ub_overlap_ag=false",
            {"tp_comm_overlap_ag": False, "tp_comm_overlap_rs_dgrad": True},
        ),
    ],
)
def test_switches_of_te_transformer_layer_change_the_default_and_its_name(
    options: dict[str, bool], name: str, switches: dict[str, bool]
) -> None:
    given = layer_point(layer=options)
    assert layer_variants.names(given) == ["none", name, "floor"]
    config = layer_variants.configurations(given)[name]
    assert config.switches == {**SWITCH_DEFAULTS, **switches}
    assert set(config.slots) == (set(OWN_SCATTER) if "rs_dgrad" in name else set())
    # A point without them is the point of earlier versions.
    recorded = layer_variants.complete(layer_point())
    layer = {option: value for option, value in recorded["layer"].items() if not option.startswith(("ub_", "moe"))}
    earlier = {**recorded, "layer": {**layer, "ub_overlap_rs_dgrad": False}}
    assert point_key(decoded_point(earlier)) == point_key(decoded_point(recorded))


def test_switches_may_follow_the_name_of_a_preset() -> None:
    config = configuration("bulk ub_bulk_wgrad=false", num_sm=4)
    assert config.slots == configuration("bulk", num_sm=4).slots
    assert methods_allowed(config.switches)["fc1_wgrad"] == frozenset()
    assert methods_allowed(config.switches)["fc1_dgrad"] == {"bulk"}


def configuration(name: str, **changes: Any) -> OverlapConfig:
    """By a list of variants, in which what does not overlap has no configuration."""
    (config,) = layer_variants.configurations(layer_point(**changes, layer={"variants": ["none", name]})).values()
    return config


KNOBS: dict[str, dict[str, Any]] = {
    "none given": {},
    "num_sm alone": {"num_sm": 2},
    "all": {
        **{"num_sm": 1, "aggregate": True, "num_splits": 2, "cga_size": 1, "set_sm_margin": False, "use_ce": False},
        **{"atomic_gemm": False, "fp8_buf": True, "comm_priority": -1, "gemm_priority": -2},
        "pipeline_rs_overlap_first_gemm": True,
    },
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("knobs", KNOBS.values(), ids=KNOBS)
def test_every_preset_is_one_that_the_library_takes(preset: str, knobs: dict[str, Any]) -> None:
    config = configuration(preset, **knobs)
    assert overlap_cfg.slots_refusal(config.slots) is None
    assert overlap_cfg.switches_refusal(config) is None
    assert set(config.switches) == set(SWITCH_DEFAULTS)
    assert config.switches["tp_comm_overlap"]
    # What a preset configures its switches let run, and what a method does not configure is off.
    allowed = methods_allowed(config.switches)
    assert all(setting["method"] in allowed[slot] for slot, setting in config.slots.items())
    if preset in ("bulk", "ring_exchange", "pipeline", "split"):
        assert {slot for slot, methods in allowed.items() if methods} == set(config.slots)


GATHERING = ["qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad"]
SCATTERING = ["proj_fprop", "fc2_fprop"]
BULK = ["qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad"]
OWN_SCATTER = ["qkv_dgrad", "fc1_dgrad"]


@pytest.mark.parametrize(
    ("preset", "methods", "switches"),
    [
        ("default", {}, {}),
        ("bulk", dict.fromkeys(BULK, "bulk"), None),
        ("ring_exchange", dict.fromkeys([*GATHERING, *SCATTERING, *OWN_SCATTER], "ring_exchange"), None),
        ("pipeline", dict.fromkeys([*SCATTERING, *OWN_SCATTER], "pipeline"), None),
        ("split", {**dict.fromkeys(GATHERING, "ring_exchange"), **dict.fromkeys(SCATTERING, "pipeline")}, None),
        ("rs_dgrad", dict.fromkeys(OWN_SCATTER, "ring_exchange"), {"tp_comm_overlap_rs_dgrad": True}),
        ("atomic", dict.fromkeys(["qkv_fprop", "proj_fprop", "fc1_fprop", "fc2_fprop"], "ring_exchange"), {}),
    ],
)
def test_the_slots_of_every_preset_and_switches_that_are_not_at_their_defaults(
    preset: str, methods: dict[str, str], switches: dict[str, bool] | None
) -> None:
    config = configuration(preset, num_sm=1)
    assert {slot: setting["method"] for slot, setting in config.slots.items()} == methods
    if switches is not None:
        assert config.switches == {**SWITCH_DEFAULTS, **switches}
    if preset == "atomic":
        assert all((s["atomic_gemm"], s["num_sm"]) == (True, 1) for s in config.slots.values())


def test_knobs_go_to_every_slot_that_has_them_and_others_are_the_methods_defaults() -> None:
    slots = configuration("split", **KNOBS["all"]).slots
    ring = {"method": "ring_exchange", "num_sm": 1, "cga_size": 1, "set_sm_margin": False, "use_ce": False}
    priorities = {"comm_priority": -1, "gemm_priority": -2}
    assert {**ring, **priorities, "aggregate": True, "atomic_gemm": False}.items() <= slots["qkv_fprop"].items()
    pipeline = {"method": "pipeline", "num_sm": 1, "num_splits": 2, "cga_size": 1, "set_sm_margin": False}
    of_pipeline = {"atomic_gemm": False, "fp8_buf": True, "pipeline_rs_overlap_first_gemm": True}
    assert slots["fc2_fprop"] == {**pipeline, **priorities, **of_pipeline}
    slots = configuration("split", num_sm=3).slots
    assert slots["qkv_fprop"] == {**ring, "num_sm": 3, "use_ce": True, "aggregate": False}
    assert slots["proj_fprop"] == {**pipeline, "num_sm": 3, "num_splits": 4, "cga_size": 2, "set_sm_margin": True}
    # Of torch they are its own affair.
    assert configuration("split", backend="torch", num_sm=3).slots == {
        **{slot: {"method": "ring_exchange", "num_sm": 3} for slot in GATHERING},
        **{slot: {"method": "pipeline", "num_sm": 3} for slot in SCATTERING},
    }


def test_a_file_is_read_with_its_switches_also_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = {"fc1_dgrad": {"method": "pipeline", "num_sm": 4}}
    path = tmp_path / "cfg.yaml"
    path.write_text("#   tp_comm_overlap_disable_qkv: true\n" + yaml.safe_dump(slots))
    changed = {"tp_comm_overlap_disable_qkv": True, "tp_comm_overlap_rs_dgrad": True}
    config = OverlapConfig(slots, {**SWITCH_DEFAULTS, **changed})
    monkeypatch.setenv("HOME", str(tmp_path))
    assert configuration(f"file:{path}") == configuration("file:~/cfg.yaml") == config
    same = layer_variants.configurations(layer_point(layer={"tp_comm_overlap_cfg": str(path)}))
    assert same == {f"file:{path}": config}
