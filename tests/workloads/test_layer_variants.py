from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from overlap_sweep import overlap_cfg, space
from overlap_sweep.errors import UserError
from overlap_sweep.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig, methods_allowed
from overlap_sweep.workloads import layer_variants
from overlap_sweep.workloads.layer_variants import PRESETS
from tests.points import layer_point


def names(backend: str = "transformer_engine", **layer: Any) -> list[str]:
    return layer_variants.names(layer_point(backend=backend, layer=layer))


@pytest.mark.parametrize(
    ("layer", "overlapped"),
    [
        ({}, None),
        ({"ub_overlap_rs_dgrad": True}, "rs_dgrad"),
        ({"tp_comm_overlap_cfg": "/a/b.yaml"}, "file:/a/b.yaml"),
    ],
)
def test_unasked_the_users_one_configuration_or_the_default_runs_beside_none(
    layer: dict[str, Any], overlapped: str | None
) -> None:
    assert names(**layer) == ["none", overlapped or "default", "floor"]
    assert names(**layer, comm_overlap=False) == ["none", "floor"]
    # A backend without a default runs none.
    assert names("torch", **layer) == ["none", *([overlapped] if overlapped else []), "floor"]


@pytest.mark.parametrize(
    ("variants", "overlapping", "not_overlapping"),
    [
        (["none", "default"], ["none", "default", "floor"], ["none", "floor"]),
        (["default", "none"], ["default", "none", "floor"], ["none", "floor"]),
        (["floor", "bulk", "none"], ["bulk", "none", "floor"], ["none", "floor"]),
        (["bulk", "bulk", "file:x"], ["bulk", "file:x", "floor"], ["none", "floor"]),
        (["none"], ["none", "floor"], ["none", "floor"]),
        (list(PRESETS), [*PRESETS, "floor"], ["none", "floor"]),
        # The floor is never alone.
        ([], ["none", "floor"], ["none", "floor"]),
        (["floor"], ["none", "floor"], ["none", "floor"]),
    ],
)
def test_a_list_of_ones_own_is_kept_in_its_order_with_the_floor_last(
    variants: list[str], overlapping: list[str], not_overlapping: list[str]
) -> None:
    assert names(variants=variants) == overlapping
    assert names(variants=variants, comm_overlap=False) == not_overlapping


@pytest.mark.parametrize(
    "several",
    [
        {"variants": ["default"], "ub_overlap_rs_dgrad": True},
        {"variants": ["default"], "tp_comm_overlap_cfg": "/a/b.yaml"},
        {"tp_comm_overlap_cfg": "/a/b.yaml", "ub_overlap_rs_dgrad": True},
    ],
)
def test_what_overlaps_is_said_once(several: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^layer\.\w+ and layer\.\w+ both say how the layer overlaps; give one of"):
        names(**several)
    assert names(**several, comm_overlap=False) == ["none", "floor"]


def test_two_files_of_one_name_in_the_run_directory_are_refused(tmp_path: Path) -> None:
    point = layer_point(layer={"variants": [f"file:{tmp_path}/a/b.yaml", f"file:{tmp_path}/a-b.yaml"]})
    with pytest.raises(UserError, match="would have one name; rename one"):
        layer_variants.configurations(point)


def configuration(name: str, **changes: Any) -> OverlapConfig:
    point = layer_point(**changes, layer={"variants": [name]})
    return layer_variants.configurations(point)[name]


KNOBS: dict[str, dict[str, Any]] = {
    "none given": {},
    "num_sm alone": {"num_sm": 2},
    "all": {
        "num_sm": 1,
        "aggregate": True,
        "num_splits": 2,
        "cga_size": 1,
        "set_sm_margin": False,
        "use_ce": False,
        "atomic_gemm": False,
        "fp8_buf": True,
    },
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("knobs", KNOBS.values(), ids=KNOBS)
@pytest.mark.parametrize("kind", space.LAYER_KINDS)
def test_every_preset_is_one_that_the_library_takes(preset: str, knobs: dict[str, Any], kind: str) -> None:
    config = configuration(preset, **knobs)
    assert overlap_cfg.slots_refusal(config.slots) is None
    assert overlap_cfg.switches_refusal(config) is None
    assert set(config.switches) == set(SWITCH_DEFAULTS)
    assert config.switches["tp_comm_overlap"]


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_preset_configures_its_switches_let_run_and_what_a_method_does_not_is_off(preset: str) -> None:
    config = configuration(preset)
    allowed = methods_allowed(config.switches)
    assert all(setting["method"] in allowed[slot] for slot, setting in config.slots.items())
    if preset in ("bulk", "ring_exchange", "pipeline", "split"):
        assert {slot for slot, methods in allowed.items() if methods} == set(config.slots)


GATHERING = ["qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad"]
SCATTERING = ["proj_fprop", "fc2_fprop"]
BULK = ["qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad"]
OWN_SCATTER = ["qkv_dgrad", "fc1_dgrad"]


@pytest.mark.parametrize(
    ("preset", "methods"),
    [
        ("default", {}),
        ("bulk", dict.fromkeys(BULK, "bulk")),
        ("ring_exchange", dict.fromkeys([*GATHERING, *SCATTERING, *OWN_SCATTER], "ring_exchange")),
        ("pipeline", dict.fromkeys([*SCATTERING, *OWN_SCATTER], "pipeline")),
        ("split", {**dict.fromkeys(GATHERING, "ring_exchange"), **dict.fromkeys(SCATTERING, "pipeline")}),
        ("rs_dgrad", dict.fromkeys(OWN_SCATTER, "ring_exchange")),
        ("atomic", dict.fromkeys(["qkv_fprop", "proj_fprop", "fc1_fprop", "fc2_fprop"], "ring_exchange")),
    ],
)
def test_the_slots_of_every_preset(preset: str, methods: dict[str, str]) -> None:
    assert {slot: setting["method"] for slot, setting in configuration(preset).slots.items()} == methods


@pytest.mark.parametrize(
    ("preset", "changed"),
    [("default", {}), ("atomic", {}), ("rs_dgrad", {"tp_comm_overlap_rs_dgrad": True})],
)
def test_other_presets_leave_the_switches_at_megatron_cores_defaults(preset: str, changed: dict[str, bool]) -> None:
    assert configuration(preset).switches == {**SWITCH_DEFAULTS, **changed}


def test_atomic_is_one_atomic_gemm_by_ring_exchange_in_both_of_a_pair() -> None:
    slots = configuration("atomic", num_sm=1).slots
    assert all(setting["atomic_gemm"] is True for setting in slots.values())
    assert all(setting["num_sm"] == 1 for setting in slots.values())


def test_knobs_go_to_every_slot_that_has_them_and_others_are_the_methods_defaults() -> None:
    slots = configuration("split", **KNOBS["all"]).slots
    ring = {"method": "ring_exchange", "num_sm": 1, "cga_size": 1, "set_sm_margin": False, "use_ce": False}
    assert {**ring, "aggregate": True, "atomic_gemm": False}.items() <= slots["qkv_fprop"].items()
    pipeline = {"method": "pipeline", "num_sm": 1, "num_splits": 2, "cga_size": 1, "set_sm_margin": False}
    assert slots["fc2_fprop"] == {**pipeline, "atomic_gemm": False, "fp8_buf": True}
    slots = configuration("split", num_sm=3).slots
    assert slots["qkv_fprop"] == {**ring, "num_sm": 3, "use_ce": True, "aggregate": False}
    assert slots["proj_fprop"] == {**pipeline, "num_sm": 3, "num_splits": 4, "cga_size": 2, "set_sm_margin": True}
    # Of torch they are its own affair.
    assert configuration("split", backend="torch", num_sm=3).slots == {
        **{slot: {"method": "ring_exchange", "num_sm": 3} for slot in GATHERING},
        **{slot: {"method": "pipeline", "num_sm": 3} for slot in SCATTERING},
    }


def test_what_does_not_overlap_has_no_configuration() -> None:
    assert layer_variants.configurations(layer_point(layer={"comm_overlap": False})) == {}
    several = layer_point(layer={"variants": ["bulk", "none", "default", "floor"]})
    assert list(layer_variants.configurations(several)) == ["bulk", "default"]


def test_a_file_is_read_with_its_switches(tmp_path: Path) -> None:
    slots = {"fc1_dgrad": {"method": "pipeline", "num_sm": 4}}
    path = tmp_path / "cfg.yaml"
    path.write_text("#   tp_comm_overlap_disable_qkv: true\n" + yaml.safe_dump(slots))
    config = configuration(f"file:{path}")
    assert config.slots == slots
    changed = {"tp_comm_overlap_disable_qkv": True, "tp_comm_overlap_rs_dgrad": True}
    assert config.switches == {**SWITCH_DEFAULTS, **changed}
    same = layer_variants.configurations(layer_point(layer={"tp_comm_overlap_cfg": str(path)}))
    assert same == {f"file:{path}": config}


def test_a_file_may_lie_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "cfg.yaml").write_text("{}\n")
    assert configuration("file:~/cfg.yaml") == OverlapConfig()


@pytest.mark.parametrize("name", ["magic", "Default", "fc1_dgrad", "cfg.yaml", ""])
def test_an_unknown_variant_is_told_the_known_ones(name: str) -> None:
    with pytest.raises(UserError, match=r"is not known; choose among none, floor, default, bulk, .*, file:<path>\.$"):
        configuration(name)


def test_a_file_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        configuration(f"file:{tmp_path}/nowhere.yaml")
