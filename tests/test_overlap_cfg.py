"""Files that Megatron-LM takes as tp_comm_overlap_cfg, ours and others'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from overlap_sweep import overlap_cfg, space
from overlap_sweep.analysis.sweep import analyse
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.errors import UserError
from overlap_sweep.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig
from overlap_sweep.report.files import write_reports
from tests.made_sweeps import write_sweep
from tests.make_point import make_point, operator_config, pass_times

SLOTS: dict[str, space.Setting] = {
    "qkv_fprop": {"method": "ring_exchange", "num_sm": 1, "aggregate": True, "use_ce": True},
    "proj_fprop": {"method": "pipeline", "num_sm": 16, "num_splits": 4, "cga_size": 2, "set_sm_margin": True},
    "fc1_dgrad": {"method": "bulk", "num_sm": 8},
    "fc1_wgrad": {"method": "bulk", "num_sm": 8},
    "fc2_dgrad": {"method": "ring_exchange", "atomic_gemm": False, "fp8_buf": True},
}


def written(directory: Path, text: str | dict[str, Any]) -> Path:
    path = directory / "cfg.yaml"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return path


def changed(**switches: bool) -> dict[str, bool]:
    return {**SWITCH_DEFAULTS, **switches}


@pytest.mark.parametrize(
    "slots",
    [
        SLOTS,
        # What only Transformer Engine knows, and switches as numbers, as in Megatron-LM's and NeMo's own files.
        {"proj_fprop": {"is_reduce_scatter": 1, "comm_priority": 0, "pipeline_rs_overlap_first_gemm": True}},
        {"fc2_fprop": {"method": "pipeline", "set_sm_margin": 1, "fp8_buf": 0}},
    ],
)
def test_slots_are_read_as_they_are_under_megatron_cores_defaults(tmp_path: Path, slots: dict[str, Any]) -> None:
    assert overlap_cfg.read(written(tmp_path, slots)) == OverlapConfig(slots, SWITCH_DEFAULTS)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}\n", "# nothing but a comment\n", "---\n", "# tp_comm_of_tomorrow: true\n{}\n"),
        *("# tp_comm_bulk_wgrad is false\n{}\n", "# with tp_comm_bulk_wgrad: false\n{}\n"),
    ],
)
def test_a_file_without_slots_and_switches_is_the_default(tmp_path: Path, text: str) -> None:
    assert overlap_cfg.read(written(tmp_path, text)) == OverlapConfig()


ON, QKV_OFF, FC1_OFF = "tp_comm_overlap_rs_dgrad", "tp_comm_overlap_disable_qkv", "tp_comm_overlap_disable_fc1"


@pytest.mark.parametrize(
    ("text", "switches"),
    [
        # A dgrad that scatters its own output is switched on, unless a comment says otherwise.
        *((f"{op}_dgrad: {{method: {m}}}", {ON: True}) for op in ("qkv", "fc1") for m in ("ring_exchange", "pipeline")),
        ("fc1_dgrad: {method: bulk}", {}),
        (
            f"#   {ON}: false\n#   tp_comm_bulk_wgrad: false  (--x)  y\nfc1_dgrad: {{method: pipeline}}",
            {"tp_comm_bulk_wgrad": False},
        ),
        *(
            (f"# In Megatron-Core's configuration:\n#   {name}: {str(not on).lower()}  (--x)  y\n{{}}", {name: not on})
            for name, on in SWITCH_DEFAULTS.items()
        ),
    ],
)
def test_switches_are_read_from_slots_and_comments(tmp_path: Path, text: str, switches: dict[str, bool]) -> None:
    assert overlap_cfg.read(written(tmp_path, text)).switches == changed(**switches)


def reported(directory: Path, tp_size: int) -> OverlapConfig:
    """What `analyze.py` wrote for the TP size, read again."""
    write_reports(analyse(directory, AnalysisConfig()), directory, "python analyze.py here")
    return overlap_cfg.read(directory / f"optimal_tp_comm_overlap_cfg_tp{tp_size}.yaml")


def test_our_own_report_comes_back_with_its_switches(tmp_path: Path) -> None:
    read = reported(write_sweep(tmp_path), 2)
    assert read.slots == {
        "fc1_dgrad": {"method": "bulk", "num_sm": 4},
        "fc1_wgrad": {"method": "bulk", "num_sm": 4},
        "fc2_fprop": {"method": "pipeline", "num_sm": 8, "num_splits": 4},
    }
    assert read.switches == changed(tp_comm_overlap_disable_fc1=True)


def test_a_report_of_no_overlap_comes_back_as_switches_alone(tmp_path: Path) -> None:
    read = reported(write_sweep(tmp_path), 4)
    assert read == OverlapConfig({}, changed(tp_comm_bulk_dgrad=False, tp_comm_bulk_wgrad=False))


def test_a_report_of_a_scattering_dgrad_comes_back(tmp_path: Path) -> None:
    for operator in ("qkv", "fc1"):
        ring = operator_config(2, operator, "dgrad", "ring_exchange", num_sm=2)
        make_point("operator", tmp_path, ring, bwd=pass_times(90.0))
    read = reported(tmp_path, 2)
    assert set(read.slots) == {"qkv_dgrad", "fc1_dgrad"}
    assert read.switches == changed(tp_comm_overlap_rs_dgrad=True)
    assert overlap_cfg.switches_refusal(read) is None


@pytest.mark.parametrize("slots", [SLOTS, {}])
@pytest.mark.parametrize("switches", [SWITCH_DEFAULTS, {name: not on for name, on in SWITCH_DEFAULTS.items()}])
def test_what_a_layer_was_given_comes_back(
    tmp_path: Path, slots: dict[str, space.Setting], switches: dict[str, bool]
) -> None:
    config = OverlapConfig(slots, switches)
    assert overlap_cfg.read(written(tmp_path, overlap_cfg.text(config))) == config


def test_of_what_an_operator_was_given_the_slots_come_back(tmp_path: Path) -> None:
    text = overlap_cfg.text(OverlapConfig(SLOTS, {}))
    assert "not here were not overlapped" in text
    assert overlap_cfg.read(written(tmp_path, text)).slots == SLOTS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, "cannot be read") for text in ("fc1_fprop: {method: ring_exchange", "a: b: c")),
        *((text, "is no tp_comm_overlap_cfg") for text in ("[1, 2]", "bulk", "fc1_dgrad: bulk", "fc1_dgrad:")),
        ("fc3_fprop: {}", "fc3_fprop is no slot"),
        ("1: {method: bulk}", "1 is no slot"),
        ("proj_wgrad: {method: bulk}", "proj_wgrad rides on its dgrad"),
        ("fc2_wgrad: {}", "fc2_wgrad rides on its dgrad"),
        ("fc1_dgrad: {method: bulk, sms: 4}", "fc1_dgrad has no sms; its knobs are num_sm, aggregate"),
        ("fc1_fprop: {1: 2, sms: 3}", "fc1_fprop has no 1, sms"),
        ("fc1_dgrad: {method: magic}", "fc1_dgrad takes bulk, ring_exchange, pipeline, not magic"),
        ("fc1_dgrad: {method: [bulk]}", "fc1_dgrad takes bulk, ring_exchange, pipeline, not"),
        ("fc2_fprop: {method: pipeline, num_sm: many}", "fc2_fprop: num_sm=many is no number"),
        ("fc2_fprop: {method: pipeline, num_splits: [4]}", "fc2_fprop: num_splits=[4] is no number"),
        ("fc2_fprop: {method: pipeline, aggregate: maybe}", "fc2_fprop: aggregate=maybe is no number"),
        ("fc2_fprop: {method: pipeline, num_splits: 0}", "fc2_fprop: num_splits=0 is less than 1"),
    ],
)
def test_what_is_no_such_file_is_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError) as error:
        overlap_cfg.read(path)
    message = str(error.value)
    assert message.startswith(str(path))
    assert says in message
    assert "\n" not in message
    assert message.endswith(".")


def test_a_file_that_is_not_there_or_no_text_is_one_clear_error(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    for path in (tmp_path / "nowhere.yaml", tmp_path, binary):
        with pytest.raises(UserError, match=r"cannot be read \(.*\)"):
            overlap_cfg.read(path)


def test_every_slot_takes_its_methods_and_no_others() -> None:
    for operator in space.OPERATORS:
        for phase in space.PHASES:
            takes = space.methods_of(operator, phase)
            for method in space.METHODS:
                reason = overlap_cfg.slots_refusal({space.slot(operator, phase): {"method": method}})
                assert (reason is None) == (method in takes), (operator, phase, method)


RING, BULK, PIPELINE = {"method": "ring_exchange"}, {"method": "bulk"}, {"method": "pipeline"}


@pytest.mark.parametrize(
    ("slots", "says"),
    [
        ({"fc1_fprop": PIPELINE}, "fc1_fprop takes ring_exchange, not pipeline"),
        ({"proj_dgrad": PIPELINE}, "proj_dgrad takes ring_exchange, not pipeline"),
        ({"fc2_fprop": BULK}, "fc2_fprop takes ring_exchange, pipeline, not bulk"),
        ({"fc1_dgrad": PIPELINE, "fc1_wgrad": BULK}, "fc1_wgrad cannot be configured beside fc1_dgrad by pipeline"),
        ({"qkv_wgrad": {"num_sm": 4}, "qkv_dgrad": RING}, "qkv_wgrad cannot be configured beside qkv_dgrad"),
        # Beside another operator's it can; and knobs without a method are the slot's defaults.
        ({"fc1_dgrad": PIPELINE, "qkv_dgrad": BULK, "qkv_wgrad": BULK}, None),
        ({"fc1_fprop": {"num_sm": 2}}, None),
    ],
)
def test_what_transformer_engine_would_not_take_is_read_and_refused(
    tmp_path: Path, slots: dict[str, dict[str, Any]], says: str | None
) -> None:
    reason = overlap_cfg.slots_refusal(overlap_cfg.read(written(tmp_path, slots)).slots)
    assert reason is None if says is None else says in str(reason)


@pytest.mark.parametrize(
    ("slots", "switches", "lacking"),
    [
        ({}, {}, None),
        ({"fc1_dgrad": RING}, {"tp_comm_bulk_dgrad": False}, None),
        ({"fc1_dgrad": RING, "qkv_dgrad": {"method": "pipeline"}}, {ON: True}, None),
        ({"fc1_dgrad": RING}, {ON: True}, "qkv_dgrad"),
        ({"qkv_dgrad": RING}, {ON: True}, "fc1_dgrad"),
        ({"qkv_dgrad": RING, "fc1_dgrad": BULK}, {ON: True}, "fc1_dgrad"),
        ({}, {ON: True}, "qkv_dgrad"),
        ({"fc1_dgrad": RING}, {ON: True, QKV_OFF: True}, None),
        ({"qkv_dgrad": RING}, {ON: True, FC1_OFF: True}, None),
        ({}, {ON: True, QKV_OFF: True, FC1_OFF: True}, None),
        ({"fc1_dgrad": RING}, {ON: True, "tp_comm_overlap": False}, None),
    ],
)
def test_a_scattering_dgrad_holds_for_qkv_and_fc1_alike(
    slots: dict[str, Any], switches: dict[str, bool], lacking: str | None
) -> None:
    reason = overlap_cfg.switches_refusal(OverlapConfig(slots, changed(**switches)))
    assert reason is None if lacking is None else f"{lacking} is not set to ring_exchange or pipeline" in str(reason)


@pytest.mark.parametrize(
    ("switches", "says"),
    [
        ({}, "tp_comm_overlap_rs_dgrad is off, so that fc1_dgrad overlaps in bulk"),
        ({ON: True, FC1_OFF: True}, f"{FC1_OFF} is on, so that fc1_dgrad overlaps in bulk"),
    ],
)
def test_a_scattering_dgrads_buffers_are_not_for_bulk(switches: dict[str, bool], says: str) -> None:
    config = OverlapConfig({"fc1_dgrad": RING, "qkv_dgrad": RING}, changed(**switches))
    assert says in str(overlap_cfg.switches_refusal(config, ["fc1"]))
    assert overlap_cfg.switches_refusal(config, ["proj", "fc2"]) is None


@pytest.mark.parametrize(
    ("switches", "operators", "expected"),
    [
        ({}, ["proj"], True),
        ({"tp_comm_overlap": False}, list(space.OPERATORS), False),
        ({"tp_comm_overlap_ag": False, "tp_comm_overlap_rs": False}, ["proj"], False),
        ({"tp_comm_overlap_ag": False, "tp_comm_overlap_rs": False}, ["qkv"], True),
        ({"tp_comm_overlap_ag": False, "tp_comm_bulk_dgrad": False, "tp_comm_bulk_wgrad": False}, ["qkv"], False),
        ({"tp_comm_overlap_ag": False, "tp_comm_bulk_dgrad": False, "tp_comm_bulk_wgrad": False}, ["fc1", "fc2"], True),
    ],
)
def test_whether_a_layer_overlaps_at_all(switches: dict[str, bool], operators: list[str], expected: bool) -> None:
    assert overlap_cfg.overlaps(OverlapConfig({}, changed(**switches)), operators) is expected
