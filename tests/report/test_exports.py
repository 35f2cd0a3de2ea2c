"""Every export, taken back by the library that it is for or by what that library does with it."""

from __future__ import annotations

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

from overlap_sweep import overlap_cfg, space
from overlap_sweep.backends import transformer_engine
from overlap_sweep.backends.transformer_engine.switches import MEGATRON_NAMES
from overlap_sweep.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig
from overlap_sweep.report import exports
from tests.processes import run_ranks
from tests.report import bridge_stand_in

BRIDGE = "megatron.bridge.training.comm_overlap"

RING = {"aggregate": False, "num_sm": 1, "cga_size": 1, "set_sm_margin": False, "use_ce": True}
PIPE = {"num_sm": 16, "num_splits": 4, "cga_size": 2, "set_sm_margin": True}
BULK = {"num_sm": 4, "cga_size": 2, "set_sm_margin": False}


def config(slots: dict[str, Any], **changed: bool) -> OverlapConfig:
    return OverlapConfig(slots, {**SWITCH_DEFAULTS, **{f"tp_comm_{name}": on for name, on in changed.items()}})


CONFIGS = {
    "pipelined fprop beside bulk pairs": config(
        {
            "qkv_fprop": {"method": "ring_exchange", **RING, "aggregate": True},
            "qkv_dgrad": {"method": "bulk", **BULK},
            "qkv_wgrad": {"method": "bulk", **BULK, "num_sm": 24},
            "proj_fprop": {"method": "pipeline", **PIPE, "fp8_buf": True},
            "proj_dgrad": {"method": "ring_exchange", **RING},
            "fc1_dgrad": {"method": "bulk", **BULK},
            "fc1_wgrad": {"method": "bulk", **BULK},
            "fc2_fprop": {"method": "pipeline", **PIPE, "num_splits": 2},
        },
        overlap_disable_fc1=True,
    ),
    "dgrads that scatter": config(
        {
            "qkv_dgrad": {"method": "ring_exchange", **RING, "use_ce": False, "num_sm": 4},
            "fc1_dgrad": {"method": "pipeline", **PIPE},
            "fc2_fprop": {"method": "ring_exchange", **RING, "set_sm_margin": True},
        },
        overlap_rs_dgrad=True,
        bulk_wgrad=False,
    ),
    "every method": config(
        {
            "qkv_dgrad": {"method": "bulk", **BULK},
            "qkv_wgrad": {"method": "bulk", **BULK},
            "proj_fprop": {"method": "pipeline", **PIPE},
            "fc1_fprop": {"method": "ring_exchange", **RING},
            "fc1_dgrad": {"method": "ring_exchange", **RING},
            "fc2_fprop": {"method": "ring_exchange", **RING},
        },
        overlap_rs_dgrad=True,
        overlap_disable_qkv=True,
    ),
    "dgrad set up to scatter and not used": config(
        {"fc1_dgrad": {"method": "ring_exchange", **RING}}, bulk_dgrad=False
    ),
    "the library's slots": config({}, overlap_ag=False, overlap_rs=False),
    "everything off": config({}, overlap=False),
    "everything off, with more to read": config(
        {"fc2_fprop": {"method": "pipeline", **PIPE}}, overlap=False, overlap_disable_qkv=True
    ),
}

each_config = pytest.mark.parametrize("given", CONFIGS.values(), ids=CONFIGS)


def bridge_names(request: pytest.FixtureRequest) -> ModuleType:
    return bridge_stand_in if request.param == "stand-in" else installed_bridge()


bridge = pytest.fixture(bridge_names, params=["stand-in", "installed"])


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


def test_the_configurations_make_sense() -> None:
    for given in CONFIGS.values():
        assert overlap_cfg.slots_refusal(given.slots) is None
        assert overlap_cfg.switches_refusal(given) is None
    methods = {setting["method"] for setting in CONFIGS["every method"].slots.values()}
    assert methods == set(space.METHODS) - {"none"}


@each_config
def test_what_is_written_is_read_back_whole(tmp_path: Path, given: OverlapConfig) -> None:
    assert json.loads(exports.ub_cfgs_json(given)) == given.slots
    arguments, on = exports.te_layer_arguments(given), given.switches["tp_comm_overlap"]
    assert arguments.pop("ub_tp_comm_overlap") == on
    assert arguments == {ours: on and given.switches[theirs] for ours, theirs in MEGATRON_NAMES.items()}
    path = tmp_path / "overlap.yaml"
    path.write_text(exports.megatron_yaml(given, ["Measured here.", "", "slot: {with: a colon}\nand two lines"]))
    assert overlap_cfg.read(path) == given
    assert yaml.safe_load(path.read_text()) == given.slots
    assert path.read_text().startswith("# Measured here.\n#\n# slot: {with: a colon}\n# and two lines\n")


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "dgrads that scatter",
            [
                "overlap: true  (--tp-comm-overlap)",
                "overlap_rs_dgrad: true  (--tp-comm-overlap-rs-dgrad)",
                "bulk_wgrad: false  (--disable-tp-comm-bulk-wgrad)",
            ],
        ),
        ("every method", ["overlap_disable_qkv: true  (no option: a field of TransformerConfig)"]),
        ("dgrad set up to scatter and not used", ["overlap_rs_dgrad: false  (its default)"]),
        ("everything off", ["overlap: false"]),
    ],
)
def test_the_yaml_names_the_options_of_megatron_lm(name: str, lines: list[str]) -> None:
    text = exports.megatron_yaml(CONFIGS[name], [])
    told = [line.removeprefix("#   tp_comm_") for line in text.splitlines() if line.startswith("#   tp_comm_")]
    assert set(lines) <= set(told)
    assert ("tp_comm_bulk_dgrad" in text) == (name == "dgrad set up to scatter and not used")
    assert text.endswith("\n{}\n") == (CONFIGS[name].slots == {})


def test_the_settings_of_a_single_operator_go_with_the_default_switches(tmp_path: Path) -> None:
    slots = {"fc2_fprop": {"method": "pipeline", **PIPE}}
    path = tmp_path / "overlap.yaml"
    path.write_text(exports.megatron_yaml(OverlapConfig(slots, {}), []))
    assert overlap_cfg.read(path) == OverlapConfig(slots)


@each_config
def test_megatron_bridge_hands_on_what_was_meant(bridge: ModuleType, given: OverlapConfig) -> None:
    text = exports.megatron_bridge_preset(given, ["Measured here."], "overlaps_of_tp4")
    model = model_after(bridge, text)
    assert {name: getattr(model, name) for name in SWITCH_DEFAULTS} == (
        given.switches if given.switches["tp_comm_overlap"] else {**SWITCH_DEFAULTS, "tp_comm_overlap": False}
    )
    if not given.switches["tp_comm_overlap"]:
        return
    assert model.tp_comm_overlap_cfg.keys() == given.slots.keys()
    for slot, setting in given.slots.items():
        handed = model.tp_comm_overlap_cfg[slot]
        assert {knob: handed[knob] for knob in setting.keys() & handed.keys()}.items() <= setting.items()
        for knob in setting.keys() - handed.keys():
            assert f"#   {slot}: {knob}={setting[knob]}\n" in text
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
        "fc2_fprop": {"method": "pipeline", **PIPE, "num_sm": 8, **plain},
    }


def test_a_preset_tells_what_is_lost_from_what_goes_without_saying() -> None:
    text = exports.megatron_bridge_preset(CONFIGS["dgrads that scatter"], [], "overlaps")
    lost, _, same = text.partition("which Transformer Engine has by default:")
    assert "#   qkv_dgrad: use_ce=False\n" in lost.partition("they are lost:")[2]
    assert "#   fc2_fprop: use_ce=True\n" in same
    text = exports.megatron_bridge_preset(CONFIGS["every method"], [], "overlaps")
    assert "lost" not in text
    text = exports.megatron_bridge_preset(config({"qkv_dgrad": {"method": "bulk", **BULK}}), [], "overlaps")
    assert "no field" not in text


def test_without_overlap_the_preset_says_so(bridge: ModuleType) -> None:
    text = exports.megatron_bridge_preset(CONFIGS["everything off"], [], "overlaps")
    assert "# Don't overlap." in text
    assert not model_after(bridge, text, tp_comm_overlap=True).tp_comm_overlap


def test_the_stand_in_has_the_fields_of_the_installed_megatron_bridge() -> None:
    real = installed_bridge()
    for name in ("PipelineOverlapCfg", "RingExchangeOverlapCfg", "BulkOverlapCfg", "TransformerLayerTPOverlapCfg"):
        known, found = (
            {field.name: field.default for field in dataclasses.fields(getattr(module, name))}
            for module in (bridge_stand_in, real)
        )
        assert known == found
    fields = {field.name: field.default for field in dataclasses.fields(bridge_stand_in.CommOverlapConfig)}
    assert fields.items() <= {field.name: field.default for field in dataclasses.fields(real.CommOverlapConfig)}.items()


def test_what_no_argument_of_a_layer_says_is_told() -> None:
    assert exports.te_layer_lacks(CONFIGS["every method"]) == ["tp_comm_overlap_disable_qkv"]
    assert exports.te_layer_lacks(CONFIGS["dgrads that scatter"]) == []
    assert exports.te_layer_lacks(CONFIGS["everything off, with more to read"]) == []


def initialise(ranks: Any, files: dict[str, dict[str, Any]], arguments: dict[str, bool]) -> dict[str, Any]:
    """What userbuffers are made of each file's slots; and whether a layer takes the arguments."""
    import inspect

    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.module import base

    from overlap_sweep.backends.transformer_engine import userbuffers

    made: dict[str, Any] = {}
    for file, slots in files.items():
        userbuffers.initialize(userbuffers.Userbuffers(1024, 1024, ranks.world_size, False, "gloo", slots))
        made[file] = {slot: type(base.get_ub(slot, False)).__name__ for slot in slots}
        userbuffers.destroy()
    layer = inspect.signature(te.TransformerLayer.__init__).parameters
    return {**made, "arguments": sorted(arguments.keys() - layer.keys())}


@pytest.mark.gpu(count=2)
@pytest.mark.skipif(bool(transformer_engine.missing()), reason="needs Transformer Engine")
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
    for made in run_ranks(2, initialise, files, exports.te_layer_arguments(given), device="cuda"):
        assert made == {"yaml": expected, "json": expected, "bridge": expected, "arguments": []}
