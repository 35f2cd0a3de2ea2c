"""The files of one TP size: what was proven, or the best of each slot, for every library."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import yaml

from overlap_sweep import overlap_cfg
from overlap_sweep.analysis.sweep import Analysis, analyse
from overlap_sweep.analysis.trials import NO_OVERLAP
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig
from overlap_sweep.report.files import write_reports
from tests.made_sweeps import (
    BEST,
    BEST_SLOTS,
    BEST_SWITCHES,
    LABELS,
    OTHER,
    PRESET_SLOTS,
    WINS,
    trial,
    write_operators,
    write_proof,
    write_sweep,
    write_tuned_sweep,
    write_tuner,
)
from tests.make_point import layer_config, make_point, operator_config, pass_times

YAML = "optimal_tp_comm_overlap_cfg_tp4.yaml"
BEST_CONFIG = OverlapConfig(BEST_SLOTS, BEST_SWITCHES)


def written(directory: Path) -> Analysis:
    analysis = analyse(directory, AnalysisConfig())
    write_reports(analysis, directory, "python analyze.py here")
    return analysis


def head_of(path: Path) -> list[str]:
    return [line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#")]


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        (WINS, BEST_CONFIG),
        ({**WINS, "tuned": 0.96}, OverlapConfig()),
        ({**WINS, "preset preset_tp4": 0.8}, OverlapConfig(PRESET_SLOTS, dict(SWITCH_DEFAULTS))),
        ({**WINS, "none": 0.8}, NO_OVERLAP),
    ],
)
def test_the_file_is_the_recommended_configuration(
    tmp_path: Path, ratios: dict[str, float], expected: OverlapConfig
) -> None:
    written(write_tuned_sweep(tmp_path, ratios=ratios))
    assert overlap_cfg.read(tmp_path / YAML) == expected
    assert yaml.safe_load((tmp_path / YAML).read_text()) == expected.slots
    assert (tmp_path / "optimal_tp_comm_overlap_cfg.yaml").read_bytes() == (tmp_path / YAML).read_bytes()
    assert json.loads((tmp_path / "ub_cfgs_tp4.json").read_text()) == expected.slots
    preset = (tmp_path / "megatron_bridge_preset_tp4.py").read_text()
    ast.parse(preset)
    given = {line.split("=")[0].strip() for line in preset.splitlines() if "OverlapCfg(num" in line}
    assert given == set(expected.slots)


def test_without_a_proof_it_is_the_plan(tmp_path: Path) -> None:
    write_tuned_sweep(tmp_path / "a", ratios={}, status="failed", error="boom")
    write_sweep(tmp_path / "b")
    for folder in ("a", "b"):
        (case,) = written(tmp_path / folder).cases
        for tp_size, plan in case.plans.items():
            file = tmp_path / folder / YAML.replace("4", str(tp_size))
            assert overlap_cfg.read(file) == plan.config == case.config(tp_size)
            assert json.loads((tmp_path / folder / f"ub_cfgs_tp{tp_size}.json").read_text()) == plan.config.slots
            assert (tmp_path / folder / f"megatron_bridge_preset_tp{tp_size}.py").exists()


def test_the_head_has_the_proof(tmp_path: Path) -> None:
    written(write_tuned_sweep(tmp_path, warnings=["GPU 3 was throttled."]))
    assert head_of(tmp_path / YAML) == [
        "Communication overlap for TP=4: Megatron-LM's --tp-comm-overlap-cfg, Transformer Engine's ub_cfgs.",
        "llama3_8b, 8192 tokens, bf16, backend megatron on NVIDIA H200",
        "Measured 2026-11-20 21:02 to 2026-11-20 21:11 UTC on node7; 8 x NVIDIA H200; driver 580.1, torch 2.13.0",
        "python launch.py +experiment=tp_overlap_tuner",
        "python analyze.py here",
        "",
        "Proven on the whole layer (transformer_layer, attention fused (cuDNN 9.19.0)), 2026-11-20 21:11 UTC, 7 rounds "
        "side by side.",
        "This is the configuration 'tuned'. Tuned is 4.7% faster than the default (4.7 to 4.7%), the fastest of the "
        "others: use tuned.",
        "none               fwd 20.300, bwd 40.600, all 60.900 ms",
        "default            fwd 19.285, bwd 38.570, all 57.855 ms, 0.950 [0.950, 0.950] of none, hidden 33%",
        "tuned              fwd 18.371, bwd 36.743, all 55.114 ms, 0.905 [0.905, 0.905] of none, hidden 63%",
        "preset preset_tp4  fwd 19.691, bwd 39.382, all 59.073 ms, 0.970 [0.970, 0.970] of none, hidden 20%",
        "floor              fwd 17.255, bwd 34.510, all 51.765 ms, 0.850 [0.850, 0.850] of none",
        "GPU 3 was throttled.",
        "",
        "Not overlapped, by the switches: fc1_fprop.",
        "Not in this file, at Transformer Engine's default: qkv_fprop, qkv_dgrad, qkv_wgrad, proj_fprop, proj_dgrad, "
        "fc2_dgrad.",
        "",
        "The operators one by one, us:",
        "fc1 fwd: not overlapped; without overlap 200.0, default 210.0; the best overlap, ring_agg0, is 10.0% slower",
        "fc1 bwd: dgrad bulk_sm4 + wgrad bulk_sm4 320.0; without overlap 400.0, default 360.0",
        "fc2 fwd: pipeline_sm8_split4 150.0; without overlap 200.0, default 160.0",
        "Sum over fc1, fc2 fwd: 670.0 us, without overlap 800.0, default 730.0",
        "",
        "Set in Megatron-Core's configuration (on Megatron-LM's command line):",
        "tp_comm_overlap: true  (--tp-comm-overlap)",
        "tp_comm_overlap_disable_fc1: true  (no option: a field of TransformerConfig)",
        "",
        "A slot that is not in this file gets Transformer Engine's default overlap, unless a switch turns it off.",
    ]
    preset = head_of(tmp_path / "megatron_bridge_preset_tp4.py")
    assert preset[0] == "Communication overlap for TP=4: Megatron-Bridge's TransformerLayerTPOverlapCfg."
    assert preset[1:20] == head_of(tmp_path / YAML)[1:20]
    assert "cfg.model.tp_comm_overlap_disable_fc1 = True" in preset


def test_the_head_speaks_of_the_configuration_in_the_file(tmp_path: Path) -> None:
    written(write_tuned_sweep(tmp_path, changed={"tuned": OTHER}))
    head = head_of(tmp_path / YAML)
    assert "fc1 bwd: as the library has it; without overlap 400.0, default 360.0" in head
    assert not any(line.startswith("Sum over") for line in head)
    more = {**BEST_SLOTS, "fc2_fprop": {"method": "pipeline", "num_sm": 24, "num_splits": 4}}
    more["qkv_dgrad"] = {"method": "bulk", "num_sm": 2}
    del more["fc1_wgrad"]
    written(write_tuned_sweep(tmp_path / "b", changed={"tuned": {**BEST, "settings": more}}))
    head = head_of(tmp_path / "b" / YAML)
    assert "fc1 bwd: dgrad bulk_sm4, the others as the library has it; without overlap 400.0, default 360.0" in head
    assert "fc2 fwd: pipeline_sm24_split4, not measured; without overlap 200.0, default 160.0" in head


def test_the_head_says_that_nothing_was_proven(tmp_path: Path) -> None:
    written(write_tuned_sweep(tmp_path, ratios={}, status="failed", error="boom"))
    for file in (YAML, "megatron_bridge_preset_tp4.py"):
        assert "Not proven on the whole layer: the layer failed: boom." in head_of(tmp_path / file)
    written(write_sweep(tmp_path / "b"))
    assert not any("proven" in line for line in head_of(tmp_path / "b" / YAML))


def test_other_backends_are_only_a_hint(tmp_path: Path) -> None:
    write_operators(tmp_path, backend="torch")
    write_proof(tmp_path, point={**layer_config(), "backend": "torch"})
    write_tuner(tmp_path, proofs=[trial("proof", LABELS)])
    written(tmp_path)
    for file in (YAML, "megatron_bridge_preset_tp4.py"):
        head = head_of(tmp_path / file)
        assert any(line.startswith("Measured with backend=torch, not with Transformer Engine's") for line in head)
        assert any(line.startswith("Not in this file, without overlap where this was measured: qkv") for line in head)
    assert overlap_cfg.read(tmp_path / YAML) == BEST_CONFIG


def test_a_size_without_operators_has_its_files(tmp_path: Path) -> None:
    make_point(
        "operator",
        tmp_path,
        operator_config(2, "fc1", "all", "bulk", num_sm=4, backend="megatron"),
        bwd=pass_times(90.0),
    )
    write_proof(tmp_path)
    write_tuner(tmp_path, proofs=[trial("proof", LABELS)])
    written(tmp_path)
    assert overlap_cfg.read(tmp_path / YAML) == BEST_CONFIG
    assert not any("operators" in line for line in head_of(tmp_path / YAML))
    assert overlap_cfg.read(tmp_path / YAML.replace("4", "2")).slots["fc1_dgrad"] == {"method": "bulk", "num_sm": 4}


def test_cases_do_not_share_files(tmp_path: Path) -> None:
    for model, tuned in (("llama3_8b", 0.9), ("qwen3_0_6b", 0.99)):
        write_operators(tmp_path, model=model)
        write_proof(tmp_path, {**WINS, "tuned": tuned}, name=model, point=layer_config(model=model))
    write_tuner(tmp_path, proofs=[trial(name, LABELS) for name in ("llama3_8b", "qwen3_0_6b")])
    written(tmp_path)
    (llama,), (qwen,) = (tmp_path.glob(f"{model}*/{YAML}") for model in ("llama3_8b_meg", "qwen3_0_6b_meg"))
    assert (overlap_cfg.read(llama), overlap_cfg.read(qwen)) == (BEST_CONFIG, OverlapConfig())
    files = [entry["file"] for entry in json.loads((tmp_path / "proof.json").read_text())["proofs"]]
    assert files == [path.relative_to(tmp_path).as_posix() for path in (llama, qwen)]
