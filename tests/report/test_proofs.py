"""The tuner's proofs on the terminal, in a pipe and in summary.txt."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from overlap_sweep.analysis.sweep import analyse
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.overlap_cfg import SWITCH_DEFAULTS
from overlap_sweep.report.console import console_for
from overlap_sweep.report.text import print_answers, summary_text
from tests.made_sweeps import (
    LABELS,
    OTHER,
    PRESET,
    WINS,
    rounds,
    trial,
    write_operators,
    write_proof,
    write_tuned_sweep,
    write_tuner,
)
from tests.make_point import make_point

FILE = "optimal_tp_comm_overlap_cfg_tp4.yaml"


def shown(directory: Path, width: int | None = None) -> str:
    stream = io.StringIO()
    console = console_for(stream) if width is None else Console(file=stream, width=width, highlight=False, markup=False)
    print_answers(analyse(directory, AnalysisConfig()), console)
    return stream.getvalue()


def lines_of(directory: Path) -> list[str]:
    return shown(directory).splitlines()


@pytest.mark.parametrize(
    ("ratios", "noise", "expected"),
    [
        (WINS, 0.0, f"tuned, 9.5% faster than none (9.5 to 9.5%), 4.7% faster than the default: {FILE}"),
        (
            {**WINS, "preset preset_tp4": 0.94},
            0.0,
            "tuned, 9.5% faster than none (9.5 to 9.5%), 4.7% faster than the default, 3.7% faster than preset "
            f"preset_tp4: {FILE}",
        ),
        (
            {**WINS, "tuned": 0.95},
            0.01,
            "no faster than the default beyond the noise: use the default, 5.0% faster than none (5.0 to 5.0%): "
            f"{FILE}",
        ),
        (
            {**WINS, "preset preset_tp4": 0.89},
            0.0,
            "tuned is 1.7% slower than preset preset_tp4 (1.7 to 1.7%): use preset preset_tp4, 11.0% faster than none "
            f"(11.0 to 11.0%): {FILE}",
        ),
        (
            {"none": 1.0, "default": 1.03, "tuned": 1.02, "floor": 0.9},
            0.0,
            f"tuned is 2.0% slower than none (2.0 to 2.0%): don't overlap; {FILE} says so",
        ),
        (
            {"none": 1.0, "default": 1.03, "tuned": 1.0, "floor": 0.9},
            0.01,
            f"no faster than none beyond the noise: don't overlap; {FILE} says so",
        ),
        ({"none": 1.0, "tuned": 0.9, "floor": 0.8}, 0.0, f"tuned, 10.0% faster than none (10.0 to 10.0%): {FILE}"),
        (
            {"default": 1.0, "tuned": 0.9, "floor": 0.8},
            0.0,
            f"tuned, 10.0% faster than the default (10.0 to 10.0%): {FILE}",
        ),
    ],
)
def test_the_answer_comes_first(tmp_path: Path, ratios: dict[str, float], noise: float, expected: str) -> None:
    lines = lines_of(write_tuned_sweep(tmp_path, ratios=ratios, noise=noise))
    assert lines[1].startswith("llama3_8b, 8192 tokens, bf16")
    assert lines[2] == f"  TP=4: {expected}"
    assert lines[3].startswith("        operators one by one: 1.19x no overlap, 1.09x the default in fc1, fc2 fwd")


def test_no_overlap_may_be_all_that_was_found(tmp_path: Path) -> None:
    write_operators(tmp_path)
    write_proof(tmp_path, {"none": 1.0, "default": 1.03, "floor": 0.9})
    write_tuner(tmp_path, proofs=[trial("proof", {**LABELS, "tuned": "none"})])
    assert lines_of(tmp_path)[2] == f"  TP=4: no overlap that was found pays: don't overlap; {FILE} says so"


def test_the_table_the_verdict_and_what_was_tried(tmp_path: Path) -> None:
    lines = lines_of(write_tuned_sweep(tmp_path))
    at = lines.index("Proof at TP=4, transformer_layer, attention fused (cuDNN 9.19.0):")
    rows = {line.split("  ")[0].strip(): line.split() for line in lines[at + 4 : at + 9]}
    assert rows["none"] == ["none", "20.300", "40.600", "60.900", "1.000", "0%"]
    assert rows["tuned"] == ["tuned", "18.371", "36.743", "55.114", "0.905", "[0.905,", "0.905]", "63%"]
    assert rows["preset preset_tp4"][2:] == ["19.691", "39.382", "59.073", "0.970", "[0.970,", "0.970]", "20%"]
    verdict = lines.index(
        "  Tuned is 4.7% faster than the default (4.7 to 4.7%), the fastest of the others: use tuned."
    )
    assert lines[verdict + 1 : verdict + 4] == [
        "  Tried together before, ratio to none:",
        "    0.910 [0.910, 0.910]  best of each slot, taken",
        "    0.920 [0.920, 0.920]  fc1 bwd by none",
    ]
    assert "The operators one by one:" in lines[verdict:]
    assert lines.count("Proof at TP=4, transformer_layer, attention fused (cuDNN 9.19.0):") == 1
    assert not any(line.startswith("llama3_8b transformer_layer") for line in lines)


def test_how_long_it_took_and_what_was_dropped(tmp_path: Path) -> None:
    lines = lines_of(write_tuned_sweep(tmp_path))
    at = lines.index("Tuning")
    assert lines[at + 1 : at + 3] == [
        "  12 min 30 s: 8 min 5 s for 143 operator points, 4 min 25 s for 2 whole layers",
        "  Dropped: TP sizes: TP=8 left out: 4 GPUs are visible",
    ]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"ratios": {**WINS, "tuned": 0.95}, "noise": 0.01},
            "  The file holds the default, not the best of the operators one by one; the two differ in fc1_dgrad, "
            "fc1_wgrad, fc2_fprop, tp_comm_overlap_disable_fc1.",
        ),
        (
            {"changed": {"tuned": OTHER}},
            "  The file holds what was taken together, not the best of the operators one by one; the two differ in "
            "fc1_dgrad, fc1_wgrad.",
        ),
        (
            {"ratios": {**WINS, "none": 0.8}},
            "  The file says so, whatever is best for the operators one by one.",
        ),
    ],
)
def test_where_the_file_is_not_what_the_operators_say(tmp_path: Path, changed: dict, expected: str) -> None:
    assert expected in lines_of(write_tuned_sweep(tmp_path, **changed))


def test_the_switches_are_the_file_s(tmp_path: Path) -> None:
    text = shown(write_tuned_sweep(tmp_path, ratios={**WINS, "none": 0.8}))
    assert "Switches to set in Megatron-Core at TP=4:\n  tp_comm_overlap: false  (as none was measured)\n" in text
    assert "tp_comm_overlap_disable_fc1: true" not in text


def test_a_proof_that_failed_says_why(tmp_path: Path) -> None:
    write_tuned_sweep(tmp_path, ratios={}, status="failed", error="[rank3] out of memory\n...")
    lines = lines_of(tmp_path)
    assert lines[2] == "  TP=4: not proven on the whole layer: the layer failed: [rank3] out of memory"
    assert lines[3].startswith("        operators one by one")
    assert "    0.910 [0.910, 0.910]  best of each slot" in lines
    assert "  failed: proof: [rank3] out of memory" in lines


def test_a_proof_that_cannot_be_judged_is_shown(tmp_path: Path) -> None:
    lines = lines_of(write_tuned_sweep(tmp_path, changed={"tuned": {"launch_bound": True}}))
    reason = "ot proven on the whole layer: tuned was launch-bound, its time says nothing about the device"
    assert lines[2] == f"  TP=4: n{reason}"
    assert f"  N{reason}." in lines
    assert "  Launch-bound, left out of the verdict: tuned." in lines
    assert any(line.startswith(" tuned") and line.rstrip().endswith("launch-bound") for line in lines)


def test_what_the_layer_warned_of(tmp_path: Path) -> None:
    ratios = {label: ratio for label, ratio in WINS.items() if not label.startswith("preset")}
    warnings = [f"{PRESET} was not measured: fc1_fprop: num_sm=40 is too many.", "GPU 3 was throttled."]
    lines = lines_of(write_tuned_sweep(tmp_path, ratios=ratios, warnings=warnings))
    assert "  preset preset_tp4 was not measured: fc1_fprop: num_sm=40 is too many." in lines
    assert "  GPU 3 was throttled." in lines


def test_together_may_have_failed(tmp_path: Path) -> None:
    write_operators(tmp_path)
    write_proof(tmp_path)
    make_point("layer", tmp_path, variants={}, name="together", status="failed", error="boom")
    write_tuner(
        tmp_path, together=[trial("together", {"best of each slot": "file:a"})], proofs=[trial("proof", LABELS)]
    )
    assert "  No combinations were tried together: the layer failed: boom." in lines_of(tmp_path)


def test_sweeps_of_a_date_s_directory(tmp_path: Path) -> None:
    write_tuned_sweep(tmp_path / "10-00", started="2026-11-20T10:00:00+00:00")
    write_tuned_sweep(tmp_path / "11-00", ratios={**WINS, "tuned": 0.9}, started="2026-11-20T11:00:00+00:00")
    write_operators(tmp_path / "12-00", model="qwen3_0_6b")
    write_tuner(tmp_path / "12-00", dropped={"qwen3_0_6b TP=4": "it cannot scale"})
    make_point("layer", tmp_path / "13-00", variants={"none": rounds(1.0), "default": rounds(0.9)})
    text = shown(tmp_path)
    folder = "llama3_8b_megatron_NVIDIA-H200_bf16_tokens8192"
    assert f"5.3% faster than the default: {folder}/{FILE}\n" in text
    assert "  TP=4 again, in 10-00: tuned is 4.7% faster than the default" in text
    assert "  TP=4: not proven on the whole layer: it cannot scale\n" in text
    assert "default is 10.0% faster than none (10.0 to 10.0%)" in text
    assert text.count("llama3_8b transformer_layer, TP=4") == 1
    tuning = text[text.index("\nTuning\n") :]
    assert "\n  11-00, 12 min 30 s: 8 min 5 s for 143 operator points, 4 min 25 s for 2 whole layers\n" in tuning
    assert (
        "\n  12-00, 12 min 30 s: 8 min 5 s for 143 operator points\n    Dropped: qwen3_0_6b TP=4: it cannot" in tuning
    )


def test_a_layer_of_no_case_is_said_and_shown(tmp_path: Path) -> None:
    write_operators(tmp_path, tokens=4096)
    write_proof(tmp_path)
    write_tuner(tmp_path, proofs=[trial("proof", LABELS)])
    text = shown(tmp_path)
    assert "llama3_8b transformer_layer, TP=4, 8192 tokens" in text
    assert "  TP=4: not proven on the whole layer: none of the operators that were measured are of its case" in text


def test_without_a_tuner_nothing_of_it_is_said(tmp_path: Path) -> None:
    write_operators(tmp_path)
    text = shown(tmp_path)
    for word in ("proven", "Proof", "Tuning", "one by one", "Search"):
        assert word not in text


def test_the_summary_tells_of_the_search(tmp_path: Path) -> None:
    summary = summary_text(analyse(write_tuned_sweep(tmp_path), AnalysisConfig()))
    search = summary[summary.index("\nSearch\n") :]
    assert search.startswith(
        """
Search
  143 points in 8 min 5 s
  llama3_8b TP=4 fc1 fwd: don't overlap; 1 of 340 settings measured; nothing left promises 1.0%
    refused 3 times: num_sm=40 is more than 32
  llama3_8b TP=4 fc1 bwd: dgrad bulk_sm4 + wgrad bulk_sm4, 320.0 us, 1.25x no overlap; 2 of 340 settings measured; \
nothing left promises 1.0%
    pipeline dropped: 40% slower than the best

Commands
  python launch.py +experiment=tp_overlap_tuner
"""
    )
    assert "Search" not in shown(tmp_path)


def test_a_search_without_the_tuner_is_told_of_too(tmp_path: Path) -> None:
    write_tuned_sweep(tmp_path / "sweep")
    (tmp_path / "sweep" / "tuner.json").unlink()
    text = (tmp_path / "sweep" / "search.json").read_text().replace('"dropped": {}', '"dropped": {"fc2": "no time"}')
    (tmp_path / "sweep" / "search.json").write_text(text)
    summary = summary_text(analyse(tmp_path, AnalysisConfig()))
    assert "\nSearch in sweep\n" in summary
    assert "\n  Dropped: fc2: no time\n" in summary


@pytest.mark.parametrize("width", [45, 80, 200])
def test_a_terminal_of_any_width_shows_everything(tmp_path: Path, width: int) -> None:
    changed = {"tuned": {"switches": {**SWITCH_DEFAULTS, "tp_comm_overlap_disable_fc1": True}}}
    text = shown(write_tuned_sweep(tmp_path, ratios={**WINS, "default": 0.9}, changed=changed), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = " ".join(text.split())
    for expected in ("0.905 [0.905, 0.905]", "tuned is 0.6% slower than the default", FILE, "best of each slot, taken"):
        assert expected in words
