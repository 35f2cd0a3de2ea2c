"""Every export, taken back by the library that it is for or by what that library does with it."""

import ast
import dataclasses
import importlib.metadata
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from overlap_sweep.backends import installed
from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig
from overlap_sweep.workloads.operator import exports
from tests.processes import run_ranks
from tests.workloads.operator import bridge_stand_in

BRIDGE = "megatron.bridge.training.comm_overlap"

RING = {
    **{"method": "ring_exchange", "aggregate": False, "num_sm": 1, "cga_size": 1, "set_sm_margin": False},
    "use_ce": True,
}
PIPE = {"method": "pipeline", "num_sm": 16, "num_splits": 4, "cga_size": 2, "set_sm_margin": True}
BULK = {"method": "bulk", "num_sm": 4, "cga_size": 2, "set_sm_margin": False}


def config(slots: dict[str, Any], **changed: bool) -> OverlapConfig:
    slots = {slot: dict(setting) for slot, setting in slots.items()}
    return OverlapConfig(slots, {**SWITCH_DEFAULTS, **{f"tp_comm_{name}": on for name, on in changed.items()}})


CONFIGS = {
    "pipelined fprop beside bulk pairs": config(
        {
            **{"qkv_fprop": {**RING, "aggregate": True}, "qkv_dgrad": BULK, "qkv_wgrad": {**BULK, "num_sm": 24}},
            **{"proj_fprop": {**PIPE, "fp8_buf": True}, "proj_dgrad": RING, "fc1_dgrad": BULK, "fc1_wgrad": BULK},
            "fc2_fprop": {**PIPE, "num_splits": 2},
        },
        overlap_disable_fc1=True,
    ),
    "dgrads that scatter": config(
        {
            "qkv_dgrad": {**RING, "use_ce": False, "num_sm": 4},
            "fc1_dgrad": PIPE,
            "fc2_fprop": {**RING, "set_sm_margin": True},
        },
        overlap_rs_dgrad=True,
        bulk_wgrad=False,
    ),
    "every method": config(
        {
            **{"qkv_dgrad": BULK, "qkv_wgrad": BULK, "proj_fprop": PIPE, "fc1_fprop": RING, "fc1_dgrad": RING},
            "fc2_fprop": RING,
        },
        overlap_rs_dgrad=True,
        overlap_disable_qkv=True,
    ),
    "dgrad set up to scatter and not used": config({"fc1_dgrad": RING}, bulk_dgrad=False),
    "the library's slots": config({}, overlap_ag=False, overlap_rs=False),
    "everything off": config({}, overlap=False),
    "everything off, with more to read": config({"fc2_fprop": PIPE}, overlap=False, overlap_disable_qkv=True),
}

each_config = pytest.mark.parametrize("given", CONFIGS.values(), ids=CONFIGS)


@pytest.fixture(params=["stand-in", "installed"])
def bridge(request: pytest.FixtureRequest) -> ModuleType:
    return bridge_stand_in if request.param == "stand-in" else installed_bridge()


class Anything(ModuleType):
    """A module that has every name, as a class of its own."""

    def __getattr__(self, name: str) -> Any:
        return type(name, (), {})


def installed_bridge() -> ModuleType:
    """Megatron-Bridge's real module, without what it imports: the package itself needs Transformer Engine and CUDA.

    `pip install --no-deps megatron-bridge` is enough for it.
    """
    try:
        found = importlib.metadata.distribution("megatron-bridge")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs megatron-bridge")
    path = Path(str(found.locate_file(BRIDGE.replace(".", "/") + ".py")))
    tree, module = ast.parse(path.read_text()), ModuleType(BRIDGE)
    imported = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    foreign = {"transformer_engine", *(name for name in imported if name.startswith("megatron."))}
    # dataclasses look their module up.
    known: dict[str, ModuleType] = {name: Anything(name) for name in foreign} | {BRIDGE: module}
    with patch.dict(sys.modules, known):
        exec(compile(tree, str(path), "exec"), module.__dict__)
    return module


def model_after(bridge: ModuleType, text: str, **changed: Any) -> SimpleNamespace:
    """The model's configuration once a recipe has done what the preset's comments say and Megatron-Bridge has set up
    its communication. `changed` are the recipe's own."""
    model = SimpleNamespace(
        **{**SWITCH_DEFAULTS, "tp_comm_overlap": False, "tp_comm_overlap_cfg": None},
        tensor_model_parallel_size=4,
        sequence_parallel=True,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        overlap_moe_expert_parallel_comm=False,
    )
    vars(model).update(changed)
    recipe = SimpleNamespace(model=model, comm_overlap=None)
    advice = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith(("#   from ", "#   cfg."))]
    known: dict[str, ModuleType] = {"transformer_engine": Anything("transformer_engine"), BRIDGE: bridge}
    with patch.dict(sys.modules, known):
        names: dict[str, Any] = {"cfg": recipe}
        exec(text, names)
        exec("\n".join(advice), names)
        recipe.comm_overlap.data_parallel_size = 1
        recipe.comm_overlap.finalize()
        recipe.comm_overlap.setup(model, object(), object())
    return model


@each_config
def test_what_is_written_is_read_back_whole(tmp_path: Path, given: OverlapConfig) -> None:
    assert (overlap_cfg.slots_refusal(given.slots), overlap_cfg.switches_refusal(given)) == (None, None)
    on = given.switches["tp_comm_overlap"]
    assert json.loads(exports.ub_cfgs_json(given)) == (given.slots if on else None)
    path = tmp_path / "overlap.yaml"
    path.write_text(exports.megatron_yaml(given, ["Measured here.", "", "slot: {with: a colon}\nand two lines"]))
    assert overlap_cfg.read(path) == given
    assert yaml.safe_load(path.read_text()) == given.slots
    assert path.read_text().startswith("# Measured here.\n#\n# slot: {with: a colon}\n# and two lines\n")


def test_settings_without_switches_are_read_back_with_the_default_ones(tmp_path: Path) -> None:
    slots = {"fc2_fprop": PIPE}
    (tmp_path / "overlap.yaml").write_text(exports.megatron_yaml(OverlapConfig(slots, {}), []))
    assert overlap_cfg.read(tmp_path / "overlap.yaml") == OverlapConfig(slots)


@each_config
def test_megatron_bridge_hands_on_what_was_meant(bridge: ModuleType, given: OverlapConfig) -> None:
    text, on = exports.megatron_bridge_preset(given, ["Measured here."], "tp4"), given.switches["tp_comm_overlap"]
    model = model_after(bridge, text, tp_comm_overlap=not on)
    switches = {name: getattr(model, name) for name in SWITCH_DEFAULTS}
    assert ("# Keep overlap off." in text) == (not on)
    if not on:
        assert switches == {**SWITCH_DEFAULTS, "tp_comm_overlap": False}
        return
    assert switches == given.switches
    assert model.tp_comm_overlap_cfg.keys() == given.slots.keys()
    for slot, setting in given.slots.items():
        handed = model.tp_comm_overlap_cfg[slot]
        assert {knob: handed[knob] for knob in setting.keys() & handed.keys()}.items() <= setting.items()
        for knob in setting.keys() - handed.keys():
            # A ring exchange uses copy engines unless the setting says otherwise.
            is_default = (knob, setting[knob]) == ("use_ce", True)
            assert (f"#   {slot}: {knob}={setting[knob]}\n" in text) is not is_default
        # All that it adds is what initialize_ub would do anyway.
        assert {handed[knob] for knob in handed.keys() - setting.keys()} <= {False}


@pytest.mark.parametrize("off", [{"tensor_model_parallel_size": 1}, {"sequence_parallel": False}])
def test_megatron_bridge_turns_off_what_the_preset_says_it_does(bridge: ModuleType, off: dict[str, Any]) -> None:
    text = exports.megatron_bridge_preset(CONFIGS["every method"], [], "overlaps")
    assert not model_after(bridge, text, **off).tp_comm_overlap


def test_a_preset_takes_open_knobs_from_the_slot_as_transformer_engine_does(bridge: ModuleType) -> None:
    sparse = {
        "qkv_fprop": {"method": "ring_exchange"},
        "qkv_dgrad": {},
        "proj_fprop": {"method": "ring_exchange", "num_sm": 2},
        "fc1_dgrad": {"method": "ring_exchange"},
        "fc2_fprop": {"num_sm": 8},
    }
    text = exports.megatron_bridge_preset(config(sparse, overlap_rs_dgrad=True), [], "overlaps")
    plain = {"atomic_gemm": False, "fp8_buf": False}
    ring = {"method": "ring_exchange", "num_sm": 1, "cga_size": 1, "set_sm_margin": False, "aggregate": False, **plain}
    assert model_after(bridge, text).tp_comm_overlap_cfg == {
        "qkv_fprop": ring,
        "qkv_dgrad": {"method": "bulk", "num_sm": 16, "cga_size": 2, "set_sm_margin": True},
        # initialize_ub's defaults are those of a pipeline here, whatever the method.
        "proj_fprop": {**ring, "num_sm": 2, "cga_size": 2, "set_sm_margin": True},
        "fc1_dgrad": ring,
        "fc2_fprop": {**PIPE, "num_sm": 8, **plain},
    }


def test_the_stand_in_has_the_fields_of_the_installed_megatron_bridge() -> None:
    real = installed_bridge()

    def defaults(module: ModuleType, name: str) -> dict[str, Any]:
        return {field.name: field.default for field in dataclasses.fields(getattr(module, name))}

    for name in ("PipelineOverlapCfg", "RingExchangeOverlapCfg", "BulkOverlapCfg", "TransformerLayerTPOverlapCfg"):
        assert defaults(bridge_stand_in, name) == defaults(real, name)
    assert defaults(bridge_stand_in, "CommOverlapConfig").items() <= defaults(real, "CommOverlapConfig").items()


def initialise(ranks: Any, files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What userbuffers are made of each file's slots."""
    from transformer_engine.pytorch.module import base

    from overlap_sweep.backends.transformer_engine import userbuffers

    made: dict[str, Any] = {}
    for file, slots in files.items():
        userbuffers.initialize(1024, 1024, ranks.world_size, False, "gloo", slots)
        made[file] = {slot: type(base.get_ub(slot, False)).__name__ for slot in slots}
        userbuffers.destroy()
    return made


@pytest.mark.gpu(count=2)
@pytest.mark.skipif(bool(installed.missing()), reason="needs Transformer Engine")
def test_transformer_engine_takes_every_file(tmp_path: Path) -> None:
    given = CONFIGS["every method"]
    (tmp_path / "megatron.yaml").write_text(exports.megatron_yaml(given, ["Measured here."]))
    (tmp_path / "ub_cfgs.json").write_text(exports.ub_cfgs_json(given))
    preset = exports.megatron_bridge_preset(given, [], "overlaps")
    files = {
        "yaml": yaml.safe_load((tmp_path / "megatron.yaml").read_text()),
        "json": json.loads((tmp_path / "ub_cfgs.json").read_text()),
        "bridge": model_after(bridge_stand_in, preset).tp_comm_overlap_cfg,
    }
    kinds = {"ring_exchange": "CommOverlapP2P", "pipeline": "CommOverlap", "bulk": "CommOverlap"}
    expected = {slot: kinds[setting["method"]] for slot, setting in given.slots.items()}
    for made in run_ranks(2, initialise, files, device="cuda"):
        assert made == {"yaml": expected, "json": expected, "bridge": expected}
