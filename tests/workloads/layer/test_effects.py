"""What the report of a layer says of variants that changed nothing in what ran. Traces are recorded, times made up."""

import shutil
from pathlib import Path
from typing import Any

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS
from overlap_sweep.report.section import Answer, Section
from overlap_sweep.results.run_directory import trace_file
from overlap_sweep.workloads import analyse
from tests.golden.archives import unpack
from tests.made_sweeps import rounds
from tests.make_point import layer_config, make_point

TRACES = Path(__file__).parents[2] / "data" / "traces"
RATIOS = {"none": 1.0, "default": 0.9, "floor": 0.8}


def analysed(
    directory: Path, traces: dict[str, str], backend: str = "transformer_engine", slots: dict[str, Any] | None = None
) -> tuple[Section, Answer]:
    """A layer whose variants have these traces of layers: the default is the fastest whatever ran."""
    told: dict[str, dict[str, Any]] = {"default": {"switches": SWITCH_DEFAULTS, "settings": slots or {}}}
    variants = {name: rounds(ratio, **told.get(name, {})) for name, ratio in RATIOS.items()}
    config = layer_config(backend=backend, **{"runtime.device": "cuda"})
    names = {trace_file(0, name): f"h200x4_llama3_70b_layer_{trace}.json.gz" for name, trace in traces.items()}
    point = make_point("layer", directory, config, variants=variants, traces=list(names))
    for name, trace in names.items():
        shutil.copy(TRACES / trace, point / name)
    (section,) = analyse(directory, AnalysisConfig()).sections
    (answer,) = section.answers
    return section, answer


def effects(answer: Answer) -> dict[str, str | None]:
    return {row.name: row.effect.in_brief if row.effect else None for row in answer.compared.rows}


def test_a_variant_that_ran_is_compared_with_no_overlap(tmp_path: Path) -> None:
    section, answer = analysed(tmp_path, {"none": "none", "default": "te_default"})

    assert effects(answer) == {"none": None, "default": "calls, gemms, grid, copies", "floor": None}
    assert [(one.name, one.verdict) for one in answer.compared.rows[1].effect.settings] == [
        ("tp_comm_overlap", "in force")
    ]
    assert answer.cautions == []
    rows = section.points.table.records(section.points.rows)
    assert [row["effect"] for row in rows] == [None, "calls, gemms, grid, copies", None]


def test_an_overlap_that_did_not_run_is_named_first_and_its_gain_noise(tmp_path: Path) -> None:
    _, answer = analysed(tmp_path, {"none": "none", "default": "none"})

    assert effects(answer)["default"] == "nothing"
    assert answer.cautions == [
        "default changed nothing in what ran, so its gain is noise.",
        "As the traces show: tp_comm_overlap=True not in force: nothing like userbuffers ran.",
    ]


def test_slots_of_a_file_that_did_not_run_are_named(tmp_path: Path) -> None:
    slots = {
        "fc1_dgrad": {"method": "bulk", "num_sm": 16},
        "fc2_fprop": {"method": "ring_exchange", "num_sm": 1},
        "qkv_wgrad": {"method": "bulk", "num_sm": 4},
    }

    section, answer = analysed(tmp_path, {"none": "none", "default": "te_default"}, slots=slots)

    scattered = "in place of NCCL's reduce_scatter of 134.2 MB"
    ring, bulk = (f"userbuffers_fp16_sum_inplace_gpu_rr_rs{kind} with 16 blocks ran" for kind in ("_oop", ""))
    assert answer.cautions == [
        f"As the traces show: fc2_fprop=ring_exchange num_sm=1 not in force: 4 {ring}, {scattered}; "
        f"qkv_wgrad=bulk num_sm=4 not in force: 1 {bulk}, not num_sm=4, {scattered}."
    ]
    (exhibit,) = answer.more
    assert exhibit.listing
    assert [(row.name, row.verdict) for row in exhibit.listing.rows] == [
        ("fc1_dgrad", "in force"),
        ("fc2_fprop", "not in force"),
        ("qkv_wgrad", "not in force"),
    ]
    (layer,) = section.report["layers"]  # type: ignore[attr-defined]
    assert [slot["name"] for slot in layer["variants"][1]["slots"]] == [*slots]
    assert "slots" not in layer["variants"][0]


def test_without_a_trace_of_no_overlap_nothing_is_said(tmp_path: Path) -> None:
    _, answer = analysed(tmp_path, {"default": "te_default"})

    assert effects(answer) == {"none": None, "default": None, "floor": None}
    assert answer.cautions == []


def test_the_switch_is_of_userbuffers_alone(tmp_path: Path) -> None:
    """Other backends overlap by other kernels."""
    _, answer = analysed(tmp_path, {"none": "none", "default": "te_default"}, backend="torch")

    assert answer.compared.rows[1].effect.settings == []
    assert answer.cautions == []


def test_what_keeps_the_fastest_from_the_floor_is_shown_and_written(tmp_path: Path) -> None:
    (section,) = analyse(unpack("layer", tmp_path), AnalysisConfig()).sections
    (answer,) = section.answers

    _, exhibit = answer.more
    assert exhibit.heading == "What keeps ring_exchange from the floor"
    assert exhibit.listing
    shown = exhibit.listing.table.records(exhibit.listing.rows)
    assert [(row["pass"], row["operator"]) for row in shown] == [
        *(("fwd", operator) for operator in ("qkv", "proj", "fc1", "fc2", "")),
        *(("bwd", operator) for operator in ("fc2", "fc1", "proj", "qkv", "")),
    ]
    in_all = {
        name: sum(row[name] for row in shown) for name in ("rest_us", "gemm_us", "other_us", "exposed_us", "gap_us")
    }
    assert list(exhibit.notes) == [
        "In all {rest_us:.1f} us: GEMMs {gemm_us:.1f}, other kernels {other_us:.1f}, exposed communication "
        "{exposed_us:.1f}, gaps {gap_us:.1f}.".format(**in_all)
    ]
    (layer,) = section.report["layers"]  # type: ignore[attr-defined]
    written = {one["variant"]: one.get("rests") for one in layer["variants"]}
    assert [one["rest_us"] for one in written["ring_exchange"]] == [row["rest_us"] for row in shown]
    assert [name for name, own in written.items() if own is None] == ["floor"]
