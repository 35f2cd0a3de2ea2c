"""`Report`: what a recorded sweep of the tuner says in Python."""

import json
from dataclasses import FrozenInstanceError, asdict, fields
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from overlap_sweep import Report, UserError
from overlap_sweep.tuner.content import BestSetting, LayerTimes
from overlap_sweep.workloads.layer.section import COMPARED
from overlap_sweep.workloads.operator.section import ANSWERS
from tests.analyze import analyze
from tests.golden.archives import unpack
from tests.made_sweeps import write_operators


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that was recorded on two H200s, analysed. Not to be changed."""
    sweep = unpack("tuner", tmp_path_factory.mktemp("recorded") / "tuner")
    assert analyze(sweep).returncode == 0
    return sweep


@pytest.fixture(scope="module")
def report(directory: Path) -> Report:
    return Report(str(directory))


def written(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "tuning_report.json").read_text())
    return content


def test_settings_have_the_columns_of_the_answers(report: Report, directory: Path) -> None:
    assert {field.name for field in fields(BestSetting)} >= set(ANSWERS.types) - {"pass"}
    (first, *_), entry = report.best, written(directory)["best"][0]
    assert asdict(first) == {name: entry[name] for name in asdict(first)}
    assert first.pass_name == entry["pass"]
    with pytest.raises(FrozenInstanceError):
        first.time_us = 0.0  # type: ignore[misc]
    frame = pd.DataFrame(report.best)
    assert list(frame["slot"]) == [best.slot for best in report.best]


def test_a_proof_compares_whole_layers(report: Report) -> None:
    proof = report.proof[2]
    assert {field.name for field in fields(LayerTimes)} >= set(COMPARED.types)
    assert (proof.proven, proof.recommended, proof.best_other) == (True, "tuned", "default")
    assert list(proof.variants) == ["none", "default", "tuned", "floor"]
    assert proof.tuned_to is not None
    assert proof.tuned_to["none"].low < proof.tuned_to["none"].ratio == proof.variants["tuned"].ratio < 1
    assert proof.settings == report.ub_cfgs(2)
    assert proof.switches == report.switches(2)


def test_what_is_known_of_tp_sizes(report: Report) -> None:
    assert report.tp_scaling.optimal_tp_size == 2
    assert report.tp_scaling.results["proj"].scaling_efficient == {1: True, 2: False}
    assert [(answer.tp_size, answer.is_best_tp_size) for answer in report.answers] == [(2, True)]
    assert report.unmeasured_slots == []


TRACED_OF_PASS = {
    *("gemm_time_us", "comm_time_us", "overlap_time_us", "overlap_ratio", "e2e_time_us"),
}
NUMBER = (int, float)


def test_every_configuration_has_the_fields_that_scripts_for_other_tuners_read(directory: Path) -> None:
    """Those of a point without a trace are null; it says why."""
    whole = written(directory)
    (case,) = (case["name"] for case in whole["cases"])
    types: dict[str, Any] = {"config_id": str, "operator": str, "phase": str, "tp_size": int, "overlap_method": str}
    passes = {f"{name}_{field}": NUMBER for name in ("forward", "backward") for field in TRACED_OF_PASS}
    counts = {"num_gemm_events": int, "num_comm_events": int}
    traced = {**passes, **counts, "operator_e2e_time_us": NUMBER, "total_overlap_ratio": NUMBER}
    profiled = [entry for entry in whole["configurations"] if entry["profiled"]]
    assert 0 < len(profiled) < len(whole["configurations"])
    for entry in whole["configurations"]:
        assert entry["case"] == case
        assert {name: type(entry[name]) for name in types} == types
        found = {name: entry[name] for name in traced if entry[name] is not None}
        if entry["status"] != "ok":
            assert (found, entry["error"] is None) == ({}, False)
        elif entry["profiled"]:
            assert not {name for name in traced if name not in found or not isinstance(found[name], traced[name])}
        else:
            assert not found
            assert entry["not_profiled_because"]


def test_the_sizes_of_the_model_are_with_its_case(report: Report, directory: Path) -> None:
    sizes = {"hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_kv_heads": 8}
    (case,), (entry,) = report.cases, written(directory)["cases"]
    assert case.sizes == entry["sizes"]
    assert {name: case.sizes[name] for name in sizes} == sizes
    assert case.tokens == 8192


def test_each_of_several_cases_has_its_tp_scaling(tmp_path: Path) -> None:
    write_operators(tmp_path)
    write_operators(tmp_path, precision="fp16")
    assert analyze(tmp_path).returncode == 0
    report, scaling = Report(tmp_path), written(tmp_path)["tp_scaling"]
    assert set(scaling) == {"by_case"}
    assert list(scaling["by_case"]) == [case.name for case in report.cases]
    assert {tuple(case.tp_scaling.results) for case in report.cases} == {("fc1", "fc2")}
    with pytest.raises(UserError, match="use the `tp_scaling` of one of `cases`"):
        report.tp_scaling  # noqa: B018


def test_the_file_comes_with_its_arguments(report: Report, directory: Path) -> None:
    path = directory / "optimal_tp_comm_overlap_cfg_tp2.yaml"
    assert (report.yaml(2), report.files[path.name]) == (path, path)
    assert report.megatron_arguments(2) == [
        *("--tensor-model-parallel-size", "2", "--sequence-parallel", "--tp-comm-overlap"),
        *("--tp-comm-overlap-cfg", str(path), "--tp-comm-overlap-rs-dgrad"),
    ]
    with pytest.raises(UserError, match="no file for TP=8, which was not searched"):
        report.megatron_arguments(8)


@pytest.mark.parametrize(
    ("switches", "arguments"),
    [
        ("tp_comm_overlap: false", []),
        ("tp_comm_overlap: false\n# tp_comm_overlap_disable_qkv: true", []),
        ("tp_comm_bulk_wgrad: false", ["--disable-tp-comm-bulk-wgrad"]),
    ],
)
def test_switches_become_arguments(directory: Path, tmp_path: Path, switches: str, arguments: list[str]) -> None:
    changed = _with_switches(directory, tmp_path, switches)
    assert changed.megatron_arguments(2)[6:] == arguments
    assert (changed.ub_cfgs(2) is None) == (not changed.switches(2)["tp_comm_overlap"])


def test_a_switch_without_an_argument_is_an_error(directory: Path, tmp_path: Path) -> None:
    changed = _with_switches(directory, tmp_path, "tp_comm_overlap_disable_qkv: true")
    with pytest.raises(UserError, match="no argument for tp_comm_overlap_disable_qkv=True; set it in its Transformer"):
        changed.megatron_arguments(2)


def _with_switches(directory: Path, target: Path, switches: str) -> Report:
    report = Report(directory)
    report.save(target)
    changed = Report(target)
    changed.yaml(2).write_text(f"# {switches}\n{{}}\n")
    return changed


def test_answers_come_before_what_could_not_be_proven(tmp_path: Path) -> None:
    recommended = [{"tp_size": 2, "operator": "fc1", "pass": "fwd", "recommendation": "fc1 fwd: use ring_agg0"}]
    common: dict[str, Any] = {"case": None, "point": "layer", "variants": {}}
    proofs = [
        {**common, "tp_size": 2, "proven": False, "verdict": "not proven on the whole layer: it was skipped."},
        {
            **common,
            "tp_size": 4,
            "proven": True,
            "recommended": "tuned",
            "verdict": "tuned is 4% faster than none: use tuned.",
        },
    ]
    whole = {"recommendations": recommended, "proof": proofs}
    (tmp_path / "tuning_report.json").write_text(json.dumps(whole))
    *answers, last = Report(tmp_path).recommendations
    assert [str(one) for one in answers] == ["TP=4: tuned is 4% faster than none: use tuned.", "fc1 fwd: use ring_agg0"]
    assert [(one.operator, one.pass_name) for one in answers] == [(None, None), ("fc1", "fwd")]
    assert (last.tp_size, last.is_proven) == (2, False)


def test_a_notebook_shows_the_answer_and_the_settings(report: Report) -> None:
    shown = report._repr_html_()
    assert report.answers[0].headline in shown
    assert shown.count("<tr>") == len(report.best) + 1
    assert "<script" not in shown
    assert str(report.answers[0].headline) in str(report)
    assert repr(report) == f"Report({str(report.directory)!r})"


def test_names_of_models_are_no_markup(directory: Path, tmp_path: Path) -> None:
    whole = written(directory)
    whole["cases"][0]["model"] = "<img src=x onerror=alert(1)>"
    (tmp_path / "tuning_report.json").write_text(json.dumps(whole))
    assert "<img" not in Report(tmp_path)._repr_html_()


def test_a_directory_without_operators_has_an_empty_report(tmp_path: Path) -> None:
    (tmp_path / "tuning_report.json").write_text('{"kernels": []}')
    report = Report(tmp_path)
    assert (report.best, report.recommendations, report.proof, report.unmeasured_slots) == ([], [], {}, [])
    with pytest.raises(UserError, match="has no measured operator"):
        report.tp_scaling  # noqa: B018
    assert "no operator was measured" in str(report).lower()
    assert "No operator was measured" in report._repr_html_()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "has no tuning_report.json; analyse it first"),
        ('{"best": [{"slot": "fc1_dgrad"}]}', "missing required field"),
        ('{"best"', "cannot be read"),
    ],
)
def test_a_report_that_cannot_be_read_is_one_line(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "tuning_report.json").write_text(content)
    with pytest.raises(UserError, match=said) as caught:
        Report(tmp_path)
    assert "\n" not in str(caught.value)


def test_unknown_fields_of_a_later_version_are_left_out(directory: Path, tmp_path: Path) -> None:
    whole = written(directory)
    whole["best"][0]["colour"] = "green"
    (tmp_path / "tuning_report.json").write_text(json.dumps(whole))
    assert Report(tmp_path).best == Report(directory).best


def test_what_is_saved_is_a_report(report: Report, tmp_path: Path) -> None:
    saved = report.save(tmp_path / "results" / "tiny")
    assert {path.name for path in saved} == set(report.files) >= {"tuning_report.json", "points.parquet", "report.html"}
    assert Report(tmp_path / "results" / "tiny").best == report.best
    assert len(report.to_frame()) > len(report.best)
