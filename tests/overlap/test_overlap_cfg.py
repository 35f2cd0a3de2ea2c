"""Files that Megatron-LM takes as tp_comm_overlap_cfg, ours and others'."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig
from overlap_sweep.report.files import write_reports
from overlap_sweep.workloads import analyse
from tests.made_sweeps import write_sweep
from tests.make_point import make_point, operator_config, pass_times

SLOTS: dict[str, space.Setting] = {
    "qkv_fprop": {"method": "ring_exchange", "num_sm": 1, "aggregate": True, "use_ce": True},
    "proj_fprop": {"method": "pipeline", "num_sm": 16, "num_splits": 4, "cga_size": 2, "set_sm_margin": True},
    "fc1_dgrad": {"method": "bulk", "num_sm": 8},
    "fc1_wgrad": {"method": "bulk", "num_sm": 8},
    "fc2_dgrad": {"method": "ring_exchange", "atomic_gemm": False, "fp8_buf": True},
}
RING, BULK, PIPELINE = ({"method": method} for method in ("ring_exchange", "bulk", "pipeline"))
ON, QKV_OFF, FC1_OFF = "tp_comm_overlap_rs_dgrad", "tp_comm_overlap_disable_qkv", "tp_comm_overlap_disable_fc1"
OTHERWISE = {name: not on for name, on in SWITCH_DEFAULTS.items()}
# As in Megatron-LM's and NeMo's own files.
ONLY_OF_THE_ENGINE = {
    "proj_fprop": {"is_reduce_scatter": 1, "comm_priority": 0, "pipeline_rs_overlap_first_gemm": True}
}
AS_NUMBERS = {"fc2_fprop": {"method": "pipeline", "set_sm_margin": 1, "fp8_buf": 0}}


def written(directory: Path, text: str | dict[str, Any]) -> Path:
    path = directory / "cfg.yaml"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return path


def config(slots: dict[str, Any], **switches: bool) -> OverlapConfig:
    return OverlapConfig(slots, {**SWITCH_DEFAULTS, **switches})


@pytest.mark.parametrize(
    ("text", "slots", "switches"),
    [
        ("", {}, {}),
        *((f"{text}\n{{}}\n", {}, {}) for text in ("", "---", "# tp_comm_of_tomorrow: true")),
        *((f"# {text}\n{{}}\n", {}, {}) for text in ("tp_comm_bulk_wgrad is false", "with tp_comm_bulk_wgrad: false")),
        # A comment decides; without one a dgrad that scatters its own output is switched on.
        *(
            (f"# In its configuration:\n#   {name}: {str(on).lower()}  (--x)  y\n{{}}", {}, {name: on})
            for name, on in OTHERWISE.items()
        ),
        (f"#   {ON}: false\nfc1_dgrad: {{method: pipeline}}", {"fc1_dgrad": PIPELINE}, {}),
        *((slots, slots, {ON: True}) for slots in ({"qkv_dgrad": RING}, {"qkv_dgrad": PIPELINE}, {"fc1_dgrad": RING})),
        ({"fc1_dgrad": PIPELINE}, {"fc1_dgrad": PIPELINE}, {ON: True}),
        *((slots, slots, {}) for slots in (SLOTS, {"fc1_dgrad": BULK}, ONLY_OF_THE_ENGINE, AS_NUMBERS)),
    ],
)
def test_slots_are_read_as_they_are_and_switches_from_slots_and_comments(
    tmp_path: Path, text: str | dict[str, Any], slots: dict[str, Any], switches: dict[str, bool]
) -> None:
    assert overlap_cfg.read(written(tmp_path, text)) == config(slots, **switches)


def reported(directory: Path, tp_size: int) -> OverlapConfig:
    """What `analyze.py` wrote for the TP size, read again."""
    write_reports(analyse(directory, AnalysisConfig()), directory)
    return overlap_cfg.read(directory / f"optimal_tp_comm_overlap_cfg_tp{tp_size}.yaml")


def test_our_own_report_comes_back_with_its_switches(tmp_path: Path) -> None:
    """At TP 4, where nothing overlaps, all of it is off; at TP 8 dgrads scatter their own output."""
    bulk = {"method": "bulk", "num_sm": 4}
    slots = {"fc1_dgrad": bulk, "fc1_wgrad": bulk, "fc2_fprop": {"method": "pipeline", "num_sm": 8, "num_splits": 4}}
    assert reported(write_sweep(tmp_path), 2) == config(slots, tp_comm_overlap_ag=False)
    assert reported(tmp_path, 4) == config({}, tp_comm_overlap=False)
    for operator in ("qkv", "fc1"):
        ring = operator_config(8, operator, "dgrad", "ring_exchange", num_sm=2)
        make_point("operator", tmp_path, ring, bwd=pass_times(90.0))
    scattering = reported(tmp_path, 8)
    assert (set(scattering.slots), scattering.switches[ON]) == ({"qkv_dgrad", "fc1_dgrad"}, True)
    assert overlap_cfg.switches_refusal(scattering) is None


@pytest.mark.parametrize("slots", [SLOTS, {}])
@pytest.mark.parametrize("switches", [SWITCH_DEFAULTS, OTHERWISE])
def test_what_a_layer_was_given_comes_back(
    tmp_path: Path, slots: dict[str, space.Setting], switches: dict[str, bool]
) -> None:
    assert overlap_cfg.read(written(tmp_path, overlap_cfg.text(config(slots, **switches)))) == config(slots, **switches)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, "cannot be read") for text in ("fc1_fprop: {method: ring_exchange", "a: b: c")),
        *((text, "is not a tp_comm_overlap_cfg") for text in ("[1, 2]", "bulk", "fc1_dgrad: bulk", "fc1_dgrad:")),
        ("fc3_fprop: {}", "fc3_fprop is not a slot"),
        ("1: {method: bulk}", "1 is not a slot"),
        ("proj_wgrad: {method: bulk}", "proj_wgrad follows its dgrad"),
        ("fc2_wgrad: {}", "fc2_wgrad follows its dgrad"),
        ("fc1_dgrad: {method: bulk, sms: 4}", "fc1_dgrad has no knob sms; choose among num_sm, aggregate"),
        ("fc1_fprop: {1: 2, sms: 3}", "fc1_fprop has no knob 1, sms"),
        ("fc1_dgrad: {method: magic}", "fc1_dgrad.method must be one of none, bulk"),
        ("fc1_dgrad: {method: [bulk]}", "fc1_dgrad.method must be one of none, bulk"),
        ("fc2_fprop: {num_sm: many}", "fc2_fprop.num_sm=many must be an integer of at least 1"),
        ("fc2_fprop: {num_splits: [4]}", "fc2_fprop.num_splits=[4] must be an integer of at least 1"),
        ("fc2_fprop: {aggregate: maybe}", "fc2_fprop.aggregate=maybe must be true or false"),
        ("fc2_fprop: {comm_priority: 1}", "fc2_fprop.comm_priority=1 must be an integer from -5 to 0"),
    ],
)
def test_what_is_no_such_file_is_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError) as error:
        overlap_cfg.read(path)
    assert re.fullmatch(rf"{re.escape(str(path))}.*{re.escape(says)}.*\.", str(error.value))


def test_a_file_that_is_not_there_or_no_text_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    for name in ("nowhere.yaml", "", "binary.yaml"):
        with pytest.raises(UserError, match=r"cannot be read \(.*\)"):
            overlap_cfg.read(tmp_path / name)


@pytest.mark.parametrize(
    ("slots", "says"),
    [
        (
            {"fc1_dgrad": PIPELINE, "fc1_wgrad": BULK},
            "fc1_wgrad must have no overlap if fc1_dgrad overlaps by pipeline",
        ),
        ({"fc1_fprop": BULK}, "fc1_fprop takes ring_exchange, not bulk"),
        ({"qkv_wgrad": {"num_sm": 4}, "qkv_dgrad": RING}, "qkv_wgrad must have no overlap if qkv_dgrad"),
        # Beside another operator's it can; and knobs without a method are the slot's defaults.
        ({"fc1_dgrad": PIPELINE, "qkv_dgrad": BULK, "qkv_wgrad": BULK}, "None"),
        ({"fc1_fprop": {"num_sm": 2}}, "None"),
    ],
)
def test_what_transformer_engine_would_not_take_is_refused(slots: dict[str, dict[str, Any]], says: str) -> None:
    assert str(overlap_cfg.slots_refusal(slots)).startswith(says)


@pytest.mark.parametrize(
    ("slots", "switches", "says"),
    [
        ({}, {}, "None"),
        ({"fc1_dgrad": RING}, {"tp_comm_bulk_dgrad": False}, "None"),
        ({"fc1_dgrad": RING, "qkv_dgrad": PIPELINE}, {ON: True}, "None"),
        ({"fc1_dgrad": RING}, {ON: True}, f"{ON} applies to qkv and fc1 alike, but qkv_dgrad is not set"),
        ({"qkv_dgrad": RING}, {ON: True}, f"{ON} applies to qkv and fc1 alike, but fc1_dgrad is not set"),
        ({"qkv_dgrad": RING, "fc1_dgrad": BULK}, {ON: True}, f"{ON} applies to qkv and fc1 alike, but fc1_dgrad is"),
        ({"fc1_dgrad": RING}, {ON: True, QKV_OFF: True}, "None"),
        ({"qkv_dgrad": RING}, {ON: True, FC1_OFF: True}, "None"),
        ({}, {ON: True, QKV_OFF: True, FC1_OFF: True}, "None"),
        ({"fc1_dgrad": RING}, {ON: True, "tp_comm_overlap": False}, "None"),
        # Its buffers are not for bulk.
        ({"fc1_dgrad": RING}, {}, f"{ON} is off, so fc1_dgrad overlaps by bulk"),
        ({"fc1_dgrad": RING, "qkv_dgrad": RING}, {ON: True, FC1_OFF: True}, f"{FC1_OFF} is on, so fc1_dgrad"),
    ],
)
def test_a_scattering_dgrad_holds_for_qkv_and_fc1_alike(
    slots: dict[str, Any], switches: dict[str, bool], says: str
) -> None:
    """Where a layer has them: under which kinds of layer, golden refusals say, too."""
    given = config(slots, **switches)
    assert str(overlap_cfg.switches_refusal(given)).startswith(says)
    assert overlap_cfg.switches_refusal(given, ["proj", "fc2"]) is None


@pytest.mark.parametrize(
    ("off", "operators", "expected"),
    [
        ("", "proj", True),
        ("overlap", "qkv proj fc1 fc2", False),
        ("overlap_ag overlap_rs", "proj", False),
        ("overlap_ag overlap_rs", "qkv", True),
        ("overlap_ag bulk_dgrad bulk_wgrad", "qkv", False),
        ("overlap_ag bulk_dgrad bulk_wgrad", "fc1 fc2", True),
    ],
)
def test_whether_a_layer_overlaps_at_all(off: str, operators: str, expected: bool) -> None:
    given = config({}, **{f"tp_comm_{name}": False for name in off.split()})
    assert overlap_cfg.overlaps(given, operators.split()) is expected
